"""``torch.distributed.pipelining.schedules``: schedules that run stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from stageline.compat.pippy.any_schedule import AnySchedule as _PipelineSchedule
from stageline.compat.pippy.stage import PipelineStage
from stageline.running.microbatches import LossWeight
from stageline.scheduling import parse

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "get_schedule_class",
]


class PipelineScheduleSingle(_PipelineSchedule):
    """A schedule with one stage per rank."""

    def __init__(
        self,
        stage: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(stage, n_microbatches, *args, **kwargs)


class PipelineScheduleMulti(_PipelineSchedule):
    """A schedule with several stages per rank; by itself it runs what a file or a subclass says."""

    def _load_csv(self, filename: str, format: str = "compute_only") -> None:
        """Run the schedule of a CSV file, one line per rank."""
        if format not in ("compute_only", "compute_comms"):
            raise ValueError(f"format={format!r}: wanted 'compute_only' or 'compute_comms'")
        self._pipeline = self._built(parse(Path(filename).read_text(encoding="utf-8")))

    def _validate_and_set_stage_mapping(self, actions: Mapping[int, Sequence[Any]]) -> None:
        """Run the order of a subclass: for each rank its actions, which print as in a file."""
        rows = [
            [str(each) for each in actions[rank] if each is not None] for rank in sorted(actions)
        ]
        self._pipeline = self._built(parse("\n".join(map(",".join, rows))))


_PipelineScheduleRuntime = PipelineScheduleMulti  # torchtitan's name for a schedule of a file


class _ScheduleForwardOnly(PipelineScheduleSingle):
    """All forwards, without a loss."""

    family = "forward-only"

    def step(self, *args: Any, target: Any = None, losses: Any = None, **kwargs: Any) -> Any:
        if target is not None or losses is not None:
            raise RuntimeError("Forward-only schedule does not support loss computation")
        return super().step(*args, **kwargs)


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    family = "gpipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward; fewer microbatches than stages are no error here."""

    family = "1f1b"


class ScheduleInterleaved1F1B(PipelineScheduleMulti):
    """1F1B with several stages per rank."""

    family = "interleaved"


class ScheduleLoopedBFS(PipelineScheduleMulti):
    """Several stages per rank, all microbatches stage by stage."""

    family = "looped-bfs"

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool | LossWeight | None = None,
        **kwargs: Any,
    ) -> None:
        merged = {"output_merge_spec": output_merge_spec, "scale_grads": scale_grads}
        super().__init__(stages, n_microbatches, loss_fn, **merged, **kwargs)


class ScheduleInterleavedZeroBubble(PipelineScheduleMulti):
    """Several stages per rank, the backward in two halves."""

    family = "interleaved-zb"


class ScheduleZBVZeroBubble(PipelineScheduleMulti):
    """Two stages per rank in a V, the backward in two halves."""

    family = "zb-v"
    _holds = 2


class ScheduleDualPipeV(PipelineScheduleMulti):
    """Two stages per rank in a V, forwards and backwards that overlap."""

    family = "dualpipe-v"
    _holds = 2


_CLASSES: dict[str, type[_PipelineSchedule]] = {
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "GPipe": ScheduleGPipe,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "PipelineScheduleMulti": PipelineScheduleMulti,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


def get_schedule_class(schedule_name: str) -> type[_PipelineSchedule]:
    """Return the class of a schedule; upper and lower case are the same.

    Example:
        >>> get_schedule_class("interleaved1f1b").__name__
        'ScheduleInterleaved1F1B'

    Raises:
        ValueError: There is no such schedule.
    """
    by_name = {name.lower(): known for name, known in _CLASSES.items()}
    if schedule_name.lower() not in by_name:
        raise ValueError(
            f"Unknown schedule name '{schedule_name}'. The valid options are {list(_CLASSES)}"
        )
    return by_name[schedule_name.lower()]
