"""A chain by a list of names and functions, of the model's own modules."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.capturing import capture_sequential
from stageline.capturing.layers import FunctionModule, LayerList, chain_of, layer_list
from stageline.capturing.sequential import is_plain_sequential
from stageline.errors import ConfigError


class Net(nn.Module):
    """A ResNet in small: named layers, a container, a function between, one module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 2, 3)
        self.relu = nn.ReLU()
        self.layer1 = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
        self.blocks = nn.ModuleList([nn.Conv2d(2, 2, 1)])
        self.fc = nn.Linear(8, 3)
        self.squash = torch.tanh

    def forward(self, x: Tensor) -> Any:
        x = self.relu(self.layer1(self.relu(self.conv1(x))))
        return self.fc(flat(x))


def flat(x: Tensor) -> Tensor:
    return torch.flatten(x, 1)


WHOLE: list[Any] = ["conv1", "relu", "layer1", "relu", flat, "fc"]


def findings(model: Any, layers: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        layer_list(model, layers)
    assert caught.value.what == "sl.layer_list"
    return caught.value.findings


def test_the_chain_computes_what_the_model_does_with_its_own_modules() -> None:
    model = Net().eval()
    chain = layer_list(model, WHOLE)
    x = torch.randn(5, 1, 4, 4)
    assert torch.equal(chain(x), model(x))
    assert chain.get_submodule("fc") is model.fc
    own = [key for key in model.state_dict() if not key.startswith("blocks")]
    assert sorted(chain.state_dict()) == sorted(own)
    assert len(chain) == 6
    assert chain[4](x).shape == (5, 16)


def test_a_chain_in_the_order_of_its_names_is_a_plain_sequential() -> None:
    chain = layer_list(Net(), ["conv1", "relu", "layer1.0", "layer1.1", flat, torch.relu, "fc"])
    assert type(chain) is nn.Sequential
    assert list(chain._modules) == ["conv1", "relu", "layer1", "flat", "relu_2", "fc"]
    assert isinstance(chain.flat, FunctionModule)


@pytest.mark.parametrize(
    "layers",
    [
        ["relu", "conv1", "relu"],
        ["layer1.0", "relu", "layer1.1"],
        ["layer1.0", "layer1"],
        ["layer1", "layer1.0"],
    ],
)
def test_no_order_is_lost(layers: list[str]) -> None:
    model = Net().eval()
    chain = layer_list(model, layers)
    assert isinstance(chain, LayerList)
    assert is_plain_sequential(chain)
    assert [id(layer) for layer in chain] == [id(model.get_submodule(name)) for name in layers]
    assert [block.name for block in capture_sequential(chain).blocks] == layers
    assert set(chain.state_dict()) <= set(model.state_dict())


def test_a_stage_of_such_a_chain_has_the_original_names() -> None:
    model = Net().eval()
    graph = capture_sequential(layer_list(model, WHOLE))
    parts = graph.cut([3])
    assert [list(stage._modules) for stage in parts.stages] == [
        ["conv1", "relu", "layer1"],
        ["relu", "flat", "fc"],
    ]
    x = torch.randn(5, 1, 4, 4)
    assert torch.equal(parts.run((x,), {}), model(x))
    assert [call.occurrence for call in graph.calls if call.path == "relu"] == [0, 1]


def test_copies_and_slices_keep_the_order() -> None:
    chain = layer_list(Net().eval(), ["layer1.0", "relu", "layer1.1", "relu"])
    x = torch.randn(2, 2, 3, 3)
    for other in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        assert torch.equal(other(x), chain(x))
    assert torch.equal(chain[2:](chain[:2](x)), chain(x))
    assert "order: layer1.0, relu, layer1.1, relu" in repr(chain)


def test_modules_may_be_given_themselves() -> None:
    model = Net()
    chain = layer_list(model, [model.conv1, nn.Flatten(), nn.Flatten(), lambda x: x[:, :8], "fc"])
    assert list(chain._modules) == ["conv1", "flatten", "flatten_2", "lambda", "fc"]
    assert chain(torch.randn(5, 1, 4, 4)).shape == (5, 3)


def test_names_of_methods_are_no_obstacle() -> None:
    def pop(x: Tensor) -> Tensor:
        return x + 1

    chain = layer_list(Net(), [pop, partial(torch.mul, other=2)])
    assert list(chain._modules) == ["pop_2", "partial"]
    assert torch.equal(chain(torch.ones(1)), torch.full((1,), 4.0))
    assert list(chain_of([("pop", nn.ReLU())])._modules) == ["pop"]


def test_everything_wrong_is_said_at_once() -> None:
    fc = nn.Linear(2, 2)
    assert findings(Net(), ["conv2", "squash", "blocks", 3, nn.ReLU, lambda x: fc(x), fc, ""]) == (
        "layers[0]: Net has no module 'conv2': did you mean 'conv1'?",
        "layers[1]: 'squash' of Net is no module: pass it as a function",
        "layers[2]: 'blocks' is a ModuleList, nobody can call it: name what it holds, 'blocks.0'",
        "layers[3]: wanted a module or a function, got int",
        "layers[4]: wanted a module or a function, got the class ReLU: write ReLU()",
        "layers[5]: a function that uses fc, a Linear with parameters or buffers that nobody would "
        "find: pass the module itself, or a module that holds it",
        "layers[6]: this Linear has state and is no part of the model: make it one",
        "layers[7]: Net has no module '': there are conv1, relu, layer1, layer1.0, layer1.1, "
        "blocks, blocks.0, fc",
    )


def test_lists_that_are_none() -> None:
    assert findings(Net(), []) == ("layers: the list is empty",)
    assert findings(Net(), "fc") == ("layers: wanted a list of layers, got str",)
    assert findings(3, ["fc"]) == ("model: wanted a module, got int",)
