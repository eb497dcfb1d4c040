"""The gradient of a linear layer's input, made by hand: autograd's bits, and its strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from stageline.running.linear import Layout, input_gradient, is_ordinary, layout_of

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [
    *((rows, columns) for rows in (1, 2, 7) for columns in (1, 2, 5)),
    *((2, 3, 5), (2, 1, 5), (1, 2, 2), (3, 2, 2, 4), (0, 5), (2, 0, 3), (64, 129)),
]


def strange(shape: tuple[int, int]) -> Tensor:
    """Return a matrix of one row or column, with strides as only such a one can have them."""
    return torch.randn(shape[::-1]).t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("outputs", [1, 3, 64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_as_autograd_makes_it(
    shape: tuple[int, ...], outputs: int, dtype: torch.dtype, has_bias: bool
) -> None:
    torch.manual_seed(0)
    compare(torch.randn(shape, dtype=dtype), outputs, has_bias)


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_as_autograd_makes_it_of_strange_strides(shape: tuple[int, int], has_bias: bool) -> None:
    torch.manual_seed(0)
    compare(strange(shape), 64, has_bias)


def compare(x: Tensor, outputs: int, has_bias: bool) -> None:
    layout = layout_of(x)
    if layout is None:
        return
    weight = torch.randn(outputs, x.shape[-1], dtype=x.dtype, requires_grad=True)
    bias = torch.randn(outputs, dtype=x.dtype, requires_grad=True) if has_bias else None
    x.requires_grad_()
    made = F.linear(x, weight, bias)
    for gradient in gradients(made):
        (wanted,) = torch.autograd.grad(made, x, gradient, retain_graph=True)
        found = input_gradient(gradient, weight.detach(), layout)
        assert torch.equal(found, wanted)
        assert found.shape == wanted.shape
        assert found.stride() == wanted.stride()


def gradients(made: Tensor) -> list[Tensor]:
    """Return gradients in three layouts: dense, one number for all, every other number."""
    wide = torch.randn(*made.shape[:-1], 2 * made.shape[-1], dtype=made.dtype)
    one = torch.randn((), dtype=made.dtype).expand(made.shape)
    return [torch.randn_like(made).detach(), one, wide[..., ::2]]


def test_how_many_of_them_are_known() -> None:
    """Or nothing would be compared above."""
    known = [shape for shape in SHAPES if layout_of(torch.ones(shape)) is not None]
    assert [shape for shape in SHAPES if shape not in known] == [(2, 0, 3)]
    assert layout_of(torch.ones(1, 1)) is Layout.COLUMNS
    assert layout_of(strange((5, 1))) is Layout.COLUMNS
    assert layout_of(torch.ones(5, 1)) is Layout.ROWS


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3),
        torch.ones(4, 3).t(),
        torch.ones(4, 6)[:, ::2],
        torch.ones(2, 3).to_sparse(),
        torch.nn.Parameter(torch.ones(2, 3)),
        torch.ones(2, 3, 1),
    ],
    ids=["vector", "transposed", "gaps", "sparse", "parameter", "column"],
)
def test_what_is_not_known(tensor: Tensor) -> None:
    assert layout_of(tensor) is None


def test_ordinary_weights() -> None:
    assert is_ordinary(torch.ones(2, 3))
    assert not is_ordinary(torch.ones(3))
    assert not is_ordinary(torch.ones(2, 3).to_sparse())
    assert not is_ordinary(torch.ones(2, 3, dtype=torch.complex64))
