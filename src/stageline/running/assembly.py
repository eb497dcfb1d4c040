"""From described stages to running parts: devices, wrappers, programs and who plays the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from stageline.capturing.staged import StagedModel, VariantStage
from stageline.capturing.streams.tracking import numbers_of_copy
from stageline.errors import ConfigError
from stageline.partitioning import Plan, StagePlan
from stageline.partitioning.recorded import CutModel
from stageline.partitioning.sharing import Shared, normalises_batches
from stageline.partitioning.sources import StageSource
from stageline.planning import forecast
from stageline.running.allocator import keep_freed_memory
from stageline.running.building import Builders
from stageline.running.foreign import Owner
from stageline.running.materialising import InitStage, is_abstract
from stageline.running.materialising import materialise as make_real
from stageline.running.names import Names
from stageline.running.placeholder import Placeholder
from stageline.running.processes import ProcessRunner
from stageline.running.program import StageProgram
from stageline.running.recordings import Recordings
from stageline.running.runner import Runner, ThreadRunner
from stageline.running.settings import Settings, WrapStage
from stageline.running.stages import HeldStage, HeldStages, added_prefix
from stageline.running.streams.calls import StageStreams, Streams
from stageline.running.streams.candidates import Candidates, function_may_draw
from stageline.running.ties import Ties
from stageline.running.timetable import Timetable
from stageline.running.transports.base import ThreadTransport
from stageline.running.transports.memory import MemoryTransport
from stageline.running.world import World
from stageline.scheduling import Schedule


@dataclass(frozen=True)
class Parts:
    """What fits together: the schedule, the device of each rank, and the ranks of this process."""

    timetable: Timetable
    devices: list[torch.device]
    ranks_here: tuple[int, ...]

    @property
    def placement(self) -> tuple[int, ...]:
        return self.timetable.schedule.placement

    @property
    def stages_here(self) -> list[int]:
        return [stage for stage, rank in enumerate(self.placement) if rank in self.ranks_here]

    def device_of(self, stage: int) -> torch.device:
        return self.devices[self.placement[stage]]


def fit(
    sources: Sequence[StageSource],
    settings: Settings,
    world: World | None,
    *,
    settings_are_right: bool,
) -> tuple[Parts | None, list[str]]:
    """Fit settings and stages together; return what does not."""
    if not settings_are_right:
        # Half of the questions make no sense then; the number of ranks can still be judged.
        readable = not settings.number_faults()
        return None, settings.num_ranks(len(sources), world)[1] if readable else []
    num_ranks, faults = settings.num_ranks(len(sources), world)
    devices, device_faults = settings.rank_devices(num_ranks, world)
    timetable = None
    if not faults:
        timetable, faults = settings.timetable([each.time for each in sources], num_ranks)
    faults = faults + device_faults
    if timetable is not None:
        faults += _missing_stages(sources, timetable.schedule.placement, world)
    if faults or timetable is None:
        return None, faults
    here = tuple(range(num_ranks)) if world is None else (world.rank,)
    return Parts(timetable, devices, here), []


def _missing_stages(
    sources: Sequence[StageSource], placement: Sequence[int], world: World | None
) -> list[str]:
    """Return a fault for every stage that should live here and was not given."""
    return [
        f"stages[{index}]: rank {rank} holds this stage, but it was not given here"
        for index, (source, rank) in enumerate(zip(sources, placement, strict=True))
        if source.module is None and (world is None or world.rank == rank)
    ]


def tie(shared: Sequence[Shared], parts: Parts) -> Ties:
    """Return the ties between stages, as this process sees them."""
    return Ties(
        shared, placement=parts.placement, devices=parts.devices, ranks_here=parts.ranks_here
    )


def materialise(cut: CutModel, parts: Parts, init_stage: InitStage | None, what: str) -> bool:
    """Make the stages of this process real if the model is on meta; return whether it was."""
    modules = {i: s.module for i, s in enumerate(cut.sources) if s.module is not None}
    here = {index: modules[index] for index in parts.stages_here}
    if cut.model is None or not is_abstract(here.values()):
        return False
    others = [module for index, module in modules.items() if index not in here]
    faults = make_real(cut.model, here, others, parts.device_of, init_stage)
    if faults:
        raise ConfigError(what, faults)
    if cut.staged is not None:
        cut.staged.watch_again()
    return True


def hold(
    sources: Sequence[StageSource],
    parts: Parts,
    ties: Ties,
    wrap_stage: WrapStage | None,
    what: str,
    names: Names | None = None,
) -> HeldStages:
    """Bring the stages of this process to their devices, and wrap them as the user wishes."""
    names = names or Names()
    elsewhere: set[str] = set()
    prefixes: list[str] = []
    localised: dict[int, nn.Module] = {}
    for index, (source, rank) in enumerate(zip(sources, parts.placement, strict=True)):
        if rank in parts.ranks_here:
            assert source.module is not None
            # All before the first is moved: that replaces buffers, which ties know by identity.
            localised[index] = ties.localise(rank, source.module, what=what)
            continue
        prefixes.append(added_prefix(index))
        if source.module is not None:
            elsewhere.update(source.module.state_dict(prefix=source.prefix))
        else:
            prefixes.append(source.prefix)
    held = []
    for index, module in localised.items():
        source, original = sources[index], module.to(parts.device_of(index))
        wrapped = original if wrap_stage is None else wrap_stage(original, index)
        if not isinstance(wrapped, nn.Module):
            got = type(wrapped).__name__
            finding = f"wrap_stage returned for stage {index}: wanted a module, got {got}"
            raise ConfigError(what, [finding])
        held.append(HeldStage(index, source.prefix, original, wrapped, source.module or original))
    return HeldStages(
        tuple(held),
        frozenset(elsewhere | names.elsewhere),
        tuple(prefixes),
        aliases=names.aliases,
        first_names=names.first,
        shadows=tuple(ties.shadows),
        order=names.order,
        placeholder=_placeholder(parts),
    )


def _placeholder(parts: Parts) -> Placeholder | None:
    """Return what optimizers of this process are given if its stages have nothing for them."""
    if len(parts.ranks_here) == len(parts.devices):
        return None  # all stages are here: an optimizer says what it says of the plain model
    return Placeholder.on(parts.devices[parts.ranks_here[0]])


def recordings(
    staged: StagedModel | None, held: HeldStages, parts: Parts, ties: Ties
) -> Recordings | None:
    """Return what chooses between the recordings of the model, for the stages that live here."""
    if staged is None:
        return None
    _refuse_shared_generator(staged, parts)
    stages = {}
    for stage in held.stages:
        assert isinstance(stage.original, VariantStage)
        # What is recorded later must use this rank's copies of tied parameters too.
        stage.original.adapt = partial(ties.localise, parts.placement[stage.index])
        stages[stage.index] = stage.original
    return Recordings(staged.holding(stages))


def _refuse_shared_generator(staged: StagedModel, parts: Parts) -> None:
    """Threads share the global generators of Python and numpy, and would draw in any order."""
    modules = staged.variants[0].recording.random_modules
    if modules and len(parts.ranks_here) > 1:
        raise ConfigError(
            "sl.Pipeline",
            [
                f"{modules[0]} draws random numbers from Python's random or numpy, whose generator "
                "all ranks of one process share: start the script with torchrun, use ranks=1, or "
                "draw from torch"
            ],
        )


def describe(cut: CutModel, held: HeldStages, parts: Parts) -> Plan:
    """Return the plan, for people and for the forecast."""
    modules = {stage.index: stage.module for stage in held.stages}
    known = [] if cut.plan is None else list(cut.plan.stages)
    stages = []
    for index, (source, rank) in enumerate(zip(cut.sources, parts.placement, strict=True)):
        count = None
        if source.module is not None:
            count = sum(parameter.numel() for parameter in source.module.parameters())
        device = str(parts.devices[rank])
        module = modules.get(index)
        has_batch_norm = source.module is not None and normalises_batches(source.module)
        here = StagePlan(
            index, rank, device, source.calls, module, count, has_batch_norm=has_batch_norm
        )
        if known:
            here = replace(known[index], rank=rank, device=device, module=module)
        stages.append(here)
    ties = () if cut.plan is None else cut.plan.ties
    return Plan(tuple(stages), ties=ties)


def programs(held: HeldStages, parts: Parts, unpack_tuples: bool) -> dict[int, StageProgram]:
    """Return what the executor runs for each stage of this process."""
    placement = parts.placement
    last = len(placement) - 1
    return {
        stage.index: StageProgram(
            index=stage.index,
            num_stages=len(placement),
            module=stage.module,
            device=parts.device_of(stage.index),
            unpack_tuples=unpack_tuples,
            next_is_local=stage.index < last
            and placement[stage.index + 1] == placement[stage.index],
            previous_is_local=stage.index > 0
            and placement[stage.index - 1] == placement[stage.index],
        )
        for stage in held.stages
    }


def streams(sources: Sequence[StageSource], held: HeldStages, settings: Settings) -> Streams:
    """Return where the random numbers of the stages come from."""
    stages = {}
    for stage in held.stages:
        source = sources[stage.index]
        numbers: Mapping[int, int] = {}
        if not isinstance(stage.original, VariantStage):
            numbers = numbers_of_copy(source.numbers, stage.given, stage.original)
        stages[stage.index] = StageStreams.of(stage.module, stage.original, numbers, source.route)
    may_draw = (
        settings.wrap_stage is not None
        or function_may_draw(settings.loss_fn)
        or any(_may_ever_draw(source.module) for source in sources)
    )
    return Streams(stages, settings.loss_fn, may_draw=may_draw)


def _may_draw_as_built(sources: Sequence[StageSource], settings: Settings) -> bool:
    """Whether something that is known here may draw, as it stands now."""
    modules = [source.module for source in sources if source.module is not None]
    streams = (StageStreams.of(module, module, {}, None) for module in modules)
    return function_may_draw(settings.loss_fn) or any(s.candidates().may_draw() for s in streams)


def _may_ever_draw(module: nn.Module | None) -> bool:
    """Whether a stage may draw in some state; every process must come to the same answer."""
    if module is None or isinstance(module, VariantStage):
        return True
    found = Candidates.among(module.modules())
    return found.unknown or bool(found.sometimes)


def facts(
    sources: Sequence[StageSource], shared: Sequence[Shared], settings: Settings, parts: Parts
) -> dict[str, dict[str, Any]]:
    """Return all that ranks must agree on, by what it stands for: names and values, for people."""
    known = all(source.module is not None for source in sources)
    schedule = parts.timetable.schedule
    parameters = {
        name: f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        for source in sources
        if source.module is not None and known
        for name, value in source.module.state_dict(prefix=source.prefix).items()
        if isinstance(value, torch.Tensor)
    }
    return {
        "the number of stages": {"it": len(sources)},
        "the parameters": parameters,
        "the stages": {
            f"stage {index}": ", ".join(source.calls) if known else "given by its rank"
            for index, source in enumerate(sources)
        },
        "the recorded graph": _recorded_code(sources) if known else {},
        "the tied parameters": {
            holder.name: f"tied to {one.name}, stage {holder.stage}"
            for one in shared
            if len({parts.placement[stage] for stage in one.stages}) > 1
            for holder in one.holders
        },
        "the number of microbatches": {"it": schedule.num_microbatches},
        "the schedule": {
            f"the row of rank {rank}": row for rank, row in enumerate(schedule.text().splitlines())
        },
        "the settings": {
            "keep_outputs": settings.keep_outputs,
            "share_outputs": settings.share_outputs,
            "deferred_batch_norm": settings.deferred_batch_norm,
            "batch_dims": str(settings.batch_dims),
            "microbatch_sizes": "a function" if settings.microbatch_sizes else None,
            "loss_reduction": str(settings.loss_reduction)
            if isinstance(settings.loss_reduction, str)
            else "a function",
            "transport": str(settings.transport),
        },
    }


def _recorded_code(sources: Sequence[StageSource]) -> dict[str, str]:
    """Return the code of recorded stages, line by line."""
    return {
        f"line {number} of stage {index}": line.strip()
        for index, source in enumerate(sources)
        if isinstance(source.module, VariantStage)
        for number, line in enumerate(source.module.module_of().code.splitlines())
    }


def owners(sources: Sequence[StageSource], ties: Ties) -> dict[int, Owner]:
    """Return the stages and the name of every parameter that is known here, by identity."""
    known = {
        id(parameter): Owner(frozenset({index}), index, source.prefix + name, ref(parameter))
        for index, source in enumerate(sources)
        if source.module is not None
        for name, parameter in source.module.named_parameters()
    }
    known.update(
        (id(parameter), Owner(stages, home, name, ref(parameter)))
        for parameter, name, home, stages in ties.users
    )
    return known


def runner_for(
    sources: Sequence[StageSource],
    shared: Sequence[Shared],
    settings: Settings,
    builders: Builders,
    parts: Parts,
    *,
    has_drawn: bool,
) -> Runner:
    """Return who plays the ranks: threads of this process, or this process as one of many.

    ``has_drawn``: whether weights were set here, with random numbers that depend on the seed.
    """
    on_cpu = all(device.type == "cpu" for device in parts.devices)
    if on_cpu:
        keep_freed_memory()
    schedule = parts.timetable.schedule
    if builders.member is None:
        transport = settings.transport
        if not isinstance(transport, ThreadTransport):
            transport = MemoryTransport()
        return ThreadRunner(transport, schedule=schedule, on_cpu=on_cpu)
    wanted = settings.transport if isinstance(settings.transport, str) else None
    carrier = builders.agree(
        facts(sources, shared, settings, parts),
        draws=has_drawn or _may_draw_as_built(sources, settings),
        transport=wanted if on_cpu else "process-group",
        placement=parts.placement,
    )
    return ProcessRunner(
        builders.member, carrier, schedule=schedule, on_cpu=on_cpu, seed=builders.seed
    )


def summary(plan: Plan, schedule: Schedule, runner: Runner) -> str:
    """Return what a pipeline prints: where it runs, its schedule and its plan."""
    weights = [stage.num_parameters for stage in plan.stages]
    known = [weight for weight in weights if weight is not None]
    outlook = f", {forecast(schedule, known)}" if len(known) == len(weights) else ""
    return (
        f"Pipeline: {plan.num_stages} stages on {runner.num_ranks} ranks ({runner.where}), "
        f"schedule {schedule.name}, {schedule.num_microbatches} microbatches{outlook}\n"
        f"{plan.table()}"
    )
