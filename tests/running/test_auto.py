"""A schedule that was searched for runs like any other, and gives the plain model's gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stageline as sl
from stageline.errors import ConfigError
from stageline.testing import plain_step


def model_of(widths: list[int]) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(6, wide), nn.Tanh(), nn.Linear(wide, 6)) for wide in widths]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(("num_stages", "ranks"), [(4, 4), (6, 3), (5, 2), (3, 1)])
@pytest.mark.parametrize("rows", [12, 5])
def test_gradients_are_those_of_the_plain_model(num_stages: int, ranks: int, rows: int) -> None:
    """Also with fewer rows than microbatches: a schedule is found for that number."""
    widths = [4, 40, 8, 30, 16, 4]
    x, y = torch.randn(rows, 6), torch.randn(rows, 6)
    plain, piped = model_of(widths), model_of(widths)
    want = plain_step(
        plain, x, target=y, loss_fn=nn.functional.mse_loss, num_microbatches=min(6, rows)
    )
    pipe = sl.Pipeline(
        piped,
        split=num_stages,
        ranks=ranks,
        schedule="auto",
        num_microbatches=6,
        loss_fn=nn.functional.mse_loss,
    )
    result = pipe.step(x, target=y)
    assert torch.equal(result.loss, want.loss)
    for (name, expected), (_, got) in zip(
        plain.named_parameters(), piped.named_parameters(), strict=True
    ):
        assert expected.grad is not None
        assert got.grad is not None
        assert torch.equal(expected.grad, got.grad), name


def test_the_times_of_the_stages_make_the_schedule() -> None:
    """Of a Sequential, parameters are the estimate; a rank holds what 1F1B does on its first."""
    model = model_of([30, 50, 20, 40])
    pipe = sl.Pipeline(model, split=[1, 1, 1, 1], num_microbatches=8, schedule="auto")
    times = [sum(each.numel() for each in layer.parameters()) for layer in model]
    costs = sl.Costs(forward=times, input_gradient=times, weight_gradient=times)
    simulation = sl.simulate(pipe.schedule, costs)
    assert max(simulation.peak) <= 4
    known = sl.find_schedule(4, 8, costs, memory_limit=4).candidates
    best = min(each.T for each in known if each.fits and each.name != "search")
    assert best > simulation.T


def test_stages_of_ones_own_count_as_equal() -> None:
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipe = sl.Pipeline.from_stages(stages, schedule="auto", num_microbatches=4)
    equal = sl.Costs(forward=1, input_gradient=1, weight_gradient=1)
    want = sl.find_schedule(2, 4, equal, memory_limit=2)
    assert want.reached == sl.simulate(pipe.schedule, equal).T


def test_a_wrong_name_names_auto_too() -> None:
    with pytest.raises(ConfigError, match="auto"):
        sl.Pipeline(model_of([4, 4]), split=2, schedule=3)  # type: ignore[arg-type]  # wrong
