"""Blocks run as a rank of a pipeline runs them, and timed: the share of one rank, over and over.

    rank 0    block 0  block 1              each rank plays its blocks forward and back, one
    rank 1             block 2  block 3     microbatch ahead, on inputs and gradients that are kept

The handlers are those of the executor. So streams, bridges for I and W, packets between blocks and
whatever else a pipeline spends time on is in the figures.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stageline.running.autocast import autocast_devices
from stageline.running.boundary import Packet
from stageline.running.current import CURRENT, number_restored
from stageline.running.executor import HANDLERS, Handler
from stageline.running.foreign import ForeignParameters
from stageline.running.forwards import forward_split
from stageline.running.loss import LossRule
from stageline.running.microbatches import Microbatches
from stageline.running.program import StageProgram
from stageline.running.recordings import Chosen
from stageline.running.state import StepState
from stageline.running.streams.calls import CallStreams
from stageline.scheduling import Kind

# While one microbatch is at work another one waits for its backward, as on all ranks but the last.
AHEAD = 1
SLOTS = AHEAD + 1
_MICROBATCHES = 2

Samples = dict[tuple[str, int], list[int]]
"""Nanoseconds of what was run, by its name and block."""


@dataclass(frozen=True)
class Work:
    """Microbatches of one size.

    Attributes:
        microbatches: As many as there are slots.
        chosen: The recording that each follows.
        streams: Where random numbers come from; None if nothing draws.
        loss_rule: How the last block ends in a loss; None if gradients of its output are made up.
    """

    microbatches: Microbatches
    chosen: Sequence[Chosen]
    streams: CallStreams | None
    loss_rule: LossRule | None

    def state(self, programs: Mapping[int, StageProgram]) -> StepState:
        """Return what a rank holds while it runs these microbatches."""
        state = StepState(
            programs,
            self.microbatches,
            builds_graph=True,
            loss_rule=self.loss_rule,
            keeps_outputs=False,
            foreign=ForeignParameters({}),
            chosen=self.chosen,
            streams=self.streams,
        )
        state.autocast = autocast_devices()
        return state


class Share:
    """The blocks of one rank.

    Args:
        programs: All blocks, as stages of one rank.
        blocks: Those of this share, one after the other.
        arrival: What comes to the first of them; None if that is the model's first.
        work: The microbatches.
        clock: Returns nanoseconds.
        together: Of the programs, one that runs several of these blocks as one stage; what comes
            to it. So a stage of several blocks is timed as well.
    """

    def __init__(
        self,
        programs: Mapping[int, StageProgram],
        blocks: range,
        arrival: Packet | None,
        work: Work,
        clock: Callable[[], int],
        together: tuple[int, Packet | None] | None = None,
    ) -> None:
        self._programs = programs
        self._blocks = blocks
        self._arrival = arrival
        self._work = work
        self._clock = clock
        self._together = together
        self.samples: Samples = defaultdict(list)

    def run_round(self) -> None:
        """Run some microbatches with B, then with I and W."""
        for splits in (False, True):
            self._run(self._blocks, self._arrival, splits)
            if self._together is not None:
                index, arrival = self._together
                self._run(range(index, index + 1), arrival, splits)

    @number_restored()
    def _run(self, blocks: range, arrival: Packet | None, splits: bool) -> None:
        state = self._work.state(self._programs)
        for number in range(_MICROBATCHES + AHEAD):
            if number < _MICROBATCHES:
                slot = number % SLOTS
                if arrival is not None:
                    state.arrivals[blocks[0], slot] = copied(arrival)
                self._forward(state, blocks, slot, splits)
            if number >= AHEAD:
                self._backward(state, blocks, (number - AHEAD) % SLOTS, splits)

    def _forward(self, state: StepState, blocks: range, slot: int, splits: bool) -> None:
        run = forward_split if splits else HANDLERS[Kind.FORWARD]
        for block in blocks:
            self._timed("F split" if splits else "F", run, state, block, slot)
        finish(state, self._programs[blocks[-1]], slot)

    def _backward(self, state: StepState, blocks: range, slot: int, splits: bool) -> None:
        kinds = [Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT] if splits else [Kind.BACKWARD]
        for block in reversed(blocks):
            for kind in kinds:
                self._timed(kind.letter, HANDLERS[kind], state, block, slot)
        state.gradients.pop((blocks[0] - 1, slot), None)

    def _timed(self, name: str, run: Handler, state: StepState, block: int, slot: int) -> None:
        CURRENT.microbatch = slot
        start = self._clock()
        run(state, block, slot, None)
        self.samples[name, block].append(self._clock() - start)


def finish(state: StepState, program: StageProgram, slot: int) -> Packet | None:
    """Take what the last block of a share has made, and let gradients come for it.

    Returns:
        What goes to the next block; None if the model ends here, in a loss.
    """
    if program.is_last and state.loss_rule is not None:
        return None  # the loss has its gradient
    if program.is_last:
        packet = state.outputs.pop(slot)
    else:
        packet = state.arrivals.pop((program.index + 1, slot)).wait()
    flags = packet.differentiable or [False] * len(packet.leaves)
    needed = [leaf for leaf, flag in zip(packet.leaves, flags, strict=True) if flag]
    state.gradients[program.index, slot] = Packet([torch.ones_like(x) for x in needed])
    return packet


def copied(packet: Packet) -> Packet:
    """Return a packet in memory of its own, as if it had just arrived."""
    return packet.with_leaves([x.clone() if isinstance(x, Tensor) else x for x in packet.leaves])


def clock_for(device: torch.device, *, alone: bool) -> Callable[[], int]:
    """Return the clock that tells how long a rank is at work.

    Args:
        device: Where it works.
        alone: Whether it has an interpreter of its own: then the time in which another thread
            holds this one's is not counted.
    """
    if device.type != "cpu":

        def synchronised() -> int:
            torch.accelerator.synchronize(device)
            return time.perf_counter_ns()

        return synchronised
    return time.thread_time_ns if alone else time.perf_counter_ns


def typical(times: Sequence[int]) -> int:
    """Return what an action takes on average, without the longest tenth of the times.

    A step is a sum of many actions, and a sum goes by averages: with medians, or lower, steps were
    predicted 10 % too short. What another program did to a few of the times is left out.

    Example:
        >>> typical([10, 11, 12, 13, 10, 11, 12, 13, 12, 11, 500])
        12
    """
    kept = sorted(times)[: len(times) - len(times) // 10]
    return round(sum(kept) / len(kept))
