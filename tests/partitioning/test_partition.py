"""From a graph and a split to a plan: options, memory, and all findings at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stageline.capturing import capture_sequential
from stageline.capturing.graph import Load
from stageline.errors import ConfigError
from stageline.partitioning.amounts import read_bytes, show_bytes
from stageline.partitioning.budget import NOMINAL, Budget, transfer_time
from stageline.partitioning.partition import partition
from stageline.partitioning.weighing import Balance
from tests.partitioning.fake_graph import FakeGraph, iterative, transformer


def findings(graph: Any, split: Any, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        partition(graph, split, **options)
    assert caught.value.what == "sl.partition"
    return caught.value.findings


@pytest.mark.parametrize(
    ("split", "paths", "num_stages", "cuts"),
    [
        (2, [], 2, (4,)),
        ([3, 5], [], 1, (3,)),
        (["layers.1", "norm"], ["layers.1", "norm"], 1, (3, 6)),
        ({"layers.0": "end"}, ["layers.0"], 1, (2,)),
    ],
)
def test_the_graph_is_opened_for_the_split_and_cut(
    split: Any, paths: list[str], num_stages: int, cuts: tuple[int, ...]
) -> None:
    graph = transformer()
    plan = partition(graph, split)
    assert graph.wanted == [(paths, num_stages)]
    assert plan.cuts == cuts
    assert plan.placement == tuple(range(len(cuts) + 1))
    assert all(isinstance(stage.module, nn.Module) for stage in plan.stages)
    assert plan.run(1, a=2) == ((1,), {"a": 2})


def test_ranks_hold_stages_that_follow_each_other() -> None:
    assert partition(transformer(), 5, ranks=2).placement == (0, 0, 0, 1, 1)
    assert findings(transformer(), 2, ranks=3) == (
        "ranks=3: there are only 2 stages: use as many ranks",
    )


def test_everything_wrong_is_said_at_once() -> None:
    found = findings(nn.Linear(2, 2), 0, balance="speed", memory_limit="much", ranks=0)
    assert found == (
        "graph: wanted what sl.capture(model, args) returns, got Linear",
        "split=0: wanted a number of stages, at least 1",
        "balance='speed': wanted one of 'time', 'memory', 'parameters'",
        "memory_limit='much': wanted bytes, or text like '16GiB'",
        "ranks=0: wanted a whole number of at least 1",
    )
    assert len(findings(transformer(), ["a", "b", "c"])) == 3


@pytest.mark.parametrize("limit", [True, 0, -5, "", "GiB", "1.2.3GiB", "12 apples", 1.5])
def test_amounts_that_cannot_be_read(limit: Any) -> None:
    assert read_bytes(limit) is None


@pytest.mark.parametrize(
    ("text", "count"), [(7, 7), ("7", 7), ("16GiB", 2**34), ("1.5kb", 1500), (" 2 MiB ", 2**21)]
)
def test_amounts_are_read(text: Any, count: int) -> None:
    assert read_bytes(text) == count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**30 - 1, "1024.0 MiB"),
        (2**53, "8192.0 TiB"),
    ],
)
def test_amounts_are_shown(count: int, text: str) -> None:
    assert show_bytes(count) == text


def test_the_three_kinds_of_balance_look_at_different_things() -> None:
    loads = [Load(8, 1, 0, 2), Load(1, 1, 0, 2), Load(1, 1, 0, 2), Load(1, 4, 0, 2)]
    graph = FakeGraph("abcd", loads=loads)
    assert partition(graph, 2).cuts == (1,)
    assert partition(graph, 2, balance="parameters").cuts == (3,)
    # The first stage keeps two microbatches, so it gets one block: 4 and 6, not 8 and 4.
    assert partition(graph, 2, balance="memory").cuts == (1,)


def test_a_narrow_place_is_a_better_cut() -> None:
    loads = [Load(1000, 1, 1, 0)] * 4
    assert partition(FakeGraph("abcd", loads=loads), 2).cuts == (2,)
    wide_in_the_middle = [0, 100, 100_000, 100, 0]
    graph = FakeGraph("abcd", loads=loads, crossing_bytes=wide_in_the_middle)
    assert partition(graph, 2).cuts == (1,)


def test_a_limit_moves_the_cut() -> None:
    loads = [Load(10, 1, 100, 0), Load(10, 1, 100, 0), Load(10, 1, 100, 0), Load(90, 1, 10, 0)]
    graph = FakeGraph("abcd", loads=loads)
    assert partition(graph, 2).cuts == (3,)
    assert partition(graph, 2, memory_limit=900).cuts == (2,)


def test_a_limit_that_cannot_be_met_says_by_how_much_and_what_would_fit() -> None:
    graph = FakeGraph("abcd", loads=[Load(10, 1, 1024, 0)] * 4)
    assert findings(graph, 2, memory_limit="5KiB") == (
        "memory_limit=5.0 KiB: the fullest of 2 stages needs 8.0 KiB however they are cut, 3.0 KiB "
        "too much: split=4 would fit",
    )
    assert findings(graph, 2, memory_limit="3KiB") == (
        "memory_limit=3.0 KiB: the fullest of 2 stages needs 8.0 KiB however they are cut, 5.0 KiB "
        "too much: no number of stages fits: raise the limit, or use smaller microbatches",
    )
    assert (
        "(4.0 KiB for each stage of a rank)" in findings(graph, 2, memory_limit="8KiB", ranks=1)[0]
    )


def test_cuts_that_the_user_chose_are_held_to_the_limit_as_well() -> None:
    graph = FakeGraph("abcd", loads=[Load(10, 1, 1024, 0)] * 4)
    assert partition(graph, [2, 2], memory_limit="8KiB").cuts == (2,)
    assert findings(graph, [3, 1], memory_limit="8KiB") == (
        "memory_limit=8.0 KiB: rank 0 needs 12.0 KiB, 4.0 KiB too much: give it less, or let "
        "split=n choose the cuts",
    )


def test_a_rank_with_several_stages_needs_memory_for_all() -> None:
    graph = FakeGraph("abcd", loads=[Load(10, 1, 1024, 0)] * 4)
    assert findings(graph, [1, 1, 1, 1], memory_limit="7KiB", ranks=2)[0].startswith(
        "memory_limit=7.0 KiB: rank 0 needs 8.0 KiB, 1.0 KiB too much"
    )
    assert Budget(100, 2).for_stage(5) == 33
    assert Budget(100).for_stage(5) == 100


def all_cuts(graph: FakeGraph, num_stages: int) -> Iterator[tuple[int, ...]]:
    return combinations(graph.cuts, num_stages - 1)


def stage_costs(graph: FakeGraph, cuts: tuple[int, ...], by: str) -> list[int]:
    """Return what each stage costs, stated the slow way."""
    ends = (0, *cuts, graph.num_nodes)
    costs = []
    for stage, (begin, end) in enumerate(pairwise(ends)):
        load = graph.load(begin, end)
        crossing = [
            transfer_time(NOMINAL, sum(value.num_bytes for value in graph.crossing(place)))
            for place in (begin, end)
            if 0 < place < ends[-1]
        ]
        costs.append(
            {
                "time": load.time + sum(crossing),
                "parameters": load.parameters,
                "memory": 4 * load.parameter_bytes
                + load.activation_bytes * (len(cuts) + 1 - stage),
            }[by]
        )
    return costs


@st.composite
def graphs(draw: st.DrawFn) -> tuple[FakeGraph, int, int]:
    """Draw a graph with few different numbers, so that there are ties; stages and a limit."""
    number = st.integers(0, draw(st.sampled_from([2, 9, 60])))
    count = draw(st.integers(1, 7))
    loads = [Load(draw(number), draw(number), draw(number), draw(number)) for _ in range(count)]
    crossing = [0, *(5 * draw(number) for _ in range(count - 1)), 0]
    graph = FakeGraph("abcdefg"[:count], loads=loads, crossing_bytes=crossing)
    return graph, draw(st.integers(1, count)), draw(st.integers(1, 400))


@settings(max_examples=400, deadline=None)
@given(graphs(), st.sampled_from(["time", "parameters", "memory"]), st.booleans())
def test_no_cut_is_better_and_none_of_the_best_is_more_even(
    drawn: tuple[FakeGraph, int, int], by: Balance, is_limited: bool
) -> None:
    graph, num_stages, limit = drawn
    possible = [
        cuts
        for cuts in all_cuts(graph, num_stages)
        if not is_limited or max(stage_costs(graph, cuts, "memory")) <= limit
    ]
    options: dict[str, Any] = {"balance": by, "memory_limit": limit if is_limited else None}
    if not possible:
        assert "too much" in findings(graph, num_stages, **options)[0]
        return
    chosen = stage_costs(graph, partition(graph, num_stages, **options).cuts, by)
    best = min(max(stage_costs(graph, cuts, by)) for cuts in possible)
    assert max(chosen) == best
    evenness = [
        sum(cost * cost for cost in costs)
        for costs in (stage_costs(graph, cuts, by) for cuts in possible)
        if max(costs) == best
    ]
    assert sum(cost * cost for cost in chosen) == min(evenness)


def test_iterations_are_stages() -> None:
    plan = partition(iterative(), {"iter_block": "end"})
    assert [stage.calls for stage in plan.stages] == [
        ("iter_block Layer",),
        ("iter_block Layer",),
        ("iter_block Layer",),
        ("output_proj Layer",),
    ]


def test_a_sequential_is_partitioned_and_run() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    plan = partition(capture_sequential(model), split=["2.1"])
    x = torch.randn(3, 4)
    assert torch.equal(plan.run(x), model(x))
    assert [stage.calls[-1] for stage in plan.stages] == ["2.0 Linear", "2.1 Tanh"]
