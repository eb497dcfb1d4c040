"""A forward that runs twice: F keeps no graph, R builds one from the same inputs.

    F   what came is kept as it came, though the stage may change it in place
    R   what the stage counts, a BatchNorm's statistics, stays as F has left it

What else R would do a second time is an error in F; an R that makes other values is one in R.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stageline.errors import EdgeError
from stageline.partitioning.sharing import keeps_statistics
from stageline.running.boundary import Packet
from stageline.running.program import StageProgram

_Versions = list[tuple[Tensor, int]]

_OR_KEEP = "or leave the stage out of recompute=, with a schedule without R"
_SAMPLES = 61
"""How many values of a tensor are compared at least."""


@dataclass
class FirstRun:
    """What the F of a stage and a microbatch leaves for its R.

    Attributes:
        packet: What came to the stage; None if those are the model's arguments.
        state: Parameters and buffers as F has left them.
        made: Some values of what F made; None where they are not compared.
    """

    packet: Packet | None
    state: _Versions
    made: list[Tensor] | None = None

    def check_state(self) -> None:
        """Raise if R would run with other weights than F."""
        if is_changed(self.state):
            raise EdgeError(
                "a parameter or buffer of the stage was modified in place after its forward, which "
                "has to run again for the backward and would make other values: call backward() "
                "first, optimizer.step() after it"
            )

    def check_made(self, results: Iterable[Tensor]) -> None:
        """Raise if R made other values than F, by more than kernels that add in any order do."""
        if self.made is None:
            return
        again = samples(results)
        pairs = zip(self.made, again, strict=False)
        if len(self.made) != len(again) or any(_differ(*pair) for pair in pairs):
            raise EdgeError(
                "the stage made other values when it was recomputed, so that its gradients would "
                "be those of another forward: it depends on something that has changed since, such "
                "as a random number that is not torch's or a count of its calls (ask "
                "sl.is_recomputing()). Leave the stage out of recompute="
            )


class FirstRuns:
    """What each F of a step leaves for its R, by stage and microbatch."""

    def __init__(self) -> None:
        self._runs: dict[tuple[int, int], FirstRun] = {}
        # Whether a stage changes its input in place: its first microbatch tells.
        self._changes: dict[int, bool] = {}

    def is_first(self, stage: int) -> bool:
        """Whether no microbatch of a stage has run so far."""
        return stage not in self._changes

    @contextmanager
    def kept(
        self, program: StageProgram, microbatch: int, packet: Packet | None, others: Iterable[Any]
    ) -> Iterator[FirstRun]:
        """Keep what a stage is about to be called with.

        Args:
            others: Arguments of the model that it may use besides.
        """
        arguments, buffers = versions(others), versions(_plain_buffers(program))
        coming = [] if packet is None else versions(packet.leaves)
        changes = self._changes.get(program.index)
        copy = None if packet is None or changes is False else _copied(packet)
        run = FirstRun(packet, [])
        yield run
        if is_changed(buffers):
            raise EdgeError(
                "the stage changes one of its buffers in place; R, which runs it again, would "
                f"change it twice: put another tensor in its place (self.mean = ...), {_OR_KEEP}"
            )
        if is_changed(arguments):
            raise EdgeError(
                "the stage changes one of the model's arguments, in place; R, which runs it again, "
                f"would change it twice: work on a copy, {_OR_KEEP}"
            )
        changed = is_changed(coming)
        if changed and copy is None:
            raise EdgeError(
                "the stage changes its input in place, but did not do so for the first microbatch "
                f"of this step; R, which runs it again, has lost it: work on a copy, {_OR_KEEP}"
            )
        if changed:
            run.packet = copy
        run.state = versions([*program.parameters, *_plain_buffers(program)])
        self._changes.setdefault(program.index, changed)
        self._runs[program.index, microbatch] = run

    def pop(self, stage: int, microbatch: int) -> FirstRun:
        return self._runs.pop((stage, microbatch))


def samples(results: Iterable[Tensor]) -> list[Tensor]:
    """Return copies of some values of each ordinary tensor.

    Example:
        >>> [found] = samples([torch.arange(610)])
        >>> found[:4], len(found)
        (tensor([ 0, 10, 20, 30]), 61)
    """
    ordinary = (x for x in results if type(x) is Tensor and x.layout is torch.strided)
    flat = [result.reshape(-1) for result in ordinary]
    return [each[:: max(1, each.numel() // _SAMPLES)].clone() for each in flat]


def _differ(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return True
    if torch.equal(one, other):
        return False
    size = one.nan_to_num().abs().max()
    atol = float(size) * torch.finfo(one.dtype).eps ** 0.5
    return not torch.allclose(one, other, rtol=0, atol=atol, equal_nan=True)


def versions(values: Iterable[Any]) -> _Versions:
    """Return tensors with how often each was written to."""
    return [
        (value, value._version)
        for value in values
        if isinstance(value, Tensor) and not value.is_inference()
    ]


def is_changed(seen: _Versions) -> bool:
    """Return whether one of them has been written to since."""
    return any(tensor._version != version for tensor, version in seen)


def _copied(packet: Packet) -> Packet:
    return packet.with_leaves(
        [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in packet.leaves]
    )


def _plain_buffers(program: StageProgram) -> list[Tensor]:
    """Return all buffers but statistics; a stage may put others in their place as it runs."""
    counting = set(map(id, _statistics(program)))
    held = (buffer for module in program.holding for buffer in module._buffers.values())
    return [buffer for buffer in held if buffer is not None and id(buffer) not in counting]


def _statistics(program: StageProgram) -> Sequence[Tensor]:
    return [
        buffer
        for module in program.normalising
        if keeps_statistics(module)
        for buffer in module.buffers(recurse=False)
    ]


class Statistics:
    """What a stage has counted so far, to go back to after it has run once more."""

    def __init__(self, program: StageProgram) -> None:
        self._before = [(buffer, buffer.clone()) for buffer in _statistics(program)]
        self._held = [(module, dict(module._buffers)) for module in program.holding]

    def put_back(self) -> None:
        for module, held in self._held:  # the stage may have put others in their place
            module._buffers.update(held)
        for buffer, before in self._before:
            # Through .data, which counts no change: backward has saved the buffer, unused.
            buffer.data.copy_(before)
