"""Why does it take so long? The chain of actions that adds up to the makespan.

From the action that ends last, go back: it began when its rank became free, or when what it waited
for arrived. That action again began for one of these reasons, and so on until time 0. Shortening
anything off this path does not make the schedule faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stageline.scheduling.action import Action, Kind
from stageline.scheduling.costs import Number, number_text
from stageline.scheduling.times import Times
from stageline.scheduling.work import Work


@dataclass(frozen=True, slots=True)
class CriticalStep:
    """One action of the critical path.

    Attributes:
        rank: Who runs it.
        action: What it is.
        start: When it starts.
        end: When it ends; the next step of the path waits for that.
        why: Why it did not start earlier: ``"start"`` for the first of the path, ``"rank"`` if its
            rank was busy with the step before, ``"edge"`` if it waited for the value of that step.
            Where both are true, the rank is given.
        edge: That value, such as ``"0->1 F3"``; None where the rank was busy.
        hop: How long the value was on its way.
    """

    rank: int
    action: Action
    start: Number
    end: Number
    why: Literal["start", "rank", "edge"]
    edge: str | None = None
    hop: Number = 0

    def __str__(self) -> str:
        reason = {
            "start": "at the start",
            "rank": "when the rank was free",
            "edge": f"when {self.edge} arrived",
        }[self.why]
        times = f"{number_text(self.start)} .. {number_text(self.end)}"
        return f"rank {self.rank}: {self.action} {times}, {reason}"


def critical_path(times: Times) -> tuple[CriticalStep, ...]:
    """Return what the makespan is made of, first to last.

    >>> from stageline.scheduling import Costs, simulate
    >>> from stageline.scheduling.schedules import one_f_one_b
    >>> for step in simulate(one_f_one_b(2, 2), Costs(latency=1)).critical_path:
    ...     print(step)
    rank 0: 0F0 0 .. 1, at the start
    rank 1: 1F0 2 .. 3, when 0->1 F0 arrived
    rank 1: 1B0 3 .. 5, when the rank was free
    rank 1: 1F1 5 .. 6, when the rank was free
    rank 1: 1B1 6 .. 8, when the rank was free
    rank 0: 0B1 9 .. 11, when 1->0 B1 arrived
    """
    if not len(times.end):
        return ()
    steps = []
    index = int(times.end.argmax())
    while index >= 0:
        step, index = _step(times, index)
        steps.append(step)
    return tuple(reversed(steps))


def _step(times: Times, index: int) -> tuple[CriticalStep, int]:
    """Return one step, and the action before it on the path or -1."""
    work, unit = times.work, times.unit
    free = times.free(index)
    arrival, user = times.arrival(index)
    kind, stage, microbatch, _ = work.rows[index].tolist()
    rank, action = int(work.ranks[index]), Action(stage, Kind(kind), microbatch)
    start, end = unit.number(max(free, arrival)), unit.number(times.end[index])
    if arrival > free:
        maker = int(work.waits[user])
        hop = unit.number(times.lag[user])
        return CriticalStep(rank, action, start, end, "edge", _edge(work, maker, user), hop), maker
    if free > 0:
        return CriticalStep(rank, action, start, end, "rank"), index - 1
    return CriticalStep(rank, action, start, end, "start"), -1


def _edge(work: Work, maker: int, user: int) -> str:
    kind, source, microbatch, _ = work.rows[maker].tolist()
    letter = "F" if kind == Kind.FORWARD else "B"
    return f"{source}->{work.rows['stage'][user]} {letter}{microbatch}"
