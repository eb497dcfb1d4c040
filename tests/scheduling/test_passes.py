"""Passes: what they keep, and that what could run before still can."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.scheduling import Action, Costs, Kind, Schedule, schedules, simulate
from stageline.scheduling.passes import (
    forward_part,
    forwards_first,
    keep_microbatches,
    recompute_activations,
)
from tests.scheduling.random_schedules import random_schedules


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
    sorted_rows = forwards_first(schedule).check()
    for before, after in zip(schedule.rows(), sorted_rows.rows(), strict=True):
        assert after == tuple(sorted(before, key=lambda action: action.kind is not Kind.FORWARD))


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
