"""The gradient of a tied parameter: what each of its copies collected in a step, added up.

    threads            all copies are here: they are added, last stage first
    two processes      rank 0 ── its part ──▶ ◀── its part ── rank 2, and both add
    more processes     rank 2 ── its part ──▶ rank 0, the root, adds ── the sum ──▶ rank 2

Every send is under way before the first wait, so no two ranks can wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import PeerError
from stageline.running.boundary import Packet
from stageline.running.runner import Runner
from stageline.running.signature import Checksum


@dataclass(frozen=True)
class Tied:
    """A parameter of several ranks.

    Attributes:
        name: Its first name in the model.
        ranks: All ranks that hold it, in the order in which gradients are added.
        root: The rank that adds them if they are more than two.
        copies: What the ranks of this process use; the first is the user's own, others follow it.
    """

    name: str
    ranks: tuple[int, ...]
    root: int
    copies: Mapping[int, nn.Parameter]

    @property
    def adders(self) -> tuple[int, ...]:
        """The ranks that add; where two share, neither has to wait for the other's sum."""
        return self.ranks if len(self.ranks) == 2 else (self.root,)

    @property
    def own(self) -> nn.Parameter:
        return next(iter(self.copies.values()))

    @property
    def shadows(self) -> dict[int, nn.Parameter]:
        return dict(list(self.copies.items())[1:])


class TiedGradients:
    """Adds up what the copies of all tied parameters have collected.

    Args:
        ties: The tied parameters of this process, in an order that all processes have in common.
        ranks_here: The ranks that live in this process.
    """

    def __init__(self, ties: Sequence[Tied], ranks_here: Sequence[int]) -> None:
        self._ties = ties
        self._exchange = None if len(ranks_here) > 1 else _Exchange(ties, ranks_here[0])

    def sums(self, runner: Runner) -> list[Tensor | None]:
        """Return the sum over all ranks for every parameter; None where nobody has a gradient."""
        if runner.num_ranks == len(runner.ranks):
            return [_sum([t.copies[rank].grad for rank in t.ranks], t.own) for t in self._ties]
        assert self._exchange is not None
        return self._exchange.sums(runner)


class _Exchange:
    """What one process gets from and gives to those with which it shares parameters."""

    def __init__(self, ties: Sequence[Tied], rank: int) -> None:
        self._ties = ties
        self._rank = rank
        others = sorted({other for tied in ties for other in tied.ranks} - {rank})
        # By the other rank, in an order that both know: what it adds, what is added for it here,
        # which sums it tells, and which it is told.
        self._added_there = _with_any({other: self._added(rank, other) for other in others})
        self._added_here = _with_any({other: self._added(other, rank) for other in others})
        self._told_there = _with_any({other: self._told(other, rank) for other in others})
        self._told_here = _with_any({other: self._told(rank, other) for other in others})
        # Copies that began from different seeds, or drifted apart, differ in most of their values.
        self._checksums = {tied.name: Checksum(tied.own) for tied in ties}
        self._numbers = {other: _Numbers(added) for other, added in self._added_there.items()}

    def _added(self, holder: int, adder: int) -> list[Tied]:
        return [tied for tied in self._ties if adder in tied.adders and holder in tied.ranks]

    def _told(self, holder: int, root: int) -> list[Tied]:
        return [tied for tied in self._added(holder, root) if holder not in tied.adders]

    def sums(self, runner: Runner) -> list[Tensor | None]:
        fault, totals = self._gather(runner)
        if self._told_there or self._told_here:
            fault = self._tell(runner, fault, totals)
        if fault:
            raise PeerError(fault)
        return [totals[tied.name] for tied in self._ties]

    def _gather(self, runner: Runner) -> tuple[str, dict[str, Tensor | None]]:
        """Return what is wrong, if anything, and the sums that are made here."""
        checksums = {name: checksum() for name, checksum in self._checksums.items()}
        own = {tied.name: _dense(tied.own.grad) for tied in self._ties}
        outgoing = {
            adder: Packet([*(own[t.name] for t in added), self._numbers[adder].filled(checksums)])
            for adder, added in self._added_there.items()
        }
        parts = {tied.name: {self._rank: own[tied.name]} for tied in self._ties}
        totals: dict[str, Tensor | None] = {}
        faults: list[str] = []

        def read(holder: int, packet: Packet) -> None:
            *gradients, numbers = packet.leaves
            added = zip(self._added_here[holder], gradients, numbers.tolist(), strict=True)
            for tied, gradient, number in added:
                if number != checksums[tied.name]:
                    faults.append(_differing(tied))
                is_pair = len(tied.ranks) == 2
                parts[tied.name][holder] = gradient if is_pair else _copy(gradient)
                if is_pair:  # the sum is whole, and made before the part may be gone
                    totals[tied.name] = self._total(tied, parts[tied.name])

        runner.swap(0, outgoing, {rank: partial(read, rank) for rank in self._added_here})
        for tied in self._ties:
            if self._rank in tied.adders and tied.name not in totals:
                totals[tied.name] = self._total(tied, parts[tied.name])
        return faults[0] if faults else "", totals

    def _total(self, tied: Tied, parts: Mapping[int, Tensor | None]) -> Tensor | None:
        """Return the sum of all parts, in memory of its own.

        A part may be on its way to others, or lie in a slab. And autograd may have given two
        parameters one memory for their gradients.
        """
        total = _sum([parts[rank] for rank in tied.ranks], tied.own)
        is_part = any(total is part for part in parts.values())
        return _copy(total) if is_part else total

    def _tell(self, runner: Runner, fault: str, totals: dict[str, Tensor | None]) -> str:
        """Tell the sums that were made here, and note those of others; return what is wrong."""
        outgoing = {
            holder: Packet([fault, *(totals[tied.name] for tied in told)])
            for holder, told in self._told_there.items()
        }
        faults = [fault]

        def read(root: int, packet: Packet) -> None:
            told, *sums = packet.leaves
            faults.append(told)
            for tied, total in zip(self._told_here[root], sums, strict=True):
                totals[tied.name] = None if total is None else _own(total, tied.own.device)

        runner.swap(1, outgoing, {rank: partial(read, rank) for rank in self._told_here})
        # A send may read its memory later; by then the user may have changed the gradient.
        for name in {tied.name for told in self._told_there.values() for tied in told}:
            totals[name] = _copy(totals[name])
        return next(filter(None, faults), "")


def _with_any(ties: dict[int, list[Tied]]) -> dict[int, list[Tied]]:
    return {rank: some for rank, some in ties.items() if some}


class _Numbers:
    """Checksums as they travel: one tensor, so that the packets of all steps look the same.

    It is written to in every step; what was sent in the one before has been read by then.
    """

    def __init__(self, ties: Sequence[Tied]) -> None:
        self._names = [tied.name for tied in ties]
        self._tensor: Tensor | None = None
        self._array: Any = None

    def filled(self, checksums: Mapping[str, int]) -> Tensor:
        if self._tensor is None:
            self._tensor = torch.zeros(len(self._names), dtype=torch.int64, device="cpu")
            self._array = self._tensor.numpy()  # whose own operations are much shorter
        for place, name in enumerate(self._names):
            self._array[place] = checksums[name]
        return self._tensor


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient as it can travel."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.clone() if tensor.device == device else tensor.to(device)


def _differing(tied: Tied) -> str:
    return (
        f"ranks {', '.join(map(str, sorted(tied.ranks)))} have different values in {tied.name}, "
        "which is tied: begin with the same seed or state_dict on every rank, and give it the same "
        "optimizer everywhere"
    )


def _sum(parts: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            moved = part.to(like.device)
            total = moved if total is None else _plus(total, moved)
    return total


def _plus(one: Tensor, other: Tensor) -> Tensor:
    # torch can add a sparse tensor to a dense one, but not the other way round.
    return other + one if one.is_sparse and not other.is_sparse else one + other


def _copy(total: Tensor | None) -> Tensor | None:
    return None if total is None else total.clone()


def onto(old: Tensor | None, total: Tensor | None) -> Tensor | None:
    """Return the gradient after a step; in place where there was one, as autograd accumulates."""
    if old is None or total is None:
        return total if old is None else old
    return total + old if old.is_sparse and not total.is_sparse else old.add_(total)
