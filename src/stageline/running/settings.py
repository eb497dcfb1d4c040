"""What a user can say about a pipeline besides the model: checked here, every finding at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stageline.errors import ScheduleError
from stageline.running.events import Observer
from stageline.running.loss import REDUCTIONS, LossFunction
from stageline.running.microbatches import BatchDims, LossReduction
from stageline.running.timetable import Timetable
from stageline.running.transports.base import ThreadTransport
from stageline.running.world import World
from stageline.scheduling import Kind, Schedule, parse, schedules

WrapStage = Callable[[nn.Module, int], nn.Module]
TRANSPORTS = ("memory", "process-group")
_RUNNABLE = (Kind.FORWARD, Kind.BACKWARD)
_MICROBATCHES_PER_RANK = 4  # the bubble of 1F1B is then at most a fifth


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
    batch_dims: BatchDims = 0
    transport: str | ThreadTransport | None = None
    keep_outputs: bool = False
    share_outputs: bool = True
    timeout: float = 1800.0
    observer: Observer | None = None

    def world(self) -> World | None:
        """Return the processes to run on; None if all ranks are threads of this one."""
        in_threads = self.transport == "memory" or isinstance(self.transport, ThreadTransport)
        return None if in_threads else World.find()

    def find_faults(self) -> list[str]:
        """Return what is wrong with the settings, whatever the model."""
        faults = [*self._number_faults(), *self._callable_faults()]
        if not _is_batch_dims(self.batch_dims):
            faults.append(
                f"batch_dims={self.batch_dims!r}: wanted a dimension (0) or one by leaf "
                f"({{'args[1]': 1}})"
            )
        if isinstance(self.transport, str) and self.transport not in TRANSPORTS:
            faults.append(f"transport={self.transport!r}: choose one of {', '.join(TRANSPORTS)}")
        elif self.transport == "process-group" and World.find() is None:
            faults.append(
                "transport='process-group': this process is alone: start the script with torchrun"
            )
        elif self.transport is not None and not isinstance(self.transport, (str, ThreadTransport)):
            faults.append(f"transport={self.transport!r}: wanted a name or a transport")
        return faults

    def _number_faults(self) -> list[str]:
        faults = []
        for name, value in (("num_microbatches", self.num_microbatches), ("ranks", self.ranks)):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                faults.append(f"{name}={value!r}: wanted a whole number of at least 1")
        if not isinstance(self.timeout, (int, float)) or not self.timeout > 0:
            faults.append(f"timeout={self.timeout!r}: wanted a number of seconds above 0")
        return faults

    def _callable_faults(self) -> list[str]:
        faults = [
            f"{name}={value!r}: wanted a function or None"
            for name, value in (
                ("loss_fn", self.loss_fn),
                ("wrap_stage", self.wrap_stage),
                ("observer", self.observer),
            )
            if value is not None and not callable(value)
        ]
        if self.loss_reduction not in REDUCTIONS and not callable(self.loss_reduction):
            faults.append(
                f"loss_reduction={self.loss_reduction!r}: wanted 'mean', 'sum' or a function of a "
                "microbatch and the whole batch that returns the microbatch's weight"
            )
        return faults

    def num_ranks(self, num_stages: int, world: World | None) -> tuple[int, list[str]]:
        """Return how many ranks the pipeline has, and what is wrong with that number."""
        given = self._given_schedule()
        if world is not None:
            if self.ranks not in (None, world.size):
                return world.size, [
                    f"ranks={self.ranks}, but torchrun started {world.size} processes: start as "
                    "many "
                    "processes as there are ranks, or leave ranks out"
                ]
            wanted = world.size
        elif isinstance(self.ranks, int):
            wanted = self.ranks
        else:
            wanted = given.num_ranks if isinstance(given, Schedule) else num_stages
        if wanted > num_stages:
            return wanted, [
                f"{wanted} ranks for {num_stages} stages: every rank needs a stage; cut the "
                "model into "
                f"more stages or use {num_stages} ranks"
            ]
        return wanted, []

    def _given_schedule(self) -> Schedule | str | ScheduleError:
        """Return the schedule that the user wrote, or the name of one of ours."""
        if isinstance(self.schedule, Schedule):
            return self.schedule
        if not isinstance(self.schedule, str) or not self.schedule.strip():
            return ScheduleError(
                f"wanted a name ({', '.join(schedules.NAMES)}), a Schedule or its text"
            )
        if self.schedule in schedules.NAMES or " " not in self.schedule.strip():
            return self.schedule
        try:
            return parse(self.schedule)
        except ScheduleError as error:
            return error

    def timetable(self, num_stages: int, num_ranks: int) -> tuple[Timetable | None, list[str]]:
        """Return the schedule for this pipeline, and what is wrong with it."""
        given = self._given_schedule()
        try:
            if isinstance(given, ScheduleError):
                raise given
            if isinstance(given, str):
                return self._built(given, num_stages, num_ranks), []
            given.check()
        except ScheduleError as error:
            return None, [f"schedule: {error}"]
        faults = self._fitting_faults(given, num_stages, num_ranks)
        return (None, faults) if faults else (Timetable(given.compute_only()), [])

    def _built(self, family: str, num_stages: int, num_ranks: int) -> Timetable:
        count = self.num_microbatches or _MICROBATCHES_PER_RANK * num_ranks
        schedule = schedules.build(family, num_stages, count, num_ranks=num_ranks)
        return Timetable(schedule.check(), family)

    def _fitting_faults(self, given: Schedule, num_stages: int, num_ranks: int) -> list[str]:
        faults = []
        for what, has, wanted in (
            ("stages", given.num_stages, num_stages),
            ("ranks", given.num_ranks, num_ranks),
            ("microbatches", given.num_microbatches, self.num_microbatches),
        ):
            if wanted is not None and has != wanted:
                faults.append(f"schedule: it is for {has} {what}, the pipeline has {wanted}")
        others = sorted(
            kind.letter for kind in given.compute_only().kinds() if kind not in _RUNNABLE
        )
        if others:
            faults.append(f"schedule: it uses {', '.join(others)}, but only F and B can be run")
        return faults

    def rank_devices(
        self, num_ranks: int, world: World | None
    ) -> tuple[list[torch.device], list[str]]:
        """Return the device of each rank, and what is wrong with the devices given."""
        if self.devices is None:
            return _default_devices(num_ranks, world), []
        if isinstance(self.devices, (str, torch.device)):
            return [], [f"devices={self.devices!r}: wanted a list with one device per rank"]
        read = [_read_device(device) for device in self.devices]
        devices = [device for device in read if isinstance(device, torch.device)]
        faults = [fault for fault in read if isinstance(fault, str)]
        if not faults and len(devices) != num_ranks:
            faults.append(f"devices: {len(devices)} devices for {num_ranks} ranks: give one each")
        return devices, faults


def _read_device(device: object) -> torch.device | str:
    """Return a device, or what is wrong with it."""
    try:
        return torch.device(device)  # type: ignore[call-overload, no-any-return]  # anything
    except (RuntimeError, TypeError) as error:
        return f"devices: {device!r} is no device ({str(error).splitlines()[0]})"


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
        return all(isinstance(k, str) and (v is None or isinstance(v, int)) for k, v in entries)
    return isinstance(value, int) and not isinstance(value, bool)
