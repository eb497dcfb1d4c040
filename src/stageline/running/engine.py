"""One call of a pipeline, from batch to result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from stageline.errors import BatchError, PipeError, ScheduleError
from stageline.running.batch_norm import deferred, kept
from stageline.running.boundary import Packet
from stageline.running.call_lock import CallLock
from stageline.running.caller import CallerState
from stageline.running.caller_graph import (
    DifferentiableRun,
    Linked,
    Unchanged,
    accumulate_inputs,
    input_gradients,
    refuse_history,
)
from stageline.running.control.agreement import ROWS, Facts
from stageline.running.events import Observer
from stageline.running.executor import BoundRow, StepState
from stageline.running.foreign import ForeignParameters
from stageline.running.forward_modes import ForwardModes
from stageline.running.loss import LossRule
from stageline.running.merging import MergedOutputs, MergeOutputs
from stageline.running.microbatches import BatchDims, Microbatches
from stageline.running.processes import ProcessRunner
from stageline.running.program import StageProgram
from stageline.running.recordings import Chosen, Recordings
from stageline.running.result import LossValues, StepResult
from stageline.running.runner import Runner
from stageline.running.shipping import Given, Shipping, has_data, has_rows
from stageline.running.signature import facts_of, named_leaves
from stageline.running.sizes import MicrobatchSizes
from stageline.running.streams.calls import (
    CallStreams,
    Streams,
    generator_untouched,
    seeds,
)
from stageline.running.ties import Ties
from stageline.running.timetable import Purpose, Timetable, halves
from stageline.running.undoing import Undo


@dataclass(eq=False)
class Engine:
    """Runs calls on the stages that live in this process.

    Attributes:
        programs: The stages that live here, by index.
        timetable: The schedule, for any batch.
        runner: Who plays the ranks.
        loss_rule: How the last stage makes a loss.
        batch_dims: Where the batch dimension lies, if not first.
        sizes: How many rows each microbatch gets; None: as ``torch.tensor_split`` cuts.
        merge: How the outputs of microbatches become those of the batch.
        keeps_outputs: Whether a step returns its outputs; the only one that may change.
        shares_outputs: Whether outputs go to every rank, or stay on the last stage's.
        undo: Puts back what a failed step has changed.
        foreign: Which stages each parameter of the model belongs to.
        ties: What stages share.
        streams: Where random numbers come from.
        defers_statistics: Whether BatchNorms count the whole batch once, when a call has ended.
    """

    programs: Mapping[int, StageProgram]
    timetable: Timetable
    runner: Runner
    loss_rule: LossRule
    batch_dims: BatchDims
    sizes: MicrobatchSizes | None
    merge: MergeOutputs
    keeps_outputs: bool
    shares_outputs: bool
    undo: Undo
    foreign: ForeignParameters
    ties: Ties
    streams: Streams
    recordings: Recordings | None = None
    defers_statistics: bool = False
    _lock: CallLock = field(default_factory=CallLock)

    @property
    def _placement(self) -> tuple[int, ...]:
        return self.timetable.schedule.placement

    @property
    def _last_rank(self) -> int:
        return self._placement[-1]

    @cached_property
    def _shipping(self) -> Shipping | None:
        """What brings data to ranks that lack it; None if all ranks live in this process."""
        if not isinstance(self.runner, ProcessRunner):
            return None
        return Shipping(self.runner, self._placement, self.recordings, self.loss_rule)

    def train(self, mode: bool) -> None:
        """Follow the pipeline's train() and eval() in what no stage contains."""
        self.runner.training = mode
        if self.recordings is not None:
            self.recordings.train(mode)

    def step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        *,
        trains: bool,
        observer: Observer | None,
    ) -> StepResult:
        """Run one training or evaluation step."""
        if trains and not self.timetable.schedule.has_backward:
            raise ScheduleError(
                f"schedule {self.timetable.schedule.name!r} has no backward, so it cannot train: "
                "call pipe.eval() for the loss alone, or choose another schedule"
            )
        purpose = Purpose.TRAIN if trains else Purpose.EVALUATE
        with self._call(purpose):
            batch = self._cut(args, kwargs, target, purpose)
            self.ties.refresh()
            states = self._states(batch, purpose, self.loss_rule)
            with self.undo.on_failure(gradients=trains), self._statistics(states):
                self._run(self.timetable.rows(batch.count, purpose), states, observer, purpose)
                last = states.get(self._last_rank)
                outputs = self._outputs(last, batch) if self.keeps_outputs else None
                loss = self.runner.finish()
            first = states.get(self._placement[0])
            if first is not None:
                accumulate_inputs(first)
            assert loss is not None
            return StepResult(loss=loss, outputs=outputs, num_microbatches=batch.count)

    def infer(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], observer: Observer | None
    ) -> Any:
        """Return the outputs of the whole batch; no graph is built."""
        purpose = Purpose.INFER
        with self._call(purpose):
            batch = self._cut(args, kwargs, None, purpose)
            self.ties.refresh()
            states = self._states(batch, purpose, None)
            with self.undo.on_failure(gradients=False), self._statistics(states):
                self._run(self.timetable.rows(batch.count, purpose), states, observer, purpose)
                outputs = self._outputs(states.get(self._last_rank), batch)
                self.runner.finish()
            return None if outputs is None else outputs()

    def differentiate(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], observer: Observer | None
    ) -> DifferentiableRun:
        """Run all forwards and keep their graphs, for a backward that comes later.

        What R computes then, it computes under the modes of this call.
        """
        purpose = Purpose.DIFFERENTIATE
        with self._call(purpose):
            caller = CallerState.capture()
            batch = self._cut(args, kwargs, None, purpose)
            self.ties.refresh()
            states = self._states(batch, purpose, None)
            rows = [halves(row) for row in self.timetable.rows(batch.count, purpose)]
            recomputes = any(later.recomputes for _, later in rows)
            modes = ForwardModes(self._modules()) if recomputes else None
            with self.undo.on_failure(gradients=False), self._statistics(states):
                self._run([forward for forward, _ in rows], states, observer, purpose)
            outputs = states[self._last_rank].outputs
            packets = [outputs.pop(index) for index in range(batch.count)]
            linked = Linked(self.undo.parameters)
        backwards = [later for _, later in rows]
        unchanged = Unchanged(batch)

        def backward(
            gradients: Sequence[Sequence[Tensor | None]], is_whole: bool
        ) -> list[Tensor | None]:
            if not states:
                raise PipeError(
                    "the graphs of this call are gone: it was differentiated before. Call the "
                    "pipeline again; retain_graph=True does not reach into it"
                )
            unchanged.check()
            linked.check()
            mine = dict(states)
            states.clear()
            last = mine[self._last_rank]
            for index, of_microbatch in enumerate(gradients):
                key = (len(self._placement) - 1, index)
                last.gradients[key] = Packet(list(of_microbatch))
            with (
                self._call(),
                self.undo.set_aside(() if is_whole else linked.parameters) as made,
                self.undo.on_failure(gradients=False),
                kept(self.programs.values(), is_wanted=self.defers_statistics),
                nullcontext() if modes is None else modes.restored(),
            ):
                self._run(backwards, mine, observer, purpose, caller)
            of_inputs = input_gradients(mine[self._placement[0]])
            of_parameters = made or [None] * len(linked.parameters)
            return [*of_parameters, *(of_inputs or [None] * len(leaves))]

        leaves = [leaf for leaf in batch.input_tensors() if leaf.requires_grad]
        inputs = [*linked.parameters, *leaves]
        return DifferentiableRun(packets, inputs, linked.has_others, batch.sizes, backward)

    def _modules(self) -> Iterator[nn.Module]:
        """Yield all modules whose training flags decide what a forward computes."""
        for program in self.programs.values():
            yield from program.module.modules()
        if self.recordings is not None:
            yield from self.recordings.opened

    def _run(
        self,
        rows: Sequence[BoundRow],
        states: Mapping[int, StepState],
        observer: Observer | None,
        purpose: Purpose,
        caller: CallerState | None = None,
    ) -> None:
        """Run rows, and give tied parameters their gradients."""
        of_call = next(iter(states.values()))  # all ranks have the same streams and statistics
        streams = of_call.streams
        with ExitStack() as stack:
            if purpose.builds_graph and self.ties.has_parameters:
                stack.enter_context(self.ties.summed(self.runner))
            if self.ties.has_buffers:
                stack.enter_context(self.ties.buffers_watched())
            stack.enter_context(generator_untouched())
            if streams is not None:
                stack.enter_context(streams.installed())
            self.runner.run(rows, states, observer, caller)
            last = states.get(self._last_rank)
            if last is not None and last.loss_rule is not None:
                # Now, while earlier ranks still run: in a moment all may wait for this one.
                losses = last.losses
                self.runner.note_loss(LossValues(losses.total(), losses.each()))
            if of_call.statistics is not None:
                of_call.statistics.combine()

    def _statistics(self, states: Mapping[int, StepState]) -> AbstractContextManager[None]:
        """Let running statistics change when the call has ended, if the user asked for it."""
        programs = self.programs.values()
        return deferred(programs, states.values(), is_wanted=self.defers_statistics)

    def _cut(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, purpose: Purpose
    ) -> Microbatches:
        """Cut the batch into microbatches, as many as all ranks agree on."""
        count = self.timetable.schedule.num_microbatches
        cut: list[Microbatches] = []
        shipping = self._shipping
        given = Given(has_data(*args, kwargs), target is not None)

        def told(batch: Microbatches | None) -> Facts:
            if shipping is None:
                return {ROWS: None if batch is None else batch.rows}
            step = self.streams.completed[purpose.name]
            draws = self.streams.draws_now()
            rows = None if batch is None else batch.rows
            leaves = batch.named_leaves() if batch else named_leaves(args, kwargs, target)
            outputs = self.keeps_outputs if self.shares_outputs else None
            call = self.runner.calls
            facts = facts_of(rows, leaves, call=call, step=step, draws=draws, outputs=outputs)
            return {**facts, **shipping.look(purpose, given, batch)}

        def look() -> Facts:
            self._check_arguments(args, kwargs, target, purpose)
            if not self._is_first and not has_rows(*args, kwargs, target):
                return told(None)
            batch = Microbatches(
                args,
                kwargs,
                target,
                num_microbatches=count,
                batch_dims=self.batch_dims,
                sizes=self.sizes,
            )
            if purpose is Purpose.TRAIN:
                refuse_history(batch)
            cut.append(batch)
            return told(batch)

        rows = self.runner.begin(purpose, look)
        if shipping is not None:
            shipping.settle(purpose, given)
        if cut:
            has_loss = purpose in (Purpose.TRAIN, Purpose.EVALUATE)
            takes_inputs = self.recordings is not None and self.recordings.takes_inputs
            cut[0].slice_ahead(
                inputs=self._is_first or takes_inputs,
                targets=has_loss and self._last_rank in self.runner.ranks,
            )
            return cut[0]
        return Microbatches((), {}, target, num_microbatches=count, rows=rows, sizes=self.sizes)

    @property
    def _is_first(self) -> bool:
        return self._placement[0] in self.runner.ranks

    def _check_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, purpose: Purpose
    ) -> None:
        if self._is_first and not has_data(*args, kwargs):
            raise BatchError(
                f"rank {self._placement[0]} holds stage 0 and needs the model's arguments, but "
                "none of them is a tensor: pass the batch, step(x, target=y)"
            )
        if purpose not in (Purpose.TRAIN, Purpose.EVALUATE):
            return
        if self.loss_rule.function is None:
            if target is not None:
                raise BatchError(
                    "a target was given, but this pipeline has no loss_fn to use it: pass "
                    "loss_fn=..., or give the labels to the model that computes its own loss"
                )
        elif target is None and self._shipping is None:
            raise BatchError(
                f"rank {self._last_rank} holds the last stage and needs a target for loss_fn: "
                "step(x, target=y)"
            )

    def _states(
        self, batch: Microbatches, purpose: Purpose, loss_rule: LossRule | None
    ) -> dict[int, StepState]:
        chosen: Sequence[Chosen] = ()
        if self._shipping is not None:
            chosen = self._shipping.chosen(batch, purpose)
            self._shipping.deliver_target(batch, purpose)
        elif self.recordings is not None:
            chosen = self.recordings.choose(batch, builds_graph=purpose.builds_graph)
        # Only now: what was recorded for this call may draw, and so may the loss.
        streams = self._streams(purpose)
        if streams is not None:
            self.runner.note_draws()
        return {
            rank: StepState(
                self.programs,
                batch,
                builds_graph=purpose.builds_graph,
                loss_rule=loss_rule,
                keeps_outputs=self.keeps_outputs,
                foreign=self.foreign,
                chosen=chosen,
                streams=streams,
            )
            for rank in self.runner.ranks
        }

    def _streams(self, purpose: Purpose) -> CallStreams | None:
        """Return the streams of a call; seed and number are the same on every rank.

        A call that can be differentiated takes its seed from the caller's generator, as a plain
        model would take all its draws: ``torch.manual_seed`` before it repeats it.
        """
        if not self.streams.may_draw:
            return None
        if purpose is Purpose.DIFFERENTIATE:
            return self.streams.of_call(purpose.name, seeds.draw, 0)
        number = self.streams.completed[purpose.name]
        return self.streams.of_call(purpose.name, lambda: self.runner.seed, number)

    def _outputs(self, last: StepState | None, batch: Microbatches) -> MergedOutputs | None:
        """Return the outputs of the batch where they are wanted; every rank merges for itself."""
        parts = None if last is None else [last.outputs.pop(i).value() for i in range(batch.count)]
        if self.shares_outputs:
            parts = self.runner.share(parts, owner=self._last_rank)
        return None if parts is None else MergedOutputs(parts, batch.sizes, self.merge)

    @contextmanager
    def _call(self, counted: Purpose | None = None) -> Iterator[None]:
        """One call at a time; what fails here fails on every rank, and what succeeds is counted."""
        is_over = True
        with self._lock.held(waits=not self.runner.compares):
            try:
                yield
            except BaseException as error:
                told = self.runner.failed(error)
                is_over = self.runner.is_over
                if told is error:
                    raise
                raise told from told.__cause__
            finally:
                if is_over and counted is not None:
                    self.streams.completed[counted.name] += 1
                if self._shipping is not None:
                    if is_over:
                        self._shipping.keep()
                    else:
                        self._shipping.forget()
