"""Passes: what they keep, and that what could run before still can."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stageline.scheduling import Kind, Schedule
from stageline.scheduling.passes import forward_part, forwards_first, keep_microbatches
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
