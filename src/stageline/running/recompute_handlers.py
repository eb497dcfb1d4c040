"""The handlers of recompute: F that drops its graph, and R, which builds it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from stageline.running.boundary import Packet, copy_shared
from stageline.running.first_runs import Statistics, samples
from stageline.running.forwards import (
    arguments_of,
    arrived_at,
    hand_on,
    run_stage,
    run_stage_split,
)
from stageline.running.program import StageProgram
from stageline.running.recompute import checkpointing, recomputing
from stageline.running.state import StepState
from stageline.running.transports.base import Edge


def forward_dropped(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """F that keeps its input and not its graph, because R will run it again.

    It builds the graph all the same: which outputs need a gradient is seen only there.
    """
    program = state.programs[stage]
    arrived = arrived_at(state, program, microbatch)
    arguments = arguments_of(state, program, microbatch)
    is_first = state.first_runs.is_first(stage)
    with (
        state.first_runs.kept(program, microbatch, arrived, arguments) as first,
        checkpointing(program.generators),  # some 50 us; R's values need not show every draw
    ):
        made = run_stage(state, program, microbatch, arrived)
        if is_first or program.is_on_cpu:  # an accelerator would be waited for
            first.made = samples(_results(state, microbatch, made))
    for table in (state.roots, state.slots, state.gradients):
        table.pop((stage, microbatch), None)
    handed_on = state.outputs.get(microbatch) if made is None else made
    if handed_on is not None:
        # A stage that returns its input as it is: the next one may change it in place before R.
        copy_shared(handed_on, [*arguments, *(first.packet.leaves if first.packet else ())])
    hand_on(state, program, microbatch, made)


def recompute(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """R: run a stage once more and keep its graph; its output has long been handed on."""
    _again(state, stage, microbatch, run_stage)


def recompute_split(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    """R before I and W."""
    _again(state, stage, microbatch, run_stage_split)


def _again(
    state: StepState,
    stage: int,
    microbatch: int,
    run: Callable[[StepState, StageProgram, int, Packet | None], Packet | None],
) -> None:
    program = state.programs[stage]
    first = state.first_runs.pop(stage, microbatch)
    first.check_state()
    statistics = Statistics(program)
    with recomputing():
        made = run(state, program, microbatch, first.packet)
    first.check_made(_results(state, microbatch, made))
    if program.is_last and state.loss_rule is None:
        del state.outputs[microbatch]  # the caller has it since F
    statistics.put_back()


def _results(state: StepState, microbatch: int, packet: Packet | None) -> Iterator[Tensor]:
    """Yield what a stage has made that gradients will come for."""
    if packet is None and state.loss_rule is not None:
        yield state.losses.of(microbatch)
        return
    made = state.outputs[microbatch] if packet is None else packet
    for leaf, flag in zip(made.leaves, made.differentiable, strict=True):
        if flag:
            yield leaf
