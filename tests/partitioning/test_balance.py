"""The cuts that make the largest part as small as possible, against every cut there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.partitioning import balance
from stageline.partitioning.balance import Problem, _near_average, earliest_begins, running_sum
from tests.partitioning.other_methods import least_largest, least_spread, local_moves, part_costs

# PipeDream's published VGG16 profile, forward and backward of 40 pieces in microseconds.
VGG16 = [
    *(46920, 9999, 159531, 9766, 9374, 54803, 5097, 75441, 5133, 4999),
    *(29149, 2757, 44481, 3103, 48133, 2870, 2682, 23823, 1722, 37259),
    *(1527, 40445, 1523, 1583, 12989, 1050, 11466, 653, 12690, 630),
    *(787, 0, 0, 7050, 407, 0, 1443, 309, 0, 941),
]


def all_cuts(count: int, num_parts: int) -> Iterator[list[int]]:
    """Yield the sizes of every way to cut a chain into parts that are not empty."""
    for cuts in combinations(range(1, count), num_parts - 1):
        ends = (0, *cuts, count)
        yield [ends[index + 1] - ends[index] for index in range(num_parts)]


def unevenness(costs: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """Return how uneven a cut is: by cost, and by length where costs tie."""
    by_cost = sum(cost * cost for cost in part_costs(costs, sizes))
    return by_cost, sum(size * size for size in sizes)


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[int], int]:
    """Draw a chain with many ties and zeros, and a number of parts."""
    largest = draw(st.sampled_from([1, 3, 50]))
    costs = draw(st.lists(st.integers(0, largest), min_size=1, max_size=9))
    return costs, draw(st.integers(1, len(costs)))


@settings(max_examples=300)
@given(chains())
def test_no_cut_has_a_smaller_largest_part(chain: tuple[list[int], int]) -> None:
    costs, num_parts = chain
    sizes = balance(costs, num_parts)
    assert len(sizes) == num_parts
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1
    best = min(max(part_costs(costs, cut)) for cut in all_cuts(len(costs), num_parts))
    assert max(part_costs(costs, sizes)) == best


@settings(max_examples=300)
@given(chains())
def test_of_the_best_cuts_the_most_even_is_taken(chain: tuple[list[int], int]) -> None:
    costs, num_parts = chain
    cuts = list(all_cuts(len(costs), num_parts))
    best = min(max(part_costs(costs, cut)) for cut in cuts)
    tied = [cut for cut in cuts if max(part_costs(costs, cut)) == best]
    assert unevenness(costs, balance(costs, num_parts)) == min(
        unevenness(costs, cut) for cut in tied
    )


@pytest.mark.parametrize(("num_parts", "bottleneck"), [(1, 672535), (2, 370931), (4, 216450)])
def test_vgg16_reaches_the_published_optimum(num_parts: int, bottleneck: int) -> None:
    sizes = balance(VGG16, num_parts)
    assert sum(sizes) == len(VGG16) == 40
    assert max(part_costs(VGG16, sizes)) == bottleneck


def test_vgg16_is_optimal_for_every_number_of_parts() -> None:
    ours = [max(part_costs(VGG16, balance(VGG16, count))) for count in range(1, 41)]
    assert ours == least_largest(VGG16)


def test_other_methods_reach_what_was_published_for_them() -> None:
    """So that the next test compares with the methods themselves."""
    assert [max(part_costs(VGG16, local_moves(VGG16, count))) for count in (2, 4)] == [
        412969,
        235590,
    ]
    assert max(part_costs(VGG16, least_spread(VGG16, 4))) == 216450
    assert local_moves([1, 2, 3, 4, 5, 6], 2) == [4, 2]


@settings(max_examples=300)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=25), st.data())
def test_no_other_method_is_ever_better(costs: list[int], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(costs)))
    ours = max(part_costs(costs, balance(costs, num_parts)))
    for method in (local_moves, least_spread):
        theirs = method(costs, num_parts)
        assert len(theirs) == num_parts
        assert sum(theirs) == len(costs)
        assert ours <= max(part_costs(costs, theirs))


def test_vgg16_on_four_machines_is_as_fast_as_pipedreams_own_cut() -> None:
    """PipeDream's optimizer, straight pipeline, cuts after 3, 11 and 22 pieces."""
    theirs = [3, 8, 11, 18]
    ours = balance(VGG16, 4)
    assert max(part_costs(VGG16, ours)) == max(part_costs(VGG16, theirs)) == 216450
    assert unevenness(VGG16, ours) <= unevenness(VGG16, theirs)


@pytest.mark.parametrize(
    ("costs", "num_parts", "sizes"),
    [
        ([1, 2, 3, 4, 5, 6], 2, [4, 2]),
        ([5], 1, [1]),
        ([0, 0], 2, [1, 1]),
        ([0, 0, 0, 0, 0, 0], 3, [2, 2, 2]),
        ([1, 1, 1, 1, 100], 3, [2, 2, 1]),  # the bottleneck leaves a choice: be even elsewhere
        ([100, 1, 1, 1, 1], 3, [1, 2, 2]),
    ],
)
def test_small_chains(costs: list[int], num_parts: int, sizes: list[int]) -> None:
    assert balance(costs, num_parts) == sizes


def test_items_that_cost_nothing_do_not_gather_in_one_part() -> None:
    assert sorted(balance([7, 0, 0, 0, 7], 2)) == [2, 3]


def test_billions_of_parameters_are_counted_to_the_last_one() -> None:
    """Float sums would not see the single parameter that decides here."""
    large = 10**12
    sizes = balance([large, 1, large, large, large], 2)
    assert max(part_costs([large, 1, large, large, large], sizes)) == 2 * large + 1
    assert max(part_costs([large, large, 1, large], balance([large, large, 1, large], 2))) == (
        2 * large
    )


def parts_needed(costs: Sequence[int], limit: int) -> int:
    """Return into how many parts a greedy cut falls that fills each up to a limit."""
    parts, room = 1, limit
    for cost in costs:
        if cost > room:
            parts, room = parts + 1, limit
        room -= cost
    return parts


def test_thousands_of_items_are_cut_exactly_too() -> None:
    costs = [(index * 7919) % 997 for index in range(5000)]
    largest = max(part_costs(costs, balance(costs, 256)))
    assert parts_needed(costs, largest) <= 256 < parts_needed(costs, largest - 1)


@settings(max_examples=200)
@given(chains())
def test_parts_near_the_average_have_the_same_largest(chain: tuple[list[int], int]) -> None:
    """What is done where looking at every part would take too long."""
    costs, num_parts = chain
    ends = [running_sum(costs)] * num_parts
    largest = max(part_costs(costs, balance(costs, num_parts)))
    limits = [earliest_begins(ends[0], ends[0], largest)] * num_parts
    sizes = _near_average(Problem(ends, ends, limits), largest)
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1
    assert max(part_costs(costs, sizes)) == largest


@pytest.mark.parametrize("num_parts", [0, -1, 4])
def test_parts_that_would_be_empty_are_refused(num_parts: int) -> None:
    with pytest.raises(ValueError, match=f"3 items cannot make {num_parts} parts"):
        balance([1, 2, 3], num_parts)
