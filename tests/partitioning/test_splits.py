"""What the user says about cuts, read and checked."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from stageline.capturing import Graph, capture_sequential
from stageline.partitioning import cut_sizes
from stageline.partitioning.splits import find_faults, num_stages_of


def graph() -> Graph:
    """Four blocks with 20, 0, 6 and 3 parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 1))
    return capture_sequential(model)


@pytest.mark.parametrize(
    ("split", "sizes"),
    [(1, [4]), (2, [2, 2]), (3, [1, 2, 1]), (4, [1, 1, 1, 1]), ([2, 1, 1], [2, 1, 1]), ((4,), [4])],
)
def test_stages_are_balanced_or_as_the_user_said(split: Any, sizes: list[int]) -> None:
    assert find_faults(split) == []
    assert cut_sizes(graph(), split) == (sizes, [])
    assert num_stages_of(split) == len(sizes)


@pytest.mark.parametrize(
    ("split", "fault"),
    [
        (0, "split=0: wanted a number of stages, at least 1"),
        (-2, "split=-2: wanted a number of stages"),
        (True, "split=True: wanted a number of stages (4) or blocks per stage ([2, 1])"),
        (2.0, "split=2.0: wanted a number of stages (4) or blocks per stage ([2, 1])"),
        ("2", "split='2': wanted a number of stages (4) or blocks per stage ([2, 1])"),
        (None, "split=None: wanted a number of stages"),
        ({"a": 1}, "split={'a': 1}: wanted a number of stages"),
        ([], "split=[]: wanted the number of blocks of each stage"),
        ([3, 0, 1], "split=[3, 0, 1]: stage 1 has 0 blocks, wanted a whole number of at least 1"),
        ([True, 3], "split=[True, 3]: stage 0 has True blocks"),
        ([2, 2.0], "split=[2, 2.0]: stage 1 has 2.0 blocks"),
        (["a", "b"], "split=['a', 'b']: stage 0 has 'a' blocks"),
    ],
)
def test_a_split_that_fits_no_model(split: object, fault: str) -> None:
    assert find_faults(split)[0].startswith(fault)


def test_every_wrong_stage_is_named_at_once() -> None:
    assert [fault.split(": ")[1] for fault in find_faults([0, 1, -1])] == [
        "stage 0 has 0 blocks, wanted a whole number of at least 1",
        "stage 2 has -1 blocks, wanted a whole number of at least 1",
    ]


def test_more_stages_than_blocks() -> None:
    assert cut_sizes(graph(), 5) == (
        [],
        ["split=5: the model has 4 blocks, so it can be cut into at most 4 stages"],
    )


@pytest.mark.parametrize("split", [[1, 1], [3, 2]])
def test_a_sum_that_is_not_the_number_of_blocks_lists_them(split: list[int]) -> None:
    sizes, (fault,) = cut_sizes(graph(), split)
    assert sizes == []
    assert fault == (
        f"split={split} places {sum(split)} blocks, the model has 4: "
        "0 Linear, 1 ReLU, 2 Linear, 3 Linear"
    )
