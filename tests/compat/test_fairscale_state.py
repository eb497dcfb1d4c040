"""Names in a state_dict, those that load, and copies of a Pipe."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stageline.compat.fairscale.nn import Pipe
from tests.compat.loops import plain

X = torch.randn(7, 4)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def pipe(**settings: Any) -> Pipe:
    return Pipe(net(), [2, 1], chunks=3, **settings)


def normed() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(first=nn.Linear(4, 6), norm=nn.BatchNorm1d(6), last=nn.Linear(6, 3))
    )


def test_keys_name_the_partition() -> None:
    assert list(pipe().state_dict()) == [
        "partitions.0.0.weight",
        "partitions.0.0.bias",
        "partitions.1.2.weight",
        "partitions.1.2.bias",
    ]


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("source", ["plain", "same", "another balance"])
def test_a_state_dict_of_any_of_them_loads(source: str, assign: bool) -> None:
    model = normed()
    model(torch.randn(8, 4))  # statistics that are not those of a new one
    values = model.state_dict()
    made = Pipe(normed(), [2, 1], chunks=2)
    made(X)
    others = {
        "plain": model,
        "same": Pipe(copy.deepcopy(model), [2, 1]),
        "another balance": Pipe(copy.deepcopy(model), [1, 1, 1]),
    }
    given = copy.deepcopy(others[source].state_dict())
    before = dict(given)
    keys = made.load_state_dict(given, assign=assign)
    assert keys.missing_keys == keys.unexpected_keys == []
    assert given.keys() == before.keys()
    for name, value in made.state_dict().items():
        assert torch.equal(value, values[name.split(".", 2)[2]]), name
    made.eval()
    assert torch.equal(made(X), plain(model.eval(), X, 2))
    made.train()
    made(X).sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_a_state_dict_loads_into_a_pipe_inside_of_a_module() -> None:
    model = net()
    outer = nn.ModuleDict({"body": pipe()})
    outer.load_state_dict({f"body.{name}": value for name, value in model.state_dict().items()})
    assert torch.equal(outer["body"](X), plain(model, X, 3))


def test_keys_that_do_not_fit_are_named() -> None:
    state = net().state_dict()
    del state["0.bias"]
    state["5.weight"] = X
    with pytest.raises(RuntimeError, match=r"(?s)partitions\.0\.0\.bias.*5\.weight"):
        pipe().load_state_dict(state)
    keys = pipe().load_state_dict(state, strict=False)
    assert keys.missing_keys == ["partitions.0.0.bias"]
    assert keys.unexpected_keys == ["5.weight"]


def by_deepcopy(made: Pipe) -> Any:
    return copy.deepcopy(made)


def by_pickle(made: Pipe) -> Any:
    return pickle.loads(pickle.dumps(made))


def by_save(made: Pipe) -> Any:
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [by_deepcopy, by_pickle, by_save])
@pytest.mark.parametrize("has_run", [False, True])
def test_a_pipe_can_be_copied(way: Callable[[Pipe], Any], has_run: bool) -> None:
    made = pipe(checkpoint="always")
    if has_run:
        made(X).sum().backward()
        made.zero_grad()
    twin = way(made)
    assert isinstance(twin, Pipe)
    assert (twin.balance, twin.devices, twin.chunks, twin.checkpoint) == (
        made.balance,
        made.devices,
        made.chunks,
        made.checkpoint,
    )
    output = twin(X)
    assert torch.equal(output, made(X))
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert all(parameter.grad is None for parameter in made.parameters())
    twin.load_state_dict(net().state_dict())  # into the copy, not into its original
    assert not torch.equal(twin(X), made(X))
