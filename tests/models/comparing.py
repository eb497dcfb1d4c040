"""Compares what a plan or a pipeline gives with what the plain model gives.

exact    outputs with their types, loss, every named gradient and every buffer are equal
close    the same, but gradients of parameters tied across stages differ by at most 1e-6:
         the plain model adds up their parts in another order
WRONG    anything else
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import stageline as sl

SEED = 11
TIED_TOLERANCE = 1e-6
# Caches for generating text that nobody asked for; a plan does not return them.
CACHES = ("past_key_values", "cache_params")


@dataclass(frozen=True)
class Run:
    """What one forward and backward leaves behind."""

    output: Any
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def run(call: Callable[..., Any], model: nn.Module, inputs: Mapping[str, Any]) -> Run:
    """Call and differentiate with fixed random numbers; ``model`` holds the parameters."""
    model.zero_grad(set_to_none=True)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    output = call(**inputs)
    as_loss(output).backward()
    return Run(output, gradients_of(model), buffers_of(model))


def gradients_of(model: nn.Module | sl.Pipeline) -> dict[str, Tensor | None]:
    """Return copies of the gradients under their names."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def gradients_by_every_name(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients under all names of their parameters: tied ones have several."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def buffers_of(model: nn.Module | sl.Pipeline) -> dict[str, Tensor]:
    """Return copies of the buffers under their names."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def as_loss(output: Any) -> Tensor:
    """Return the loss of an output, or the mean square of all that can be differentiated in it."""
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(loss, Tensor):
        return loss
    squares = [
        leaf.square().mean() for leaf in tensors(output) if leaf.requires_grad and leaf.numel()
    ]
    return torch.stack(squares).sum()


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output in order, without caches."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in CACHES:
                yield from tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors(inner)


def output_differences(got: Any, want: Any, path: str = "output") -> Iterator[str]:
    """Yield the places where an output differs from that of the plain model."""
    if type(got) is not type(want):
        yield f"{path}: {type(got).__name__} instead of {type(want).__name__}"
    elif isinstance(want, Tensor):
        if not equal(got, want):
            yield f"{path}: {distance(got, want)}"
    elif isinstance(want, (Mapping, tuple, list)):
        yield from _inner_differences(_parts(got), _parts(want), path)
    elif got != want:
        yield f"{path}: {got!r} instead of {want!r}"


def _parts(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {f".{name}": inner for name, inner in value.items() if name not in CACHES}
    return {f"[{index}]": inner for index, inner in enumerate(value)}


def _inner_differences(got: dict[str, Any], want: dict[str, Any], path: str) -> Iterator[str]:
    if list(got) != list(want):
        yield f"{path}: {' '.join(got)} instead of {' '.join(want)}"
        return
    for name, inner in want.items():
        yield from output_differences(got[name], inner, path + name)


def equal(got: Tensor | None, want: Tensor | None) -> bool:
    """Whether two tensors are equal in type, shape and every value; nan equals nan."""
    if got is None or want is None:
        return got is want
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    return torch.equal(got, want) or torch.allclose(got, want, rtol=0, atol=0, equal_nan=True)


def distance(got: Tensor, want: Tensor) -> str:
    """Say how far two tensors lie apart."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
    return f"differs by {relative(got, want):.1e}"


def relative(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, in units of the largest value."""
    scale = want.abs().max().item() if want.numel() else 0.0
    apart = (got.double() - want.double()).abs().max().item() if want.numel() else 0.0
    return apart / scale if scale else apart


def tied_names(model: nn.Module, stages: Collection[nn.Module]) -> set[str]:
    """Return the names of parameters that several stages use."""
    uses = [{id(parameter) for parameter in stage.parameters()} for stage in stages]
    return {
        name
        for name, parameter in model.named_parameters()
        if sum(id(parameter) in use for use in uses) > 1
    }


def compare(got: Run, want: Run, tied: Collection[str] = ()) -> tuple[str, list[str]]:
    """Return ``"exact"``, ``"close"`` or ``"WRONG"``, and all that differs."""
    wrong = list(output_differences(got.output, want.output))
    close = []
    for name, wanted in want.gradients.items():
        gradient = got.gradients.get(name)
        if equal(gradient, wanted):
            continue
        if gradient is None or wanted is None:
            wrong.append(f"gradient of {name}: {'none' if gradient is None else 'one too many'}")
        elif name in tied and relative(gradient, wanted) <= TIED_TOLERANCE:
            close.append(f"gradient of {name}: {distance(gradient, wanted)}")
        else:
            wrong.append(f"gradient of {name}: {distance(gradient, wanted)}")
    wrong += [
        f"buffer {name}"
        for name, wanted in want.buffers.items()
        if not equal(got.buffers.get(name), wanted)
    ]
    if wrong:
        return "WRONG", wrong + close
    return ("close", close) if close else ("exact", [])
