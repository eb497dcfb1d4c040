"""Proposals: the winner is that of simulating everything, and limits are kept to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest

from stageline.errors import ConfigError
from stageline.partitioning.costs import ModelCosts
from stageline.partitioning.device import Device, Link
from stageline.partitioning.holdings import Holdings
from stageline.planning import propose
from stageline.planning.bounds import least_time
from stageline.planning.candidates import AUTO, Candidate, Method, candidates, methods, runnable
from stageline.planning.cutting import Cutter
from stageline.planning.evaluating import Evaluator
from stageline.scheduling import simulate
from tests.planning.models import layers, uneven

SLOW = Device("by hand", {"float32": 1.0}, 1.0, link=Link(latency=5e-9, bandwidth=1e9))
ALL = ["1f1b", "zb-h1", "auto"]
NAMES = [name for name in runnable() if name != AUTO]


def every_candidate(
    ranks: int, batch: int, *, recompute: bool, degrees: list[int]
) -> list[Candidate]:
    ways = methods(NAMES, recompute=recompute)
    found = candidates(ways, ranks=ranks, batch_size=batch, data_parallel=degrees)
    return [each for each in found if each.refusal is None]


def all_cuts(num_blocks: int, num_stages: int) -> list[tuple[int, ...]]:
    places = combinations(range(1, num_blocks), num_stages - 1)
    return [tuple(b - a for a, b in pairwise((0, *cut, num_blocks))) for cut in places]


def best_of_all(
    costs: ModelCosts, ranks: int, batch: int, limit: int | None, degrees: list[int]
) -> float:
    """Simulate every candidate with every cut; return the seconds of the best that fits."""
    judge = Evaluator(costs, SLOW, metric="T")
    found = []
    for each in every_candidate(ranks, batch, recompute=limit is not None, degrees=degrees):
        if each.num_stages > len(costs.blocks):
            continue
        schedule = each.method.build(each.num_ranks, each.num_microbatches)
        for sizes in all_cuts(len(costs.blocks), each.num_stages):
            predicted = judge.predict(each, sizes, schedule)
            if limit is None or max(predicted.memory) <= limit:
                found.append(predicted.seconds)
    return min(found)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("limit", [None, 900])
def test_the_winner_is_that_of_simulating_everything(seed: int, limit: int | None) -> None:
    """All candidates with all cuts: at most 2 % better, as cuts are improved a block at a time."""
    costs = uneven(6, seed)
    best = best_of_all(costs, 2, 4, limit, [1])
    found = propose(
        costs, ranks=2, batch_size=4, device=SLOW, memory_limit=limit, schedules=NAMES
    ).best
    assert best <= found.predicted.seconds <= 1.02 * best


def test_copies_win_where_the_model_is_small() -> None:
    """Eight ranks, a batch of eight: copies need no pipeline, as long as links are fast."""
    costs = layers(8)
    fast = Device("by hand", {"float32": 1.0}, 1.0, link=Link(latency=0, bandwidth=1e15))
    found = propose(
        costs, ranks=8, batch_size=8, device=fast, data_parallel="auto", schedules=["1f1b"]
    )
    assert found.best.data_parallel == 8
    assert found.best.predicted.T == 8 * 30


def test_the_copies_of_a_rank_add_up_their_gradients_around_a_ring() -> None:
    """Of 40 bytes each sends a quarter, six times; a byte and a hop take 1 and 5 ns."""
    judge = Evaluator(layers(8), SLOW, metric="T")
    copies = Candidate(Method("1f1b"), 4, 4, 2, rows=1)
    assert judge.reduction(copies, 40) == 6 * (5 + 10)
    alone = judge.predict(replace(copies, data_parallel=1), (2, 2, 2, 2), copies.method.build(4, 2))
    predicted = judge.predict(copies, (2, 2, 2, 2), copies.method.build(4, 2))
    assert predicted.reduction == pytest.approx(90e-9)
    assert predicted.seconds == pytest.approx(alone.seconds + 90e-9)


def test_ranks_agree_once_a_step() -> None:
    """Short steps were predicted too fast: that a step begins and is over takes a millisecond."""
    slow = replace(SLOW, agreement=7e-9)
    without = propose(layers(8), ranks=2, batch_size=4, device=SLOW, schedules=NAMES)
    found = propose(layers(8), ranks=2, batch_size=4, device=slow, schedules=NAMES)
    assert found.best.predicted.T == without.best.predicted.T
    assert found.best.predicted.seconds == pytest.approx(without.best.predicted.seconds + 7e-9)
    assert "to agree that the step begins and is over" in found.best.explain()
    assert "agree" not in without.best.explain()
    assert len(found.losses) == len(without.losses)


@pytest.mark.parametrize("limit", [700, 900, 1500])
def test_no_proposal_is_above_the_limit_and_no_loser_was_below(limit: int) -> None:
    costs = uneven(7, seed=5)
    found = propose(costs, ranks=3, batch_size=6, memory_limit=limit, schedules=NAMES, top=50)
    for one in found:
        simulated = simulate(one.schedule, costs.simulated(one.sizes))
        assert simulated.peak_bytes is not None
        stages = costs.stages(one.sizes)
        for rank, peak in enumerate(simulated.peak_bytes):
            held = [s for s, at in zip(stages, one.placement, strict=True) if at == rank]
            need = int(peak) + 4 * sum(stage.parameter_bytes for stage in held)
            assert need == one.predicted.memory[rank] <= limit
    for loss in found.losses:
        assert loss.needs is None or loss.needs > limit


def test_one_stage_per_rank_is_cut_so_that_the_longest_is_shortest() -> None:
    costs = uneven(9, seed=2)
    cutter = Cutter(costs)
    candidate = Candidate(Method("1f1b"), 1, 3, 5, rows=1)

    def longest(sizes: tuple[int, ...]) -> int:
        return max(stage.time for stage in costs.stages(sizes))

    assert longest(cutter.even(candidate)) == min(map(longest, all_cuts(9, 3)))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_one_stage_per_rank_within_a_limit_is_found_if_there_is_one(name: str) -> None:
    costs = uneven(9, seed=3)
    cutter = Cutter(costs)
    candidate = Candidate(Method(name), 1, 3, 5, rows=1)
    holdings = Holdings.of(candidate.method.build(3, 5))

    def fullest(sizes: Sequence[int]) -> int:
        ends = [0, *accumulate(sizes)]
        return max(cutter.need(holdings, rank, ends) for rank in range(3))

    most = [fullest(sizes) for sizes in all_cuts(9, 3)]
    for limit in sorted(set(most))[:12]:
        sizes = cutter.fitting(candidate, holdings, limit)
        assert fullest(sizes) <= limit


def test_bounds_are_never_above_the_simulated_time() -> None:
    for ranks, batch in ((2, 5), (3, 6), (4, 8)):
        for each in every_candidate(ranks, batch, recompute=True, degrees=[1]):
            costs = uneven(each.num_stages + 2, seed=batch)
            judge = Evaluator(costs, SLOW, metric="T")
            sizes = (2, *(1,) * (each.num_stages - 2), 2)
            told = judge.simulated(each, sizes)
            simulated = simulate(each.method.build(ranks, each.num_microbatches), told)
            assert least_time(each, told) <= simulated.T, each
            assert least_time(each, told, "span") <= simulated.span, each


def test_why_the_others_lost() -> None:
    found = propose(layers(8), ranks=4, batch_size=6, memory_limit=700, top=2)
    reasons = found.reasons()
    assert reasons["interleaved x4"] == "8 blocks are too few for 16 stages"
    assert reasons["dualpipe-v x2"] == "needs m >= 2p, m=6"
    assert "% slower: bubble" in reasons["1f1b"]
    assert not set(reasons) & {str(one.method) for one in found}
    assert all(text in found.why() for text in reasons.values())


def test_a_rank_that_needs_too_much_is_named() -> None:
    """GPipe keeps 8 x 72 bytes on each of two ranks, and 320 bytes of parameters."""
    found = propose(layers(4), ranks=2, batch_size=8, memory_limit=700, schedules=["gpipe"])
    assert [str(one.method) for one in found] == ["gpipe + R"]
    everything = propose(layers(4), ranks=2, batch_size=8, memory_limit=200, schedules=["1f1b"])
    assert len(everything) == 0
    assert str(everything).startswith("Nothing fits: ")
    with pytest.raises(ConfigError, match="rank 0 needs"):
        _ = everything.best


@pytest.mark.parametrize("limit", [1, 100, 250])
@pytest.mark.parametrize("schedules", [None, ["1f1b"], ["zb-v", "interleaved"]])
def test_what_would_be_enough_is_enough(limit: int, schedules: list[str] | None) -> None:
    asked: dict[str, Any] = {"ranks": 2, "batch_size": 8, "schedules": schedules}
    nothing = propose(layers(8), memory_limit=limit, **asked)
    assert nothing.enough is not None
    needed, _ = nothing.enough
    assert f"{needed} B per rank would be enough for" in str(nothing)
    assert len(propose(layers(8), memory_limit=needed, **asked)) > 0


def test_recomputing_is_proposed_only_where_it_is_needed() -> None:
    plenty = propose(layers(8), ranks=4, batch_size=8, memory_limit=10**9, top=50)
    assert not any(one.recompute for one in plenty if one.method.schedule != "varuna")
    little = propose(layers(8), ranks=4, batch_size=8, memory_limit=330, schedules=["1f1b"])
    assert [one.recompute for one in little] == [True]


def test_a_short_span_can_be_wanted_instead_of_a_short_makespan() -> None:
    found = propose(layers(8), ranks=4, batch_size=16, schedules=["zb-v", "1f1b"], metric="span")
    best = found.best
    assert (best.method.schedule, best.predicted.span) == ("zb-v", 16 * 60)
    assert best.predicted.seconds == best.predicted.span / 1e9


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        propose(
            layers(4),
            ranks=0,
            batch_size=3,
            data_parallel=5,
            schedules=["dualpipe", "forward-only", "1f1c"],
            microbatches=[],
            metric="time",  # type: ignore[arg-type]  # wrong on purpose
            top=0,
        )
    assert [finding.split(":")[0] for finding in caught.value.findings] == [
        "ranks=0",
        "top=0",
        "metric='time'",
        "data_parallel=5",
        "schedules",
        "schedules",
        "schedules",
        "microbatches=[]",
    ]


def test_a_schedule_is_searched_where_families_wait() -> None:
    """With blocks that all differ no family is best, and the search keeps the limit too."""
    asked: dict[str, Any] = {"ranks": 3, "batch_size": 6, "microbatches": [6]}
    costs, known = uneven(8, seed=1), ["1f1b", "zb-h1", "zb-v"]
    families = propose(costs, schedules=known, **asked).best
    both = propose(costs, schedules=[*known, "auto"], **asked)
    assert both.best.method == Method("auto", 2)
    assert both.best.predicted.T < families.predicted.T
    assert simulate(both.best.schedule, costs.simulated(both.best.sizes)).T == both.best.predicted.T
    limit = max(both.best.predicted.memory) - 1
    limited = propose(costs, schedules=[*known, "auto"], memory_limit=limit, **asked)
    assert any(one.method.schedule == "auto" for one in limited)
    assert all(max(one.predicted.memory) <= limit for one in limited)


def test_why_no_schedule_was_searched() -> None:
    large = propose(layers(8), ranks=4, batch_size=1024, microbatches=[1024], schedules=ALL)
    assert large.reasons()["auto"] == "not searched: 12,288 actions, at most 6,000"
    even = propose(layers(8), ranks=4, batch_size=8, microbatches=[8], schedules=ALL)
    assert even.reasons()["auto"] == "nothing can be faster than zb-h1 with its cuts"


@pytest.mark.slow
def test_a_hundred_layers_on_a_thousand_ranks() -> None:
    """It ends, and bounds drop half of what could run; how long it takes is in benchmarks."""
    found = propose(
        layers(100, forward=10**6), ranks=1024, batch_size=4096, data_parallel="auto", device=SLOW
    )
    possible = [loss for loss in found.losses if loss.seconds is not None]
    assert sum(loss.is_bound for loss in possible) > 0.5 * len(possible)
    assert found.best.num_ranks * found.best.data_parallel == 1024
