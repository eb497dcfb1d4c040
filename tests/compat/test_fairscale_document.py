"""The tutorial of FairScale runs as it stands, with another import line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stageline.compat.fairscale
from tests.compat.documents import code_blocks, document, missing_lines, replaced

TEXT = document("003")
BLOCKS = code_blocks(TEXT)
REPLACED = {"import fairscale\n": "import stageline.compat.fairscale as fairscale\n"}
TOY, WRAP, SET_UP, STEP = (block.code for block in BLOCKS)


def script() -> str:
    return replaced("\n".join(block.code for block in BLOCKS), REPLACED)


@pytest.fixture
def ran(one_thread: None) -> dict[str, Any]:
    torch.manual_seed(1)
    names: dict[str, Any] = {}
    exec(compile(script(), "document", "exec"), names)
    return names


def test_only_the_import_line_is_another() -> None:
    assert missing_lines(BLOCKS, script()) == ["import fairscale"]


def test_the_document_runs_and_trains(ran: dict[str, Any]) -> None:
    model = ran["model"]
    assert isinstance(model, stageline.compat.fairscale.nn.Pipe)
    assert model.balance == [2, 1]
    assert len(model.devices) == 2
    assert ran["device"] == model.devices[0]
    assert ran["outputs"].shape == (20, 5)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_document_trains_like_the_plain_model(ran: dict[str, Any]) -> None:
    torch.manual_seed(1)
    names: dict[str, Any] = {}
    exec(TOY, names)  # the first block draws weights of its own
    plain = "\n".join((WRAP, SET_UP, STEP)).replace("import fairscale\n", "")
    plain = replaced(
        plain,
        {
            "fairscale.nn.Pipe(model, balance=[2, 1])": "model",
            "model.devices[0]": "torch.device('cpu')",
        },
    )
    exec(plain, names)
    assert torch.equal(ran["loss"], names["loss"])
    for (name, mine), theirs in zip(
        ran["model"].named_parameters(), names["model"].parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name
        assert torch.equal(mine.grad, theirs.grad), name


def test_the_toy_model_of_the_first_block_and_its_sequential_are_one_model() -> None:
    names: dict[str, Any] = {}
    exec(TOY, names)
    toy = names["model"]
    model = nn.Sequential(toy.net1, toy.relu, toy.net2)
    pipe = stageline.compat.fairscale.nn.Pipe(model, balance=[2, 1], devices=["cpu", "cpu"])
    x = torch.randn(20, 10)
    assert torch.equal(pipe(x), toy(x))
