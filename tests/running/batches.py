"""Batches for the tests of splitting and merging."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stageline.running.microbatches import BatchDims, Microbatches


class Pair(NamedTuple):
    """A structure whose leaves have names."""

    left: Any
    right: Any


def cut(
    *args: Any, target: Any = None, count: int = 4, dims: BatchDims = 0, **kwargs: Any
) -> Microbatches:
    return Microbatches(args, kwargs, target, num_microbatches=count, batch_dims=dims)


def rows(n: int, *more: int) -> Tensor:
    """Return a batch whose every number is another."""
    return torch.arange(float(n * int(np.prod(more)))).view(n, *more)
