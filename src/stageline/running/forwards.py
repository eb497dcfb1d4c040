"""F, the handlers that run a stage for the first time; all that R does too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from stageline.capturing.direct.calls import Call
from stageline.running.boundary import (
    Packet,
    enter,
    enter_leaf,
    enter_one,
    gradient_edge,
    is_dense,
    leave,
)
from stageline.running.early import enter_early, pays
from stageline.running.first_runs import Statistics, is_changed, versions
from stageline.running.loss import LossRule
from stageline.running.program import StageProgram
from stageline.running.split.deferred import Deferred
from stageline.running.split.mode import Differentiates, Splitting, leave_whole
from stageline.running.state import StepState
from stageline.running.streams.calls import CallStreams
from stageline.running.transports.base import Edge
from stageline.torch_private import tree_flatten


def forward(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """F: run a stage, keep its graph, hand its output on."""
    program = state.programs[stage]
    arrived = arrived_at(state, program, microbatch)
    hand_on(state, program, microbatch, run_stage(state, program, microbatch, arrived))


def forward_split(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """F whose backward is I and W."""
    program = state.programs[stage]
    arrived = arrived_at(state, program, microbatch)
    hand_on(state, program, microbatch, run_stage_split(state, program, microbatch, arrived))


def arrived_at(state: StepState, program: StageProgram, microbatch: int) -> Packet | None:
    """Wait for what the stage before has made; the first stage waits for nothing."""
    if program.is_first:
        return None
    return state.take(state.arrivals, program, (program.index, microbatch))


def hand_on(
    state: StepState, program: StageProgram, microbatch: int, packet: Packet | None
) -> None:
    if packet is None:  # the last stage has made a loss, or outputs
        return
    if program.next_is_local:
        state.arrivals[program.index + 1, microbatch] = packet
    else:
        state.departures[program.index, microbatch] = packet


def run_stage_split(
    state: StepState, program: StageProgram, microbatch: int, arrived: Packet | None
) -> Packet | None:
    """Run a stage and build bridges into its graph, unless nobody waits for I, or it is small."""
    key = (program.index, microbatch)
    state.deferred[key] = Deferred()
    needs_gradient = _needs_gradient(state, program, arrived)
    if program.is_first and not needs_gradient:  # so it is in all microbatches
        return run_stage(state, program, microbatch, arrived)
    given = arguments_of(state, program, microbatch) if arrived is None else arrived.leaves
    is_decided = state.is_decided(program)
    if not state.splits(program, given) or not needs_gradient:
        return run_stage(state, program, microbatch, arrived)
    packet = _run_known(state, program, microbatch, arrived)
    if not is_decided:
        program.worth.note(given, state.deferred[key].work)
    return packet


def _run_known(
    state: StepState, program: StageProgram, microbatch: int, arrived: Packet | None
) -> Packet | None:
    """Run a stage with bridges; if all of its layers are known, nobody has to look on."""
    known = state.known_layers(program)
    if known is None or (program.is_last and state.follows_loss()):
        return _run_bridged(state, program, microbatch, arrived, Splitting({}, Deferred()))
    try:
        return _run_bridged(state, program, microbatch, arrived, known.splitting)
    finally:
        known.splitting.end()


def _run_bridged(
    state: StepState,
    program: StageProgram,
    microbatch: int,
    arrived: Packet | None,
    mode: Splitting,
) -> Packet | None:
    """Run a stage with bridges; if it differentiates, once more without them."""
    key = (program.index, microbatch)
    statistics = Statistics(program)
    given = [
        *arguments_of(state, program, microbatch),
        *([] if arrived is None else arrived.leaves),
    ]
    seen = versions(given)
    mode.begin(state.leaves(program.index), state.deferred[key])
    try:
        return run_stage(state, program, microbatch, arrived, mode)
    except Differentiates:
        leave_whole(program.module)
    if is_changed(seen):
        raise RuntimeError(
            "the stage differentiates inside its forward and changes its input in place, so it "
            "cannot begin again without bridges: use a schedule with B for it"
        )
    state.deferred[key] = Deferred()
    state.stays_whole(program)
    statistics.put_back()
    return run_stage(state, program, microbatch, arrived)


def _needs_gradient(state: StepState, program: StageProgram, arrived: Packet | None) -> bool:
    flags = state.microbatches.inputs_with_gradient if arrived is None else arrived.differentiable
    return state.builds_graph and any(flags)


def arguments_of(state: StepState, program: StageProgram, microbatch: int) -> list[Any]:
    """Return the arguments of the model that a stage may use."""
    if state.chosen:
        return list(state.chosen[microbatch].leaves)
    return tree_flatten(state.microbatches.inputs(microbatch))[0] if program.is_first else []


def run_stage(
    state: StepState,
    program: StageProgram,
    microbatch: int,
    arrived: Packet | None,
    mode: Splitting | None = None,
) -> Packet | None:
    """Call a stage; return what goes to the next one, None if it is the last."""
    with state.counting(program, microbatch):
        if arrived is None:
            output = call_first(state, program, microbatch, mode)
        elif arrived.spec is None and arrived.differentiable[0]:  # by far the most common packet
            tensor = arrived.leaves[0]
            entered = _entered(state, program, microbatch, tensor, mode)
            output = call_stage(state, program, microbatch, entered, mode)
            del entered
        else:
            several = enter(arrived)
            if several.slot is not None:
                state.slots[program.index, microbatch] = several.slot
            output = call_stage(state, program, microbatch, several.value, mode)
            several.check()
            del several
    if program.is_last:
        finish(state, program, microbatch, output, mode)
        return None
    packet, roots = leave(output, program.buffers)
    if state.builds_graph:
        if not state.foreign.is_known(program.index):
            results = [output] if packet.spec is None else tree_flatten(output)[0]
            state.foreign.check(program.index, results)
        state.roots[program.index, microbatch] = roots
    return packet


def _entered(
    state: StepState,
    program: StageProgram,
    microbatch: int,
    tensor: Tensor,
    mode: Splitting | None,
) -> Tensor:
    """Let a single tensor into a stage."""
    key = (program.index, microbatch)
    if mode is None:
        entrance = state.entrance(program)
        if entrance is not None and pays(entrance, tensor):
            entered = enter_early(tensor, entrance, state.slots, key)
            if entered is not None:
                return entered
    if state.takes_leaf(program) and is_dense(tensor):
        return enter_leaf(tensor, state.slots, key)
    return enter_one(tensor, state.slots, key)


def call_stage(
    state: StepState,
    program: StageProgram,
    microbatch: int,
    value: Any,
    mode: Splitting | None = None,
) -> Any:
    """Call a stage with what the stage before returned."""
    if mode is None:
        return _called(state, program, microbatch, state.call_of(program), value)
    known = state.known_layers(program)
    if known is not None and mode is known.splitting:
        return program.call(known.call, value)
    with mode:  # around the user's code alone: it asks about every look at a tensor
        made = _called(state, program, microbatch, program.module, value)
    return mode.held(made)


def _called(state: StepState, program: StageProgram, microbatch: int, run: Call, value: Any) -> Any:
    if state.streams is None:
        if state.chosen:
            return _call_recorded(state, program, microbatch, run, value)
        return program.call(run, value)
    if state.chosen:
        call = partial(_call_recorded, state, program, microbatch, run, value)
    else:
        call = partial(program.call, run, value)
    return _drawing(state.streams, program.index, microbatch, call)


def call_first(
    state: StepState, program: StageProgram, microbatch: int, mode: Splitting | None = None
) -> Any:
    """Call the first stage with the arguments of the model."""
    inputs = _model_inputs(state, microbatch)
    if mode is None:
        return _called_first(state, program, microbatch, state.call_of(program), inputs)
    known = state.known_layers(program)
    if known is not None and mode is known.splitting:
        return program.call_first(known.call, *inputs)
    with mode:
        made = _called_first(state, program, microbatch, program.module, inputs)
    return mode.held(made)


def _called_first(
    state: StepState,
    program: StageProgram,
    microbatch: int,
    run: Call,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
) -> Any:
    if state.streams is None:
        if state.chosen:
            return _call_recorded(state, program, microbatch, run, None, inputs)
        return program.call_first(run, *inputs)
    if state.chosen:
        call = partial(_call_recorded, state, program, microbatch, run, None, inputs)
    else:
        call = partial(program.call_first, run, *inputs)
    return _drawing(state.streams, program.index, microbatch, call)


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


def _drawing(streams: CallStreams, stage: int, microbatch: int, call: Callable[[], Any]) -> Any:
    """Run a stage; what it draws comes from the streams of the microbatch."""
    with streams.forward(stage, microbatch):
        return call()


def _call_recorded(
    state: StepState,
    program: StageProgram,
    microbatch: int,
    run: Call,
    value: Any,
    inputs: Any = None,
) -> Any:
    """Run a stage of a recorded model: it takes arguments of the model whichever stage it is."""
    variant, leaves = state.chosen[microbatch]
    if inputs is not None and state.builds_graph and state.microbatches.inputs_with_gradient:
        leaves = tree_flatten(inputs)[0]
    if not program.is_on_cpu:
        leaves = program.localise(leaves)
    return run(value, leaves, variant)


def finish(
    state: StepState, program: StageProgram, microbatch: int, output: Any, mode: Splitting | None
) -> None:
    """Turn the last stage's output into a loss, or keep it for gradients that come later."""
    if state.loss_rule is not None:
        loss, weight = weighed_loss(state, program, microbatch, output, mode)
        if state.builds_graph:
            _prepare_backward(state, program, microbatch, loss, weight)
        return
    packet, roots = leave(output, program.buffers)
    state.outputs[microbatch] = packet
    if state.builds_graph:
        state.roots[program.index, microbatch] = roots


def weighed_loss(
    state: StepState,
    program: StageProgram,
    microbatch: int,
    output: Any,
    mode: Splitting | None = None,
) -> tuple[Tensor, float]:
    """Return the loss of a microbatch and what it weighs; note both, and the output if wanted."""
    rule = state.loss_rule
    assert rule is not None
    target = state.microbatches.target(microbatch)
    if not program.is_on_cpu:
        target = program.localise(target)
    if mode is None or not state.follows_loss():
        loss = _loss(state, rule, microbatch, output, target)
    else:
        with mode:
            loss = _loss(state, rule, microbatch, output, target)
        loss = mode.held(loss)
    if state.builds_graph and not loss.requires_grad:
        raise RuntimeError(
            "the loss depends on no parameter that requires a gradient: unfreeze one, or call "
            "pipe.eval() first if only the loss is wanted"
        )
    weight = rule.weight(state.microbatches, microbatch)
    state.losses.note(microbatch, loss, weight)
    if state.keeps_outputs:
        state.outputs[microbatch] = leave(output, program.buffers)[0]
    return loss, weight


def _loss(state: StepState, rule: LossRule, microbatch: int, output: Any, target: Any) -> Tensor:
    if state.streams is None:
        return rule.loss(output, target)
    with state.streams.loss(microbatch):
        return rule.loss(output, target)


def _prepare_backward(
    state: StepState, program: StageProgram, microbatch: int, loss: Tensor, weight: float
) -> None:
    """Note where the gradient of a loss enters its graph, and the gradient."""
    if not state.foreign.is_known(program.index):
        state.foreign.check(program.index, [loss])
    key = (program.index, microbatch)
    # Not the loss itself, whose storage may be as large as what it was reduced from.
    state.roots[key] = [gradient_edge(loss)]
    # The share as root gradient is what multiplying the loss by it would give, at no cost.
    state.gradients[key] = Packet([state.share(weight, loss) if weight else None])
