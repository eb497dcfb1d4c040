"""The executor: one loop over the row of a rank. It does not know which schedule it runs.

Every kind of action has a handler of a few lines. What a step needs while it runs lives in one
``StepState``, made when the step begins and dropped when it ends, so that nothing outlives its
step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from stageline import log
from stageline.errors import StepError
from stageline.running.autocast import autocast_devices, autocast_suspended
from stageline.running.boundary import GradientSlot, Packet, enter, gradient_edge, leave
from stageline.running.events import ActionDone, Observer
from stageline.running.foreign import ForeignParameters
from stageline.running.loss import LossRule
from stageline.running.microbatches import Microbatches
from stageline.running.program import StageProgram
from stageline.running.recordings import Chosen
from stageline.running.streams.calls import CallStreams
from stageline.running.transports.base import Aborted, Arrived, Edge, Endpoint, Receipt
from stageline.scheduling import Action, Kind, Schedule
from stageline.torch_private import run_backward, tree_flatten

Key = tuple[int, int]  # stage, microbatch
_NOTHING: AbstractContextManager[None] = nullcontext()


class StepState:
    """Everything that one rank holds during one step.

    Attributes:
        arrivals: Inputs on their way to (stage, microbatch).
        departures: Outputs of (stage, microbatch) that wait for their send.
        roots: Where the gradients of the outputs of (stage, microbatch) enter its graph.
        slots: Where the gradients of the inputs of (stage, microbatch) will lie.
        gradients: Gradients on their way to the outputs of (stage, microbatch).
        returns: Gradients of the inputs of (stage, microbatch) that wait for their send.
        input_gradients: Gradients of the model's arguments, for each microbatch, where asked for.
        losses: Loss of each microbatch, detached, and what it weighs.
        outputs: Output of each microbatch, detached, where the caller wants it.
        chosen: Of a recorded model, what each microbatch follows.
        streams: Where random numbers come from; None if nothing here can draw.
        endpoint: This rank's side of the transport; the runner sets it when rows begin.
        autocast: The device types for which forward runs under autocast.
        waited: Seconds spent waiting for packets in the current action; None if nobody observes.
        position: Which action of its row the rank is at, for those who wait for it.
    """

    endpoint: Endpoint

    def __init__(
        self,
        programs: Mapping[int, StageProgram],
        microbatches: Microbatches,
        *,
        builds_graph: bool,
        loss_rule: LossRule | None,
        keeps_outputs: bool,
        foreign: ForeignParameters,
        chosen: Sequence[Chosen] = (),
        streams: CallStreams | None = None,
    ) -> None:
        self.chosen = chosen
        self.streams = streams
        self.programs = programs
        self.microbatches = microbatches
        self.builds_graph = builds_graph
        self.loss_rule = loss_rule
        self.keeps_outputs = keeps_outputs
        self.foreign = foreign
        self.arrivals: dict[Key, Receipt] = {}
        self.departures: dict[Key, Packet] = {}
        self.roots: dict[Key, list[GradientEdge]] = {}
        self.slots: dict[Key, GradientSlot] = {}
        self.gradients: dict[Key, Receipt] = {}
        self.returns: dict[Key, Packet] = {}
        self.input_gradients: dict[int, Sequence[Tensor | None]] = {}
        self.losses: dict[int, tuple[Tensor, float]] = {}
        self.outputs: dict[int, Packet] = {}
        self.autocast: list[str] = []
        self.waited: float | None = None
        self.position = 0
        self._shares: dict[float, Tensor] = {}

    def share(self, weight: float, like: Tensor) -> Tensor:
        """Return a weight as root gradient of a loss; microbatches of one size have one."""
        known = self._shares.get(weight)
        if known is None or known.dtype is not like.dtype or known.shape != like.shape:
            known = self._shares[weight] = torch.full_like(like, weight)
        return known


def _wait(state: StepState, receipt: Receipt) -> Packet:
    if state.waited is None:
        return receipt.wait()
    start = time.perf_counter()
    packet = receipt.wait()
    state.waited += time.perf_counter() - start
    return packet


def _model_inputs(state: StepState, microbatch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the model; those that require a gradient enter like any value."""
    inputs = state.microbatches.inputs(microbatch)
    flags = state.microbatches.inputs_with_gradient if state.builds_graph else []
    if not flags:
        return inputs
    leaves, spec = tree_flatten(inputs)
    cut_off = [leaf.detach() if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]
    entered = enter(Packet(cut_off, spec, flags))
    assert entered.slot is not None
    state.slots[0, microbatch] = entered.slot
    args, kwargs = entered.value
    return args, kwargs


def _forward(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    program = state.programs[stage]
    if program.is_first:
        inputs = _model_inputs(state, microbatch)
        if state.chosen:
            call = partial(_call_recorded, state, program, microbatch, None, inputs)
        else:
            call = partial(program.call_first, *inputs)
        output = _drawing(state, stage, microbatch, call)
    else:
        packet = _wait(state, state.arrivals.pop((stage, microbatch)))
        entered = enter(program.accept(packet))
        del packet
        if entered.slot is not None:
            state.slots[stage, microbatch] = entered.slot
        if state.chosen:
            call = partial(_call_recorded, state, program, microbatch, entered.value)
        else:
            call = partial(program.call, entered.value)
        output = _drawing(state, stage, microbatch, call)
        entered.check()
    if program.is_last:
        _finish(state, program, microbatch, output)
        return
    packet, roots = leave(output, program.buffers)
    if state.builds_graph:
        state.foreign.check(stage, [output] if packet.spec is None else tree_flatten(output)[0])
        state.roots[stage, microbatch] = roots
    if program.next_is_local:
        state.arrivals[stage + 1, microbatch] = Arrived(packet)
    else:
        state.departures[stage, microbatch] = packet


def _drawing(state: StepState, stage: int, microbatch: int, call: Callable[[], Any]) -> Any:
    """Run a stage; what it draws comes from the streams of the microbatch."""
    if state.streams is None:
        return call()
    with state.streams.forward(stage, microbatch):
        return call()


def _call_recorded(
    state: StepState, program: StageProgram, microbatch: int, value: Any, inputs: Any = None
) -> Any:
    """Run a stage of a recorded model: it takes arguments of the model whichever stage it is."""
    chosen = state.chosen[microbatch]
    leaves = chosen.leaves
    if inputs is not None and state.microbatches.inputs_with_gradient and state.builds_graph:
        leaves = tree_flatten(inputs)[0]
    return program.module(value, program.localise(leaves), chosen.variant)


def _finish(state: StepState, program: StageProgram, microbatch: int, output: Any) -> None:
    """Turn the last stage's output into a loss, or keep it for gradients that come later."""
    rule = state.loss_rule
    if rule is None:
        packet, roots = leave(output, program.buffers)
        state.outputs[microbatch] = packet
        if state.builds_graph:
            state.roots[program.index, microbatch] = roots
        return
    target = program.localise(state.microbatches.target(microbatch))
    if state.streams is None:
        loss = rule.loss(output, target)
    else:
        with state.streams.loss(microbatch):
            loss = rule.loss(output, target)
    weight = rule.weight(state.microbatches, microbatch)
    detached = loss.detach()
    state.losses[microbatch] = (detached, weight)
    if state.keeps_outputs:
        state.outputs[microbatch] = leave(output, program.buffers)[0]
    if state.builds_graph:
        if not loss.requires_grad:
            raise RuntimeError(
                "the loss depends on no parameter that requires a gradient: unfreeze one, or call "
                "pipe.eval() first if only the loss is wanted"
            )
        state.foreign.check(program.index, [loss])
        key = (program.index, microbatch)
        state.roots[key] = [gradient_edge(loss)]
        # The share as root gradient is what multiplying the loss by it would give, at no cost.
        share = state.share(weight, detached) if weight else None
        state.gradients[key] = Arrived(Packet([share]))


def _backward(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    program = state.programs[stage]
    key = (stage, microbatch)
    packet = program.accept(_wait(state, state.gradients.pop(key)))
    roots, gradients = _present(state.roots.pop(key), packet.leaves)
    del packet
    slot = state.slots.pop(key, None)
    if slot is not None:
        slot.is_open = True
    if roots:
        streams = _NOTHING if state.streams is None else state.streams.backward(stage, microbatch)
        with streams:
            if state.autocast:
                with autocast_suspended(state.autocast):
                    run_backward(roots, gradients)
            else:
                run_backward(roots, gradients)
    del roots, gradients
    if program.is_first:
        if slot is not None:
            state.input_gradients[microbatch] = slot.gradients
        return
    returned = Packet([] if slot is None else list(slot.gradients))
    if program.previous_is_local:
        state.gradients[stage - 1, microbatch] = Arrived(returned)
    else:
        state.returns[key] = returned


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


def _send_forward(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    assert edge is not None
    state.endpoint.send(edge, state.departures.pop((stage, microbatch)))


def _send_backward(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    assert edge is not None
    state.endpoint.send(edge, state.returns.pop((stage, microbatch)))


def _receive_forward(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    assert edge is not None
    state.arrivals[stage, microbatch] = state.endpoint.receive(edge)


def _receive_backward(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    assert edge is not None
    state.gradients[stage, microbatch] = state.endpoint.receive(edge)


Handler = Callable[[StepState, int, int, "Edge | None"], None]

HANDLERS: dict[Kind, Handler] = {
    Kind.FORWARD: _forward,
    Kind.BACKWARD: _backward,
    Kind.SEND_FORWARD: _send_forward,
    Kind.SEND_BACKWARD: _send_backward,
    Kind.RECEIVE_FORWARD: _receive_forward,
    Kind.RECEIVE_BACKWARD: _receive_backward,
}


@dataclass(frozen=True)
class BoundRow:
    """The row of one rank with every handler and edge looked up once."""

    rank: int
    actions: tuple[Action, ...]
    steps: tuple[tuple[Handler, int, int, Edge | None], ...]


def bind(schedule: Schedule, rank: int) -> BoundRow:
    """Look up the handlers of a rank's row; the schedule must carry its transfers."""
    return bind_actions(schedule.row(rank), rank, schedule.placement)


def bind_actions(actions: Sequence[Action], rank: int, placement: Sequence[int]) -> BoundRow:
    """Look up the handlers of some actions of a rank."""
    steps = tuple(
        (HANDLERS[action.kind], action.stage, action.microbatch, _edge(action, placement))
        for action in actions
    )
    return BoundRow(rank, tuple(actions), steps)


def _edge(action: Action, placement: Sequence[int]) -> Edge | None:
    if action.peer is None:
        return None
    here, there = action.stage, action.peer
    sends = action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
    source, target = (here, there) if sends else (there, here)
    letter = "F" if action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD) else "B"
    return Edge(source, target, letter, action.microbatch, placement[source], placement[target])


def run_row(row: BoundRow, state: StepState, observer: Observer | None = None) -> None:
    """Run all actions of a rank; an exception is wrapped once, with what only this loop knows."""
    state.autocast = autocast_devices()
    try:
        if observer is None:
            for position, (handler, stage, microbatch, edge) in enumerate(row.steps):
                state.position = position
                handler(state, stage, microbatch, edge)
        else:
            for position in range(len(row.steps)):
                state.position = position
                observer = _observed(row, position, state, observer)
    except (Aborted, KeyboardInterrupt):
        raise
    except BaseException as cause:
        action = row.actions[state.position]
        raise StepError(
            rank=row.rank, stage=action.stage, microbatch=action.microbatch, action=str(action)
        ) from cause


def _observed(
    row: BoundRow, position: int, state: StepState, observer: Observer | None
) -> Observer | None:
    """Run one action and tell the observer; one that raises is logged and dropped, not obeyed."""
    handler, stage, microbatch, edge = row.steps[position]
    state.waited = 0.0
    start = time.perf_counter()
    handler(state, stage, microbatch, edge)
    end = time.perf_counter()
    if observer is None:
        return None
    try:
        action = str(row.actions[position])
        observer(ActionDone(row.rank, action, position, start, end, state.waited))
    except Exception as error:
        log.warning(row.rank, f"the observer raised {error!r} and is not asked again in this step")
        return None
    return observer
