"""Who races: every entry with the name it has in the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from models import Case

TORCH = "torch pipelining, 1F1B"
PLAIN = "plain, one thread"
OURS = "stageline processes, 1f1b"
AGAIN = "the same again (A/A)"
THREADS = "stageline threads, 1f1b"
LIMIT = "limit of 1F1B"
REPLAYED = "the same, replayed"
THREADS_LIMIT = "limit of 1F1B in threads"
YARDSTICKS = frozenset({PLAIN, OURS, AGAIN, THREADS, TORCH, LIMIT})
"""What all others are measured by, and what goals are about."""


@dataclass(frozen=True)
class Entry:
    """One contestant.

    Attributes:
        name: In the tables.
        kind: The file here that builds it.
        options: What that file is told besides.
        processes: How many it has.
        threads: Intra-op threads of each of them.
        environment: Whose environment it runs in; None is the project's own.
        in_every_heat: Whether it is in every heat, besides the yardsticks.
    """

    name: str
    kind: str
    options: Mapping[str, str | int] = field(default_factory=dict)
    processes: int = 2
    threads: int = 1
    environment: str | None = None
    in_every_heat: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Its lines in the tables."""
        return (LIMIT, REPLAYED) if self.name == LIMIT else (self.name,)

    @property
    def is_yardstick(self) -> bool:
        """Whether it is in every heat."""
        return self.in_every_heat or self.name in YARDSTICKS

    @property
    def is_limit(self) -> bool:
        return self.kind == "stage_times"

    @property
    def is_ours(self) -> bool:
        """Whether stageline runs it, perhaps behind the door of another system."""
        return self.kind == "ours" or str(self.options.get("home", "")).startswith("stageline")


def short() -> list[Entry]:
    """Return what `make bench` has time for."""
    return [
        Entry(PLAIN, "plain", processes=1),
        Entry(OURS, "ours"),
        Entry(AGAIN, "ours"),
        Entry(THREADS, "ours", processes=1),
        Entry(TORCH, "torch_pipelining"),
        Entry(LIMIT, "stage_times"),
    ]


def full(case: Case) -> list[Entry]:
    """Return everybody."""
    return [
        Entry(PLAIN, "plain", processes=1),
        Entry("plain, two threads", "plain", processes=1, threads=2),
        Entry(OURS, "ours"),
        Entry(AGAIN, "ours"),
        *_ours_more(case),
        Entry(THREADS, "ours", processes=1),
        Entry("stageline threads, zb-h1", "ours", {"schedule": "zb-h1"}, processes=1),
        *_torch(case),
        Entry("fairscale Pipe", "fairscale_pipe", processes=1, environment="fairscale"),
        Entry("torchgpipe GPipe", "torchgpipe_pipe", processes=1, environment="torchgpipe"),
        Entry("DeepSpeed PipelineModule", "deepspeed_pipe", environment="deepspeed"),
        Entry(LIMIT, "stage_times"),
        Entry(THREADS_LIMIT, "stage_times", {"both": 1}, processes=1),
    ]


def _ours_more(case: Case) -> list[Entry]:
    looped = max(case.cuts) if case.each else 4
    names = {"zb-h1": 2, "interleaved": looped, "interleaved-zb": looped, "zb-v": 4}
    entries = [
        Entry("stageline processes, 1f1b, one ahead", "ours", {"ahead": 1}),
        *(
            Entry(f"stageline processes, {name}", "ours", {"schedule": name, "stages": stages})
            for name, stages in names.items()
        ),
    ]
    if case.each:
        name = "stageline processes, 1f1b, a stage per call"
        entries.insert(0, Entry(name, "ours", {"stages": looped}))
    return entries


def _torch(case: Case) -> list[Entry]:
    looped = max(case.cuts) if case.each else 4
    more = {
        "ZB1P, a stage per rank": ("InterleavedZeroBubble", 2),
        "Interleaved1F1B": ("Interleaved1F1B", looped),
        "InterleavedZeroBubble": ("InterleavedZeroBubble", looped),
        "ZBVZeroBubble": ("ZBVZeroBubble", 4),
    }
    return [
        Entry(TORCH, "torch_pipelining"),
        *(
            Entry(f"torch pipelining, {name}", "torch_pipelining", {"schedule": s, "stages": n})
            for name, (s, n) in more.items()
        ),
    ]
