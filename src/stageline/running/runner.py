"""Who plays the ranks: threads of this process. (processes.py: this process, as one of many.)"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from stageline.running.boundary import Packet
from stageline.running.caller import CallerState, refuse_foreign_modes
from stageline.running.control.agreement import ROWS, Facts
from stageline.running.cores import share_of_threads, use_threads
from stageline.running.events import Observer
from stageline.running.executor import BoundRow, StepState, run_row
from stageline.running.in_turn import Tempo, are_apart, can_run_in_turn, run_in_turn
from stageline.running.result import LossValues
from stageline.running.timetable import Purpose
from stageline.running.transports.base import ThreadTransport
from stageline.running.transports.memory import MemoryTransport
from stageline.running.workers import WorkerPool
from stageline.scheduling import Kind, Schedule

FORWARD_WINDOW = 2
"""Packets under way per channel where no backward bounds them: one travels, one is worked on."""


def forward_window(schedule: Schedule) -> int | None:
    """Return how many packets of a forward-only run may be under way per channel; None: any number.

    Where values also travel back to an earlier rank, two ranks could wait for each other to take
    something; and where stages take microbatches in another order, one could wait for what the
    other may not send yet. There only the rows bound them.
    """
    one_way = all(here <= there for here, there in pairwise(schedule.placement))
    orders = {
        row["microbatch"][(row["kind"] == Kind.FORWARD) & (row["stage"] == stage)].tobytes()
        for row in schedule.arrays
        for stage in set(row["stage"].tolist())
    }
    return FORWARD_WINDOW if one_way and len(orders) == 1 else None


class Runner(ABC):
    """Runs rows for the ranks that live in this process.

    Attributes:
        ranks: The pipeline ranks that live here.
        num_ranks: How many the pipeline has in all.
        calls: How many calls were begun, this one included.
        compares: Whether ranks compare what they were given.
        is_over: Whether a call that failed here was over for all ranks before: only what its caller
            wanted to do with the result has failed.
        training: The mode that the pipeline was put into.
        where: Where the ranks live and what carries packets, for people.
    """

    ranks: tuple[int, ...]
    num_ranks: int
    calls: int = 0
    compares: bool = False
    is_over: bool = False
    training: bool = True
    where: str = "threads of one process"

    @property
    @abstractmethod
    def seed(self) -> int:
        """What random streams are keyed with, the same on every rank."""

    @abstractmethod
    def begin(self, purpose: Purpose, look: Callable[[], Facts]) -> int:
        """Begin a call: return how many rows its batch has, as agreed by all ranks.

        ``look`` returns what this rank was given, or raises.
        """

    def note_draws(self) -> None:
        """Take notice that something here draws in this call: then all ranks need one seed."""
        return

    @abstractmethod
    def run(
        self,
        rows: Sequence[BoundRow],
        states: Mapping[int, StepState],
        observer: Observer | None,
        caller: CallerState | None = None,
    ) -> None:
        """Run the rows of all ranks that live here.

        Args:
            rows: One for each rank of the pipeline.
            states: What each rank that lives here holds.
            observer: Told of each action.
            caller: The modes to run under, if not those of the calling thread.
        """

    @abstractmethod
    def share(self, value: Any, *, owner: int) -> Any:
        """Return, on every rank, the value that the owner's rank has."""

    @abstractmethod
    def note_loss(self, loss: LossValues) -> None:
        """Take the losses of a call, which all ranks will know when it has ended."""

    @abstractmethod
    def finish(self) -> LossValues | str | None:
        """End a call on all ranks or on none.

        Return its losses, if it has any: the tensors, or what the rank that has them says of them.
        """

    @abstractmethod
    def failed(self, error: BaseException) -> BaseException:
        """Tell the other ranks that a call has failed here; return what to raise."""

    @abstractmethod
    def swap(
        self,
        number: int,
        outgoing: Mapping[int, Packet],
        readers: Mapping[int, Callable[[Packet], None]],
    ) -> None:
        """Send packets to ranks of other processes, and let what comes from some of them be read.

        All sends are under way before the first wait. The tensors of a packet that is read may be
        gone afterwards. ``number`` tells the swaps of a step apart.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of threads and connections."""


class ThreadRunner(Runner):
    """All ranks are threads of this process."""

    def __init__(self, transport: ThreadTransport, *, schedule: Schedule, on_cpu: bool) -> None:
        self.num_ranks = schedule.num_ranks
        self.ranks = tuple(range(self.num_ranks))
        self._transport = transport
        self._forward_window = forward_window(schedule)
        self._on_cpu = on_cpu
        self._pool: WorkerPool | None = None
        self._loss: LossValues | None = None
        self._placement = schedule.placement
        self._tempos: dict[tuple[bool, bool, int], Tempo | None] = {}
        self._takes_turns = on_cpu and isinstance(transport, MemoryTransport)

    @property
    def seed(self) -> int:
        return torch.initial_seed()

    def begin(self, purpose: Purpose, look: Callable[[], Facts]) -> int:
        return int(look()[ROWS])

    def run(
        self,
        rows: Sequence[BoundRow],
        states: Mapping[int, StepState],
        observer: Observer | None,
        caller: CallerState | None = None,
    ) -> None:
        tempo = self._tempo(rows, states) if observer is None else None
        in_turn = tempo is not None and tempo.prefers_turns
        start = time.perf_counter()
        before = torch.get_num_threads()
        threads = share_of_threads(self.num_ranks) if self._on_cpu else before
        try:
            if in_turn:
                use_threads(threads)
                run_in_turn(self._placement, states)
            else:
                if caller is None:
                    caller = CallerState.capture()
                else:
                    refuse_foreign_modes()
                self._run_in_threads(rows, states, observer, caller, threads)
        finally:
            if threads != before:
                torch.set_num_threads(before)
        if tempo is not None:
            tempo.note(time.perf_counter() - start, in_turn=in_turn)

    def _run_in_threads(
        self,
        rows: Sequence[BoundRow],
        states: Mapping[int, StepState],
        observer: Observer | None,
        caller: CallerState,
        threads: int,
    ) -> None:
        builds_graph = states[0].builds_graph
        window = None if builds_graph else self._forward_window
        exchange = self._transport.open(self.num_ranks, window=window)
        jobs = []
        for rank, state in states.items():
            state.endpoint = exchange.endpoint(rank)
            act = partial(run_row, rows[rank], state, observer)
            jobs.append(partial(_act, caller, act, builds_graph, threads))
        failures = self._workers().run(jobs, on_failure=exchange.abort)
        try:
            if failures:
                raise failures[0]
        finally:
            # Or the exception's traceback holds this frame, and the frame the exception.
            del failures, jobs, states

    def _tempo(self, rows: Sequence[BoundRow], states: Mapping[int, StepState]) -> Tempo | None:
        """Return what knows how fast calls of this kind are; None if there is only one way."""
        state = states[0]
        if not (self._takes_turns and can_run_in_turn(state)):
            return None
        kind = (state.builds_graph, state.loss_rule is None, state.microbatches.count)
        if kind not in self._tempos:
            fits = all(row.is_ascending and not row.recomputes for row in rows)
            fits = fits and are_apart(state.programs.values())
            count = sum(row.num_computing for row in rows)
            self._tempos[kind] = Tempo(count, self.num_ranks) if fits else None
        return self._tempos[kind]

    def _workers(self) -> WorkerPool:
        if self._pool is None or not self._pool.usable:
            self._pool = WorkerPool(self.num_ranks)
        return self._pool

    def share(self, value: Any, *, owner: int) -> Any:
        return value

    def note_loss(self, loss: LossValues) -> None:
        self._loss = loss

    def finish(self) -> LossValues | None:
        loss, self._loss = self._loss, None
        return loss

    def failed(self, error: BaseException) -> BaseException:
        return error

    def swap(
        self,
        number: int,
        outgoing: Mapping[int, Packet],
        readers: Mapping[int, Callable[[Packet], None]],
    ) -> None:
        assert not outgoing  # there is no other process
        assert not readers

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _act(caller: CallerState, act: Callable[[], None], builds_graph: bool, threads: int) -> None:
    use_threads(threads)
    caller.run(act, builds_graph=builds_graph)
