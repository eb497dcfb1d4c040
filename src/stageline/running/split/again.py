"""A forward that runs twice: F keeps no graph, R builds one from the same inputs.

    F   what came is kept as it came, though the stage may change it in place
    R   what the stage counts, a BatchNorm's statistics, stays as F has left it

What else R would do a second time is an error in F.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from stageline.errors import EdgeError
from stageline.partitioning.sharing import keeps_statistics
from stageline.running.boundary import Packet
from stageline.running.program import StageProgram

_Versions = list[tuple[Tensor, int]]


class Inputs:
    """The inputs that R of (stage, microbatch) will need; None: those are the model's arguments."""

    def __init__(self) -> None:
        self._packets: dict[tuple[int, int], Packet | None] = {}
        # Whether a stage changes its input in place: its first microbatch tells.
        self._changes: dict[int, bool] = {}

    @contextmanager
    def kept(
        self, program: StageProgram, microbatch: int, packet: Packet | None, others: Iterable[Any]
    ) -> Iterator[None]:
        """Keep what a stage is about to be called with.

        Args:
            others: Arguments of the model that it may use besides.
        """
        fixed = versions(others) + versions(_plain_buffers(program))
        coming = [] if packet is None else versions(packet.leaves)
        changes = self._changes.get(program.index)
        copy = None if packet is None or changes is False else _copied(packet)
        yield
        if is_changed(fixed):
            raise EdgeError(
                "the stage changes one of its buffers, or of the model's arguments, in place; R, "
                "which runs it again, would change it twice: use a schedule without R"
            )
        changed = is_changed(coming)
        if changed and copy is None:
            raise EdgeError(
                "the stage changes its input in place, but did not do so for the first microbatch "
                "of this step; R, which runs it again, has lost it: use a schedule without R"
            )
        self._changes[program.index] = changed
        self._packets[program.index, microbatch] = copy if changed else packet

    def pop(self, stage: int, microbatch: int) -> Packet | None:
        return self._packets.pop((stage, microbatch))


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


def _plain_buffers(program: StageProgram) -> Iterator[Tensor]:
    counting = {id(buffer) for buffer in _statistics(program)}
    return (buffer for buffer in program.buffers if id(buffer) not in counting)


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

    def put_back(self) -> None:
        for buffer, before in self._before:
            # Through .data, which counts no change: backward has saved the buffer, unused.
            buffer.data.copy_(before)
