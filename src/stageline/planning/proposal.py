"""A proposal: cuts, schedule and microbatches, and what a step of them should cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from stageline.capturing.graph import Cuttable
from stageline.errors import ConfigError
from stageline.partitioning.amounts import show_bytes
from stageline.partitioning.plan import Plan
from stageline.planning.candidates import Candidate, Method
from stageline.planning.comparing import Comparison, Measured, seconds_of
from stageline.scheduling import Schedule
from stageline.wording import aligned, milliseconds


@dataclass(frozen=True)
class Prediction:
    """What a step should cost, by simulation.

    Attributes:
        seconds: The whole step.
        T: Its nanoseconds until the last rank has ended; no reduction.
        span: The longest time of a rank from its own first forward, likewise.
        bubble: The share of the ranks' time in which they do not compute.
        busy: Nanoseconds in which each rank computes.
        reduction: Seconds in which copies of the pipeline add up their gradients.
        parameter_bytes: What each rank keeps of parameters, with gradients and optimizer.
        activation_bytes: What each rank holds of activations at most.
        agreement: Seconds in which the ranks agree that the step begins, and that it is over.
    """

    seconds: float
    T: int
    span: int
    bubble: float
    busy: tuple[int, ...]
    reduction: float
    parameter_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    agreement: float = 0.0

    @property
    def memory(self) -> tuple[int, ...]:
        """The bytes that each rank needs."""
        pairs = zip(self.parameter_bytes, self.activation_bytes, strict=True)
        return tuple(fixed + held for fixed, held in pairs)


@dataclass(frozen=True)
class Proposal:
    """One way to run a model: hand it to ``sl.Pipeline(plan=proposal)``.

    Attributes:
        sizes: How many blocks each stage has.
        placement: The rank of each stage.
        schedule: Who does what, in which order.
        method: The schedule's name, how many stages a rank has, whether activations are recomputed.
        num_microbatches: Slices of the batch; of one copy's share of it.
        rows: The rows of the largest of them.
        data_parallel: How many copies of the pipeline share the batch.
        predicted: What a step should cost.
        origin: Where the costs came from.
    """

    sizes: tuple[int, ...]
    placement: tuple[int, ...]
    schedule: Schedule
    method: Method
    num_microbatches: int
    rows: int
    data_parallel: int
    predicted: Prediction
    origin: str
    _graph: Cuttable | None = field(default=None, compare=False, repr=False)
    _opened_for: int = field(default=1, compare=False, repr=False)

    @property
    def num_ranks(self) -> int:
        """The ranks of one pipeline."""
        return max(self.placement) + 1

    @property
    def num_stages(self) -> int:
        return len(self.sizes)

    @property
    def recompute(self) -> bool:
        """Whether activations are computed again for the backward."""
        return self.method.recompute

    @property
    def candidate(self) -> Candidate:
        """What it was before its cuts were chosen."""
        return Candidate(
            self.method, self.data_parallel, self.num_ranks, self.num_microbatches, self.rows
        )

    @property
    def has_graph(self) -> bool:
        """Whether it was made for a model, not from costs alone."""
        return self._graph is not None

    @property
    def graph(self) -> Cuttable:
        """The captured model.

        Raises:
            ConfigError: It was made from costs alone.
        """
        if self._graph is None:
            raise ConfigError(
                "the plan of this proposal",
                ["it was made from costs alone: use sl.find_plans(model, ...), or from_json"],
            )
        return self._graph

    @property
    def cuts(self) -> tuple[int, ...]:
        """The positions of the graph between the stages."""
        return tuple(self.graph.cuts[last - 1] for last in [*accumulate(self.sizes)][:-1])

    @cached_property
    def plan(self) -> Plan:
        """The stages; the model is cut when this is first asked for."""
        return Plan.of(self.graph, self.cuts, self.placement, opened_for=self._opened_for)

    @property
    def opened_for(self) -> int:
        """The number of stages for which the graph was opened."""
        return self._opened_for

    def table(self) -> str:
        """Return what each rank has to do, as a table."""
        each, predicted = range(self.num_ranks), self.predicted
        held = [[stage for stage, at in enumerate(self.placement) if at == rank] for rank in each]
        wall = max(predicted.T, 1)
        columns = {
            "rank": [str(rank) for rank in each],
            "stages": [" ".join(str(stage) for stage in stages) for stages in held],
            "blocks": [str(sum(self.sizes[stage] for stage in stages)) for stages in held],
            "busy ms": [milliseconds(busy / 1e9) for busy in predicted.busy],
            "idle": [f"{100 * (wall - busy) / wall:.0f} %" for busy in predicted.busy],
            "parameters": [show_bytes(size) for size in predicted.parameter_bytes],
            "activations": [show_bytes(size) for size in predicted.activation_bytes],
            "memory": [show_bytes(size) for size in predicted.memory],
        }
        return f"{self}\n{aligned(columns, left=['stages'])}"

    def explain(self) -> str:
        """Return where the time of the step goes, in words."""
        predicted = self.predicted
        longest = max(predicted.busy)
        rank = predicted.busy.index(longest)
        even = sum(predicted.busy) / len(predicted.busy)
        fullest = max(predicted.memory)
        parts = [even, longest - even, predicted.T - longest]
        shared, uneven, waiting = (milliseconds(part / 1e9) for part in parts)
        lines = [
            str(self),
            f"{shared} ms of work for each rank if it were shared evenly",
            f"{uneven} ms more because rank {rank} has the most of it",
            f"{waiting} ms in which rank {rank} waits: the schedule",
        ]
        if self.data_parallel > 1:
            lines.append(
                f"{milliseconds(predicted.reduction)} ms to add up the gradients of "
                f"{self.data_parallel} copies"
            )
        if predicted.agreement:
            lines.append(
                f"{milliseconds(predicted.agreement)} ms to agree that the step begins and is over"
            )
        lines += [
            f"{milliseconds(predicted.seconds)} ms in all, bubble {100 * predicted.bubble:.1f} %",
            f"fullest: rank {predicted.memory.index(fullest)} with {show_bytes(fullest)}",
            f"costs: {self.origin}",
        ]
        return "\n".join(lines)

    def compare(self, measured: Measured) -> Comparison:
        """Set the prediction beside what was measured.

        Args:
            measured: Seconds of a step; of several, of which the median counts; or the
                ``Recorder`` that was the pipeline's observer.
        """
        return Comparison(self.predicted.seconds, seconds_of(measured))

    def __str__(self) -> str:
        return (
            f"{self.candidate}: {milliseconds(self.predicted.seconds)} ms, "
            f"bubble {100 * self.predicted.bubble:.1f} %"
        )

    def to_json(self) -> str:
        """Return the proposal as text that ``from_json`` reads; it holds no weights."""
        from stageline.planning.saving import proposal_text

        return proposal_text(self)

    @classmethod
    def from_json(
        cls,
        text: str,
        model: Any = None,
        example_args: tuple[Any, ...] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
    ) -> Proposal:
        """Return the proposal that was saved as text.

        Args:
            text: What ``to_json`` returned.
            model: The model, or a capture of it; another one is refused. Without it the
                proposal can be read and compared, but has no plan.
            example_args: The arguments of one call of the model; not with a capture.
            example_kwargs: Its keyword arguments.
        """
        from stageline.planning.saving import read_proposal

        return read_proposal(text, model, example_args, example_kwargs)
