"""Which modules a survey would never open, and what it says of a model that cannot be run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stageline.capturing.survey import Choice, Visit, survey_structure
from tests.capturing.survey_models import (
    WIDTH,
    EncoderDecoder,
    Experts,
    Model,
    Stack,
    blocks,
    chosen,
    families,
    numbered,
    surveyed,
)


class Checkpointed(Stack):
    gradient_checkpointing = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class FlagOnly(Stack):
    gradient_checkpointing = True


class MyAttention(nn.TransformerEncoderLayer):
    """A class of torch under another name."""


def hooked() -> Stack:
    stack = Stack(blocks(3))
    stack.register_forward_hook(lambda *_: None)
    return stack


def replaced() -> Stack:
    stack = Stack(blocks(3))
    stack.forward = stack.forward  # type: ignore[method-assign]  # as some libraries do
    return stack


@pytest.mark.parametrize(
    ("trunk", "reason"),
    [
        (hooked, "it has hooks"),
        (lambda: Checkpointed(blocks(3)), "it is checkpointed"),
        (replaced, "its forward was replaced"),
        (lambda: nn.TransformerEncoderLayer(WIDTH, 1, 4), "torch.nn.modules.transformer"),
        (lambda: MyAttention(WIDTH, 1, 4), "torch.nn.modules.transformer.TransformerEncoderLayer"),
    ],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_closed_modules_are_not_opened(trunk: Callable[[], nn.Module], reason: str) -> None:
    model = Model(trunk())
    (visit,) = (visit for visit in surveyed(model).visits if visit.path == "trunk")
    assert visit.closed is not None
    assert reason in visit.closed
    assert not visit.is_openable
    assert chosen(model, 4) == ([""], ["stem", "trunk", "head"])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_modules_are_closed() -> None:
    def reason(module: nn.Module) -> str | None:
        return Visit(module, "", 0, None).closed

    compiled = Stack(blocks(1))
    compiled.compile(backend="eager")
    assert reason(compiled) == "it is compiled"
    assert reason(torch.jit.script(nn.Sequential(nn.ReLU()))) == "it is compiled by torch.jit"
    assert "DataParallel" in str(reason(nn.DataParallel(nn.ReLU())))
    assert reason(nn.ModuleList()) == "its class has no forward"


def test_checkpointing_closes_only_who_does_it_and_only_in_training() -> None:
    assert chosen(Model(FlagOnly(blocks(3))))[1] == numbered("trunk.blocks", 3)
    assert chosen(Model(Checkpointed(blocks(3))).eval())[1] == numbered("trunk.blocks", 3)


def test_closed_layers_are_still_a_family() -> None:
    trunk = nn.Sequential(*(Checkpointed(blocks(2)) for _ in range(3)))
    assert chosen(Model(trunk), 3) == (["", "trunk"], numbered("trunk", 3))


def test_a_model_with_hooks_is_not_opened() -> None:
    assert surveyed(hooked_model()).choose(2) == Choice(frozenset(), ())


def hooked_model() -> Model:
    model = Model(Stack(blocks(3)))
    model.register_forward_pre_hook(lambda *_: None)
    return model


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_the_transformer_of_torch_is_opened_to_its_layers() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 1, 4)
    assert chosen(Model(nn.TransformerEncoder(layer, 3))) == (
        ["", "trunk"],
        numbered("trunk.layers", 3),
    )


# A model on meta.


@pytest.mark.parametrize(
    "trunk",
    [
        lambda: nn.Sequential(*blocks(3)),
        lambda: Stack(blocks(3)),
        EncoderDecoder,
        lambda: nn.Sequential(*(Experts() for _ in range(2))),
        lambda: nn.Sequential(Stack(blocks(2)), Stack(blocks(9))),
    ],
)
def test_the_structure_says_the_same_as_a_run(trunk: Callable[[], nn.Module]) -> None:
    real, meta = Model(trunk()), Model(trunk())
    meta.trunk.to("meta")
    found = surveyed(meta)
    not_run = [visit.path for visit in survey_structure(meta).visits]
    assert [visit.path for visit in found.visits] == not_run
    assert found.choose(2) == surveyed(real).choose(2)
    assert families(found) == families(survey_structure(real))


def test_a_module_registered_twice_is_visited_once() -> None:
    trunk = Stack([*blocks(2)] * 2)
    trunk.again = trunk.blocks[0]
    paths = [visit.path for visit in survey_structure(trunk).visits]
    assert paths.count("blocks.0") == 1
    assert "blocks.2" not in paths
    assert "again" not in paths
