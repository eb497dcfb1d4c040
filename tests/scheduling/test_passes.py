"""Passes: what they keep, and that what could run before still can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.scheduling import Action, Costs, Kind, Schedule, schedules, simulate
from stageline.scheduling.passes import (
    forward_part,
    forwards_first,
    keep_microbatches,
)
from stageline.scheduling.recompute import recompute, recompute_activations
from tests.scheduling.random_schedules import random_schedules

GRADIENTS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)


@given(random_schedules(), st.integers(1, 4))
def test_keep_microbatches(schedule: Schedule, count: int) -> None:
    kept = keep_microbatches(schedule, count).check()
    assert kept.num_microbatches == min(count, schedule.num_microbatches)
    assert kept.placement == schedule.placement
    for before, after in zip(schedule.rows(), kept.rows(), strict=True):
        assert after == tuple(action for action in before if action.microbatch < count)


@given(random_schedules())
def test_forward_part(schedule: Schedule) -> None:
    part = forward_part(schedule).check()
    assert not part.has_backward
    for before, after in zip(schedule.rows(), part.rows(), strict=True):
        assert after == tuple(action for action in before if action.kind is Kind.FORWARD)


@given(random_schedules())
def test_forwards_first(schedule: Schedule) -> None:
    """Forwards keep their order; gradients that ascend in all stages descend afterwards."""
    sorted_rows = forwards_first(schedule).check()
    descends = all(gradients_ascend(row) for row in schedule.rows())
    last = schedule.num_microbatches - 1
    for before, after in zip(schedule.rows(), sorted_rows.rows(), strict=True):
        forwards = [action for action in before if action.kind is Kind.FORWARD]
        others = [a for a in before if a.kind not in (Kind.FORWARD, Kind.RECOMPUTE)]
        if descends:
            others = [replace(each, microbatch=last - each.microbatch) for each in others]
        assert [a for a in after if a.kind is not Kind.RECOMPUTE] == forwards + others
        again = {(a.stage, a.microbatch) for a in before if a.kind is Kind.RECOMPUTE}
        assert {(a.stage, a.microbatch) for a in after if a.kind is Kind.RECOMPUTE} == again


def gradients_ascend(row: Sequence[Action]) -> bool:
    latest: dict[tuple[Kind, int], int] = {}
    for action in row:
        if action.kind not in (Kind.FORWARD, Kind.RECOMPUTE):
            if action.microbatch < latest.get((action.kind, action.stage), -1):
                return False
            latest[action.kind, action.stage] = action.microbatch
    return True


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_gradients_of_a_call_come_in_the_order_of_the_plain_loop(name: str) -> None:
    """Autograd differentiates the last part of a concatenation first."""
    stages = schedules.family(name).num_stages(3)
    sorted_rows = forwards_first(schedules.build(name, stages, 8, num_ranks=3))
    for row in sorted_rows.rows():
        for stage in range(stages):
            order = [a.microbatch for a in row if a.stage == stage and a.kind in GRADIENTS]
            assert order == sorted(order, reverse=True)


@given(random_schedules(), st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4))))
def test_recompute(schedule: Schedule, wanted: set[tuple[int, int]]) -> None:
    """What is wanted has one R right before its backward; what had one keeps its own."""
    again = recompute(schedule, lambda stage, microbatch: (stage, microbatch) in wanted).check()
    for before, after in zip(schedule.rows(), again.rows(), strict=True):
        known = {(a.stage, a.microbatch) for a in before if a.kind is Kind.RECOMPUTE}
        places = [(a.stage, a.microbatch) for a in after if a.kind is Kind.RECOMPUTE]
        differentiated = {(a.stage, a.microbatch) for a in after if a.kind in GRADIENTS}
        assert len(places) == len(set(places))
        assert set(places) == known | (wanted & differentiated)
        for action, following in pairwise(after):
            place = (action.stage, action.microbatch)
            if action.kind is Kind.RECOMPUTE and place not in known:
                assert (following.stage, following.microbatch) == place
                assert following.kind in GRADIENTS


@given(random_schedules())
def test_recompute_activations(schedule: Schedule) -> None:
    """Every backward either follows its forward or has one R somewhere before it."""
    again = recompute_activations(schedule).check()
    for before, after in zip(schedule.rows(), again.rows(), strict=True):
        without = [action for action in after if action.kind is not Kind.RECOMPUTE]
        assert without == [action for action in before if action.kind is not Kind.RECOMPUTE]
        recomputed = {(a.stage, a.microbatch) for a in after if a.kind is Kind.RECOMPUTE}
        for earlier, later in pairwise(without):
            place = (later.stage, later.microbatch)
            is_fresh = earlier == Action(later.stage, Kind.FORWARD, later.microbatch)
            if later.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and not is_fresh:
                assert place in recomputed


@pytest.mark.parametrize("name", ["dualpipe-v", "zb-v", "interleaved", "gpipe"])
def test_recomputing_keeps_less_and_pairs_stay(name: str) -> None:
    stages = schedules.family(name).num_stages(3)
    schedule = schedules.build(name, stages, 8, num_ranks=3)
    again = recompute_activations(schedule).check()
    costs = Costs(activation_bytes=100, input_bytes=1)
    before, after = simulate(schedule, costs), simulate(again, costs)
    assert before.peak_bytes is not None
    assert after.peak_bytes is not None
    assert sum(after.peak_bytes) < sum(before.peak_bytes)
    assert [len(pairs) for pairs in again.pairs] == [len(pairs) for pairs in schedule.pairs]
