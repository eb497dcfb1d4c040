"""fairscale.nn.Pipe: two partitions in one process, GPipe.

A Pipe has one worker thread per distinct device, and all CPU devices are one device: the two
partitions take turns, and backward runs in the calling thread.

The same script runs on stageline's door: only the home of its import is another.
"""

from __future__ import annotations

import warnings
from importlib import import_module

import torch
from torch import Tensor, nn

from contestant import Contestant
from models import Case


def build(case: Case, dropout: float, home: str = "fairscale.nn") -> Contestant:
    with warnings.catch_warnings():  # it recommends a module that torch no longer has
        warnings.simplefilter("ignore")
        pipe = import_module(home).Pipe(
            case.layers(dropout),
            balance=case.cuts[2],
            devices=["cpu", "cpu"],
            chunks=case.num_microbatches,
            checkpoint="never",
        )
    return trained_whole(case, pipe)


def trained_whole(case: Case, pipe: nn.Module, *, tied: bool = True) -> Contestant:
    """Train a module that takes the whole batch and cuts it by itself."""
    x, y = case.batch()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=case.rate)

    def step() -> Tensor:
        loss = case.loss(pipe(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Contestant(step, tied=tied)
