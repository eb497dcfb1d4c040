"""The handlers that differentiate: B in one piece, or I and W."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from stageline.running.autocast import autocast_suspended
from stageline.running.boundary import GradientSlot, Packet, Root
from stageline.running.early import EarlySlot
from stageline.running.program import StageProgram
from stageline.running.split.deferred import Deferred
from stageline.running.state import Key, StepState
from stageline.running.transports.base import Edge
from stageline.torch_private import run_backward

_NOTHING: AbstractContextManager[None] = nullcontext()


def backward(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """B: all gradients of a stage; ``edge``, where that of the input may leave in the middle."""
    key = (stage, microbatch)
    program = state.programs[stage]
    roots, gradients = _roots(state, program, key)
    slot = state.slots.pop(key, None)
    if slot is not None:
        slot.is_open = True
        if edge is not None and isinstance(slot, EarlySlot):
            slot.leave_by(state.endpoint, edge)
    if roots:
        differentiate(state, key, roots, gradients)
    _hand_back(state, program, key, slot)


def input_gradient(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """I: the gradient of the input, and what cannot wait for W."""
    key = (stage, microbatch)
    program = state.programs[stage]
    roots, gradients = _roots(state, program, key)
    slot = state.slots.pop(key, None)
    if slot is None and not state.is_whole(program):
        # Nobody waits for a gradient of the input: all of it can wait.
        state.deferred[key] = Deferred.whole(roots, gradients)
    elif roots:
        deferred = state.deferred[key]
        deferred.is_open = True
        if slot is not None:
            slot.is_open = True
        differentiate(state, key, roots, gradients)
        deferred.is_open = False
    _hand_back(state, program, key, slot)


def weight_gradient(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """W: the gradients of the parameters that have waited."""
    key = (stage, microbatch)
    deferred = state.deferred.pop(key)
    if state.streams is None and not state.autocast:
        deferred.run()
    else:
        _differentiate(state, key, deferred.run)


def differentiate(
    state: StepState,
    key: Key,
    roots: Sequence[Root],
    gradients: Sequence[Tensor],
) -> None:
    """Run a backward from these roots."""
    if state.streams is None and not state.autocast:
        run_backward(roots, gradients)
    else:
        _differentiate(state, key, partial(run_backward, roots, gradients))


def _differentiate(state: StepState, key: Key, run: Callable[[], None]) -> None:
    """Run a backward: in the streams of its microbatch, and outside autocast."""
    streams = _NOTHING if state.streams is None else state.streams.backward(*key)
    with streams:
        if state.autocast:
            with autocast_suspended(state.autocast):
                run()
        else:
            run()


def _roots(state: StepState, program: StageProgram, key: Key) -> tuple[list[Root], list[Tensor]]:
    """Wait for the gradients of a stage's outputs; return them, and where they enter its graph."""
    gradients = state.take(state.gradients, program, key).leaves
    roots = state.roots.pop(key)
    if len(roots) == 1 and len(gradients) == 1 and gradients[0] is not None:
        return roots, gradients
    pairs = [
        (root, gradient)
        for root, gradient in zip(roots, gradients, strict=True)
        if gradient is not None
    ]
    return [root for root, _ in pairs], [gradient for _, gradient in pairs]


def _hand_back(
    state: StepState, program: StageProgram, key: Key, slot: GradientSlot | None
) -> None:
    """Give the gradient of a stage's input to whom it belongs."""
    stage, microbatch = key
    if program.is_first:
        if slot is not None:
            state.input_gradients[microbatch] = slot.gradients
        return
    if isinstance(slot, EarlySlot):
        slot.close()
        if slot.has_left:
            state.returns[key] = None
            return
    returned = Packet([] if slot is None else list(slot.gradients))
    if program.previous_is_local:
        state.gradients[stage - 1, microbatch] = returned
    else:
        state.returns[key] = returned
