"""How PiPPy's functions cut arguments and join outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stageline.compat.pippy.microbatch import (
    LossReducer,
    TensorChunkSpec,
    _Replicate,
    merge_chunks,
    split_args_kwargs_into_chunks,
    sum_reducer,
)

X = torch.arange(20.0).view(10, 2)


@pytest.mark.parametrize("chunks", [1, 3, 4, 10])
def test_what_is_cut_and_joined_is_what_it_was(chunks: int) -> None:
    args, kwargs = (X, {"a": X + 1}), {"mask": X > 3}
    split_args, split_kwargs = split_args_kwargs_into_chunks(args, kwargs, chunks)
    assert (len(split_args), len(split_kwargs)) == (chunks, chunks)
    assert [len(part) for part, _ in split_args] == [len(p) for p in X.tensor_split(chunks)]
    merged = merge_chunks(split_args, None)
    assert torch.equal(merged[0], X)
    assert torch.equal(merged[1]["a"], X + 1)
    assert torch.equal(merge_chunks(split_kwargs, {"mask": TensorChunkSpec(0)})["mask"], X > 3)


def test_what_is_no_tensor_goes_to_every_microbatch() -> None:
    """A tensor without dimensions too: torch tries to cut it and fails."""
    scale = torch.tensor(2.0)
    args, kwargs = split_args_kwargs_into_chunks((7, None, "word", scale), {"flag": True}, 2)
    assert args == [(7, None, "word", scale)] * 2
    assert kwargs == [{"flag": True}] * 2
    assert merge_chunks([(1, "a"), (1, "a")], None) == (1, "a")


def test_specs() -> None:
    specs = (TensorChunkSpec(1), _Replicate)
    split, _ = split_args_kwargs_into_chunks((X, X), None, 2, specs)
    assert [tuple(part.shape) for part, _ in split] == [(10, 1), (10, 1)]
    assert all(whole is X for _, whole in split)
    assert torch.equal(merge_chunks([part for part, _ in split], TensorChunkSpec(1)), X)
    assert [str(spec) for spec in TensorChunkSpec.from_tuple((0, 1))] == [
        "TensorChunkSpec(0)",
        "TensorChunkSpec(1)",
    ]
    assert TensorChunkSpec.from_dict({"mask": 2})["mask"].split_dim == 2
    assert repr(TensorChunkSpec(1)).endswith("microbatch.TensorChunkSpec(1)")


def test_reducers() -> None:
    parts = [(X, torch.tensor(1.0)), (X, torch.tensor(2.0))]
    _, total = merge_chunks(parts, (TensorChunkSpec(0), sum_reducer))
    assert float(total) == 3.0

    def product(so_far: Tensor, part: Tensor) -> Tensor:
        return so_far * part

    _, made = merge_chunks(parts, (TensorChunkSpec(0), LossReducer(torch.tensor(5.0), product)))
    assert float(made) == 10.0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: merge_chunks([1, 2], None), "inconsistent values"),
        (lambda: merge_chunks([(X,), X], None), "different structures"),
        (lambda: merge_chunks([(X, X, X)], [TensorChunkSpec(0)] * 2), "2 entries for 3 values"),
        (
            lambda: split_args_kwargs_into_chunks((X,), {}, 2, (TensorChunkSpec(0),) * 2),
            "2 entries for 1 arguments",
        ),
    ],
)
def test_what_does_not_fit(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()
