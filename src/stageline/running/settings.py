"""What a user can say about a pipeline besides the model: checked here, every finding at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed import ProcessGroup

from stageline.errors import ScheduleError, original_errors
from stageline.partitioning.budget import Budget
from stageline.planning.searching import find_schedule
from stageline.running.control import Member, join
from stageline.running.events import Observer
from stageline.running.loss import REDUCTIONS, LossFunction
from stageline.running.materialising import InitStage
from stageline.running.merging import MergeOutputs
from stageline.running.microbatches import BatchDims, LossReduction
from stageline.running.sizes import MicrobatchSizes
from stageline.running.timetable import Timetable
from stageline.running.transports.base import ThreadTransport
from stageline.running.world import World
from stageline.scheduling import Action, Costs, Kind, Schedule, parse, schedules
from stageline.scheduling.checking import find_faults as find_schedule_faults
from stageline.scheduling.recompute import Recompute, recompute_faults

WrapStage = Callable[[nn.Module, int], nn.Module]
TRANSPORTS = ("memory", "shared-memory", "process-group")
AUTO = "auto"
"""The name that stands for a search, with the estimated times of the stages."""

_MICROBATCHES_PER_RANK = 4  # the bubble of 1F1B is then at most a fifth
_EFFORT = 0.05  # well below a second, even for many ranks


@dataclass(frozen=True)
class Settings:
    """The arguments of a pipeline that do not concern the model."""

    num_microbatches: int | None = None
    schedule: str | Schedule = "1f1b"
    loss_fn: LossFunction | None = None
    loss_reduction: LossReduction = "mean"
    ranks: int | None = None
    devices: Sequence[str | torch.device] | None = None
    wrap_stage: WrapStage | None = None
    init_stage: InitStage | None = None
    recompute: Recompute = "never"
    batch_dims: BatchDims = 0
    microbatch_sizes: MicrobatchSizes | None = None
    merge_outputs: MergeOutputs | None = None
    original_errors: bool = False
    transport: str | ThreadTransport | None = None
    keep_outputs: bool = False
    share_outputs: bool = True
    deferred_batch_norm: bool = False
    timeout: float = 1800.0
    heartbeat_timeout: float = 30.0
    observer: Observer | None = None
    unpack_tuples: bool = False
    group: ProcessGroup | None = None

    def world(self) -> World | None:
        """Return the processes to run on; None if all ranks are threads of this one."""
        in_threads = self.transport == "memory" or isinstance(self.transport, ThreadTransport)
        return None if in_threads else World.find(self.group)

    def join(self, world: World | None) -> Member | None:
        """Meet the other processes of the job, if there are any."""
        if world is None:
            return None
        wait, silence = (
            value if _is_seconds(value) else default
            for value, default in ((self.timeout, 1800.0), (self.heartbeat_timeout, 30.0))
        )
        with world.waits(wait):
            return join(
                world.store(wait),
                world.rank,
                world.size,
                timeout=wait,
                heartbeat_timeout=silence,
                name=world.name,
            )

    def default_split(self) -> int | None:
        """Return the number of stages if the user names none: one per process, or per rank."""
        world = self.world()
        return self.ranks if world is None else world.size

    def errors(self) -> AbstractContextManager[None]:
        """Return what calls run in: errors of the user's code keep their type if wanted."""
        return original_errors() if self.original_errors else nullcontext()

    def find_faults(self) -> list[str]:
        """Return what is wrong with the settings, whatever the model."""
        faults = [
            *self.number_faults(),
            *self._callable_faults(),
            *self._transport_faults(),
            *self._device_faults(),
        ]
        faults += [f"schedule: {fault}" for fault in self._schedule_faults()]
        faults += recompute_faults(self.recompute)
        if not _is_batch_dims(self.batch_dims):
            faults.append(
                f"batch_dims={self.batch_dims!r}: wanted a dimension (0) or one by leaf "
                "({'args[1]': 1})"
            )
        return faults

    def number_faults(self) -> list[str]:
        faults = [
            f"{name}={value!r}: wanted a whole number of at least 1"
            for name, value in (("num_microbatches", self.num_microbatches), ("ranks", self.ranks))
            if value is not None and not (_is_whole(value) and value >= 1)
        ]
        faults += [
            f"{name}={value!r}: wanted a number of seconds above 0"
            for name, value in (
                ("timeout", self.timeout),
                ("heartbeat_timeout", self.heartbeat_timeout),
            )
            if not _is_seconds(value)
        ]
        faults += [
            f"{name}={value!r}: wanted True or False"
            for name, value in (
                ("keep_outputs", self.keep_outputs),
                ("share_outputs", self.share_outputs),
                ("deferred_batch_norm", self.deferred_batch_norm),
                ("unpack_tuples", self.unpack_tuples),
                ("original_errors", self.original_errors),
            )
            if not isinstance(value, bool)
        ]
        return faults

    def _callable_faults(self) -> list[str]:
        faults = [
            f"{name}={value!r}: wanted a function or None"
            for name, value in (
                ("loss_fn", self.loss_fn),
                ("wrap_stage", self.wrap_stage),
                ("init_stage", self.init_stage),
                ("microbatch_sizes", self.microbatch_sizes),
                ("merge_outputs", self.merge_outputs),
                ("observer", self.observer),
            )
            if value is not None and not callable(value)
        ]
        if isinstance(self.loss_fn, type):
            name = self.loss_fn.__name__
            faults.append(f"loss_fn={name}: wanted a function, got a class: write {name}()")
        if self.loss_reduction not in REDUCTIONS and not callable(self.loss_reduction):
            faults.append(
                f"loss_reduction={self.loss_reduction!r}: wanted 'mean', 'sum' or a function of a "
                "microbatch and the whole batch that returns the microbatch's weight"
            )
        return faults

    def _transport_faults(self) -> list[str]:
        is_in_threads = self.transport == "memory" or isinstance(self.transport, ThreadTransport)
        if self.group is not None and is_in_threads:
            return ["group: ranks are threads of this process with this transport: leave one out"]
        if self.transport is None or isinstance(self.transport, ThreadTransport):
            return []
        if not isinstance(self.transport, str):
            return [f"transport={self.transport!r}: wanted a name or a transport"]
        if self.transport not in TRANSPORTS:
            return [f"transport={self.transport!r}: choose one of {', '.join(TRANSPORTS)}"]
        # A group of one process is all right: groups of a job, with one script, may differ in size.
        if self.transport != "memory" and self.group is None and World.find() is None:
            return [
                f"transport={self.transport!r}: this process is alone: start the script with "
                "torchrun"
            ]
        return []

    def _device_faults(self) -> list[str]:
        if self.devices is None:
            return []
        if not isinstance(self.devices, (list, tuple)):
            return [f"devices={self.devices!r}: wanted a list with one device per rank"]
        world = self.world()
        faults = [
            _device_fault(device, is_here=world is None or world.rank == rank)
            for rank, device in enumerate(self.devices)
        ]
        return [fault for fault in faults if fault is not None]

    def _schedule_faults(self) -> list[str]:
        given = self._given_schedule()
        if isinstance(given, ScheduleError):
            return [str(given)]
        if given == AUTO:
            return []
        refusal = schedules.family(given).refusal if isinstance(given, str) else given.refusal
        if refusal is not None or isinstance(given, str):
            return [] if refusal is None else [refusal]
        faults = find_schedule_faults(given)
        if Kind.REDUCE in given.kinds():
            faults.append("it uses REDUCE, which cannot be run: leave it out")
        return faults

    def num_ranks(self, num_stages: int, world: World | None) -> tuple[int, list[str]]:
        """Return how many ranks the pipeline has, and what is wrong with that number."""
        given = self._given_schedule()
        if world is not None:
            if self.ranks not in (None, world.size):
                return world.size, [_ranks_fault(self.ranks, world)]
            wanted = world.size
        elif self.ranks is not None:
            wanted = self.ranks
        elif isinstance(given, Schedule):
            return given.num_ranks, []  # whether it fits is said of the schedule
        elif isinstance(given, str) and given != AUTO:
            wanted = schedules.family(given).num_ranks(num_stages)
        else:
            wanted = num_stages  # a search; or the schedule is wrong, which is said elsewhere
        if wanted > num_stages:
            return wanted, [
                f"{wanted} ranks for {num_stages} stages: every rank needs a stage; cut the model "
                f"into more stages or use {num_stages} ranks"
            ]
        return wanted, []

    def _given_schedule(self) -> Schedule | str | ScheduleError:
        """Return the schedule that the user wrote, the name of one of ours, or what is wrong."""
        names = ", ".join((*schedules.NAMES, AUTO))
        if isinstance(self.schedule, Schedule):
            return self.schedule
        if not isinstance(self.schedule, str) or not self.schedule.strip():
            return ScheduleError(
                f"wanted a name ({names}), a Schedule or its text, got {self.schedule!r}"
            )
        if self.schedule in (*schedules.NAMES, AUTO):
            return self.schedule
        try:
            if len(self.schedule.split()) == 1 and not _is_action(self.schedule):
                schedules.build(self.schedule, 1, 1)  # raises, with the nearest name
            return parse(self.schedule)
        except ScheduleError as error:
            return error

    def budget(self) -> Budget:
        """Return what ranks run, for their memory: where nothing else is said, 1F1B."""
        given = self._given_schedule()
        if isinstance(given, ScheduleError) or recompute_faults(self.recompute):
            return Budget(num_ranks=self.ranks)  # find_faults tells
        if given in ("1f1b", AUTO) and self.recompute == "never":
            return Budget(num_ranks=self.ranks)
        schedule = "1f1b" if given == AUTO else given  # what is searched for holds no more
        return Budget(None, self.ranks, schedule, self.num_microbatches, recompute=self.recompute)

    def timetable(
        self, times: Sequence[int | None], num_ranks: int
    ) -> tuple[Timetable | None, list[str]]:
        """Return the schedule for this pipeline, and what is wrong with it for this model.

        Args:
            times: The estimated time of each stage, None where it is not known.
            num_ranks: Workers.
        """
        num_stages = len(times)
        faults = recompute_faults(self.recompute, num_stages)
        if faults:
            return None, faults
        given = self._given_schedule()
        assert not isinstance(given, ScheduleError)  # find_faults has told
        try:
            if given == AUTO:
                return self._searched(times, num_ranks), []
            if isinstance(given, str):
                return self._built(given, num_stages, num_ranks), []
        except ScheduleError as error:
            return None, [f"schedule: {error}"]
        faults = self._fitting_faults(given, num_stages, num_ranks)
        if faults:
            return None, faults
        return Timetable(given.compute_only(), recompute=self.recompute), []

    def _built(self, family: str, num_stages: int, num_ranks: int) -> Timetable:
        count = self.num_microbatches or _MICROBATCHES_PER_RANK * num_ranks
        schedule = schedules.build(family, num_stages, count, num_ranks=num_ranks)
        fitted = partial(schedules.fitted, family, num_stages, num_ranks=num_ranks)
        return Timetable(schedule.check(), fitted, self.recompute)

    def _searched(self, times: Sequence[int | None], num_ranks: int) -> Timetable:
        """Find a schedule that holds no more than 1F1B does on its first rank.

        Every process searches for itself. All come to the same schedule: the times are estimates
        made from the graph, which is the same everywhere, and the search counts instead of timing.
        """
        known = [max(time, 1) for time in times if time is not None]
        each = known if len(known) == len(times) else [1] * len(times)
        costs = Costs(forward=each, input_gradient=each, weight_gradient=each)

        def find(count: int, placement: Sequence[int] | None = None) -> Schedule:
            found = find_schedule(
                num_ranks,
                count,
                costs,
                num_stages=len(times),
                placement=placement,
                memory_limit=num_ranks,
                effort=_EFFORT,
            )
            return found.schedule

        full = find(self.num_microbatches or _MICROBATCHES_PER_RANK * num_ranks)
        return Timetable(full.check(), partial(find, placement=full.placement), self.recompute)

    def _fitting_faults(self, given: Schedule, num_stages: int, num_ranks: int) -> list[str]:
        return [
            f"schedule: it is for {has} {what}, the pipeline has {wanted}"
            for what, has, wanted in (
                ("stages", given.num_stages, num_stages),
                ("ranks", given.num_ranks, num_ranks),
                ("microbatches", given.num_microbatches, self.num_microbatches),
            )
            if wanted is not None and has != wanted
        ]

    def rank_devices(
        self, num_ranks: int, world: World | None
    ) -> tuple[list[torch.device], list[str]]:
        """Return the device of each rank, and what is wrong with their number."""
        if self.devices is None:
            return _default_devices(num_ranks, world), []
        if len(self.devices) != num_ranks:
            return [], [
                f"devices: {len(self.devices)} devices for {num_ranks} ranks: give one each"
            ]
        return [torch.device(device) for device in self.devices], []


def _ranks_fault(ranks: int | None, world: World) -> str:
    if world.members:  # a part of the world
        return f"ranks={ranks}, but group has {world.size} processes: leave ranks out"
    return (
        f"ranks={ranks}, but torchrun started {world.size} processes: start as many processes as "
        "there are ranks, leave ranks out, or name a part of them with group=..."
    )


def _device_fault(device: object, *, is_here: bool) -> str | None:
    """Return what is wrong with a device: no such name, or not for this process to use."""
    try:
        named = torch.device(device)  # type: ignore[call-overload]  # anything may have come
        if named.type == "meta":
            raise TypeError("nothing can run there")
        if not is_here:
            return None
        torch.empty(0, device=named)
    except (RuntimeError, TypeError, AssertionError) as error:
        return f"devices: {device!r} is no device ({str(error).splitlines()[0]})"
    return None


def _is_action(text: str) -> bool:
    try:
        Action.parse(text.strip())
    except ScheduleError:
        return False
    return True


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _default_devices(num_ranks: int, world: World | None) -> list[torch.device]:
    """Return one accelerator per rank where there are any, else the CPU."""
    if not torch.accelerator.is_available():
        return [torch.device("cpu")] * num_ranks
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    count = torch.accelerator.device_count()
    if world is not None:
        here = int(os.environ.get("LOCAL_RANK", "0"))
        return [torch.device(kind.type, here % count)] * num_ranks
    return [torch.device(kind.type, rank % count) for rank in range(num_ranks)]


def _is_batch_dims(value: object) -> bool:
    if isinstance(value, Mapping):
        entries: Any = value.items()
        return all(isinstance(k, str) and (v is None or _is_whole(v)) for k, v in entries)
    return _is_whole(value)
