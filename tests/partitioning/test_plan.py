"""The plan as a table, and the stages it is made of."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

from stageline.capturing import capture_sequential
from stageline.capturing.graph import Crossing, Load, Tie
from stageline.capturing.layers import FunctionModule
from stageline.errors import ConfigError
from stageline.partitioning import Plan, StagePlan
from stageline.partitioning.partition import partition
from stageline.partitioning.sources import cut_model, read_stages
from tests.partitioning.fake_graph import FakeGraph, transformer


def stage(index: int, rank: int, *calls: str, count: int | None) -> StagePlan:
    return StagePlan(index, rank, "cpu", calls, None, count)


def test_the_table_shows_ranks_sizes_and_calls() -> None:
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
            "stage  rank  device  parameters  share  calls\n"
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


def test_the_table_shows_all_that_is_known() -> None:
    loads = [Load(30, 1000, 4000, 0), Load(50, 500, 2000, 0), Load(20, 500, 2000, 0)]
    graph = FakeGraph(
        ["embed", "body", "head"],
        loads=loads,
        crossing_bytes=[0, 32, 8500, 0],
        ties=[Tie(("embed.weight", "head.weight"), (0, 1, 2), 1200), Tie(("a", "b"), (0, 2))],
    )
    assert partition(graph, [1, 1, 1]).table() == (
        "stage  rank  parameters  share    bytes  time  receives                 calls\n"
        "    0     0       1,000   50 %  3.9 KiB  30 %                           embed Layer (1)\n"
        "    1     1         500   25 %  2.0 KiB  50 %  float32 [2, 4], 32 B     body Layer (1)\n"
        "    2     2         500   25 %  2.0 KiB  20 %  float32 [2, 4], 8.3 KiB  head Layer (1)\n"
        "tied: embed.weight = head.weight in stages 0, 1 and 2, 1,200 parameters "
        "counted in each\n"
        "tied: a = b in stages 0 and 2"
    )


def test_of_many_values_that_cross_the_largest_is_shown() -> None:
    crossing = (Crossing("m", "bool [4]", 4), Crossing("x", "float32 [4, 9]", 144))
    first = stage(0, 0, "0 Linear", count=3)
    last = StagePlan(1, 1, "", ("1 Linear",), None, 3, receives=crossing)
    assert "float32 [4, 9] +1 more, 148 B  1 Linear (1)" in Plan((first, last)).table()


NORMALISED = (
    "each microbatch is normalised alone; running statistics are updated by each in turn, with "
    "deferred_batch_norm=True once by the whole batch"
)


def test_the_table_says_how_batch_norm_sees_the_batch() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    plan = partition(capture_sequential(model), 3)
    assert plan.table().splitlines()[-1] == f"BatchNorm in stages 0 and 2: {NORMALISED}"
    norm.eval()  # frozen
    assert plan.table().splitlines()[-1] == f"BatchNorm in stage 2: {NORMALISED}"


def test_of_layers_that_normalise_each_row_nothing_is_said() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True), nn.LayerNorm(4))
    assert "normalised" not in partition(capture_sequential(model), 2).table()
    frozen = nn.Sequential(nn.BatchNorm1d(4)).eval()
    assert "normalised" not in partition(capture_sequential(frozen), 1).table()


def test_a_batch_norm_of_another_process_is_known() -> None:
    elsewhere = dataclasses.replace(stage(1, 1, count=8), has_batch_norm=True)
    table = Plan((stage(0, 0, "Linear", count=20), elsewhere)).table()
    assert table.splitlines()[-1] == f"BatchNorm in stage 1: {NORMALISED}"


def test_equal_plans_are_equal_whatever_their_modules() -> None:
    assert partition(transformer(), 2) == partition(transformer(), 2)
    assert partition(transformer(), 2) != partition(transformer(), 3)
    assert "Identity" not in repr(partition(transformer(), 2))


def test_a_plan_of_the_users_own_modules_cannot_be_run_or_saved() -> None:
    plan = Plan((stage(0, 0, "0 ReLU", count=0),))
    with pytest.raises(ConfigError, match="it only describes a pipeline"):
        plan.run(1)
    with pytest.raises(ConfigError, match="only a plan of a graph can be saved"):
        plan.to_json()


def test_a_plan_survives_json() -> None:
    graph = transformer()
    plan = partition(graph, ["layers.1", "norm"], ranks=2)
    text = plan.to_json()
    assert json.loads(text)["cuts"] == [3, 6]
    loaded = Plan.from_json(text, transformer())
    assert loaded == plan
    assert loaded.run(1) == ((1,), {})
    assert graph.wanted[-1] == (["layers.1", "norm"], 1)


def test_a_loaded_plan_opens_the_model_as_the_first_one_did() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 1))

    plan = partition(capture_sequential(model()), 3)
    loaded = Plan.from_json(plan.to_json(), capture_sequential(model()))
    assert [one.calls for one in loaded.stages] == [("0.0 Linear",), ("0.1 Tanh",), ("1 Linear",)]


def test_a_plan_of_another_model_is_refused_with_what_differs() -> None:
    text = partition(transformer(), 2).to_json()
    with pytest.raises(ConfigError) as caught:
        Plan.from_json(text, FakeGraph(["embed", "layers.0"], fingerprint="beef"))
    assert caught.value.findings == (
        "the plan was made for another model: fingerprint f00d, 8 nodes, 10 modules; this graph "
        "has fingerprint beef, 2 nodes, 3 modules: make a new plan, sl.partition(graph, ...)",
        "stage 0 had layers.1 Layer where this graph has nothing",
    )
    wider = capture_sequential(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    plan = partition(capture_sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), 2)
    with pytest.raises(ConfigError) as caught:
        Plan.from_json(plan.to_json(), wider)
    assert len(caught.value.findings) == 1  # the same calls, other shapes


def broken(**entries: Any) -> str:
    return json.dumps({**json.loads(partition(transformer(), 2).to_json()), **entries})


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        (3, "returned, got int"),
        ("{", "this is no JSON: Expecting property name"),
        ("[]", "this JSON holds no plan"),
        ('{"format": "other"}', "this JSON holds no plan"),
        (broken(version=9), "this plan text has version 9, wanted 1"),
        (broken(cuts="x"), "entry 'cuts': wanted positions, got 'x'"),
        (broken(placement=[0, -1]), "entry 'placement': wanted a rank for each stage, got"),
        (broken(calls=[3]), r"entry 'calls': wanted names for each stage, got \[3\]"),
        (broken(fingerprint=None), "entry 'fingerprint': wanted a text, got None"),
        (broken(cuts=[9]), r"entry 'cuts': \[9\] is no ascending list below 8 nodes"),
        (broken(placement=[0]), "1 cuts make 2 stages, but 1 have a rank and 2 have calls"),
    ],
)
def test_text_that_is_no_plan(text: Any, finding: str) -> None:
    with pytest.raises(ConfigError, match=finding):
        Plan.from_json(text, transformer())


def test_all_broken_entries_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        Plan.from_json(broken(cuts=None, opened=3, num_nodes=True), transformer())
    assert len(caught.value.findings) == 3


def test_a_cut_model_keeps_its_modules_and_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    sources, faults = cut_model(model, [2, 1])
    assert faults == []
    assert [source.calls for source in sources] == [("0 Linear", "1 ReLU"), ("2 Linear",)]
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
    assert [source.calls[0].rsplit(".", 1)[-1] for source in sources] == [
        "Linear",
        "relu",
        "<lambda>",
    ]
    assert isinstance(sources[2].module, FunctionModule)
    assert torch.equal(sources[2].module(torch.zeros(1)), torch.ones(1))


def test_a_mapping_leaves_the_others_to_other_processes() -> None:
    sources, faults = read_stages({1: nn.ReLU()}, 3)
    assert faults == []
    assert [source.module is None for source in sources] == [True, False, True]
    assert sources[2].calls == ()
