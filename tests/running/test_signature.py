"""What a rank tells of its batch, whatever that is made of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stageline.running.control.agreement import CONTENTS
from stageline.running.microbatches import Microbatches
from stageline.running.signature import Checksum, checksum, facts_of

X = torch.arange(4.0).reshape(2, 2)
LEAVES = {
    "a conjugate, which has no bytes of its own": torch.complex(X, X).conj(),
    "truth values": X > 1,
    "bfloat16": X.bfloat16(),
    "transposed": X.t(),
    "empty": X[:, :0],
    "whole numbers": X.long(),
}


def told(*leaves: Tensor, call: int = 0) -> dict[str, str]:
    batch = Microbatches(leaves, {}, None, num_microbatches=2)
    facts = facts_of(batch.rows, batch.named_leaves(), call=call, step=0, draws=False)
    contents: dict[str, str] = facts.get(CONTENTS, {})
    return contents


@pytest.mark.parametrize("what", LEAVES)
def test_any_leaf_can_be_told(what: str) -> None:
    assert told(X, LEAVES[what]) == told(X.clone(), LEAVES[what].clone())


def test_another_value_is_told_otherwise() -> None:
    """Also where the values that are shown are the same."""
    long = torch.zeros(8, 100)
    changed = long.clone()
    changed[7, 99] = 1
    assert told(long)["args[0]"].startswith("[0, 0, 0, ...] (checksum ")
    assert told(long) != told(changed)


def test_values_are_told_in_the_first_calls_and_then_now_and_then() -> None:
    assert [call for call in range(120) if told(X, call=call)] == [0, 1, 2, 3, 50, 100]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch._neg_view(-x),
        nn.Parameter,
        lambda x: torch.stack([x, x], 2)[..., 0],
    ],
    ids=["strides", "negated", "parameter", "gaps"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_values_have_one_checksum_however_they_lie(
    other: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 40).to(dtype)
    assert checksum(other(x)) == checksum(x)
    assert checksum(other(x) + 1) != checksum(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(5000),
        lambda: torch.randn(50, 60).t(),
        lambda: torch.randn(50).half(),
        lambda: torch.randn(9, dtype=torch.complex64).conj().imag,
        lambda: torch.zeros(0),
    ],
)
def test_a_checksum_that_is_taken_again_sees_every_change(make: Callable[[], Tensor]) -> None:
    tensor = nn.Parameter(make(), requires_grad=False)
    again = Checksum(tensor)
    assert again() == checksum(tensor) == again()
    if not tensor.numel():
        return
    seen = {again()}
    tensor.add_(1)
    seen.add(again())
    tensor.data = tensor.data + 1  # other memory
    seen.add(again())
    assert again() == checksum(tensor)
    assert len(seen) == 3


def test_a_checksum_that_is_taken_again_sees_that_a_weight_was_turned() -> None:
    weight = nn.Parameter(torch.arange(9.0).view(3, 3), requires_grad=False)
    again = Checksum(weight)
    before = again()
    weight.data = weight.data.t()  # the same memory
    assert again() == checksum(weight) != before
    weight.data = weight.data.t()
    assert again() == before
