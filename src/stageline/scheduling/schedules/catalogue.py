"""The families by name: what each is, what it needs, what it costs, and how to build it.

The formulas are for p ranks, m microbatches, v stages per rank; F, B, I, W are the times of a
rank's whole share of the model, and the bubble is what T exceeds m * (F + B) by. Peak is in
activations of one microbatch in a rank's share of the model.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from stageline.errors import ScheduleError
from stageline.scheduling.passes import keep_microbatches
from stageline.scheduling.schedule import Schedule, refusal
from stageline.scheduling.schedules.bitpipe import bitpipe
from stageline.scheduling.schedules.chimera import chimera
from stageline.scheduling.schedules.dualpipe import dualpipe
from stageline.scheduling.schedules.dualpipe_v import dualpipe_v
from stageline.scheduling.schedules.forward_only import forward_only
from stageline.scheduling.schedules.gpipe import gpipe
from stageline.scheduling.schedules.interleaved import interleaved
from stageline.scheduling.schedules.interleaved_zb import interleaved_zb
from stageline.scheduling.schedules.looped_bfs import looped_bfs
from stageline.scheduling.schedules.one_f_one_b import one_f_one_b
from stageline.scheduling.schedules.sequential import sequential
from stageline.scheduling.schedules.v_half import v_half
from stageline.scheduling.schedules.v_min import v_min
from stageline.scheduling.schedules.varuna import varuna
from stageline.scheduling.schedules.zb_h1 import zb_h1
from stageline.scheduling.schedules.zb_h2 import zb_h2
from stageline.scheduling.schedules.zb_v import zb_v


class _Function(Protocol):
    __name__: str

    def __call__(
        self, num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
    ) -> Schedule: ...


def _any_count(num_ranks: int, count: int) -> int:
    return count


@dataclass(frozen=True)
class Family:
    """What is known of a family without building it.

    Attributes:
        name: As ``build`` knows it.
        function: Builds it.
        summary: What it does, in a few words.
        placement: Which stages a rank holds: consecutive, looped or a V.
        bubble: By how much T exceeds the time of the work.
        peak: How many activations a rank holds at most.
        needs: Which sizes it takes, for people; empty for all.
        stages_per_rank: How many stages a rank holds unless told otherwise.
        replicas: How many copies of the model it keeps.
        round_up: Ranks and microbatches -> the next number of microbatches that it takes.
    """

    name: str
    function: _Function
    summary: str
    placement: str
    bubble: str
    peak: str
    needs: str = ""
    stages_per_rank: int = 1
    replicas: int = 1
    round_up: Callable[[int, int], int] = _any_count

    @property
    def refusal(self) -> str | None:
        """Why it can be simulated and drawn but not run; None for all others."""
        return refusal(self.name, self.replicas)

    @property
    def options(self) -> frozenset[str]:
        """What can be set besides the numbers of stages, microbatches and ranks."""
        usual = {"num_stages", "num_microbatches", "num_ranks"}
        return frozenset(inspect.signature(self.function).parameters) - usual

    @property
    def stages_text(self) -> str:
        """How many stages a rank may hold, for people."""
        if "stages_per_rank" in self.options:
            return f"v ({self.stages_per_rank})"
        fixed = self.placement != "consecutive"
        return str(self.stages_per_rank) if fixed else "1 or more"

    def num_ranks(self, num_stages: int) -> int:
        """Return how many ranks so many stages take, unless told otherwise; at least one."""
        return max(1, num_stages // self.stages_per_rank)

    def num_stages(self, num_ranks: int) -> int:
        """Return how many stages so many ranks take, unless told otherwise."""
        return num_ranks * self.stages_per_rank


_ALL = (
    Family("gpipe", gpipe, "all forwards, then all backwards", "consecutive", "(p-1)(F+B)", "m"),
    Family(
        "1f1b", one_f_one_b, "one forward, one backward", "consecutive", "(p-1)(F+B)", "min(p-r, m)"
    ),
    Family("sequential", sequential, "one microbatch at a time", "consecutive", "(p-1)m(F+B)", "1"),
    Family("forward-only", forward_only, "inference", "consecutive", "(p-1)F", "1"),
    Family(
        "interleaved",
        interleaved,
        "1f1b round v stages per rank, in groups",
        "looped",
        "(p-1)(F+B)/v",
        "p + (p-1)/v",
        stages_per_rank=2,
    ),
    Family(
        "looped-bfs",
        looped_bfs,
        "gpipe round v stages per rank",
        "looped",
        "(p-1)(F+B)/v",
        "m",
        stages_per_rank=2,
    ),
    Family(
        "zb-h1",
        zb_h1,
        "1f1b with W where a rank would wait",
        "consecutive",
        "(p-1)(F+I-W)",
        "min(p, m)",
    ),
    Family(
        "zb-h2",
        zb_h2,
        "zb-h1 filled twice as deep",
        "consecutive",
        "(p-1)(F+I-2W), span",
        "2p - 1",
        needs="m >= 2p",
        round_up=lambda ranks, count: max(count, 2 * ranks),
    ),
    Family(
        "interleaved-zb",
        interleaved_zb,
        "zb-h1 round v stages per rank",
        "looped",
        "(p-1)(F+I-W)/v",
        "p",
        stages_per_rank=2,
    ),
    Family(
        "zb-v",
        zb_v,
        "a V in which no rank waits",
        "V",
        "0, F=I=W, m >= 2p-1, span",
        "p",
        stages_per_rank=2,
    ),
    Family(
        "v-half",
        v_half,
        "a V with half the memory of 1f1b",
        "V",
        "(3p-4)F/2 at most, F=I=W, span",
        "floor((p+2)/2)",
        stages_per_rank=2,
    ),
    Family(
        "v-min",
        v_min,
        "a V with a third of the memory of 1f1b",
        "V",
        "(4p-5)F/2 at most, F=I=W, span",
        "floor((p+4)/3)",
        stages_per_rank=2,
    ),
    Family(
        "dualpipe-v",
        dualpipe_v,
        "a V in which F and B overlap",
        "V",
        "(p-1)(F&B+B-3W)/2",
        "p + 1/2",
        needs="m >= 2p",
        stages_per_rank=2,
        round_up=lambda ranks, count: max(count, 2 * ranks),
    ),
    Family(
        "varuna",
        varuna,
        "recomputes what it did not keep",
        "consecutive",
        "(3p-4)F at most, B=2F",
        "1, and inputs",
    ),
    Family(
        "dualpipe",
        dualpipe,
        "two copies that overlap where they meet",
        "both ways",
        "(p/2-1)(F&B+B-3W)",
        "p + 1",
        needs="p even, m even, m >= 2p",
        replicas=2,
        round_up=lambda ranks, count: max(count + count % 2, 2 * ranks),
    ),
    Family(
        "chimera",
        chimera,
        "two copies that fill each other's waits",
        "both ways",
        "(p/2-1)(m/p+1)B, B=2F",
        "p",
        needs="p even, m a multiple of p",
        replicas=2,
        round_up=lambda ranks, count: -(-count // ranks) * ranks,
    ),
    Family(
        "bitpipe",
        bitpipe,
        "chimera with each copy in a V",
        "V both ways",
        "(p/2-1)(m/p+1)B/2, B=2F",
        "p",
        needs="p even, m a multiple of p",
        stages_per_rank=2,
        replicas=2,
        round_up=lambda ranks, count: -(-count // ranks) * ranks,
    ),
)

_FAMILIES = {found.name: found for found in _ALL}

NAMES = tuple(_FAMILIES)
"""The names that ``build`` knows."""


def family(name: str) -> Family:
    """Return what is known of the family of that name.

    >>> family("zb-v").stages_per_rank, family("chimera").needs
    (2, 'p even, m a multiple of p')

    Raises:
        ScheduleError: There is no such family.
    """
    found = _FAMILIES.get(name)
    if found is None:
        near = difflib.get_close_matches(name.lower(), NAMES, n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise ScheduleError(f"unknown schedule {name!r}: choose one of {', '.join(NAMES)}.{guess}")
    return found


def build(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    num_ranks: int | None = None,
    **options: int | None,
) -> Schedule:
    """Return the schedule of that name.

    >>> build("1f1b", num_stages=4, num_microbatches=8) == one_f_one_b(4, 8)
    True

    Args:
        name: One of ``NAMES``.
        num_stages: Pieces of the model.
        num_microbatches: Slices of the batch.
        num_ranks: Workers; what the family makes of the stages unless given.
        options: ``stages_per_rank`` and ``group_size``, for the families that take them.

    Raises:
        ScheduleError: There is no such schedule, or it cannot be built for these numbers; the
            message names some that work.
    """
    found = family(name)
    for option in options.keys() - found.options:
        raise ScheduleError(f"{name} takes no {option}: leave it out")
    return found.function(num_stages, num_microbatches, num_ranks=num_ranks, **options)


def fitted(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    num_ranks: int | None = None,
    **options: int | None,
) -> Schedule:
    """Return the schedule of that name for a batch of any size.

    Where the family cannot be built for so few microbatches, it is built for the next number that
    it takes, and the actions of those that are not there are left out.

    >>> fitted("zb-h2", num_stages=2, num_microbatches=1).num_microbatches
    1
    """
    found = family(name)
    ranks = num_ranks or found.num_ranks(num_stages)
    count = found.round_up(ranks, num_microbatches)
    whole = build(name, num_stages, count, num_ranks=num_ranks, **options)
    return whole if count == num_microbatches else keep_microbatches(whole, num_microbatches)
