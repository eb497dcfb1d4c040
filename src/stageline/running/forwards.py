"""The handlers that run a stage: F, and R where F kept no graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from stageline.running.boundary import Packet, enter, gradient_edge, leave
from stageline.running.program import StageProgram
from stageline.running.split.again import Statistics, is_changed, versions
from stageline.running.split.deferred import Deferred
from stageline.running.split.mode import Differentiates, Splitting, leave_whole
from stageline.running.state import StepState, wait
from stageline.running.transports.base import Arrived, Edge
from stageline.torch_private import tree_flatten


def forward(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """F: run a stage, keep its graph, hand its output on."""
    program = state.programs[stage]
    arrived = _arrived(state, program, microbatch)
    _hand_on(state, program, microbatch, _run(state, program, microbatch, arrived))


def forward_split(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """F whose backward is I and W."""
    program = state.programs[stage]
    arrived = _arrived(state, program, microbatch)
    _hand_on(state, program, microbatch, _run_split(state, program, microbatch, arrived))


def forward_dropped(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """F that keeps its input and not its graph, because R will run it again.

    It builds the graph all the same: which outputs need a gradient is seen only there.
    """
    program = state.programs[stage]
    arrived = _arrived(state, program, microbatch)
    arguments = _arguments(state, program, microbatch)
    with state.again.kept(program, microbatch, arrived, arguments):
        made = _run(state, program, microbatch, arrived)
    for table in (state.roots, state.slots, state.gradients):
        table.pop((stage, microbatch), None)
    _hand_on(state, program, microbatch, made)


def recompute(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """R: run a stage once more and keep its graph; its output has long been handed on."""
    _again(state, stage, microbatch, _run)


def recompute_split(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """R before I and W."""
    _again(state, stage, microbatch, _run_split)


def _again(
    state: StepState,
    stage: int,
    microbatch: int,
    run: Callable[[StepState, StageProgram, int, Packet | None], Packet | None],
) -> None:
    program = state.programs[stage]
    statistics = Statistics(program)
    run(state, program, microbatch, state.again.pop(stage, microbatch))
    statistics.put_back()


def _arrived(state: StepState, program: StageProgram, microbatch: int) -> Packet | None:
    """Wait for what the stage before has made; the first stage waits for nothing."""
    if program.is_first:
        return None
    return program.accept(wait(state, state.arrivals.pop((program.index, microbatch))))


def _hand_on(
    state: StepState, program: StageProgram, microbatch: int, packet: Packet | None
) -> None:
    if packet is None:  # the last stage has made a loss, or outputs
        return
    if program.next_is_local:
        state.arrivals[program.index + 1, microbatch] = Arrived(packet)
    else:
        state.departures[program.index, microbatch] = packet


def _run_split(
    state: StepState, program: StageProgram, microbatch: int, arrived: Packet | None
) -> Packet | None:
    """Run a stage and build bridges into its graph, unless nobody waits for I."""
    key = (program.index, microbatch)
    leaves = state.leaves(program.index)
    deferred = state.deferred[key] = Deferred()
    if not leaves or not _needs_gradient(state, program, arrived):
        return _run(state, program, microbatch, arrived)
    statistics = Statistics(program)
    given = [*_arguments(state, program, microbatch), *([] if arrived is None else arrived.leaves)]
    seen = versions(given)
    try:
        with Splitting(leaves, deferred) as mode:
            return _run(state, program, microbatch, arrived, mode)
    except Differentiates:
        leave_whole(program.module)
    if is_changed(seen):
        raise RuntimeError(
            "the stage differentiates inside its forward and changes its input in place, so it "
            "cannot begin again without bridges: use a schedule with B for it"
        )
    state.deferred[key] = Deferred()
    leaves.clear()
    statistics.put_back()
    return _run(state, program, microbatch, arrived)


def _needs_gradient(state: StepState, program: StageProgram, arrived: Packet | None) -> bool:
    flags = state.microbatches.inputs_with_gradient if arrived is None else arrived.differentiable
    return state.builds_graph and any(flags)


def _arguments(state: StepState, program: StageProgram, microbatch: int) -> list[Any]:
    """Return the arguments of the model that a stage may use."""
    if state.chosen:
        return list(state.chosen[microbatch].leaves)
    return tree_flatten(state.microbatches.inputs(microbatch))[0] if program.is_first else []


def _run(
    state: StepState,
    program: StageProgram,
    microbatch: int,
    arrived: Packet | None,
    mode: Splitting | None = None,
) -> Packet | None:
    """Call a stage; return what goes to the next one, None if it is the last."""
    output = _call(state, program, microbatch, arrived)
    if mode is not None:
        output = mode.held(output)
    if program.is_last:
        _finish(state, program, microbatch, output, mode)
        return None
    packet, roots = leave(output, program.buffers)
    if state.builds_graph:
        checked = [output] if packet.spec is None else tree_flatten(output)[0]
        state.foreign.check(program.index, checked)
        state.roots[program.index, microbatch] = roots
    return packet


def _call(state: StepState, program: StageProgram, microbatch: int, arrived: Packet | None) -> Any:
    """Let what arrived into the graph of a stage, and call it."""
    if arrived is None:
        inputs = _model_inputs(state, microbatch)
        if state.chosen:
            call = partial(_call_recorded, state, program, microbatch, None, inputs)
        else:
            call = partial(program.call_first, *inputs)
        return _drawing(state, program.index, microbatch, call)
    entered = enter(arrived)
    del arrived
    if entered.slot is not None:
        state.slots[program.index, microbatch] = entered.slot
    if state.chosen:
        call = partial(_call_recorded, state, program, microbatch, entered.value)
    else:
        call = partial(program.call, entered.value)
    output = _drawing(state, program.index, microbatch, call)
    entered.check()
    return output


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


def _finish(
    state: StepState, program: StageProgram, microbatch: int, output: Any, mode: Splitting | None
) -> None:
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
    if mode is not None:
        loss = mode.held(loss)
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
