"""Stages that share something: when they fail, what they may use, how they are copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import plain_step
from tests.running.tied import (
    WIDTH,
    batch,
    differences,
    first_and_last,
    gradients,
    linears,
    made,
    pipeline,
    plain,
    three_times,
    tie,
    two_parameters,
    wanted_gradients,
    weight,
)
from tests.wrappers import Doubled


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Untied gradients are compared to the last bit."""


# Failures


class Fuse(nn.Module):
    """Raises when it is blown."""

    def __init__(self) -> None:
        super().__init__()
        self.blown = False

    def forward(self, x: Tensor) -> Tensor:
        if self.blown:
            raise RuntimeError("blown")
        return x

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("it holds nothing that is tied, so it need not be copied")


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_failed_step_leaves_nothing(accumulated: bool) -> None:
    fuse = Fuse()
    model = made(first_and_last)
    model.append(fuse)
    pipe = pipeline(first_and_last, model, split=[1, 1, 1, 2], schedule="gpipe")
    x, y = batch(first_and_last)
    if accumulated:
        pipe.step(x, target=y)
    own = weight(model, 0)
    kept = own.grad
    before = None if kept is None else kept.clone()

    fuse.blown = True
    with pytest.raises(sl.StepError, match="blown"):
        pipe.step(x, target=y)
    assert own.grad is kept
    assert before is None or torch.equal(own.grad, before)  # type: ignore[arg-type]

    fuse.blown = False
    pipe.zero_grad()
    pipe.step(x, target=y)
    plain_model = made(first_and_last)
    plain(first_and_last, plain_model, x, y)
    wanted = wanted_gradients(plain_model)
    assert differences(gradients(pipe), wanted, {"0.weight"}) == []


class BackwardFails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("no way back")


class NoWayBack(nn.Module):
    def forward(self, x: Tensor) -> Any:
        apply: Any = BackwardFails.apply
        return apply(x)


def test_a_step_that_fails_after_the_last_stage_has_its_gradient_leaves_nothing() -> None:
    model = made(first_and_last)
    model.insert(1, NoWayBack())
    pipe = pipeline(first_and_last, model, split=5)
    x, y = batch(first_and_last)
    with pytest.raises(sl.StepError, match="no way back"):
        pipe.step(x, target=y)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert all(
        parameter.grad is None
        for stage in pipe._stages.stages
        for parameter in stage.module.parameters()
    )


def test_a_hook_would_see_a_part_of_the_gradient_and_is_refused() -> None:
    pipe = pipeline(first_and_last)
    x, y = batch(first_and_last)
    handle = next(pipe.parameters()).register_hook(lambda gradient: gradient * 2)
    with pytest.raises(sl.PipeError, match=r"0\.weight is used by stages of several ranks.*hook"):
        pipe.step(x, target=y)
    handle.remove()
    pipe.step(x, target=y)


class Stubborn(nn.Linear):
    """Cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("I am one of a kind")


class Forgetful(nn.Linear):
    """Makes new parameters when it is copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        return Forgetful(self.in_features, self.out_features)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Stubborn, "copying it failed with TypeError: I am one of a kind"),
        (Forgetful, "its copy has a 1.0.weight of its own"),
    ],
)
def test_a_stage_that_cannot_be_copied_is_refused(kind: Any, why: str) -> None:
    layer = kind(WIDTH, WIDTH)
    with pytest.raises(sl.ConfigError) as caught:
        sl.Pipeline(nn.Sequential(nn.Sequential(layer), nn.Sequential(layer)), split=2)
    (finding,) = caught.value.findings
    assert why in finding
    assert "(tied: 0.0.weight, 0.0.bias)" in finding
    # With one rank nothing has to be copied.
    sl.Pipeline(nn.Sequential(nn.Sequential(layer), nn.Sequential(layer)), split=2, ranks=1)


# Use of a tied parameter by others


def test_a_holder_may_use_the_parameter_in_its_loss() -> None:
    """Through its own stage, or through the model, which the user has at hand."""
    model, other = made(first_and_last), made(first_and_last)

    def penalised(weights: nn.Sequential) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda output, target: F.mse_loss(output, target) + weight(weights, 3).pow(2).sum()

    pipe = pipeline(first_and_last, model, loss_fn=penalised(model))
    x, y = batch(first_and_last)
    pipe.step(x, target=y)
    plain_step(other, x, target=y, num_microbatches=4, loss_fn=penalised(other), num_threads=1)
    assert differences(gradients(pipe), wanted_gradients(other), {"0.weight"}) == []


def test_a_stage_that_does_not_hold_it_may_not_use_it() -> None:
    model = tie(linears(), 2, 0)
    pipe = pipeline(
        first_and_last,
        model,
        loss_fn=lambda output, target: F.mse_loss(output, target) + weight(model, 0).sum(),
    )
    x, y = batch(first_and_last)
    with pytest.raises(sl.StepError, match=r"uses 0\.weight, a parameter of stage 0"):
        pipe.step(x, target=y)


def test_a_parameter_that_was_replaced_by_its_tie_may_not_be_used() -> None:
    """Its gradient would go to a Parameter that no optimizer knows."""
    model = made(two_parameters)
    pipe = pipeline(
        two_parameters,
        model,
        loss_fn=lambda output, target: F.mse_loss(output, target) + weight(model, 3).sum(),
    )
    x, y = batch(two_parameters)
    with pytest.raises(sl.StepError, match=r"uses 0\.weight, a parameter of stage 0"):
        pipe.step(x, target=y)


# Modules


def test_wrap_stage_gets_the_copy() -> None:
    model = made(first_and_last)
    seen: dict[int, nn.Module] = {}

    def wrap(module: nn.Module, index: int) -> nn.Module:
        seen[index] = module
        return Doubled(module)

    pipe = pipeline(first_and_last, model, wrap_stage=wrap)
    x, y = batch(first_and_last)
    pipe.step(x, target=y)
    assert seen[0].get_parameter("0.weight") is weight(model, 0)
    assert seen[3].get_parameter("3.weight") is not weight(model, 0)
    assert seen[3].get_parameter("3.bias") is model[3].bias
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert [n for n, _ in pipe.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_training_mode_reaches_copies_and_originals() -> None:
    model = made(three_times)
    pipe = pipeline(three_times, model, split=[2, 2, 2])
    copies = [module for stage in pipe._stages.stages for module in stage.module.modules()]
    pipe.eval()
    assert not any(module.training for module in (*model[0].modules(), *copies))
    pipe.train()
    assert all(module.training for module in (*model[0].modules(), *copies))
    model[0].eval()  # a layer that the user freezes after pipe.train(), in the model he has
    x, y = batch(three_times)
    pipe.step(x, target=y)
    assert not pipe._stages.stages[2].module.get_submodule("4").training


def test_several_stages_of_a_rank_have_one_copy() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    pipe = pipeline(first_and_last, nn.Sequential(layer, layer, layer, layer), split=4, ranks=2)
    used = [
        {id(parameter) for parameter in stage.module.parameters()} for stage in pipe._stages.stages
    ]
    by_rank: dict[int, set[int]] = {}
    for stage, ids in zip(pipe.plan.stages, used, strict=True):
        by_rank.setdefault(stage.rank, set()).update(ids)
    assert all(len(ids) == 2 for ids in by_rank.values())  # a weight and a bias
    assert by_rank[0].isdisjoint(by_rank[1])


# Buffers


class Scaled(nn.Module):
    """Uses a buffer; may count its calls in it, in place or not."""

    def __init__(self, scale: Tensor, counts: str = "") -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", scale)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.counts = counts

    def forward(self, x: Tensor) -> Any:
        if self.counts == "in place":
            self.scale.add_(1)
        elif self.counts == "replaced":
            self.scale = self.scale + 1
        return self.linear(x) + self.scale


def scaled(counts: str = "") -> nn.Sequential:
    scale = torch.full((WIDTH,), 0.5)
    return nn.Sequential(Scaled(scale), nn.ReLU(), Scaled(scale, counts))


def test_a_shared_buffer_that_nobody_changes_works() -> None:
    pipe, model = pipeline(scaled, split=3), made(scaled)
    x, y = batch(scaled)
    pipe.step(x, target=y)
    plain(scaled, model, x, y)
    assert differences(gradients(pipe), wanted_gradients(model), set()) == []
    assert [name for name, _ in pipe.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert list(pipe.state_dict()) == list(model.state_dict())


def test_one_module_with_a_buffer_in_two_stages_works() -> None:
    def twice() -> nn.Sequential:
        block = Scaled(torch.full((WIDTH,), 0.5))
        return nn.Sequential(block, nn.ReLU(), block)

    pipe, model = pipeline(twice, split=3), made(twice)
    x, y = batch(twice)
    pipe.step(x, target=y)
    plain(twice, model, x, y)
    tied = {"0.linear.weight", "0.linear.bias"}
    assert differences(gradients(pipe), wanted_gradients(model), tied) == []
    assert list(pipe.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("mode", ["train", "eval", "infer"])
@pytest.mark.parametrize("counts", ["in place", "replaced"])
def test_a_shared_buffer_that_a_stage_changes_is_named(counts: str, mode: str) -> None:
    pipe = pipeline(scaled, made(lambda: scaled(counts)), split=3).train(mode == "train")
    x, y = batch(scaled)
    with pytest.raises(sl.PipeError, match=r"\.scale is a buffer of several stages, and one of"):
        pipe(x) if mode == "infer" else pipe.step(x, target=y)
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_batchnorm_in_evaluation_may_stand_in_two_stages() -> None:
    norm = nn.BatchNorm1d(WIDTH).eval()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), norm)
    pipe = pipeline(first_and_last, model, split=[2, 2])
    x, y = batch(first_and_last)
    pipe.step(x, target=y)
    assert norm.weight.grad is not None
    pipe.train()
    with pytest.raises(sl.PipeError, match=r"1\.running_mean: a BatchNorm1d of several stages is"):
        pipe.step(x, target=y)
    norm.eval()
    pipe.step(x, target=y)
    assert not norm.running_mean.any()  # type: ignore[union-attr]
