"""Schedules that need two copies of the weights are refused, with the reason, at construction."""

from __future__ import annotations

import pytest
from torch import nn

import stageline as sl
from tests.scheduling.families import TWO_COPIES

REASON = "needs 2 copies of the weights, on different ranks, and a pipeline here keeps one"


def build(schedule: str | sl.Schedule) -> sl.Pipeline:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return sl.Pipeline(
        model, split=4, num_microbatches=8, schedule=schedule, loss_fn=nn.functional.mse_loss
    )


@pytest.mark.parametrize("name", TWO_COPIES)
def test_by_name(name: str) -> None:
    with pytest.raises(sl.ConfigError, match=f"schedule: {name} {REASON}"):
        build(name)


def test_as_schedule_and_as_text() -> None:
    schedule = sl.schedules.dualpipe(4, 8)
    with pytest.raises(sl.ConfigError, match=f"schedule: dualpipe {REASON}"):
        build(schedule)
    with pytest.raises(sl.ConfigError, match=f"schedule: custom {REASON}"):
        build(schedule.text())
