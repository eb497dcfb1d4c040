"""How the outputs of the microbatches become one again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stageline as sl
from stageline.running.merging import merge_outputs
from tests.running.batches import Pair, cut, rows


@dataclass
class Opaque:
    """An output that nobody has registered as a structure."""

    logits: Tensor


pytestmark = pytest.mark.usefixtures("one_thread")


def test_tensors_are_joined_along_the_batch() -> None:
    x = rows(5, 2)
    assert torch.equal(merge_outputs(list(x.split([3, 2])), [3, 2]), x)
    assert torch.equal(merge_outputs(list(x.t().split([3, 2], 1)), [3, 2], 1), x.t())
    assert torch.equal(merge_outputs(list(x.t().split([3, 2], 1)), [3, 2], -1), x.t())


def test_structures_are_kept() -> None:
    parts = [Pair({"a": rows(2)}, [rows(2)]), Pair({"a": rows(1)}, [rows(1)])]
    merged = merge_outputs(parts, [2, 1])
    assert isinstance(merged, Pair)
    assert merged.left["a"].tolist() == [0.0, 1.0, 0.0]
    assert merged.right[0].tolist() == [0.0, 1.0, 0.0]


def test_output_dimensions_by_name() -> None:
    parts = [{"t": rows(3, n), "whole": rows(n), "n": rows(n)} for n in (2, 1)]
    merged = merge_outputs(parts, [2, 1], {"output['t']": 1, "output['whole']": None})
    assert merged["t"].shape == (3, 3)
    assert isinstance(merged["whole"], sl.PerMicrobatch)
    assert merged["n"].shape == (3,)


@pytest.mark.parametrize("value", [None, 3, "text", True, (1, "a")])
def test_equal_plain_values_stay_one(value: object) -> None:
    assert merge_outputs([value, value], [1, 1]) == value


@pytest.mark.parametrize("values", [(1, 2), (1, True), (None, 0), ("a", "b")])
def test_different_plain_values_come_one_per_microbatch(values: tuple[Any, Any]) -> None:
    merged = merge_outputs(values, [1, 1])
    assert isinstance(merged, sl.PerMicrobatch)
    assert merged == list(values)


@pytest.mark.parametrize(
    "outputs",
    [
        (torch.tensor(1.0), torch.tensor(2.0)),  # no dimension to join along
        (rows(7), rows(7)),  # not the size of a microbatch
        (rows(2), None),  # a tensor here, none there
        ((rows(2), rows(2)), rows(1)),  # another structure
        ({"a": rows(2)}, {"b": rows(1)}),
    ],
)
def test_what_cannot_be_joined_comes_one_per_microbatch(outputs: tuple[Any, Any]) -> None:
    merged = merge_outputs(outputs, [2, 1])
    assert isinstance(merged, sl.PerMicrobatch)
    assert isinstance(merged, list)
    assert all(got is want for got, want in zip(merged, outputs, strict=True))


def test_one_microbatch_is_the_batch() -> None:
    x = rows(3)
    assert merge_outputs([{"x": x, "n": 1}], [3]) == {"x": x, "n": 1}


def test_outputs_that_cannot_be_compared_come_one_per_microbatch() -> None:
    """Asked whether two arrays, or two records of tensors, are equal, Python raises."""
    arrays = (np.zeros(2), np.zeros(2))
    assert merge_outputs(arrays, [2, 2]) == list(arrays)
    records = (Opaque(rows(2)), Opaque(rows(2)))
    merged = merge_outputs(records, [2, 2])
    assert isinstance(merged, sl.PerMicrobatch)
    assert merged[1] is records[1]


@given(n=st.integers(1, 20), m=st.integers(1, 8), dim=st.integers(-2, 1))
def test_what_is_split_and_merged_is_what_was_there(n: int, m: int, dim: int) -> None:
    x = rows(n, n)
    batch = cut(x, count=m, dims=dim)
    parts = [batch.inputs(index)[0][0] for index in range(batch.count)]
    assert torch.equal(merge_outputs(parts, batch.sizes, dim), x)


def test_a_dimension_for_an_output_that_does_not_exist_is_refused() -> None:
    """Otherwise the slip goes unnoticed and the output is joined along dimension 0."""
    pipe = sl.Pipeline.from_stages(
        [lambda x: x.t()], num_microbatches=2, batch_dims={"output[0]": 1}
    ).eval()
    with pytest.raises(sl.BatchError, match=r"batch_dims names 'output\[0\]'.* output"):
        pipe(rows(4, 2))
