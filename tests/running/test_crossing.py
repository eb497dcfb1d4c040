"""What crosses between stages arrives as it was, and its gradient comes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stageline as sl
from stageline.testing import OrderedTransport, RankPool
from tests.running.crossing import CASES, differences, differences_in_process


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_between_threads(name: str, schedule: str) -> None:
    assert differences(name, "memory", schedule) == []


@pytest.mark.parametrize("name", CASES)
def test_over_the_strict_transport(name: str) -> None:
    assert differences(name, OrderedTransport()) == []


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_between_processes(name: str, two_ranks: RankPool) -> None:
    assert two_ranks.run(differences_in_process, name) == [[], []]


def test_a_value_changed_in_place_by_the_next_stage_is_noticed_as_in_the_plain_model() -> None:
    """Tanh keeps its output for backward; a ReLU in place behind it destroys that.

    The plain model refuses to differentiate this. A pipeline that handed the storage over without
    its version counter would return a wrong gradient instead.
    """
    stages = [
        nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 1)),
    ]
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(sl.StepError, match="modified by an inplace operation"):
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 1))


def _send_an_object(rank: int) -> str:
    def made_up(x: torch.Tensor) -> object:
        return {"x": x, "o": object()}

    pipe = sl.Pipeline.from_stages([made_up, lambda v: v["x"]], num_microbatches=1, timeout=5)
    with pytest.raises(sl.StepError) as caught:
        pipe.eval()(torch.ones(2, 2))
    return str(caught.value)


@pytest.mark.processes
def test_an_object_that_cannot_cross_between_processes_is_named() -> None:
    pool = RankPool(2)
    try:
        first, second = pool.run(_send_an_object)
    finally:
        pool.close()
    assert "edge 0->1 F0: leaf 1 is a object, which cannot cross between processes" in first
    assert first == second
