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
from stageline.scheduling.schedule import Schedule
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
        function: Builds it.
        summary: What it does, in a few words.
        placement: Which stages a rank holds: consecutive, looped or a V.
        bubble: By how much T exceeds the time of the work.
        peak: How many activations a rank holds at most.
        needs: Which sizes it takes, for people; empty for all.
        stages_per_rank: How many stages a rank holds unless told otherwise.
        refusal: Why it can be simulated and drawn but not run; None for all others.
        round_up: Ranks and microbatches -> the next number of microbatches that it takes.
    """

    function: _Function
    summary: str
    placement: str
    bubble: str
    peak: str
    needs: str = ""
    stages_per_rank: int = 1
    refusal: str | None = None
    round_up: Callable[[int, int], int] = _any_count

    @property
    def options(self) -> frozenset[str]:
        """What can be set besides the numbers of stages, microbatches and ranks."""
        usual = {"num_stages", "num_microbatches", "num_ranks"}
        return frozenset(inspect.signature(self.function).parameters) - usual

    def num_ranks(self, num_stages: int) -> int:
        """Return how many ranks so many stages take, unless told otherwise; at least one."""
        return max(1, num_stages // self.stages_per_rank)

    def num_stages(self, num_ranks: int) -> int:
        """Return how many stages so many ranks take, unless told otherwise."""
        return num_ranks * self.stages_per_rank


_TWO_COPIES = (
    "it needs two copies of the weights, on different ranks, and this library keeps one: it can "
    "be simulated and drawn, not run"
)

_FAMILIES: dict[str, Family] = {
    "gpipe": Family(gpipe, "all forwards, then all backwards", "consecutive", "(p-1)(F+B)", "m"),
    "1f1b": Family(
        one_f_one_b, "one forward, one backward", "consecutive", "(p-1)(F+B)", "min(p-r, m)"
    ),
    "sequential": Family(
        sequential, "one microbatch at a time", "consecutive", "(p-1)m(F+B)", "1"
    ),
    "forward-only": Family(forward_only, "inference", "consecutive", "(p-1)F", "1"),
    "interleaved": Family(
        interleaved,
        "1f1b, in groups round several stages per rank",
        "looped",
        "(p-1)(F+B)/v",
        "p + (p-1)/v",
        stages_per_rank=2,
    ),
    "looped-bfs": Family(
        looped_bfs,
        "gpipe, stage by stage round several per rank",
        "looped",
        "(p-1)(F+B)/v",
        "m",
        stages_per_rank=2,
    ),
    "zb-h1": Family(
        zb_h1, "1f1b with W where a rank would wait", "consecutive", "(p-1)(F+I-W)", "min(p, m)"
    ),
    "zb-h2": Family(
        zb_h2,
        "zb-h1 filled twice as deep",
        "consecutive",
        "(p-1)(F+I-2W), span",
        "2p - 1",
        needs="m >= 2p",
        round_up=lambda ranks, count: max(count, 2 * ranks),
    ),
    "interleaved-zb": Family(
        interleaved_zb,
        "zb-h1 round several stages per rank",
        "looped",
        "(p-1)(F+I-W)/v",
        "p",
        stages_per_rank=2,
    ),
    "zb-v": Family(
        zb_v,
        "a V in which no rank waits if F=I=W",
        "V",
        "0, span, m >= 2p-1",
        "p",
        stages_per_rank=2,
    ),
    "v-half": Family(
        v_half,
        "a V with half the memory of 1f1b",
        "V",
        "about half of 1f1b's, span",
        "floor((p+2)/2)",
        stages_per_rank=2,
    ),
    "v-min": Family(
        v_min,
        "a V with a third of the memory of 1f1b",
        "V",
        "about 2/3 of 1f1b's, span",
        "floor((p+4)/3)",
        stages_per_rank=2,
    ),
    "dualpipe-v": Family(
        dualpipe_v,
        "a V in which F and B overlap",
        "V",
        "(p-1)(F&B+B-3W)/2",
        "p + 1/2",
        needs="m >= 2p",
        stages_per_rank=2,
        round_up=lambda ranks, count: max(count, 2 * ranks),
    ),
    "varuna": Family(
        varuna,
        "recomputes what it did not keep",
        "consecutive",
        "at most (p-1)(F+R+B)",
        "min(3(p-1-r), m) inputs",
    ),
    "dualpipe": Family(
        dualpipe,
        "two copies that overlap where they meet",
        "both ways",
        "(p/2-1)(F&B+B-3W)",
        "p + 1",
        needs="p even, m even, m >= 2p",
        refusal=_TWO_COPIES,
        round_up=lambda ranks, count: max(count + count % 2, 2 * ranks),
    ),
    "chimera": Family(
        chimera,
        "two copies that fill each other's waits",
        "both ways",
        "(p/2-1)(m/p+1)B if B=2F",
        "p",
        needs="p even, m a multiple of p",
        refusal=_TWO_COPIES,
        round_up=lambda ranks, count: -(-count // ranks) * ranks,
    ),
    "bitpipe": Family(
        bitpipe,
        "chimera with each copy in a V",
        "V both ways",
        "(p/2-1)(m/p+1)B/2 if B=2F",
        "p",
        needs="p even, m a multiple of p",
        stages_per_rank=2,
        refusal=_TWO_COPIES,
        round_up=lambda ranks, count: -(-count // ranks) * ranks,
    ),
}

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
