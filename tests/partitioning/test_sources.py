"""An nn.Sequential cut by every spelling of a split, as the Pipeline does."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from stageline.capturing.marks import CutPoint, begin_block
from stageline.partitioning.sources import cut_model


def named() -> nn.Sequential:
    body = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    return nn.Sequential(OrderedDict(stem=nn.Linear(2, 2), body=body, head=nn.Linear(2, 1)))


@pytest.mark.parametrize(
    ("split", "calls"),
    [
        (3, [("stem Linear",), ("body Sequential",), ("head Linear",)]),
        ([1, 2], [("stem Linear",), ("body Sequential", "head Linear")]),
        (
            ["body.1", "head"],
            [("stem Linear", "body.0 Linear"), ("body.1 ReLU", "body.2 Linear"), ("head Linear",)],
        ),
        ({"body": "end"}, [("stem Linear", "body Sequential"), ("head Linear",)]),
        (
            {"body.0": "begin"},
            [("stem Linear",), ("body.0 Linear", "body.1 ReLU", "body.2 Linear", "head Linear")],
        ),
        ([["stem"], ["body", "head"]], [("stem Linear",), ("body Sequential", "head Linear")]),
    ],
)
def test_a_sequential_is_cut_by_all_spellings(split: Any, calls: list[Any]) -> None:
    model = named()
    sources, faults = cut_model(model, split)
    assert faults == []
    assert [source.calls for source in sources] == calls
    keys: list[str] = []
    x = value = torch.randn(3, 2)
    for source in sources:
        assert source.module is not None
        keys += source.module.state_dict()
        value = source.module(value)
    assert keys == list(model.state_dict())
    assert torch.equal(value, model(x))


def test_cut_points_between_children_are_marks() -> None:
    layers = [nn.Linear(2, 2), CutPoint(), nn.Linear(2, 2), nn.ReLU(), CutPoint(), nn.Linear(2, 2)]
    for split, sizes in (("marks", [1, 2, 1]), (2, [1, 3]), ([1, 2], [1, 3])):
        sources, faults = cut_model(nn.Sequential(*layers), split)
        assert faults == []
        assert [len(source.calls) for source in sources] == sizes
    assert cut_model(nn.Sequential(*layers, CutPoint()), "marks")[1] == [
        "split='marks': CutPoint 6 lies after the last operation, a stage would be empty: remove it"
    ]
    assert cut_model(nn.Sequential(CutPoint()), 1)[1] == ["model: it has no children but CutPoints"]


def test_marks_of_a_sequential_that_cannot_be_used() -> None:
    cut = CutPoint()
    twice = nn.Sequential(nn.Linear(2, 2), cut, nn.Linear(2, 2), cut, nn.Linear(2, 2))
    assert cut_model(twice, 2)[1] == [
        "CutPoint 1 stands in the chain again, as 3: make one for each place"
    ]

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut = CutPoint()

    hidden = nn.Sequential(Inner(), nn.Linear(2, 2))
    assert cut_model(hidden, 2)[1] == [
        "CutPoint 0.cut lies inside a child of the model and is found only when the model runs: "
        "give example_args"
    ]
    assert cut_model(hidden, [1, 1])[1] == []


def test_begun_blocks_of_a_sequential_are_marks() -> None:
    model = named()
    begin_block(model.get_submodule("body.1"), "B1")
    begin_block(model.get_submodule("head"), "B2")
    for split in ("marks", 3):
        sources, faults = cut_model(model, split)
        assert faults == []
        assert [source.calls[0] for source in sources] == [
            "stem Linear",
            "body.1 ReLU",
            "head Linear",
        ]
    sources, faults = cut_model(model, [["B1"], ["B2"]])
    assert [len(source.calls) for source in sources] == [4, 1]
