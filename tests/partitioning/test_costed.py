"""Cuts by measured costs under a schedule, against every cut there is; limits and ways out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.errors import ConfigError
from stageline.partitioning.blocks import Blocks
from stageline.partitioning.budget import Budget, transfer_time
from stageline.partitioning.costs import BlockCosts, ModelCosts
from stageline.partitioning.device import Device, Link
from stageline.partitioning.partition import partition
from stageline.scheduling import Kind, schedules
from tests.partitioning.fake_graph import FakeGraph
from tests.partitioning.test_holding import RUN, models

MACHINE = Device(
    "made up",
    {"float32": 1e9},
    1e9,
    link=Link(1e-9, 5e9),
    network=Link(9e-9, 1e9),
    ranks_per_host=2,
)


def graph_for(costs: ModelCosts) -> FakeGraph:
    return FakeGraph([f"block{index}" for index in range(len(costs.blocks))])


def all_sizes(count: int, num_stages: int) -> Iterator[list[int]]:
    for cuts in combinations(range(1, count), num_stages - 1):
        yield [b - a for a, b in pairwise([0, *cuts, count])]


def slowest(costs: ModelCosts, sizes: list[int], budget: Budget) -> int:
    """Return what the slowest stage takes, stated the slow way."""
    stages = costs.stages(sizes)
    placement, kinds = budget.placement(len(sizes)), budget.kinds(len(sizes))
    hops = [
        transfer_time(budget.link(*pair), stage.output_bytes)
        for pair, stage in zip(pairwise(placement), stages[:-1], strict=True)
    ]
    around = [a + b for a, b in zip([0, *hops], [*hops, 0], strict=True)]
    times = []
    for stage, hop in zip(stages, around, strict=True):
        halves = stage.input_gradient + stage.weight_gradient
        backward = halves if Kind.INPUT_GRADIENT in kinds else stage.backward
        again = stage.forward if Kind.RECOMPUTE in kinds else 0
        times.append(stage.forward + again + backward + hop)
    return max(times)


@pytest.mark.parametrize("device", [None, MACHINE], ids=["nominal", "described"])
@settings(max_examples=60)
@given(models(), st.data())
def test_no_cut_that_keeps_the_limit_is_faster(
    device: Device | None, costs: ModelCosts, data: st.DataObject
) -> None:
    straight = [n for n in RUN if schedules.family(n).placement == "consecutive" and n != "varuna"]
    num_stages = data.draw(st.integers(1, len(costs.blocks)))
    limit = data.draw(st.none() | st.integers(1, 1500))
    name = data.draw(st.none() | st.sampled_from([n for n in straight if n != "zb-h2"]))
    budget = Budget(limit, schedule=name, num_microbatches=5, device=device)
    blocks = Blocks.of_costs(costs, budget.kinds(num_stages))
    possible = [
        sizes
        for sizes in all_sizes(len(costs.blocks), num_stages)
        if limit is None or max(budget.rank_memory(blocks, sizes)) <= limit
    ]
    options: dict[str, Any] = {"costs": costs, "schedule": name, "device": device}
    options |= {"memory_limit": limit, "num_microbatches": 5}
    if not possible:
        with pytest.raises(ConfigError, match="too much"):
            partition(graph_for(costs), num_stages, **options)
        return
    plan = partition(graph_for(costs), num_stages, **options)
    chosen = [b - a for a, b in pairwise([0, *plan.cuts, len(costs.blocks)])]
    assert limit is None or max(budget.rank_memory(blocks, chosen)) <= limit
    best = min(slowest(costs, sizes, budget) for sizes in possible)
    assert slowest(costs, chosen, budget) == best


@pytest.mark.parametrize("name", [n for n in RUN if schedules.family(n).stages_per_rank == 2])
@settings(max_examples=20)
@given(models(least=4), st.integers(50, 1500))
def test_ranks_with_several_stages_keep_the_limit(name: str, costs: ModelCosts, limit: int) -> None:
    budget = Budget(limit, schedule=name)
    blocks = Blocks.of_costs(costs, budget.kinds(4))
    unlimited = partition(graph_for(costs), 4, costs=costs, schedule=name)
    try:
        plan = partition(graph_for(costs), 4, costs=costs, schedule=name, memory_limit=limit)
    except ConfigError:
        sizes = [b - a for a, b in pairwise([0, *unlimited.cuts, len(costs.blocks)])]
        assert max(budget.rank_memory(blocks, sizes)) > limit
        return
    assert plan.placement == budget.placement(4)
    chosen = [b - a for a, b in pairwise([0, *plan.cuts, len(costs.blocks)])]
    assert max(budget.rank_memory(blocks, chosen)) <= limit


def layers(count: int, kept: int = 1024, parameters: int = 0) -> ModelCosts:
    block = BlockCosts("layer", 10, 10, 10, 20, 0, kept, 0, parameters // 4, parameters, 8)
    return ModelCosts((block,) * count, rows=8, origin="by hand")


def findings(costs: ModelCosts, split: Any, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        partition(graph_for(costs), split, costs=costs, **options)
    return caught.value.findings


def test_a_schedule_that_holds_more_needs_more() -> None:
    """Four stages of one layer each: 1F1B holds four microbatches at most, GPipe all sixteen."""
    costs = layers(4)
    assert partition(graph_for(costs), 4, costs=costs, memory_limit="4KiB").num_stages == 4
    assert partition(
        graph_for(costs), 4, costs=costs, memory_limit="16KiB", schedule="gpipe"
    ).placement == (0, 1, 2, 3)
    assert findings(costs, 4, memory_limit="15KiB", schedule="gpipe") == (
        "memory_limit=15.0 KiB: the fullest of 4 stages needs 16.0 KiB however they are cut, "
        "1.0 KiB too much: microbatches of 7 rows or schedule='1f1b' would fit",
    )


def test_memory_moves_a_cut_only_where_it_must() -> None:
    """The first stage of 1F1B holds two microbatches, the second one."""
    costs = layers(8)
    assert partition(graph_for(costs), 2, costs=costs).cuts == (4,)
    assert partition(graph_for(costs), 2, costs=costs, memory_limit="8KiB").cuts == (4,)
    assert partition(graph_for(costs), 2, costs=costs, memory_limit="6KiB").cuts == (3,)


@pytest.mark.parametrize("schedule", [None, "1f1b", "gpipe", "zb-h1", "zb-v"])
@pytest.mark.parametrize(("parameters", "limit"), [(0, 7000), (40, 9000), (0, 900), (40, 700)])
def test_what_is_said_to_fit_does(schedule: str | None, parameters: int, limit: int) -> None:
    costs = layers(12, kept=1000, parameters=parameters)
    options: dict[str, Any] = {"memory_limit": limit, "schedule": schedule, "num_microbatches": 8}
    (told,) = findings(costs, 2, **options)
    assert re.match(r"memory_limit=[\d.]+ (Ki)?B.*needs [\d.]+ KiB however they are cut", told)
    stages, rows = re.search(r"split=(\d+)", told), re.search(r"of (\d+) rows?", told)
    assert "would fit" in told or "no number of stages and no size" in told
    if stages and rows and "with" in told:
        costs = costs.at(1)
        assert partition(graph_for(costs), int(stages[1]), costs=costs, **options)
        return
    if stages:
        assert partition(graph_for(costs), int(stages[1]), costs=costs, **options)
    if rows:
        assert partition(graph_for(costs), 2, costs=costs.at(int(rows[1])), **options)
        more = costs.at(int(rows[1]) + 1)
        assert "too much" in findings(more, 2, **options)[0]  # and it is the largest that fits
    if "1f1b' would fit" in told:
        assert partition(graph_for(costs), 2, costs=costs, **{**options, "schedule": "1f1b"})


def test_where_nothing_fits_that_is_said() -> None:
    assert findings(layers(3, parameters=4096), 2, memory_limit="1KiB")[0].endswith(
        "no number of stages and no size of microbatches fits: raise the limit"
    )


def test_a_device_limits_memory_and_connects_ranks() -> None:
    costs = layers(4)
    small = Device("small", {"float32": 1e9}, 1e9, memory=1024)
    assert "memory_limit=1.0 KiB" in findings(costs, 2, device=small)[0]
    assert partition(graph_for(costs), 2, costs=costs, device=small, memory_limit="9KiB")


def test_stages_show_what_was_measured() -> None:
    costs = layers(4)
    stage = partition(graph_for(costs), 2, costs=costs).stages[0]
    assert (stage.time, stage.activation_bytes) == (60, 2048)


def test_everything_wrong_is_said_at_once() -> None:
    costs: Any = {"blocks": ()}
    with pytest.raises(ConfigError) as caught:
        partition(
            graph_for(layers(4)),
            2,
            costs=costs,
            schedule="1f1c",
            num_microbatches=0,
            device="A100",  # type: ignore[arg-type]  # a name is no device
        )
    assert caught.value.findings == (
        "num_microbatches=0: wanted a whole number of at least 1",
        "costs: wanted what sl.measure_costs(graph) returns, got dict",
        "device: wanted an sl.Device, got str: sl.Device.named('A100')",
        "schedule: unknown schedule '1f1c': choose one of "
        f"{', '.join(schedules.NAMES)}. Did you mean '1f1b'?",
    )


def test_schedules_that_do_not_fit_the_split() -> None:
    costs = layers(4)
    assert findings(costs, 2, schedule=schedules.gpipe(3, 4)) == (
        "schedule: it is for 3 stages, the split makes 2",
    )
    assert findings(costs, 2, schedule=schedules.gpipe(2, 4), ranks=1) == (
        "schedule: it is for 2 ranks, ranks=1",
    )
    assert findings(costs, 3, schedule="zb-v")[0].startswith("schedule: zb-v needs 2 stages for")
    assert "chimera" in findings(costs, 2, schedule="chimera")[0]
    assert "got int" in findings(costs, 2, schedule=3)[0]


def test_costs_of_another_model() -> None:
    costs = layers(4)
    with pytest.raises(ConfigError) as caught:
        partition(graph_for(layers(5)), 2, costs=costs)
    assert caught.value.findings == (
        "costs: they are for 4 blocks, the model, opened for 2 stages, has 5: measure "
        "graph.opened_at([], num_stages=2)",
    )
