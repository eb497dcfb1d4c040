"""``deferred_batch_norm=True``: running statistics as if the whole batch had been seen once.

    F of a microbatch   normalises by the mean and variance of the microbatch, as ever; running
                        statistics stay as they are, and what the microbatch adds is noted
    the end of a call   the notes are put together, first microbatch first, and every BatchNorm
                        updates its running statistics once; a call that fails changes nothing

What a BatchNorm does is seen where it calls ``F.batch_norm``, under a function mode of the thread
that runs the stage. So the user's modules stay as they are, classes with a ``forward`` of their own
are followed too, and R, whose notes replace those of F, counts nothing twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stageline.errors import PipeError
from stageline.partitioning.sharing import is_batch_norm, keeps_statistics
from stageline.running.program import StageProgram
from stageline.running.streams.compiled import compiled_among, uncompiled
from stageline.wording import a_kind

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_UNCOMPILED = (
    "deferred_batch_norm=True follows what a BatchNorm is given, which cannot be seen in compiled "
    "code: leave the module uncompiled, or leave deferred_batch_norm out"
)


class Moments(NamedTuple):
    """What one call with one microbatch has seen, for each channel.

    Sums are those of differences to a number close to the mean: where the mean is large, the sum of
    squares would lose what the variance is made of.

    Attributes:
        num_values: Values per channel.
        near: A number close to their mean.
        total: Sum of their differences to it.
        squares: Sum of the squares of these differences.
        momentum: What the BatchNorm gave as its momentum.
    """

    num_values: int
    near: Tensor
    total: Tensor
    squares: Tensor
    momentum: float

    @classmethod
    def of(cls, values: Tensor, momentum: float) -> Moments:
        """Return those of an input: batch first, then channels.

        Example:
            >>> Moments.of(torch.tensor([[1.0], [2.0], [6.0]]), 0.1)[:4]
            (3, tensor([3.]), tensor([0.]), tensor([14.]))
        """
        values = values.detach()
        if values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()
        dims = [dim for dim in range(values.dim()) if dim != 1]
        near = values.mean(dims, keepdim=True)
        apart = values - near
        count = math.prod(values.shape[dim] for dim in dims)
        return cls(count, near.flatten(), apart.sum(dims), apart.square().sum(dims), momentum)

    def in_double(self) -> Moments:
        """Return the same on the CPU, in float64, which not every accelerator has."""
        near, total, squares = (t.cpu().double() for t in (self.near, self.total, self.squares))
        return Moments(self.num_values, near, total, squares, self.momentum)


def mean_and_variance(parts: Sequence[Moments]) -> tuple[Tensor, Tensor]:
    """Return the mean and the unbiased variance of what several microbatches have seen.

    They are added in the order given, so that results do not depend on the schedule.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [6.0]])
        >>> mean, variance = mean_and_variance([Moments.of(part, 0.1) for part in x.split(2)])
        >>> mean.item(), variance.item()
        (3.0, 7.0)
    """
    parts = [part.in_double() for part in parts]
    count = sum(part.num_values for part in parts)
    means = [part.near + part.total / part.num_values for part in parts]
    zero = torch.zeros_like(means[0])
    mean = sum((p.num_values * m for p, m in zip(parts, means, strict=True)), zero) / count
    squares = zero
    for part, own in zip(parts, means, strict=True):
        within = part.squares - part.total.square() / part.num_values
        squares = squares + within + part.num_values * (own - mean).square()
    return mean, squares / (count - 1)


@dataclass
class _Norm:
    """A BatchNorm that trains, in one call of the pipeline.

    Attributes:
        stage: Whose it is.
        module: The BatchNorm.
        before: Its statistics before the call.
        seen: What each microbatch has added, one entry for each time that it was called.
        after: Its statistics after the call.
    """

    stage: int
    module: nn.Module
    before: dict[str, Tensor]
    seen: dict[int, list[Moments]] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, stage: int, module: nn.Module) -> _Norm:
        return cls(stage, module, {name: b.clone() for name, b in _statistics(module).items()})

    def combine(self) -> None:
        """Compute what the statistics will be.

        Raises:
            PipeError: They were changed, and what for was not seen.
        """
        seen = [self.seen[microbatch] for microbatch in sorted(self.seen)]
        if not any(seen):
            self._refuse_changes()
        state = {name: value.cpu() for name, value in self.before.items()}
        mean, var = state["running_mean"].double(), state["running_var"].double()
        tracked = state.get("num_batches_tracked")
        for number in range(max(map(len, seen), default=0)):
            # Code with branches may leave it out for a microbatch.
            parts = [calls[number] for calls in seen if number < len(calls)]
            factor = parts[0].momentum
            if tracked is not None:
                tracked = tracked + 1
                if getattr(self.module, "momentum", factor) is None:  # the mean of all batches
                    factor = 1 / int(tracked)
            batch_mean, batch_var = mean_and_variance(parts)
            mean = (1 - factor) * mean + factor * batch_mean
            var = (1 - factor) * var + factor * batch_var
        self.after = {"running_mean": mean, "running_var": var}
        if tracked is not None:
            self.after["num_batches_tracked"] = tracked

    def _refuse_changes(self) -> None:
        for name, now in _statistics(self.module).items():
            if not torch.equal(now, self.before[name]):
                raise PipeError(
                    f"deferred_batch_norm=True: {a_kind(self.module)} of stage {self.stage} has "
                    f"changed its {name} without calling torch.nn.functional.batch_norm, so what "
                    "it has seen of the batch is not known (SyncBatchNorm does so, too): use a "
                    "BatchNorm of torch's, call eval() on it, or leave deferred_batch_norm out"
                )

    def write(self, values: Mapping[str, Tensor]) -> None:
        for name, buffer in _statistics(self.module).items():
            # Through .data, which counts no change: a backward to come has saved the buffer.
            buffer.data.copy_(values[name])


def _statistics(module: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of a BatchNorm; empty if it is not like one of torch's."""
    found = {name: getattr(module, name, None) for name in STATISTICS}
    known = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    return known if {"running_mean", "running_var"} <= known.keys() else {}


def _training(module: nn.Module) -> list[nn.Module]:
    """Return the BatchNorms of a stage that would update their running statistics."""
    return [
        inner
        for inner in module.modules()
        if is_batch_norm(inner) and keeps_statistics(inner) and _statistics(inner)
    ]


class _Watching(TorchFunctionMode):
    """Lets a BatchNorm update copies of its running statistics, and notes what it has seen.

    Args:
        notes: Where, by the identity of ``running_mean``.
    """

    def __init__(self, notes: Mapping[int, list[Moments]]) -> None:
        super().__init__()
        self._notes = notes

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        notes = self._notes.get(id(running_mean)) if training else None
        if notes is not None and running_mean is not None and running_var is not None:
            # Not None: a checkpoint of the user's own compares what is saved when it runs again.
            running_mean, running_var = running_mean.clone(), running_var.clone()
        made = F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        if notes is not None:
            notes.append(Moments.of(input, momentum))
        return made


class DeferredStatistics:
    """The BatchNorms that train in the stages of this process, in one call.

    Args:
        programs: The stages.
    """

    def __init__(self, programs: Iterable[StageProgram]) -> None:
        self._programs = tuple(programs)
        self._norms = {
            program.index: [_Norm.of(program.index, each) for each in _training(program.module)]
            for program in self._programs
        }

    def follows(self, stage: int) -> bool:
        """Whether a stage has a BatchNorm that trains."""
        return bool(self._norms[stage])

    def watching(self, stage: int, microbatch: int) -> TorchFunctionMode:
        """Return the mode under which a stage runs on a microbatch, for the first time or again."""
        notes: dict[int, list[Moments]] = {}
        for norm in self._norms[stage]:
            notes[id(norm.module.running_mean)] = norm.seen[microbatch] = []
        return _Watching(notes)

    @contextmanager
    def compiler_off(self) -> Iterator[None]:
        """Run compiled code uncompiled where a stage is followed."""
        followed = [program.module for program in self._programs if self.follows(program.index)]
        if not followed:
            yield
            return
        modules = [module for stage in followed for module in stage.modules()]
        with uncompiled(compiled_among(modules), _UNCOMPILED):
            yield

    def combine(self) -> None:
        """Compute what all statistics will be, once all microbatches have run."""
        for norm in self._all():
            norm.combine()

    def commit(self) -> None:
        """Let all BatchNorms have their new statistics."""
        for norm in self._all():
            norm.write(norm.after)

    def put_back(self) -> None:
        """Let all BatchNorms have the statistics of before the call."""
        for norm in self._all():
            norm.write(norm.before)

    def _all(self) -> Iterator[_Norm]:
        return (norm for norms in self._norms.values() for norm in norms)


class Deferring(Protocol):
    """What knows the statistics of its call: the state of a rank."""

    statistics: DeferredStatistics | None


@contextmanager
def deferred(
    programs: Iterable[StageProgram], states: Iterable[Deferring], *, is_wanted: bool
) -> Iterator[None]:
    """Update running statistics when what happens inside has ended, and not at all if it fails.

    Args:
        programs: The stages of this process.
        states: What its ranks hold during the call.
        is_wanted: Whether the user asked for it; else statistics are updated by each microbatch.
    """
    if not is_wanted:
        yield
        return
    statistics = DeferredStatistics(programs)
    states = list(states)
    for state in states:
        state.statistics = statistics
    try:
        with statistics.compiler_off():
            yield
    finally:
        for state in states:  # graphs may live longer than the call
            state.statistics = None
    statistics.commit()


@contextmanager
def kept(programs: Iterable[StageProgram], *, is_wanted: bool) -> Iterator[None]:
    """Leave running statistics as they are, whatever a checkpoint of the user's own runs again.

    Args:
        programs: The stages of this process.
        is_wanted: Whether the user asked for statistics that count a batch once.
    """
    if not is_wanted:
        yield
        return
    statistics = DeferredStatistics(programs)
    try:
        yield
    finally:
        statistics.put_back()
