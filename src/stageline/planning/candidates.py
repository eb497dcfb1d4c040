"""What can be proposed: every way to share a batch among ranks, before any of it is simulated.

ranks = data_parallel * num_ranks            copies side by side, each a pipeline
batch = data_parallel * num_microbatches * rows, the last ones one row smaller where that
        does not come out even
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from stageline.scheduling import Kind, Schedule, schedules
from stageline.scheduling.recompute import recompute_activations
from stageline.scheduling.schedules import Family

AUTO = "auto"
"""The name of schedules that are searched for, not built by a rule."""

STAGES_PER_RANK = (2, 4)
"""How many stages a rank may hold where a family lets you choose."""

_NEVER_TRAINS = "forward-only"
_RECOMPUTES = "varuna"
_KEEPS_ONE = "sequential"


@dataclass(frozen=True, order=True)
class Method:
    """How a pipeline runs, whatever its size.

    Attributes:
        schedule: The name of a family, or ``"auto"``.
        stages_per_rank: How many stages a rank holds.
        recompute: Whether activations are computed again for the backward.
    """

    schedule: str
    stages_per_rank: int = 1
    recompute: bool = False

    @property
    def family(self) -> Family | None:
        return None if self.schedule == AUTO else schedules.family(self.schedule)

    @property
    def keeping(self) -> Method:
        """The same method without recomputing what it does not have to."""
        return self if self.build_name or self.schedule == AUTO else replace(self, recompute=False)

    @property
    def looks(self) -> str:
        """Which stages a rank holds: consecutive, looped or a V."""
        if self.family is None:
            return "consecutive" if self.stages_per_rank == 1 else "V"
        return self.family.placement

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients may be computed later than those of the inputs."""
        return self.family is None or _splits(self.schedule)

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage.

        Example:
            >>> Method("zb-v", 2).placement(3)
            (0, 1, 2, 2, 1, 0)
            >>> Method("zb-h1", 2).placement(3)
            (0, 0, 1, 1, 2, 2)
        """
        ranks = range(num_ranks)
        if self.looks == "V":
            return (*ranks, *reversed(ranks))
        if self.looks == "consecutive":
            return tuple(rank for rank in ranks for _ in range(self.stages_per_rank))
        return (*ranks,) * self.stages_per_rank

    def build(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """Return the schedule; not for ``"auto"``, which has no rule."""
        num_stages = num_ranks * self.stages_per_rank
        built = schedules.build(self.schedule, num_stages, num_microbatches, num_ranks=num_ranks)
        return built if self.build_name else recompute_activations(built)

    @property
    def build_name(self) -> str | None:
        """By which name alone a pipeline can build it; None if it takes more than that."""
        return None if self.adds_recompute or self.schedule == AUTO else self.schedule

    @property
    def adds_recompute(self) -> bool:
        """Whether it recomputes more than its family does by itself: ``recompute="waiting"``."""
        return self.recompute and self.schedule != _RECOMPUTES

    def __str__(self) -> str:
        several = f" x{self.stages_per_rank}" if self.stages_per_rank > 1 else ""
        again = " + R" if self.adds_recompute else ""
        return f"{self.schedule}{several}{again}"


@cache
def _splits(name: str) -> bool:
    """Whether a family has I and W, as a small schedule of it shows."""
    family = schedules.family(name)
    built = schedules.build(name, family.num_stages(2), 4, num_ranks=2)
    return Kind.INPUT_GRADIENT in built.kinds()


@dataclass(frozen=True)
class Candidate:
    """One way to run a batch on some ranks, without its cuts.

    Attributes:
        method: How each pipeline runs.
        data_parallel: How many copies of the pipeline share the batch.
        num_ranks: The ranks of one copy.
        num_microbatches: The microbatches of one copy.
        rows: The size of the largest of them.
    """

    method: Method
    data_parallel: int
    num_ranks: int
    num_microbatches: int
    rows: int

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.method.stages_per_rank

    @cached_property
    def refusal(self) -> str | None:
        """Why there is no such schedule; None if there is."""
        family = self.method.family
        if family is None:
            return None
        if family.round_up(self.num_ranks, self.num_microbatches) != self.num_microbatches:
            return f"needs {family.needs}"
        return None

    def __str__(self) -> str:
        copies = f", {self.data_parallel} copies" if self.data_parallel > 1 else ""
        return (
            f"{self.method} on {self.num_ranks} ranks{copies}, m={self.num_microbatches} "
            f"of {self.rows} rows"
        )


def methods(names: Iterable[str] | None = None, *, recompute: bool) -> list[Method]:
    """Return all methods, or those of some schedules.

    Example:
        >>> [str(method) for method in methods(["interleaved", "zb-v"], recompute=False)]
        ['interleaved x2', 'interleaved x4', 'zb-v x2']
    """
    found = []
    for name in runnable() if names is None else names:
        for stages_per_rank in _stages_per_rank(name):
            found += [Method(name, stages_per_rank, again) for again in _kinds(name, recompute)]
    return found


def _kinds(name: str, recompute: bool) -> Sequence[bool]:
    """Return whether a schedule keeps activations, recomputes them, or may do either."""
    if name == _RECOMPUTES:
        return (True,)
    if name in (AUTO, _KEEPS_ONE):
        return (False,)
    return (False, True) if recompute else (False,)


def runnable() -> list[str]:
    """Return the names of all schedules that train and that a pipeline can run."""
    trains = (name for name in schedules.NAMES if name != _NEVER_TRAINS)
    return [*(name for name in trains if schedules.family(name).refusal is None), AUTO]


def _stages_per_rank(name: str) -> Sequence[int]:
    if name == AUTO:
        return (1, 2)
    family = schedules.family(name)
    return {"looped": STAGES_PER_RANK, "V": (2,)}.get(family.placement, (1,))


def divisors(number: int) -> list[int]:
    """Return all numbers that divide another.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [low for low in range(1, int(number**0.5) + 1) if number % low == 0]
    return sorted({*small, *(number // low for low in small)})


def microbatch_counts(rows: int, num_ranks: int) -> list[int]:
    """Return into how many microbatches so many rows are cut if nobody says.

    All that come out even; and powers of two, of which the sizes differ by a row. At least one for
    each rank, as long as there are rows: with fewer, most of a pipeline waits.

    Example:
        >>> microbatch_counts(12, num_ranks=2), microbatch_counts(3, num_ranks=8)
        ([2, 3, 4, 6, 8, 12], [3])
    """
    powers = (2**power for power in range(rows.bit_length()))
    least = min(rows, num_ranks)
    return sorted(count for count in {*divisors(rows), *powers} if least <= count <= rows)


def candidates(
    ways: Sequence[Method],
    *,
    ranks: int,
    batch_size: int,
    data_parallel: Sequence[int],
    microbatches: Sequence[int] | None = None,
) -> Iterator[Candidate]:
    """Yield every way to run a batch on some ranks.

    A single rank has nothing to schedule: one method stands for all.
    """
    for copies in data_parallel:
        rows, num_ranks = -(-batch_size // copies), ranks // copies
        counts = microbatch_counts(rows, num_ranks) if microbatches is None else microbatches
        for method in ways if num_ranks > 1 else _alone(ways):
            for count in counts:
                if count <= rows:
                    size = -(-rows // count)
                    yield Candidate(method, copies, num_ranks, count, size)


def _alone(ways: Sequence[Method]) -> list[Method]:
    """Return what makes a difference on one rank, where each backward follows its forward."""
    plain = [method for method in ways if method.stages_per_rank == 1 and not method.recompute]
    plain.sort(key=lambda method: method.schedule != "1f1b")
    return plain[:1]
