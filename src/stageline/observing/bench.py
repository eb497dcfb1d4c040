"""The blocks of a model on the bench: copies, microbatches for them, and what is seen of each."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stageline.capturing.inputs import Arguments
from stageline.capturing.recorded import Graph
from stageline.observing.memory import StageMemory, measure_call
from stageline.observing.playing import Players
from stageline.observing.shares import (
    SLOTS,
    Samples,
    Share,
    Work,
    clock_for,
    copied,
    finish,
    typical,
)
from stageline.partitioning.balance import balance
from stageline.partitioning.costs import TIMES, BlockCosts, BoundaryCosts, ModelCosts
from stageline.running.allocator import keep_freed_memory
from stageline.running.boundary import Packet
from stageline.running.cores import share_of_cores, share_of_threads
from stageline.running.forwards import forward
from stageline.running.loss import LossFunction, LossRule, own_loss
from stageline.running.microbatches import Microbatches, replicate
from stageline.running.program import StageProgram
from stageline.running.recordings import Recordings
from stageline.running.streams.calls import StageStreams, Streams
from stageline.torch_private import tree_flatten
from stageline.wording import from_to

# Of normal errors: 1.48 median deviations are one standard deviation, and a median is 1.25 times as
# uncertain as an average.
_ERROR_OF_MEDIAN = 1.48 * 1.25


@dataclass(frozen=True)
class Neighbours:
    """Who computes at the same time.

    Attributes:
        count: How many ranks, the one that is timed included.
        cores: How many of them have a core at a time.
        alone: Whether each has an interpreter of its own.
    """

    count: int
    cores: int
    alone: bool

    @property
    def threads(self) -> int:
        """How many intra-op threads each rank has, as in a pipeline."""
        if self.count == 1:
            return share_of_cores()  # beside other processes, if torchrun has started them
        if self.alone:
            return max(1, min(torch.get_num_threads(), self.cores // self.count))
        return share_of_threads(self.count)

    def __str__(self) -> str:
        where = "processes" if self.alone else "threads"
        return "one rank busy" if self.count == 1 else f"{self.count} ranks busy as {where}"


@dataclass(frozen=True)
class _Played:
    """A copy of all blocks, with microbatches for them."""

    programs: Mapping[int, StageProgram]
    work: Work
    together: Mapping[int, range]

    @contextmanager
    def streaming(self) -> Iterator[None]:
        streams = self.work.streams
        with nullcontext() if streams is None else streams.installed():
            yield


class _Together(nn.Module):
    """Blocks that run as one stage."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, value: Any, leaves: Sequence[Any], variant: str | None) -> Any:
        for block in self.blocks:
            value = block(value, leaves, variant)
        return value


class Bench:
    """Runs the blocks of a model.

    Args:
        graph: The model.
        loss_fn: What the last block ends in; None if the model has its own loss, or none.
        target: What the loss is given for the rows of the example.
    """

    def __init__(self, graph: Graph, loss_fn: LossFunction | None, target: Any) -> None:
        self._graph = graph
        self._loss_fn = loss_fn
        self._target = Arguments.of((target,), {})
        self._staged = graph.cut(graph.cuts)
        tensors = (*graph.model.parameters(), *graph.model.buffers())
        self._device = next((t.device for t in tensors), torch.device("cpu"))
        if self._device.type == "cpu":
            keep_freed_memory()  # as every pipeline does

    def measure(
        self, rows: int, repeats: int, neighbours: Neighbours, advance: Callable[[], None]
    ) -> ModelCosts:
        """Return what all blocks cost for microbatches of so many rows."""
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            played = self._played(rows)
            with played.streaming():
                packets = _arrivals(played)
            if self._loss_fn is None and _is_loss(packets[-1]):
                played = self._played(rows, LossRule(None, "mean"))
            memories = [_memory(played, block, packets) for block in range(len(packets) - 1)]
            spans = self._spans(self._num_players(neighbours))
            together = [_wanted(span, memories) for span in spans]
            played = self._played(rows, played.work.loss_rule, together)
            samples = self._timed(played, spans, packets, repeats, neighbours, advance)
        scale = max(neighbours.count / neighbours.cores, 1.0)
        ends = pairwise([0, *self._graph.cuts, self._graph.num_nodes])
        blocks = [
            self._costs(index, span, samples, scale, memories[index], packets)
            for index, span in enumerate(ends)
        ]
        boundary = _boundary(played.together, samples, memories, scale)
        origin = f"measured here, {neighbours}"
        return ModelCosts(tuple(blocks), rows, origin, boundary=boundary)

    def _played(
        self, rows: int, rule: LossRule | None = None, together: Sequence[range] = ()
    ) -> _Played:
        """Copy the blocks, and make microbatches for all slots.

        Args:
            rows: Of a microbatch.
            rule: What a model with a loss of its own ends in.
            together: Blocks that also run as one stage, with a number behind those of the blocks.
        """
        if self._loss_fn is not None:
            rule = LossRule(self._loss_fn, "mean")
        args, kwargs = _batch(self._graph.example, rows * SLOTS)
        (target,), _ = _batch(self._target, rows * SLOTS)
        batch = Microbatches(args, kwargs, target, num_microbatches=SLOTS)
        chosen = Recordings(self._staged).choose(batch, builds_graph=True)
        programs = {
            index: self._program(index, copy.deepcopy(stage), len(self._staged.held))
            for index, stage in self._staged.held.items()
        }
        several = {len(programs) + at: span for at, span in enumerate(together) if len(span) > 1}
        for index, span in several.items():
            module = _Together([programs[block].module for block in span])
            is_last = span[-1] == len(self._staged.held) - 1
            programs[index] = self._program(index, module, index + (1 if is_last else 2))
        streams = Streams(
            {i: StageStreams.of(p.module, p.module, {}, None) for i, p in programs.items()},
            self._loss_fn,
            may_draw=True,
        )
        drawn = streams.of_call("measuring", lambda: 0, 0)
        return _Played(programs, Work(batch, chosen, drawn, rule), several)

    def _program(self, index: int, module: nn.Module, num_stages: int) -> StageProgram:
        return StageProgram(
            index=index,
            num_stages=num_stages,
            module=module,
            device=self._device,
            next_is_local=True,
            previous_is_local=True,
        )

    def _timed(
        self,
        played: _Played,
        spans: Sequence[range],
        packets: Sequence[Packet | None],
        repeats: int,
        neighbours: Neighbours,
        advance: Callable[[], None],
    ) -> Samples:
        clock = clock_for(self._device, alone=neighbours.alone)
        players = []
        for index in range(self._num_players(neighbours)):
            if index == len(spans):
                rows = played.work.microbatches.rows // SLOTS
                played = self._played(rows, played.work.loss_rule)
            span = spans[index % len(spans)]
            together = next(
                ((i, packets[s[0]]) for i, s in played.together.items() if s[0] in span), None
            )
            players.append(
                Share(played.programs, span, packets[span[0]], played.work, clock, together)
            )
        with played.streaming():
            return Players(players, repeats, neighbours.threads, advance).play()

    def _num_players(self, neighbours: Neighbours) -> int:
        """Return how many ranks really run at the same time."""
        return min(neighbours.count, neighbours.cores) if self._device.type == "cpu" else 1

    def _spans(self, count: int) -> list[range]:
        """Return which blocks go together: shares of about the same time, as in a pipeline."""
        ends = pairwise([0, *self._graph.cuts, self._graph.num_nodes])
        times = [self._graph.load(*span).time for span in ends]
        sizes = balance(times, min(count, len(times)))
        return [range(a, b) for a, b in pairwise([0, *accumulate(sizes)])]

    def _costs(
        self,
        index: int,
        span: tuple[int, int],
        samples: Samples,
        scale: float,
        memory: StageMemory,
        packets: Sequence[Packet | None],
    ) -> BlockCosts:
        load = self._graph.load(*span)
        kept = memory.after_forward - memory.after_weight_gradient
        is_last = index == len(packets) - 2
        return BlockCosts(
            name=from_to(self._graph.label(*span)),
            **_times(samples, index, scale, is_split=memory.is_split),
            input_bytes=memory.input_bytes,
            activation_bytes=max(kept - memory.input_bytes, 0),
            input_gradient_frees=memory.after_forward - memory.after_input_gradient,
            parameters=load.parameters,
            parameter_bytes=load.parameter_bytes,
            output_bytes=0 if is_last else _size(packets[index + 1]),
            kept_output_bytes=memory.output_bytes,
            wants_input_gradient=memory.wants_input_gradient,
        )


def _times(samples: Samples, index: int, scale: float, *, is_split: bool) -> dict[str, int]:
    """Return what a block takes, or several that run as one stage."""
    times = {what: typical(found) for (what, block), found in samples.items() if block == index}
    # Bridges are built in F; only schedules with I and W pay for them.
    bridges = max(times["F split"] - times["F"], 0) if is_split else 0
    return {
        "forward": round(scale * times["F"]),
        "input_gradient": round(scale * (times["I"] + bridges)),
        "weight_gradient": round(scale * times["W"]),
        "backward": round(scale * times["B"]),
    }


def _wanted(span: range, memories: Sequence[StageMemory]) -> range:
    """Return the blocks of a share from the first on to which a value comes that has a gradient.

    A stage that begins before does nothing in I, and so cannot be compared with its blocks.
    """
    begin = next((at for at in span if at and memories[at].wants_input_gradient), span.stop)
    return range(begin, span.stop)


def _boundary(
    together: Mapping[int, range],
    samples: Samples,
    memories: Sequence[StageMemory],
    scale: float,
) -> BoundaryCosts:
    """Return what a boundary takes: by how much blocks together are faster than one by one.

    That is small beside what they take. So times are compared that were taken one after the other;
    of the differences the median counts, less its error: what is not sure is not taken off.
    """
    gains: dict[str, list[float]] = {name: [] for name in TIMES}
    for index, span in together.items():
        is_split = any(memories[block].is_split for block in span)
        joined = _series(samples, index, is_split=is_split)
        apart = [_series(samples, at, is_split=memories[at].is_split) for at in span]
        for name, times in joined.items():
            sums = (sum(each[name][at] for each in apart) for at in range(len(times)))
            gains[name] += [
                (total - time) / (len(span) - 1) for total, time in zip(sums, times, strict=True)
            ]
    sure = {name: _surely(found or [0]) for name, found in gains.items()}
    return BoundaryCosts(**{name: max(0, round(scale * sure[name])) for name in TIMES})


def _surely(found: Sequence[float]) -> float:
    """Return the median, less its standard error as far as the median deviation tells it."""
    middle = statistics.median(found)
    deviation = statistics.median(abs(each - middle) for each in found)
    return middle - _ERROR_OF_MEDIAN * deviation / math.sqrt(len(found))


def _series(samples: Samples, index: int, *, is_split: bool) -> dict[str, list[int]]:
    """Return all times of a block, in the order in which they were taken."""
    plain, split, inputs = (samples[what, index] for what in ("F", "F split", "I"))
    if is_split:
        inputs = [i + s - f for i, s, f in zip(inputs, split, plain, strict=True)]
    weights, backward = samples["W", index], samples["B", index]
    return dict(zip(TIMES, (plain, inputs, weights, backward), strict=True))


def _batch(example: Arguments, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments for so many rows, marked so that they are split as the example says."""
    if example.rows is None:
        return example.unpacked()
    grown = example.with_rows(rows)
    leaves = [
        new if example.is_batch(old) or not isinstance(old, Tensor) else replicate(new)
        for old, new in zip(example.leaves, grown.leaves, strict=True)
    ]
    return grown.with_leaves(leaves).unpacked()


def _arrivals(played: _Played) -> list[Packet | None]:
    """Run all blocks once; return what comes to each, and what the last one makes."""
    work = replace(played.work, loss_rule=None)
    state = work.state(played.programs)
    packets: list[Packet | None] = [None]
    for index, program in sorted(played.programs.items()):
        forward(state, index, 0, None)
        made = finish(state, program, 0)
        assert made is not None  # there is no loss
        packets.append(copied(made))
        state.arrivals[index + 1, 0] = made
    return packets


def _is_loss(packet: Packet | None) -> bool:
    assert packet is not None
    loss = own_loss(packet.value())
    return isinstance(loss, Tensor) and loss.numel() == 1 and any(packet.differentiable)


def _memory(played: _Played, block: int, packets: Sequence[Packet | None]) -> StageMemory:
    program, work = played.programs[block], played.work
    chosen = work.chosen[0]
    flags = work.microbatches.inputs_with_gradient if program.is_first else []
    given = packets[block]
    if flags:  # they enter like any value
        leaves, spec = tree_flatten(work.microbatches.inputs(0))
        cut_off = [
            leaf.detach() if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)
        ]
        given = Packet(cut_off, spec, flags)

    def call(value: Any) -> Any:
        arguments = tree_flatten(value)[0] if flags else chosen.leaves
        came = None if flags else value
        output = program.module(came, program.localise(arguments), chosen.variant)
        if program.is_last and work.loss_rule is not None:
            return work.loss_rule.loss(output, work.microbatches.target(0))
        return output

    return measure_call(program.module, call, given, is_lent=bool(flags))[0]


def _size(packet: Packet | None) -> int:
    leaves = [] if packet is None else packet.leaves
    return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor))
