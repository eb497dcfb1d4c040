"""Values that enter a stage as leaves: only where the plain model's bits come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.running import forwards
from stageline.running.boundary import enter_leaf
from stageline.running.program import StageProgram
from stageline.testing import plain_step


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What has entered as a leaf."""
    seen: list[Tensor] = []

    def noted(tensor: Tensor, *where: Any) -> Tensor:
        leaf = enter_leaf(tensor, *where)
        seen.append(leaf)
        return leaf

    monkeypatch.setattr(forwards, "enter_leaf", noted)
    return seen


def stack(width: int, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(width, 1)).to(dtype)


def gradient(model: nn.Module, name: str) -> Tensor:
    found = model.get_parameter(name).grad
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 3), (4, 1), (8, 7), (4, 5, 3), (4, 1, 3), (4, 2, 2, 3)])
def test_to_the_last_bit(shape: tuple[int, ...], dtype: torch.dtype, entered: list[Tensor]) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], 1, dtype=dtype)
    plain, model = stack(shape[-1], dtype), stack(shape[-1], dtype)
    wanted = plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.mse_loss)
    pipe = sl.Pipeline(model, split=[1, 1, 2], num_microbatches=4, loss_fn=F.mse_loss)
    vars(pipe._engine.runner)["_takes_turns"] = False
    assert torch.equal(pipe.step(x, target=y).loss, wanted.loss)
    for name, _ in plain.named_parameters():
        assert torch.equal(gradient(model, name), gradient(plain, name)), name
    assert len(entered) == 8  # two stages, four microbatches


def program(module: nn.Module) -> StageProgram:
    return StageProgram(1, 2, module, torch.device("cpu"))


class Own(nn.Linear):
    pass


def hooked(add: Callable[[nn.Linear], object]) -> nn.Linear:
    layer = nn.Linear(2, 2)
    add(layer)
    return layer


def test_a_linear_layer_takes_leaves() -> None:
    assert program(nn.Linear(2, 2)).takes_leaf()
    assert program(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))).takes_leaf()


@pytest.mark.parametrize(
    "module",
    [
        nn.ReLU(inplace=True),
        nn.Conv2d(1, 1, 1),
        nn.Sequential(),
        nn.Sequential(nn.ReLU(), nn.Linear(2, 2)),
        Own(2, 2),
        nn.Linear(2, 2).requires_grad_(False),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        hooked(lambda layer: layer.register_forward_pre_hook(lambda _, x: x)),
        hooked(lambda layer: layer.register_forward_hook(lambda *_: None)),
        hooked(lambda layer: layer.register_full_backward_hook(lambda *_: None)),
        hooked(lambda layer: setattr(layer, "forward", lambda x: x.add_(1))),
    ],
    ids=lambda module: type(module).__name__,
)
def test_nothing_else_does(module: nn.Module) -> None:
    assert not program(module).takes_leaf()


def test_nobody_does_while_somebody_listens_to_all_modules() -> None:
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    try:
        assert not program(nn.Linear(2, 2)).takes_leaf()
    finally:
        handle.remove()


def test_a_layer_that_gets_a_hook_later_takes_no_more_leaves(entered: list[Tensor]) -> None:
    """What a hook does to its input, nobody knows: it is asked for in every step anew."""
    x, y = torch.randn(4, 3), torch.randn(4, 1)
    plain, model = stack(3, torch.float32), stack(3, torch.float32)
    pipe = sl.Pipeline(model, split=[1, 3], num_microbatches=2, loss_fn=F.mse_loss)
    vars(pipe._engine.runner)["_takes_turns"] = False
    pipe.step(x, target=y)
    assert len(entered) == 2
    pipe.zero_grad()
    for each in (plain, model):
        each.get_submodule("1.0").register_forward_pre_hook(
            lambda _, given: (given[0].clone().mul_(2),)
        )
    wanted = plain_step(plain, x, target=y, num_microbatches=2, loss_fn=F.mse_loss)
    assert torch.equal(pipe.step(x, target=y).loss, wanted.loss)
    assert len(entered) == 2
    first = "0.0.weight"
    assert torch.equal(gradient(model, first), gradient(plain, first))


class Impatient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.sum().backward(retain_graph=True)
        return x


def test_a_backward_inside_a_stage_is_refused() -> None:
    stages = [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), Impatient(), nn.Linear(3, 1))]
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=2, loss_fn=F.mse_loss)
    with pytest.raises(sl.StepError, match=r"backward\(\) was called inside a stage's forward"):
        pipe.step(torch.randn(4, 3), target=torch.randn(4, 1))


def test_nothing_enters_as_a_leaf_where_saved_tensors_are_kept_elsewhere(
    entered: list[Tensor],
) -> None:
    """The layer's input would go to the disk, say, and stay alive as a leaf all the same."""
    pipe = sl.Pipeline(
        stack(3, torch.float32), split=[1, 3], num_microbatches=2, loss_fn=F.mse_loss
    )
    vars(pipe._engine.runner)["_takes_turns"] = False
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        pipe.step(torch.randn(4, 3), target=torch.randn(4, 1))
    assert not entered


def test_under_autocast_nothing_enters_as_a_leaf(entered: list[Tensor]) -> None:
    """The layer keeps its input in another dtype there, and a leaf would be held besides."""
    pipe = sl.Pipeline(
        stack(3, torch.float32), split=[1, 3], num_microbatches=2, loss_fn=F.mse_loss
    )
    vars(pipe._engine.runner)["_takes_turns"] = False  # where nothing enters anyway
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(torch.randn(4, 3), target=torch.randn(4, 1))
    assert not entered
