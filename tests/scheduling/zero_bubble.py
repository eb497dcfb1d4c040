"""The zero-bubble schedules, written down from their authors' rules for the tests of the simulator.

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024): the rules are those of the authors' code.
"""

from __future__ import annotations

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


class _Vee:
    """The next action of each kind, of a rank's first stage (FIW) and of its second (fiw)."""

    def __init__(self, rank: int, p: int) -> None:
        self.stages = {"F": rank, "I": rank, "W": rank}
        self.stages |= {letter.lower(): 2 * p - 1 - rank for letter in "FIW"}
        self.done = dict.fromkeys("FIWfiw", 0)
        self.row: list[Action] = []

    def run(self, letters: str, times: int = 1) -> None:
        for letter in letters * times:
            kind = {"F": F, "I": I, "W": W}[letter.upper()]
            self.row.append(Action(self.stages[letter], kind, self.done[letter]))
            self.done[letter] += 1


def _vee(rank: int, p: int, n: int) -> list[Action]:
    vee = _Vee(rank, p)
    vee.run("F", 2 * (p - rank) - 1)
    vee.run("fF", rank)
    vee.run("fiw", p - rank)
    while vee.done["f"] < vee.done["F"] or vee.done["F"] < n:
        vee.run("FIWfiw" if vee.done["F"] < n else "IWfiw")
    vee.run("Ii", rank)
    vee.run("IW", p - rank)
    vee.run("w", n - vee.done["w"])
    vee.run("W", n - vee.done["W"])
    return vee.row
