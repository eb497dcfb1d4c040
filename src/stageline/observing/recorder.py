"""Collects what ranks did: how long each computed, waited for input, and stood idle."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from stageline.running.events import ActionDone


@dataclass(frozen=True)
class RankTime:
    """Where the time of one rank went, in seconds.

    Attributes:
        rank: Who.
        busy: Computing, or handing packets over.
        waiting: In an action whose input had not arrived yet.
        total: From the first event of any rank to the last.
    """

    rank: int
    busy: float
    waiting: float
    total: float

    @property
    def utilisation(self) -> float:
        return self.busy / self.total if self.total else 0.0


class Recorder:
    """An observer that keeps all events: ``sl.Pipeline(..., observer=Recorder())``.

    Example:
        >>> recorder = Recorder()
        >>> recorder(ActionDone(0, "0F0", 0, start=0.0, end=2.0, waited=0.5))
        >>> recorder(ActionDone(1, "1F0", 0, start=0.0, end=3.0, waited=2.0))
        >>> print(recorder.table())
        rank  busy s  waiting s  utilisation
           0   1.500      0.500         50 %
           1   1.000      2.000         33 %
    """

    def __init__(self) -> None:
        self.events: list[ActionDone] = []

    def __call__(self, event: ActionDone) -> None:
        self.events.append(event)  # list.append is atomic: ranks may be threads

    def clear(self) -> None:
        """Forget what was recorded."""
        self.events.clear()

    def times(self) -> list[RankTime]:
        """Add the events up, one entry per rank that was seen."""
        by_rank: dict[int, list[ActionDone]] = defaultdict(list)
        for event in self.events:
            by_rank[event.rank].append(event)
        if not by_rank:
            return []
        total = max(e.end for e in self.events) - min(e.start for e in self.events)
        return [
            RankTime(
                rank=rank,
                busy=sum(event.end - event.start - event.waited for event in by_rank[rank]),
                waiting=sum(event.waited for event in by_rank[rank]),
                total=total,
            )
            for rank in sorted(by_rank)
        ]

    def table(self) -> str:
        """Return the times as a table."""
        lines = ["rank  busy s  waiting s  utilisation"]
        lines += [
            f"{time.rank:4}  {time.busy:6.3f}  {time.waiting:9.3f}  {100 * time.utilisation:9.0f} %"
            for time in self.times()
        ]
        return "\n".join(lines)
