"""Hooks on parameters: a call gives them what the plain loop gives, once for the whole batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import plain_step

pytestmark = pytest.mark.usefixtures("one_thread")


def net() -> nn.Sequential:
    """With a parameter that no forward uses: its hooks are never called."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].unused = nn.Parameter(torch.ones(2))
    return model


def batch(rows: int = 8) -> Tensor:
    torch.manual_seed(rows)
    return torch.randn(rows, 4)


def plain_call(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in x.tensor_split(4)])


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or theirs.grad is None or torch.equal(mine.grad, theirs.grad), name


def weight(model: nn.Module) -> nn.Parameter:
    return model.get_parameter("2.weight")


def clamps(name: str, parameter: nn.Parameter, log: list[str]) -> None:
    parameter.register_hook(lambda gradient: gradient.clamp(-0.3, 0.3))


def normalises(name: str, parameter: nn.Parameter, log: list[str]) -> None:
    parameter.register_hook(lambda gradient: gradient / gradient.norm())


def logs(name: str, parameter: nn.Parameter, log: list[str]) -> None:
    parameter.register_hook(lambda gradient: log.append(name))


def clamps_after(name: str, parameter: nn.Parameter, log: list[str]) -> None:
    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.3, 0.3)
        log.append(name)

    parameter.register_post_accumulate_grad_hook(clamp)


def optimizes(name: str, parameter: nn.Parameter, log: list[str]) -> None:
    """The optimizer in the backward: weights change before other gradients exist."""
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

    def update(parameter: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(update)


HOOKS: list[Callable[[str, nn.Parameter, list[str]], None]]
HOOKS = [clamps, normalises, logs, clamps_after, optimizes]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_call_gives_hooks_the_gradient_of_the_batch(
    hook: Callable[[str, nn.Parameter, list[str]], None], recompute: str, schedule: str
) -> None:
    """They were called for each microbatch: clipped gradients were others, without a word."""
    model, plain = net(), net()
    found: list[str] = []
    wanted: list[str] = []
    for each, log in ((model, found), (plain, wanted)):
        for name, parameter in each.named_parameters():
            hook(name, parameter, log)
    pipe = sl.Pipeline(model, split=2, num_microbatches=4, schedule=schedule, recompute=recompute)
    for rows in (8, 7):
        pipe(batch(rows)).square().sum().backward()
        plain_call(plain, batch(rows)).square().sum().backward()
    assert_same(model, plain)
    assert found == wanted


def test_a_step_gives_hooks_the_gradient_of_each_microbatch() -> None:
    """As the plain loop that accumulates over microbatches does."""
    model, plain = net(), net()
    for each in (model, plain):
        for name, parameter in each.named_parameters():
            clamps(name, parameter, [])
    pipe = sl.Pipeline(model, split=2, num_microbatches=4, loss_fn=F.mse_loss)
    y = torch.zeros(8, 3)
    pipe.step(batch(), target=y)
    plain_step(plain, batch(), target=y, num_microbatches=4, loss_fn=F.mse_loss)
    assert_same(model, plain)


def test_hooks_stay_registered_and_can_be_removed() -> None:
    model = net()
    pipe = sl.Pipeline(model, split=2, num_microbatches=4)
    calls: list[int] = []
    handle = weight(model).register_hook(lambda gradient: calls.append(1))
    after = weight(model).register_post_accumulate_grad_hook(lambda weight: calls.append(2))
    pipe(batch()).sum().backward()
    plain_call(model, batch()).sum().backward()
    assert calls == [1, 2, 1, 2]
    handle.remove()
    pipe(batch()).sum().backward()
    after.remove()
    pipe(batch()).sum().backward()
    plain_call(model, batch()).sum().backward()
    assert calls == [1, 2, 1, 2, 2]


def test_hooks_are_called_once_for_each_call_of_several_threads() -> None:
    model = net()
    pipe = sl.Pipeline(model, split=2, num_microbatches=4)
    calls: list[int] = []
    weight(model).register_hook(lambda gradient: calls.append(1))
    raised: list[BaseException] = []
    x = batch()

    def train() -> None:
        try:
            for _ in range(10):
                pipe(x).sum().backward()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    assert len(calls) == 30


def test_a_hook_that_raises_is_called_again_in_the_next_backward() -> None:
    model = net()
    pipe = sl.Pipeline(model, split=2, num_microbatches=4)

    def fail(gradient: Any) -> None:
        raise KeyError("mine")

    handle = weight(model).register_hook(fail)
    for _ in range(2):
        out = pipe(batch())
        with pytest.raises(KeyError, match="mine"):
            out.sum().backward()
    handle.remove()
    pipe.zero_grad()
    pipe(batch()).sum().backward()
    plain = net()
    plain_call(plain, batch()).sum().backward()
    assert_same(model, plain)


def test_a_hook_that_comes_between_a_call_and_its_backward_is_refused() -> None:
    """It would be called twice, as the parameter is a part of the graph of the call."""
    model = net()
    pipe = sl.Pipeline(model, split=2, num_microbatches=4)
    out = pipe(batch())
    handle = weight(model).register_hook(lambda gradient: gradient * 2)
    with pytest.raises(sl.PipeError, match="register it before the call"):
        out.sum().backward()
    handle.remove()
    out.sum().backward()
    plain = net()
    plain_call(plain, batch()).sum().backward()
    assert_same(model, plain)
