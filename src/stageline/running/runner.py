"""Who plays the ranks: threads of this process, or this process as one rank among many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from stageline.errors import PeerError
from stageline.running.boundary import Packet, leave
from stageline.running.caller import CallerState, step_modes
from stageline.running.cores import share_of_cores, share_of_threads, use_threads
from stageline.running.events import Observer
from stageline.running.executor import BoundRow, StepState, run_row
from stageline.running.timetable import Purpose
from stageline.running.transports.base import Edge, Receipt, ThreadTransport
from stageline.running.transports.process_group import ProcessGroupEndpoint, ProcessGroupTransport
from stageline.running.workers import WorkerPool
from stageline.scheduling import Kind, Schedule

FORWARD_WINDOW = 2
"""Packets under way per channel where no backward bounds them: one travels, one is worked on."""

_FAILED = -1  # instead of a number of rows: the rank that should say it could not


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
    """

    ranks: tuple[int, ...]
    num_ranks: int

    @abstractmethod
    def begin(self, purpose: Purpose, count_rows: Callable[[], int | None]) -> int:
        """Begin a call: return how many rows its batch has, as agreed by all ranks."""

    @abstractmethod
    def run(
        self, rows: Sequence[BoundRow], states: Mapping[int, StepState], observer: Observer | None
    ) -> None:
        """Run the rows of all ranks that live here."""

    @abstractmethod
    def share(self, letter: str, value: Any, *, owner: int) -> Callable[[], Any]:
        """Make a value of the owner's rank known on every rank; the result asks for it."""

    @abstractmethod
    def swap(
        self, number: int, outgoing: Mapping[int, Packet], sources: Sequence[int]
    ) -> dict[int, Packet]:
        """Send packets to ranks of other processes, and return what comes from some of them.

        All sends are under way before the first wait. ``number`` tells the swaps of a step apart.
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

    def begin(self, purpose: Purpose, count_rows: Callable[[], int | None]) -> int:
        rows = count_rows()
        assert rows is not None
        return rows

    def run(
        self, rows: Sequence[BoundRow], states: Mapping[int, StepState], observer: Observer | None
    ) -> None:
        builds_graph = states[0].builds_graph
        window = None if builds_graph else self._forward_window
        exchange = self._transport.open(self.num_ranks, window=window)
        caller = CallerState.capture()
        before = torch.get_num_threads()
        threads = share_of_threads(self.num_ranks) if self._on_cpu else before
        jobs = []
        for rank, state in states.items():
            state.endpoint = exchange.endpoint(rank)
            act = partial(run_row, rows[rank], state, observer)
            jobs.append(partial(_act, caller, act, builds_graph, threads))
        try:
            failures = self._workers().run(jobs, on_failure=exchange.abort)
        finally:
            if threads != before:
                torch.set_num_threads(before)
        try:
            if failures:
                raise failures[0]
        finally:
            # Or the exception's traceback holds this frame, and the frame the exception.
            del failures, jobs, states

    def _workers(self) -> WorkerPool:
        if self._pool is None or not self._pool.usable:
            self._pool = WorkerPool(self.num_ranks)
        return self._pool

    def share(self, letter: str, value: Any, *, owner: int) -> Callable[[], Any]:
        return lambda: value

    def swap(
        self, number: int, outgoing: Mapping[int, Packet], sources: Sequence[int]
    ) -> dict[int, Packet]:
        assert not outgoing  # there is no other process
        assert not sources
        return {}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _act(caller: CallerState, act: Callable[[], None], builds_graph: bool, threads: int) -> None:
    use_threads(threads)
    caller.run(act, builds_graph=builds_graph)


class ProcessRunner(Runner):
    """This process is one rank; the others are elsewhere."""

    def __init__(
        self,
        transport: ProcessGroupTransport,
        *,
        schedule: Schedule,
        on_cpu: bool,
        digests: Mapping[str, str],
    ) -> None:
        self.rank = transport.rank
        self.ranks = (transport.rank,)
        self.num_ranks = transport.num_ranks
        self._transport = transport
        self._first_rank = schedule.placement[0]
        self._forward_window = forward_window(schedule)
        self._on_cpu = on_cpu
        self._digests = list(digests.items())
        self._endpoint: ProcessGroupEndpoint | None = None
        self._unread: list[_Once] = []

    def begin(self, purpose: Purpose, count_rows: Callable[[], int | None]) -> int:
        window = None if purpose.builds_graph else self._forward_window
        self._endpoint = self._transport.open(window=window)
        if self.rank == self._first_rank:
            return self._announce(purpose, count_rows)
        said, rows, *digests = (
            self._endpoint.receive(self._edge("S", self._first_rank, self.rank)).wait().leaves
        )
        if rows == _FAILED:
            raise PeerError(
                f"rank {self._first_rank} could not begin this step: its own error says why"
            )
        if said != purpose.value:
            raise PeerError(
                f"rank {self.rank} is at {purpose.value}, rank {self._first_rank} at {said}: "
                "every rank must make the same calls in the same order and mode"
            )
        self._compare(digests)
        mine = count_rows()
        if mine is not None and mine != rows:
            raise PeerError(
                f"rank {self.rank} was given another batch: {mine} rows, and {rows} on rank "
                f"{self._first_rank}. Every rank must call step with the same batch"
            )
        return int(rows)

    def _compare(self, theirs: Sequence[str]) -> None:
        """Raise if the first rank has built another pipeline than this one."""
        differing = [
            what for (what, mine), other in zip(self._digests, theirs, strict=True) if mine != other
        ]
        if differing:
            raise PeerError(
                f"ranks {self._first_rank} and {self.rank} have built different pipelines: they "
                f"differ in {', '.join(differing)}. Every rank must run the same script with the "
                "same arguments"
            )

    def _announce(self, purpose: Purpose, count_rows: Callable[[], int | None]) -> int:
        rows = None
        try:
            rows = count_rows()
            assert rows is not None
            return rows
        finally:
            digests = [digest for _, digest in self._digests]
            signature = Packet([purpose.value, _FAILED if rows is None else rows, *digests])
            self._send_to_others("S", signature)

    def run(
        self, rows: Sequence[BoundRow], states: Mapping[int, StepState], observer: Observer | None
    ) -> None:
        state = states[self.rank]
        assert self._endpoint is not None
        state.endpoint = self._endpoint
        before = use_threads(share_of_cores()) if self._on_cpu else torch.get_num_threads()
        self._transport.set_patient(False)  # for as long as this may fail
        try:
            with step_modes(state.builds_graph):
                run_row(rows[self.rank], state, observer)
            self._transport.set_patient(True)
        finally:
            use_threads(before)

    def share(self, letter: str, value: Any, *, owner: int) -> Callable[[], Any]:
        assert self._endpoint is not None
        if self.rank == owner:
            self._send_to_others(letter, leave(value)[0])
            return lambda: value
        # What nobody asked for is read before the next one is expected, so nothing piles up.
        for unread in self._unread:
            unread()
        self._unread = [_Once(self._endpoint.receive(self._edge(letter, owner, self.rank)))]
        return self._unread[0]

    def swap(
        self, number: int, outgoing: Mapping[int, Packet], sources: Sequence[int]
    ) -> dict[int, Packet]:
        assert self._endpoint is not None
        self._transport.set_patient(False)
        receipts = {
            rank: self._endpoint.receive(self._edge("T", rank, self.rank, number))
            for rank in sources
        }
        for rank, packet in outgoing.items():
            self._endpoint.send(self._edge("T", self.rank, rank, number), packet)
        came = {rank: receipt.wait() for rank, receipt in receipts.items()}
        self._transport.set_patient(True)
        return came

    def _send_to_others(self, letter: str, packet: Packet) -> None:
        assert self._endpoint is not None
        for rank in range(self.num_ranks):
            if rank != self.rank:
                self._endpoint.send(self._edge(letter, self.rank, rank), packet)

    def _edge(self, letter: str, source: int, target: int, number: int = 0) -> Edge:
        return Edge(source, target, letter, number, source, target)

    def close(self) -> None:
        self._transport.close()


class _Once:
    """A value that is waited for when it is first asked for."""

    def __init__(self, receipt: Receipt) -> None:
        self._receipt: Receipt | None = receipt
        self._value: Any = None

    def __call__(self) -> Any:
        if self._receipt is not None:
            self._value = self._receipt.wait().value()
            self._receipt = None
        return self._value
