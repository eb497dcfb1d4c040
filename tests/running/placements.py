"""Small schedules with I, W, R and stages in every order on the ranks, for tests that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stageline.scheduling import Schedule, parse


def zb_h1(ranks: int, microbatches: int) -> str:
    """ZB-H1: 1F1B with B in two halves, W filling what would be the bubble."""
    lines = []
    for rank in range(ranks):
        warmup = min(ranks - 1 - rank, microbatches)
        row = [f"{rank}F{m}" for m in range(warmup)]
        done = 0
        for m in range(microbatches):
            if warmup + m < microbatches:
                row.append(f"{rank}F{warmup + m}")
            row.append(f"{rank}I{m}")
            if ranks - 1 - rank + m >= ranks - 1:
                row.append(f"{rank}W{done}")
                done += 1
        row += [f"{rank}W{m}" for m in range(done, microbatches)]
        lines.append(" ".join(row))
    return "\n".join(lines)


def zb_v(ranks: int, microbatches: int) -> str:
    """ZB-V by hand: rank r holds stages r and 2p-1-r."""
    return "\n".join(_zb_v_row(ranks, microbatches, rank) for rank in range(ranks))


class _Row:
    """The row of a rank with a near and a far stage: F, I and W of each count up."""

    def __init__(self, near: int, far: int) -> None:
        self.stages = {"a": near, "z": far}
        self.counts = dict.fromkeys((letter + end for letter in "FIW" for end in "az"), 0)
        self.actions: list[tuple[int, str, int]] = []

    def add(self, times: int, *kinds: str) -> None:
        for kind in kinds * times:
            self.actions.append((self.stages[kind[1]], kind[0], self.counts[kind]))
            self.counts[kind] += 1


def _zb_v_row(ranks: int, microbatches: int, rank: int) -> str:
    row = _Row(rank, 2 * ranks - 1 - rank)
    many = max(2 * ranks - 1, microbatches)
    row.add(2 * (ranks - rank) - 1, "Fa")
    row.add(rank, "Fz", "Fa")
    row.add(ranks - rank, "Fz", "Iz", "Wz")
    while row.counts["Fz"] < row.counts["Fa"] or row.counts["Fa"] < many:
        row.add(row.counts["Fa"] < many, "Fa")
        row.add(1, "Ia", "Wa", "Fz", "Iz", "Wz")
    row.add(rank, "Ia", "Iz")
    row.add(ranks - rank, "Ia", "Wa")
    for end in "za":
        row.add(row.counts["I" + end] - row.counts["W" + end], "W" + end)
    return " ".join(f"{stage}{letter}{m}" for stage, letter, m in row.actions if m < microbatches)


def interleaved(ranks: int, microbatches: int, rounds: int = 2) -> str:
    """Interleaved 1F1B: rank r holds stages r, r + p, ..; microbatches in groups of p."""
    lines = []
    for rank in range(ranks):
        order = [
            (turn, m)
            for first in range(0, microbatches, ranks)
            for turn in range(rounds)
            for m in range(first, min(first + ranks, microbatches))
        ]
        forwards = [f"{turn * ranks + rank}F{m}" for turn, m in order]
        backwards = [f"{(rounds - 1 - turn) * ranks + rank}B{m}" for turn, m in order]
        warmup = min(2 * (ranks - 1 - rank) + (rounds - 1) * ranks, len(order))
        row = forwards[:warmup]
        for f, b in zip(forwards[warmup:], backwards, strict=False):
            row += [f, b]
        row += backwards[len(order) - warmup :]
        lines.append(" ".join(row))
    return "\n".join(lines)


def looped(
    stages_of: Callable[[int], Sequence[int]],
    ranks: int,
    microbatches: int,
    *,
    descending: bool = False,
    letters: str = "B",
) -> str:
    """All microbatches through one stage after the other, and all the way back."""
    there = range(microbatches)
    back = there[::-1] if descending else there
    lines = []
    for rank in range(ranks):
        held = sorted(stages_of(rank))
        row = [f"{stage}F{m}" for stage in held for m in there]
        row += [f"{stage}{a}{m}" for stage in held[::-1] for m in back for a in letters if a != "W"]
        if "W" in letters:
            row += [f"{stage}W{m}" for stage in held for m in there]
        lines.append(" ".join(row))
    return "\n".join(lines)


def snake(ranks: int, rounds: int) -> Callable[[int], Sequence[int]]:
    """There and back again: 0 1 2 | 2 1 0 | 0 1 2 .."""

    def stages_of(rank: int) -> Sequence[int]:
        return [turn * ranks + (ranks - 1 - rank if turn % 2 else rank) for turn in range(rounds)]

    return stages_of


def loops(ranks: int, rounds: int) -> Callable[[int], Sequence[int]]:
    return lambda rank: range(rank, ranks * rounds, ranks)


def recomputed(text: str, *, but: Sequence[int] = ()) -> str:
    """Run every stage again before its backward, but for some."""
    lines = []
    for line in text.strip().splitlines():
        row = []
        for action in line.split():
            letter = next(c for c in action if c.isalpha())
            stage = int(action.partition(letter)[0])
            if letter in "BI" and stage not in but:
                row.append(action.replace(letter, "R"))
            row.append(action)
        lines.append(" ".join(row))
    return "\n".join(lines)


def varuna(ranks: int, microbatches: int) -> str:
    """1F1B in which all stages but the last run again before B."""
    one = [
        " ".join(
            [f"{r}F{m}" for m in range(w)]
            + [f"{r}{a}{m + (w if a == 'F' else 0)}" for m in range(microbatches - w) for a in "FB"]
            + [f"{r}B{m}" for m in range(microbatches - w, microbatches)]
        )
        for r in range(ranks)
        for w in [min(ranks - 1 - r, microbatches)]
    ]
    return recomputed("\n".join(one), but=[ranks - 1])


SMALL: dict[str, Callable[[int], str]] = {
    "zb-h1": lambda m: zb_h1(4, m),
    "zb-v": lambda m: zb_v(2, m),
    "interleaved": lambda m: interleaved(2, m),
    "looped, I W": lambda m: looped(loops(2, 2), 2, m, letters="IW"),
    "snake": lambda m: looped(snake(2, 2), 2, m),
    "varuna": lambda m: varuna(4, m),
    "zb-v, R": lambda m: recomputed(zb_v(2, m)),
    "interleaved, R": lambda m: recomputed(interleaved(2, m), but=[1]),
    "one rank, I W": lambda m: looped(lambda _: range(4), 1, m, letters="IW"),
}
"""Schedules for four stages and a number of microbatches, with B, or W, ascending on each stage."""


def build(name: str, microbatches: int) -> Schedule:
    return parse(SMALL[name](microbatches)).check()
