"""The comparison itself: it sees what differs, and forgives only what it says it forgives."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.comparing import Run, compare, output_differences, run, tied_names
from tests.models.kinds import KINDS
from tests.models.local import LOCAL, TiedGPT
from tests.models.table import MEANING, columns

ONE = torch.ones(3)


@pytest.mark.parametrize(
    ("got", "want", "said"),
    [
        (ONE, ONE + 1e-7, ["output: differs by 1.2e-07"]),
        (ONE, ONE.double(), ["output: torch.float32 (3,) instead of torch.float64 (3,)"]),
        ({"a": ONE}, {"a": ONE, "b": None}, ["output: .a instead of .a .b"]),
        ({"a": ONE}, OrderedDict(a=ONE), ["output: dict instead of OrderedDict"]),
        ({"a": (ONE, 1)}, {"a": (ONE, 2)}, ["output.a[1]: 1 instead of 2"]),
        ([ONE], [ONE, ONE], ["output: [0] instead of [0] [1]"]),
        ({"a": ONE}, {"a": ONE, "past_key_values": object()}, []),
        (ONE * float("nan"), ONE * float("nan"), []),
    ],
)
def test_outputs(got: Any, want: Any, said: list[str]) -> None:
    assert list(output_differences(got, want)) == said


def _run(gradient: Tensor | None, buffer: Tensor = ONE) -> Run:
    return Run(ONE, {"weight": gradient}, {"mean": buffer})


@pytest.mark.parametrize(
    ("got", "tied", "verdict"),
    [
        (_run(ONE), (), "exact"),
        (_run(ONE + 5e-7), (), "WRONG"),
        (_run(ONE + 5e-7), ("weight",), "close"),
        (_run(ONE + 5e-6), ("weight",), "WRONG"),
        (_run(None), ("weight",), "WRONG"),
        (_run(ONE, buffer=ONE + 1e-7), (), "WRONG"),
        (replace(_run(ONE), output=ONE + 1e-7), ("weight",), "WRONG"),
    ],
)
def test_gradients_and_buffers(got: Run, tied: tuple[str, ...], verdict: str) -> None:
    assert compare(got, _run(ONE), tied)[0] == verdict


def test_parameters_of_several_stages_are_found_under_their_first_name() -> None:
    model = TiedGPT()
    stages = [nn.ModuleList([model.wte, model.wpe]), nn.ModuleList([*model.blocks, model.head])]
    assert tied_names(model, stages) == {"wte.weight"}


@pytest.mark.parametrize("entry", LOCAL, ids=lambda entry: entry.name)
def test_two_plain_runs_are_equal(entry: Any, one_thread: None) -> None:
    """Else a comparison would say nothing about stages."""
    inputs = entry.inputs(KINDS[0].given)
    first, second = (run(model, model, inputs) for model in (entry.build(), entry.build()))
    assert compare(first, second) == ("exact", [])


def test_the_table_explains_every_column() -> None:
    assert list(MEANING) == [kind.name for kind in KINDS]
    assert len(columns().splitlines()) == len(KINDS)
