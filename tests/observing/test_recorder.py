"""Events of real steps: one per action, added up rank by rank; an observer cannot spoil a step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import stageline as sl
from stageline.observing import Recorder


def pipeline(observer: Any) -> sl.Pipeline:
    return sl.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        split=2,
        num_microbatches=3,
        loss_fn=nn.functional.mse_loss,
        observer=observer,
    )


def step(pipe: sl.Pipeline) -> sl.StepResult:
    return pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))


def test_every_compute_action_of_the_schedule_is_told_once_and_in_order() -> None:
    recorder = Recorder()
    pipe = pipeline(recorder)
    step(pipe)
    for rank in range(2):
        told = [event for event in recorder.events if event.rank == rank]
        computed = [event.action for event in told if not set("<>") & set(event.action)]
        assert computed == [str(action) for action in pipe.schedule.row(rank)]
        assert [event.position for event in told] == list(range(len(told)))
        assert all(one.end <= other.start for one, other in pairwise(told))


def test_busy_and_waiting_are_parts_of_the_whole() -> None:
    recorder = Recorder()
    pipe = pipeline(recorder)
    assert recorder.times() == []
    step(pipe)
    times = recorder.times()
    assert [time.rank for time in times] == [0, 1]
    for time in times:
        assert time.busy > 0
        assert time.waiting >= 0
        assert time.busy + time.waiting <= time.total
        assert 0 < time.utilisation <= 1
    assert len(recorder.table().splitlines()) == 3
    recorder.clear()
    assert recorder.times() == []


def test_an_observer_that_raises_is_logged_and_the_step_is_what_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = []

    def broken(event: sl.ActionDone) -> None:
        asked.append(event.rank)
        raise ZeroDivisionError("mine")

    pipe = pipeline(broken)
    result = step(pipe)
    assert result.num_microbatches == 3
    assert all(parameter.grad is not None for parameter in pipe.parameters())
    assert sorted(asked) == [0, 1], "each rank asks once and not again in this step"
    assert sum("the observer raised ZeroDivisionError('mine')" in m for m in caplog.messages) == 2
