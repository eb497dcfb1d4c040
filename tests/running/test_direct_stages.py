"""Stages are called directly where nobody has to follow their calls: with the same bits."""

from __future__ import annotations

import copy
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import plain_step
from tests.capturing.direct_models import Residual, calls_of_modules

pytestmark = pytest.mark.usefixtures("one_thread")


class Around(nn.Module):
    """A model that is recorded."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]  # torch has no types here


def model(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Residual(4, 4) for _ in range(4)]
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*blocks, *drop, nn.Flatten(), nn.Linear(4 * 36, 3))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 4, 6, 6), torch.randn(8, 3)


def of_one_rank(trained: nn.Module, **options: Any) -> sl.Pipeline:
    """Return a pipeline of one rank, with cuts all the same."""
    pipe = sl.Pipeline(trained, ranks=1, num_microbatches=4, loss_fn=F.mse_loss, **options)
    vars(pipe._engine.runner)["_takes_turns"] = False
    return pipe


CHAIN: dict[str, Any] = {"split": [2, 2, 2]}
RECORDED: dict[str, Any] = {
    "example_args": (torch.zeros(2, 4, 6, 6),),
    "split": {"layers.1": "end"},
}


def wrapped(layers: nn.Sequential, options: dict[str, Any]) -> nn.Module:
    return Around(layers) if "example_args" in options else layers


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("options", [CHAIN, RECORDED], ids=["chain", "recorded"])
def test_to_the_last_bit(options: dict[str, Any], schedule: str) -> None:
    x, y = batch()
    plain = wrapped(model(), options)
    trained = copy.deepcopy(plain)
    pipe = sl.Pipeline(
        trained, num_microbatches=4, loss_fn=F.mse_loss, schedule=schedule, **options
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, trained)]
    for _ in range(3):
        wanted = plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.mse_loss)
        assert torch.equal(pipe.step(x, target=y).loss, wanted.loss)
        for name, parameter in plain.named_parameters():
            mine = trained.get_parameter(name)
            assert parameter.grad is not None
            assert mine.grad is not None
            assert torch.equal(mine.grad, parameter.grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(plain.buffers(), trained.buffers(), strict=True):
        assert torch.equal(one, other)
    pipe.close()


@pytest.mark.parametrize("options", [CHAIN, RECORDED], ids=["chain", "recorded"])
def test_layers_are_not_called_as_modules(options: dict[str, Any]) -> None:
    x, y = batch()
    with closing(of_one_rank(wrapped(model(), options), **options)) as pipe:
        pipe.step(x, target=y)
        with calls_of_modules() as calls:
            pipe.step(x, target=y)
    assert not calls


def test_a_stage_that_draws_is_followed() -> None:
    x, y = batch()
    with closing(of_one_rank(model(dropout=0.5), split=[2, 2, 3])) as pipe:
        pipe.step(x, target=y)
        with calls_of_modules() as calls:
            pipe.step(x, target=y)
    kinds = [type(module) for module in calls]
    assert kinds.count(nn.Dropout) == 4  # one for each microbatch
    assert kinds.count(nn.Linear) == 4  # in the same stage
    assert nn.Conv2d not in kinds  # in stages that draw nothing


@pytest.mark.parametrize("options", [CHAIN, RECORDED], ids=["chain", "recorded"])
def test_a_hook_that_comes_between_steps_hears_every_microbatch(options: dict[str, Any]) -> None:
    x, y = batch()
    layers = model()
    heard: list[nn.Module] = []
    with closing(of_one_rank(wrapped(layers, options), **options)) as pipe:
        pipe.step(x, target=y)
        second = layers.get_submodule("1.second")
        handle = second.register_forward_hook(lambda module, *given: heard.append(module))
        pipe.step(x, target=y)
        handle.remove()
        pipe.step(x, target=y)
    assert heard == [second] * 4


def test_a_layer_that_is_replaced_between_steps_is_called() -> None:
    x, y = batch()
    plain = model()
    trained = copy.deepcopy(plain)
    with closing(of_one_rank(trained, split=[2, 2, 2])) as pipe:
        pipe.step(x, target=y)
        plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.mse_loss)
        for each in (plain, trained):
            torch.manual_seed(2)
            each[1].second = nn.Conv2d(4, 4, 3, padding=1)
        wanted = plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.mse_loss)
        assert torch.equal(pipe.step(x, target=y).loss, wanted.loss)


def test_a_recorded_stage_that_is_compiled_runs_as_compiled() -> None:
    x, y = batch()
    ran: list[int] = []

    def compiled(stage: nn.Module, index: int) -> nn.Module:
        def call(*args: Any) -> Any:
            ran.append(index)
            return stage.forward(*args)

        vars(stage)["_compiled_call_impl"] = call  # as stage.compile() does
        return stage

    model_of_it = wrapped(model(), RECORDED)
    with closing(of_one_rank(model_of_it, wrap_stage=compiled, **RECORDED)) as pipe:
        pipe.step(x, target=y)
    assert sorted(ran) == [0] * 4 + [1] * 4


@pytest.mark.parametrize("options", [CHAIN, RECORDED], ids=["chain", "recorded"])
def test_a_hook_on_a_stage_that_comes_within_a_step_hears_the_rest(options: dict[str, Any]) -> None:
    x, y = batch()
    layers = model()
    heard: list[nn.Module] = []
    stages: list[nn.Module] = []

    def noted(stage: nn.Module, index: int) -> nn.Module:
        stages.append(stage)
        return stage

    def listen(*given: Any) -> None:
        handle.remove()
        stages[0].register_forward_hook(lambda module, *given: heard.append(module))

    with closing(of_one_rank(wrapped(layers, options), wrap_stage=noted, **options)) as pipe:
        pipe.step(x, target=y)
        handle = layers[0].register_forward_hook(listen)
        pipe.step(x, target=y)
    assert heard == [stages[0]] * 3  # of four microbatches
