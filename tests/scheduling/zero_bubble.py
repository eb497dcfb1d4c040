"""The zero-bubble schedules, written down from their authors' rules for the tests of the simulator.

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024): the rules are those of the authors' code.
"""

from __future__ import annotations

from collections.abc import Iterator

from stageline.scheduling import Action, Kind, Schedule

F, I, W = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741  # as in the papers


def zb_h1(p: int, m: int) -> Schedule:
    """Fill with p - 1 - r forwards; a W after each I as soon as p - 1 microbatches are behind."""
    rows = [_handmade(rank, p - 1 - rank, p - 1, m) for rank in range(p)]
    return Schedule.from_rows(rows, "zb-h1").check()


def zb_h2(p: int, m: int) -> Schedule:
    """The same with twice as many forwards to fill; needs m >= 2p."""
    rows = [_handmade(rank, 2 * (p - 1 - rank), 2 * (p - 1), m) for rank in range(p)]
    return Schedule.from_rows(rows, "zb-h2").check()


def _handmade(stage: int, warmup: int, delay: int, m: int) -> list[Action]:
    row = [Action(stage, F, i) for i in range(warmup)]
    weights = iter(range(m))
    for i in range(m):
        if warmup + i < m:
            row.append(Action(stage, F, warmup + i))
        row.append(Action(stage, I, i))
        if warmup + i >= delay:
            row.append(Action(stage, W, next(weights)))
    return [*row, *(Action(stage, W, i) for i in weights)]


def zb_v(p: int, m: int) -> Schedule:
    """Rank r holds stages r and 2p - 1 - r; seven phases."""
    rows = [[a for a in _vee(rank, p, max(2 * p - 1, m)) if a.microbatch < m] for rank in range(p)]
    return Schedule.from_rows(rows, "zb-v").check()


class _Counter:
    """The next action of each kind of one of a rank's two stages."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.done = dict.fromkeys((F, I, W), 0)

    def __call__(self, *kinds: Kind) -> Iterator[Action]:
        for kind in kinds:
            yield Action(self.stage, kind, self.done[kind])
            self.done[kind] += 1


def _vee(rank: int, p: int, n: int) -> Iterator[Action]:
    a, z = _Counter(rank), _Counter(2 * p - 1 - rank)
    for _ in range(2 * (p - rank) - 1):
        yield from a(F)
    for _ in range(rank):
        yield from z(F)
        yield from a(F)
    for _ in range(p - rank):
        yield from z(F, I, W)
    while z.done[F] < a.done[F] or a.done[F] < n:
        if a.done[F] < n:
            yield from a(F)
        yield from a(I, W)
        yield from z(F, I, W)
    for _ in range(rank):
        yield from a(I)
        yield from z(I)
    for _ in range(p - rank):
        yield from a(I, W)
    while z.done[W] < n:
        yield from z(W)
    while a.done[W] < n:
        yield from a(W)
