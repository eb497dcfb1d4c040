"""What a Pipe is compared with: the plain model over the chunks of a batch, and one backward."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stageline.compat.fairscale.nn import Pipe


def plain(model: nn.Module, x: Any, chunks: int) -> Any:
    """Return what a Pipe should: the outputs of the chunks, joined."""
    if isinstance(x, Tensor):
        outputs = [model(piece) for piece in x.chunk(chunks)]
    else:
        outputs = [
            model(pieces) for pieces in zip(*(each.chunk(chunks) for each in x), strict=True)
        ]
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs)
    return tuple(torch.cat(each) for each in zip(*outputs, strict=True))


def twins(model: nn.Sequential, balance: list[int], **settings: Any) -> tuple[Pipe, nn.Sequential]:
    """Return a Pipe on CPU ranks, and the plain model with the same values."""
    return Pipe(copy.deepcopy(model), balance, **settings), model


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return every gradient by its name in the plain model."""
    return {_plain_name(name): value.grad for name, value in model.named_parameters()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {_plain_name(name): value for name, value in model.named_buffers()}


def _plain_name(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("partitions.") else name


def differences(one: nn.Module, other: nn.Module) -> Iterator[str]:
    """Yield the names of gradients and buffers that are not equal, to the last bit."""
    for mine, theirs in ((gradients(one), gradients(other)), (buffers(one), buffers(other))):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            wanted = theirs[name]
            both = isinstance(value, Tensor) and isinstance(wanted, Tensor)
            if not (torch.equal(value, wanted) if both else value is wanted):  # type: ignore[arg-type]
                yield name
