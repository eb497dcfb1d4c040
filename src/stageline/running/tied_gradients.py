"""The gradient of a tied parameter: what each of its copies collected in a step, added up.

    threads            all copies are here: they are added, last stage first
    two processes      rank 0 ── its part ──▶ ◀── its part ── rank 2, and both add
    more processes     rank 2 ── its part ──▶ rank 0, the root, adds ── the sum ──▶ rank 2

Every send is under way before the first wait, so no two ranks can wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stageline.errors import PeerError
from stageline.running.boundary import Packet
from stageline.running.runner import Runner
from stageline.running.signature import checksum


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

    def _added(self, holder: int, adder: int) -> list[Tied]:
        return [tied for tied in self._ties if adder in tied.adders and holder in tied.ranks]

    def _told(self, holder: int, root: int) -> list[Tied]:
        return [tied for tied in self._added(holder, root) if holder not in tied.adders]

    def sums(self, runner: Runner) -> list[Tensor | None]:
        fault, totals = self._gather(runner)
        outgoing = {
            holder: Packet([fault, *(totals[tied.name] for tied in told)])
            for holder, told in self._told_there.items()
        }
        for root, packet in runner.swap(1, outgoing, list(self._told_here)).items():
            fault = fault or packet.leaves[0]
            for tied, total in zip(self._told_here[root], packet.leaves[1:], strict=True):
                totals[tied.name] = None if total is None else total.to(tied.own.device)
        if fault:
            raise PeerError(fault)
        # A send reads its memory later; by then the user may have changed the gradient.
        sent = {tied.name for told in self._told_there.values() for tied in told}
        return [
            _copy(totals[tied.name]) if tied.name in sent else totals[tied.name]
            for tied in self._ties
        ]

    def _gather(self, runner: Runner) -> tuple[str, dict[str, Tensor | None]]:
        """Return what is wrong, if anything, and the sums that are made here."""
        own = {tied.name: _part(tied.own) for tied in self._ties}
        outgoing = {
            adder: _packed([own[tied.name] for tied in added])
            for adder, added in self._added_there.items()
        }
        mine = [tied for tied in self._ties if self._rank in tied.adders]
        parts = {tied.name: {self._rank: own[tied.name]} for tied in mine}
        for holder, packet in runner.swap(0, outgoing, list(self._added_here)).items():
            for tied, part in zip(self._added_here[holder], _unpacked(packet), strict=True):
                parts[tied.name][holder] = part
        faults = [_differing(t) for t in mine if len({s for _, s in parts[t.name].values()}) > 1]
        totals = {t.name: _sum([parts[t.name][rank][0] for rank in t.ranks], t.own) for t in mine}
        for tied in mine:
            if totals[tied.name] is own[tied.name][0]:  # which may be on its way to others
                totals[tied.name] = _copy(totals[tied.name])
        return faults[0] if faults else "", totals


def _with_any(ties: dict[int, list[Tied]]) -> dict[int, list[Tied]]:
    return {rank: some for rank, some in ties.items() if some}


def _part(parameter: nn.Parameter) -> tuple[Any, int]:
    """Return a copy's gradient, and a checksum of some of its values.

    Copies that began from different seeds, or drifted apart, differ in most of their values.
    """
    gradient = parameter.grad
    if gradient is not None and gradient.is_sparse:  # which cannot travel
        gradient = gradient.to_dense()
    return gradient, checksum(parameter)


def _packed(parts: Sequence[tuple[Any, int]]) -> Packet:
    """Return gradients and checksums as a packet; the latter in a tensor: headers stay the same."""
    return Packet(
        [*(gradient for gradient, _ in parts), torch.tensor([number for _, number in parts])]
    )


def _unpacked(packet: Packet) -> Iterator[tuple[Any, int]]:
    *gradients, numbers = packet.leaves
    return zip(gradients, numbers.tolist(), strict=True)


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
