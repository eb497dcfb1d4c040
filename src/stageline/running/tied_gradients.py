"""The gradient of a tied parameter: what each of its copies collected in a step, added up.

    threads      all copies are here: they are added, last stage first
    processes    rank 2 ── its part ──▶ rank 0, the root, adds ── the sum ──▶ rank 2

Every send is under way before the first wait, so no two ranks can wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        root: The rank that adds them.
        copies: What the ranks of this process use; the first is the user's own, others follow it.
    """

    name: str
    ranks: tuple[int, ...]
    root: int
    copies: Mapping[int, nn.Parameter]

    @property
    def own(self) -> nn.Parameter:
        return next(iter(self.copies.values()))

    @property
    def shadows(self) -> dict[int, nn.Parameter]:
        return dict(list(self.copies.items())[1:])


def add_up(ties: Sequence[Tied], runner: Runner) -> list[Tensor | None]:
    """Return the sum over all ranks for every tied parameter; None where nobody has a gradient."""
    if runner.num_ranks == len(runner.ranks):
        return [_sum([tied.copies[rank].grad for rank in tied.ranks], tied.own) for tied in ties]
    (rank,) = runner.ranks
    return _Exchange(ties, rank, runner).sums()


class _Exchange:
    """What one process gets from and gives to those with which it shares parameters."""

    def __init__(self, ties: Sequence[Tied], rank: int, runner: Runner) -> None:
        self._ties = ties
        self._rank = rank
        self._runner = runner
        self._roots = sorted({tied.root for tied in ties} - {rank})
        adds_for = {holder for tied in ties if tied.root == rank for holder in tied.ranks}
        self._holders = sorted(adds_for - {rank})

    def sums(self) -> list[Tensor | None]:
        fault, totals = self._gather()
        came = self._runner.swap(
            1,
            {
                holder: Packet(
                    [fault, *(totals[t.name] for t in self._between(holder, self._rank))]
                )
                for holder in self._holders
            },
            self._roots,
        )
        for root, packet in came.items():
            fault = fault or packet.leaves[0]
            for tied, total in zip(self._between(self._rank, root), packet.leaves[1:], strict=True):
                totals[tied.name] = None if total is None else total.to(tied.own.device)
        if fault:
            raise PeerError(fault)
        # A send reads its memory later; by then the user may have changed the gradient.
        return [
            _copy(totals[t.name]) if t.root == self._rank else totals[t.name] for t in self._ties
        ]

    def _gather(self) -> tuple[str, dict[str, Tensor | None]]:
        """Return what is wrong, if anything, and the sums of all ties that this rank is root of."""
        mine = [tied for tied in self._ties if tied.root == self._rank]
        parts = {tied.name: {self._rank: _part(tied.own)} for tied in mine}
        came = self._runner.swap(
            0,
            {
                root: Packet(
                    [leaf for t in self._between(self._rank, root) for leaf in _part(t.own)]
                )
                for root in self._roots
            },
            self._holders,
        )
        for holder, packet in came.items():
            pairs = zip(packet.leaves[::2], packet.leaves[1::2], strict=True)
            for tied, pair in zip(self._between(holder, self._rank), pairs, strict=True):
                parts[tied.name][holder] = pair
        faults = [_differing(t) for t in mine if len({s for _, s in parts[t.name].values()}) > 1]
        totals = {t.name: _sum([parts[t.name][rank][0] for rank in t.ranks], t.own) for t in mine}
        return faults[0] if faults else "", totals

    def _between(self, holder: int, root: int) -> list[Tied]:
        """Return, in the order that both know, the ties of a holder and the rank that adds."""
        return [tied for tied in self._ties if tied.root == root and holder in tied.ranks]


def _part(parameter: nn.Parameter) -> tuple[Any, int]:
    """Return a copy's gradient, and a checksum of some of its values.

    Copies that began from different seeds, or drifted apart, differ in most of their values.
    """
    gradient = parameter.grad
    if gradient is not None and gradient.is_sparse:  # which cannot travel
        gradient = gradient.to_dense()
    return gradient, checksum(parameter)


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
