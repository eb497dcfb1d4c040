"""From described stages to running parts: devices, wrappers, programs and who plays the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stageline.partitioning import Plan, StagePlan
from stageline.partitioning.sources import StageSource
from stageline.running.program import StageProgram
from stageline.running.runner import ProcessRunner, Runner, ThreadRunner
from stageline.running.settings import Settings, WrapStage
from stageline.running.stages import HeldStage, HeldStages
from stageline.running.transports.base import ThreadTransport
from stageline.running.transports.memory import MemoryTransport
from stageline.running.transports.process_group import ProcessGroupTransport
from stageline.running.world import World


def missing_stages(
    sources: Sequence[StageSource], placement: Sequence[int], world: World | None
) -> list[str]:
    """Return a fault for every stage that should live here and was not given."""
    return [
        f"stages[{index}]: rank {rank} holds this stage, but it was not given here"
        for index, (source, rank) in enumerate(zip(sources, placement, strict=True))
        if source.module is None and (world is None or world.rank == rank)
    ]


def hold(
    sources: Sequence[StageSource],
    placement: Sequence[int],
    here: Sequence[int],
    devices: Sequence[torch.device],
    wrap_stage: WrapStage | None,
) -> HeldStages:
    """Bring the stages of this process to their devices, and wrap them as the user wishes."""
    held: list[HeldStage] = []
    elsewhere: set[str] = set()
    prefixes: list[str] = []
    for index, (source, rank) in enumerate(zip(sources, placement, strict=True)):
        if rank in here:
            assert source.module is not None
            original = source.module.to(devices[rank])
            module = original if wrap_stage is None else wrap_stage(original, index)
            held.append(HeldStage(index, source.prefix, original, module))
        elif source.module is not None:
            elsewhere.update(source.module.state_dict(prefix=source.prefix))
        else:
            prefixes.append(source.prefix)
    return HeldStages(tuple(held), frozenset(elsewhere), tuple(prefixes))


def describe(
    sources: Sequence[StageSource],
    held: HeldStages,
    placement: Sequence[int],
    devices: Sequence[torch.device],
) -> Plan:
    modules = {stage.index: stage.module for stage in held.stages}
    return Plan(
        tuple(
            StagePlan(
                index=index,
                rank=rank,
                device=str(devices[rank]),
                blocks=source.blocks,
                module=modules.get(index),
                num_parameters=None
                if source.module is None
                else sum(parameter.numel() for parameter in source.module.parameters()),
            )
            for index, (source, rank) in enumerate(zip(sources, placement, strict=True))
        )
    )


def programs(
    held: HeldStages,
    placement: Sequence[int],
    devices: Sequence[torch.device],
    unpack_tuples: bool,
) -> dict[int, StageProgram]:
    last = len(placement) - 1
    return {
        stage.index: StageProgram(
            index=stage.index,
            num_stages=len(placement),
            module=stage.module,
            device=devices[placement[stage.index]],
            unpack_tuples=unpack_tuples,
            next_is_local=stage.index < last
            and placement[stage.index + 1] == placement[stage.index],
            previous_is_local=stage.index > 0
            and placement[stage.index - 1] == placement[stage.index],
        )
        for stage in held.stages
    }


def runner_for(
    settings: Settings,
    world: World | None,
    num_ranks: int,
    first_rank: int,
    devices: Sequence[torch.device],
) -> Runner:
    on_cpu = all(device.type == "cpu" for device in devices)
    if world is None:
        transport = settings.transport
        if not isinstance(transport, ThreadTransport):
            transport = MemoryTransport()
        return ThreadRunner(num_ranks, transport, on_cpu=on_cpu)
    group = ProcessGroupTransport(world.new_group(settings.timeout), timeout=settings.timeout)
    return ProcessRunner(group, first_rank=first_rank, on_cpu=on_cpu)
