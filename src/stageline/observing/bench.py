"""The blocks of a model on the bench: copies, microbatches for them, and what is seen of each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from stageline.capturing.inputs import Arguments
from stageline.capturing.recorded import Graph
from stageline.capturing.staged import VariantStage
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
from stageline.partitioning.costs import BlockCosts, ModelCosts
from stageline.running.allocator import keep_freed_memory
from stageline.running.boundary import Packet
from stageline.running.cores import share_of_cores, share_of_threads
from stageline.running.forwards import forward
from stageline.running.loss import LossFunction, LossRule, own_loss
from stageline.running.microbatches import Microbatches, replicate
from stageline.running.program import StageProgram
from stageline.running.recordings import Recordings
from stageline.running.streams.calls import StageStreams, Streams
from stageline.wording import from_to


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

    @contextmanager
    def streaming(self) -> Iterator[None]:
        streams = self.work.streams
        with nullcontext() if streams is None else streams.installed():
            yield


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
            samples = self._timed(played, packets, repeats, neighbours, advance)
        scale = max(neighbours.count / neighbours.cores, 1.0)
        ends = pairwise([0, *self._graph.cuts, self._graph.num_nodes])
        blocks = [
            self._costs(index, span, samples, scale, memories[index], packets)
            for index, span in enumerate(ends)
        ]
        return ModelCosts(tuple(blocks), rows, f"measured here, {neighbours}")

    def _played(self, rows: int, rule: LossRule | None = None) -> _Played:
        """Copy the blocks, and make microbatches for all slots."""
        if self._loss_fn is not None:
            rule = LossRule(self._loss_fn, "mean")
        args, kwargs = _batch(self._graph.example, rows * SLOTS)
        (target,), _ = _batch(self._target, rows * SLOTS)
        batch = Microbatches(args, kwargs, target, num_microbatches=SLOTS)
        chosen = Recordings(self._staged, is_first=True).choose(batch, builds_graph=True)
        programs = {
            index: self._program(index, copy.deepcopy(stage))
            for index, stage in self._staged.held.items()
        }
        streams = Streams(
            {i: StageStreams.of(p.module, p.module, {}, None) for i, p in programs.items()},
            self._loss_fn,
            may_draw=True,
        )
        drawn = streams.of_call("measuring", 0, 0)
        return _Played(programs, Work(batch, chosen, drawn, rule))

    def _program(self, index: int, module: VariantStage) -> StageProgram:
        return StageProgram(
            index=index,
            num_stages=len(self._staged.held),
            module=module,
            device=self._device,
            next_is_local=True,
            previous_is_local=True,
        )

    def _timed(
        self,
        played: _Played,
        packets: Sequence[Packet | None],
        repeats: int,
        neighbours: Neighbours,
        advance: Callable[[], None],
    ) -> Samples:
        clock = clock_for(self._device, alone=neighbours.alone)
        count = min(neighbours.count, neighbours.cores) if self._device.type == "cpu" else 1
        spans = self._spans(min(count, len(played.programs)))
        players = []
        for index in range(count):
            if index == len(spans):
                played = self._played(played.work.microbatches.rows // SLOTS, played.work.loss_rule)
            span = spans[index % len(spans)]
            players.append(Share(played.programs, span, packets[span[0]], played.work, clock))
        with played.streaming():
            return Players(players, repeats, neighbours.threads, advance).play()

    def _spans(self, count: int) -> list[range]:
        """Return which blocks go together: shares of about the same time, as in a pipeline."""
        ends = pairwise([0, *self._graph.cuts, self._graph.num_nodes])
        sizes = balance([self._graph.load(*span).time for span in ends], count)
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
        times = {what: typical(found) for (what, block), found in samples.items() if block == index}
        # Bridges are built in F; only schedules with I and W pay for them.
        bridges = max(times["F split"] - times["F"], 0) if memory.is_split else 0
        load = self._graph.load(*span)
        kept = memory.after_forward - memory.after_weight_gradient
        is_last = index == len(packets) - 2
        return BlockCosts(
            name=from_to(self._graph.label(*span)),
            forward=round(scale * times["F"]),
            input_gradient=round(scale * (times["I"] + bridges)),
            weight_gradient=round(scale * times["W"]),
            backward=round(scale * times["B"]),
            input_bytes=memory.input_bytes,
            activation_bytes=max(kept - memory.input_bytes, 0),
            input_gradient_frees=memory.after_forward - memory.after_input_gradient,
            parameters=load.parameters,
            parameter_bytes=load.parameter_bytes,
            output_bytes=0 if is_last else _size(packets[index + 1]),
            kept_output_bytes=memory.output_bytes,
        )


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

    def call(value: Any) -> Any:
        output = program.module(value, program.localise(chosen.leaves), chosen.variant)
        if program.is_last and work.loss_rule is not None:
            return work.loss_rule.loss(output, work.microbatches.target(0))
        return output

    return measure_call(program.module, call, packets[block])[0]


def _size(packet: Packet | None) -> int:
    leaves = [] if packet is None else packet.leaves
    return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor))
