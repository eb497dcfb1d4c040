"""Copies of modules over other tensors: only what leads to them is copied."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from stageline.running.replacing import Replacement


def other(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone())


def replacement(*pairs: tuple[Tensor, Tensor]) -> Replacement:
    return Replacement({id(old): (old, new) for old, new in pairs})


class Config:
    """What many models carry along, with something that cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Block(nn.Module):
    """A parameter, a child, a configuration, and things that torch does not register."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.child = nn.Linear(2, 2)
        self.config = Config()
        self.calls: list[int] = []
        self.unregistered = [nn.Linear(2, 2)]
        self.register_buffer("scale", torch.ones(2))
        self.by_name = {"weight": self.weight}
        self.bound = self.doubled

    def doubled(self) -> Tensor:
        return self.weight * 2

    def forward(self, x: Tensor) -> Any:
        self.calls.append(1)
        return self.child(x) * self.by_name["weight"] + self.bound() + self.unregistered[0](x)


def test_a_module_without_the_tensor_is_itself() -> None:
    layer = nn.Linear(2, 2)
    assert replacement((torch.ones(1), torch.ones(1))).apply(layer) is layer
    assert Replacement({}).apply(layer) is layer


def test_everything_that_does_not_lead_to_the_tensor_is_shared() -> None:
    given, new = Block(), nn.Parameter(torch.full((2,), 3.0))
    made = replacement((given.weight, new)).apply(given)
    assert isinstance(made, Block)
    assert made is not given
    assert made.weight is new
    assert given.weight is not new
    for name in ("child", "config", "calls", "unregistered", "scale"):
        assert getattr(made, name) is getattr(given, name), name


def test_every_way_to_the_tensor_is_followed() -> None:
    """A dict of the user's and a bound method reach it too."""
    given, new = Block(), nn.Parameter(torch.full((2,), 3.0))
    made = replacement((given.weight, new)).apply(given)
    assert isinstance(made, Block)
    assert made.by_name["weight"] is new
    made(torch.ones(1, 2)).sum().backward()
    assert new.grad is not None
    assert given.weight.grad is None
    assert given.unregistered[0].weight.grad is not None


def test_what_is_registered_in_a_copy_does_not_appear_in_the_original() -> None:
    given = Block()
    made = replacement((given.weight, other(given.weight))).apply(given)
    made.register_buffer("added", torch.ones(1))
    made.add_module("more", nn.ReLU())
    made.register_forward_hook(lambda module, args, output: None)
    assert "added" not in dict(given.named_buffers())
    assert "more" not in dict(given.named_children())
    assert not given._forward_hooks


def test_a_child_that_knows_its_parent_gets_the_new_one() -> None:
    parent, child = nn.Sequential(nn.Linear(2, 2)), nn.ReLU()
    parent.append(child)
    vars(child)["parent"] = parent
    weight = parent.get_parameter("0.weight")
    made = replacement((weight, other(weight))).apply(parent)
    assert made.get_submodule("1").parent is made
    assert child.parent is parent


def test_a_module_in_two_stages_has_one_copy() -> None:
    layer = nn.Linear(2, 2)
    replace = replacement((layer.weight, other(layer.weight)))
    first = replace.apply(nn.Sequential(layer))
    second = replace.apply(nn.Sequential(nn.ReLU(), layer))
    assert first.get_submodule("0") is second.get_submodule("1")


def test_a_recurrent_layer_computes_with_the_new_weights() -> None:
    """It keeps its weights in a flat list as well."""
    given = nn.LSTM(3, 3, batch_first=True)
    old = given.get_parameter("weight_ih_l0")
    new = nn.Parameter(torch.zeros_like(old))
    made = replacement((old, new)).apply(given)
    made(torch.randn(2, 4, 3))[0].sum().backward()
    assert new.grad is not None
    assert old.grad is None
    assert given.get_parameter("weight_hh_l0").grad is not None


def test_a_parametrized_layer_computes_with_the_new_weights() -> None:
    given = parametrizations.weight_norm(nn.Linear(3, 3))
    old = given.get_parameter("parametrizations.weight.original1")
    new = other(old)
    made = replacement((old, new)).apply(given)
    made(torch.randn(2, 3)).sum().backward()
    assert new.grad is not None
    assert old.grad is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_copies_its_tensors_and_is_refused() -> None:
    script: Any = torch.jit.script  # untyped in torch
    given = script(nn.Linear(2, 2))
    weight = given.weight
    with pytest.raises(ValueError, match="copy"):
        replacement((weight, other(weight))).apply(given)
