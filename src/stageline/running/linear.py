"""The gradient of what goes into a linear layer, made by hand: the bits that autograd makes.

    output = input · weightᵀ + bias          for the input: gradient · weight

Autograd makes it in one operation with the gradient of the weight. Who wants one of them alone, or
sooner than the other, makes this one here.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional as F

from stageline.running.boundary import is_dense

LINEAR = F.linear
"""What it is the gradient of, whatever somebody puts in its place later."""


class Layout(Enum):
    """How autograd lays out the gradient of an input: as the input is."""

    ROWS = 0
    COLUMNS = 1


def layout_of(input: Tensor) -> Layout | None:
    """Return the layout of the gradient of an input; None where it is not known here.

    Example:
        >>> import torch
        >>> layout_of(torch.ones(2, 3)), layout_of(torch.ones(1, 1)), layout_of(torch.ones(3))
        (<Layout.ROWS: 0>, <Layout.COLUMNS: 1>, None)
    """
    if input.is_nested or not is_dense(input):
        return None
    shape = input.shape
    if len(shape) == 2:
        # The test that autograd has, also where both would do.
        down, across = input.stride()
        return Layout.COLUMNS if down == 1 and across == shape[0] else Layout.ROWS
    # What is folded into a single row, or a single column, may be laid out in another way.
    return Layout.ROWS if len(shape) > 2 and 1 < shape[-1] < input.numel() else None


def is_ordinary(weight: Tensor) -> bool:
    """Whether this is true of a weight: it is a matrix of real numbers, and not a sparse one."""
    is_matrix = weight.dim() == 2 and weight.layout is torch.strided
    return is_matrix and weight.is_floating_point()


def input_gradient(gradient: Tensor, weight: Tensor, layout: Layout) -> Tensor:
    """Return the gradient of an input by the operations that autograd has for it."""
    if layout is Layout.COLUMNS:
        return weight.t().mm(gradient.t()).t()
    if gradient.dim() == 2:
        return gradient.mm(weight)
    rows = gradient.reshape(-1, gradient.shape[-1]).mm(weight)
    return rows.view(*gradient.shape[:-1], weight.shape[1])
