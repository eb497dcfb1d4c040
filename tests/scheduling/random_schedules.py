"""Random schedules that can run, for property tests: any placement, any order that respects waits.

A schedule is made as an execution: time and again one action that could run now is chosen and
appended to the row of its rank. Whatever comes out can run, because it just did.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from stageline.scheduling import Action, Kind, Schedule

PLACEMENTS: dict[str, Callable[[int, int], int]] = {
    "straight": lambda stage, ranks: stage % ranks,
    "V": lambda stage, ranks: stage % ranks if stage // ranks % 2 == 0 else -1 - stage % ranks,
}


@dataclass
class ListScheduler:
    """Runs actions one by one, in any order that respects the waits."""

    placement: list[int]
    num_microbatches: int
    split_backward: bool
    recompute: bool
    done: set[tuple[int, Kind, int]] = field(default_factory=set)

    def ready(self) -> list[Action]:
        stages = range(len(self.placement))
        actions = [
            Action(stage, kind, microbatch)
            for stage in stages
            for microbatch in range(self.num_microbatches)
            for kind in self._kinds()
        ]
        return [action for action in actions if self._is_ready(action)]

    def _kinds(self) -> list[Kind]:
        backward = (
            [Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT] if self.split_backward else [Kind.BACKWARD]
        )
        return [Kind.FORWARD, *([Kind.RECOMPUTE] if self.recompute else []), *backward]

    def _is_ready(self, action: Action) -> bool:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if (stage, kind, microbatch) in self.done:
            return False
        gradient = Kind.INPUT_GRADIENT if self.split_backward else Kind.BACKWARD
        needs: list[tuple[int, Kind, int]] = []
        if kind is Kind.FORWARD and stage > 0:
            needs.append((stage - 1, Kind.FORWARD, microbatch))
        if kind is gradient and stage + 1 < len(self.placement):
            needs.append((stage + 1, gradient, microbatch))
        if kind in (gradient, Kind.RECOMPUTE):
            needs.append((stage, Kind.FORWARD, microbatch))
        if kind is gradient and self.recompute:
            needs.append((stage, Kind.RECOMPUTE, microbatch))
        if kind is Kind.WEIGHT_GRADIENT:
            needs.append((stage, gradient, microbatch))
        return all(need in self.done for need in needs)


@st.composite
def random_schedules(draw: st.DrawFn) -> Schedule:
    """Draw a schedule with up to 4 ranks, 6 stages and 4 microbatches."""
    num_ranks = draw(st.integers(1, 4))
    num_stages = draw(st.integers(num_ranks, 6))
    kind = draw(st.sampled_from(["straight", "V", "any"]))
    if kind == "any":
        extra = st.lists(
            st.integers(0, num_ranks - 1),
            min_size=num_stages - num_ranks,
            max_size=num_stages - num_ranks,
        )
        placement = draw(st.permutations([*range(num_ranks), *draw(extra)]))
    else:
        placement = [PLACEMENTS[kind](stage, num_ranks) % num_ranks for stage in range(num_stages)]
    scheduler = ListScheduler(
        placement, draw(st.integers(1, 4)), draw(st.booleans()), draw(st.booleans())
    )
    # One seed instead of a draw per choice: the orders vary as much, and a case takes no time.
    choose = random.Random(draw(st.integers(0, 2**32)))
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    while ready := scheduler.ready():
        action = choose.choice(ready)
        rows[placement[action.stage]].append(action)
        scheduler.done.add((action.stage, action.kind, action.microbatch))
    return Schedule.from_rows(rows, "random")
