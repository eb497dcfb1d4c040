"""The plan as a table, and the stages it is made of."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from stageline.partitioning import Plan, StagePlan
from stageline.partitioning.sources import FunctionStage, cut_model, read_stages


def stage(index: int, rank: int, *blocks: str, count: int | None) -> StagePlan:
    return StagePlan(index, rank, "cpu", blocks, None, count)


def test_the_table_shows_ranks_sizes_and_blocks() -> None:
    plan = Plan(
        (
            stage(0, 0, "0 Linear", "1 ReLU", count=3_000),
            stage(1, 1, "2 Linear", count=1_000),
            stage(2, 0, "3 ReLU", count=0),
        )
    )
    assert (
        str(plan)
        == plan.table()
        == (
            "stage  rank  device  parameters  share  blocks\n"
            "    0     0  cpu          3,000   75 %  0 Linear .. 1 ReLU (2)\n"
            "    1     1  cpu          1,000   25 %  2 Linear (1)\n"
            "    2     0  cpu              0    0 %  3 ReLU (1)"
        )
    )
    assert plan.num_stages == 3
    assert plan.placement == (0, 1, 0)


def test_what_another_process_holds_is_said_and_gives_no_share() -> None:
    plan = Plan((stage(0, 0, "Linear", count=20), stage(1, 1, count=None)))
    assert plan.table().splitlines()[1:] == [
        "    0     0  cpu             20         Linear (1)",
        "    1     1  cpu                        in another process",
    ]


def test_a_model_without_parameters_has_no_shares() -> None:
    plan = Plan((stage(0, 0, "0 ReLU", count=0), stage(1, 1, "1 ReLU", count=0)))
    assert "%" not in plan.table()


def test_a_plan_is_frozen() -> None:
    plan = Plan((stage(0, 0, "0 ReLU", count=0),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.stages = ()  # type: ignore[misc]  # that is the point


def test_a_cut_model_keeps_its_modules_and_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    sources, faults = cut_model(model, [2, 1])
    assert faults == []
    assert [source.blocks for source in sources] == [("0 Linear", "1 ReLU"), ("2 Linear",)]
    assert [source.prefix for source in sources] == ["", ""]
    first, last = (source.module for source in sources)
    assert isinstance(first, nn.Sequential)
    assert isinstance(last, nn.Sequential)
    assert first[0] is model[0]
    assert [name for name, _ in last.named_parameters()] == ["2.weight", "2.bias"]


def test_functions_become_stages_named_after_themselves() -> None:
    sources, faults = read_stages([nn.Linear(2, 2), torch.relu, lambda x: x + 1], None)
    assert faults == []
    assert [source.prefix for source in sources] == ["0.", "1.", "2."]
    assert [source.blocks[0].rsplit(".", 1)[-1] for source in sources] == [
        "Linear",
        "relu",
        "<lambda>",
    ]
    assert isinstance(sources[2].module, FunctionStage)
    assert torch.equal(sources[2].module(torch.zeros(1)), torch.ones(1))


def test_a_mapping_leaves_the_others_to_other_processes() -> None:
    sources, faults = read_stages({1: nn.ReLU()}, 3)
    assert faults == []
    assert [source.module is None for source in sources] == [True, False, True]
    assert sources[2].blocks == ()
