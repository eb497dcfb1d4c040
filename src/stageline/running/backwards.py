"""The handlers that differentiate: B in one piece, or I and W."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor
from torch.autograd.graph import GradientEdge

from stageline.running.autocast import autocast_suspended
from stageline.running.boundary import GradientSlot, Packet
from stageline.running.split.deferred import Deferred
from stageline.running.state import StepState, wait
from stageline.running.transports.base import Arrived, Edge
from stageline.torch_private import run_backward

_NOTHING: AbstractContextManager[None] = nullcontext()


def backward(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """B: all gradients of a stage."""
    roots, gradients = _roots(state, stage, microbatch)
    slot = state.slots.pop((stage, microbatch), None)
    if slot is not None:
        slot.is_open = True
    if roots:
        _differentiate(state, stage, microbatch, partial(run_backward, roots, gradients))
    _hand_back(state, stage, microbatch, slot)


def input_gradient(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """I: the gradient of the input, and what cannot wait for W."""
    key = (stage, microbatch)
    roots, gradients = _roots(state, stage, microbatch)
    slot = state.slots.pop(key, None)
    if slot is None:  # nobody waits for a gradient of the input: all of it can wait
        state.deferred[key] = Deferred.whole(roots, gradients)
    elif roots:
        deferred = state.deferred[key]
        slot.is_open = deferred.is_open = True
        _differentiate(state, stage, microbatch, partial(run_backward, roots, gradients))
        deferred.is_open = False
    _hand_back(state, stage, microbatch, slot)


def weight_gradient(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """W: the gradients of the parameters that have waited."""
    deferred = state.deferred.pop((stage, microbatch))
    _differentiate(state, stage, microbatch, deferred.run)


def _differentiate(state: StepState, stage: int, microbatch: int, run: Callable[[], None]) -> None:
    """Run a backward: in the streams of its microbatch, and outside autocast."""
    streams = _NOTHING if state.streams is None else state.streams.backward(stage, microbatch)
    with streams:
        if state.autocast:
            with autocast_suspended(state.autocast):
                run()
        else:
            run()


def _roots(
    state: StepState, stage: int, microbatch: int
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Wait for the gradients of a stage's outputs; return them, and where they enter its graph."""
    key = (stage, microbatch)
    packet = state.programs[stage].accept(wait(state, state.gradients.pop(key)))
    return _present(state.roots.pop(key), packet.leaves)


def _present(
    roots: list[GradientEdge], gradients: list[Tensor | None]
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Return the roots for which a gradient came, and the gradients."""
    if len(roots) == 1 and len(gradients) == 1 and gradients[0] is not None:
        return roots, gradients  # type: ignore[return-value]  # not None
    pairs = [
        (root, gradient)
        for root, gradient in zip(roots, gradients, strict=True)
        if gradient is not None
    ]
    return [root for root, _ in pairs], [gradient for _, gradient in pairs]


def _hand_back(state: StepState, stage: int, microbatch: int, slot: GradientSlot | None) -> None:
    """Give the gradient of a stage's input to whom it belongs."""
    program = state.programs[stage]
    if program.is_first:
        if slot is not None:
            state.input_gradients[microbatch] = slot.gradients
        return
    returned = Packet([] if slot is None else list(slot.gradients))
    if program.previous_is_local:
        state.gradients[stage - 1, microbatch] = Arrived(returned)
    else:
        state.returns[stage, microbatch] = returned
