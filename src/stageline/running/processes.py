"""This process as one rank among many: what a call does beside its row.

begin    what this rank was given goes to the hub; it runs on at once
run      its row; a failure anywhere ends the next wait, here and everywhere
finish   returns when every rank has come so far: a call is over for all, or for none
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stageline.errors import PipeError, StagelineError, StepError
from stageline.running.boundary import Packet, leave
from stageline.running.caller import CallerState, step_modes
from stageline.running.control import Failure, Member, leaving
from stageline.running.control.agreement import DRAWS, PURPOSE, ROWS, Facts
from stageline.running.cores import cores_for_each, use_threads
from stageline.running.events import Observer
from stageline.running.executor import BoundRow, StepState, run_row
from stageline.running.result import LossValues
from stageline.running.runner import Runner, forward_window
from stageline.running.signature import told_seed
from stageline.running.timetable import Purpose
from stageline.running.transports.base import Aborted, Edge, Endpoint, ProcessTransport
from stageline.scheduling import Schedule

_GRACE = 2.0  # seconds in which the hub says which failure was the first, or that all was over


class ProcessRunner(Runner):
    """This process is one rank; the others are elsewhere.

    Every call says what this rank was given, and the hub compares.

    Args:
        member: This rank's side of the control plane.
        transport: What carries packets.
        schedule: The schedule of the pipeline.
        on_cpu: Whether ranks share the cores of their host.
        seed: What torch has made up on rank 0, for as long as nobody calls ``torch.manual_seed``.
    """

    compares = True

    def __init__(
        self,
        member: Member,
        transport: ProcessTransport,
        *,
        schedule: Schedule,
        on_cpu: bool,
        seed: int,
    ) -> None:
        self.rank = member.rank
        self.ranks = (member.rank,)
        self.num_ranks = member.num_ranks
        self._member = member
        self._transport = transport
        self._forward_window = forward_window(schedule)
        self._on_cpu = on_cpu
        self._made_up_seed = seed
        self.where = f"processes, {transport.name}"
        self._endpoint: Endpoint | None = None
        self._loss: tuple[LossValues | None, str | None] = (None, None)
        self._most_threads = cores_for_each()
        self._purpose = Purpose.TRAIN
        self._is_begun = False
        member.on_failure = transport.abort
        self._closing = weakref.finalize(self, _close, member, transport)

    @property
    def seed(self) -> int:
        told = told_seed()
        return self._made_up_seed if told is None else told

    def begin(self, purpose: Purpose, look: Callable[[], Facts]) -> int:
        if not self._closing.alive:
            raise PipeError("this pipeline was closed on this rank: build another one")
        self._purpose = purpose
        self.is_over = False
        self._loss = (None, None)
        self._member.next_call()
        self.calls = self._member.epoch
        self._is_begun = True
        # Modules in train mode compute something else, whatever the call is for.
        trains = self.training and not purpose.builds_graph
        facts = {PURPOSE: purpose.value + " in train mode" * trains, **look()}
        self._member.begin(facts)
        if self._member.failure is not None:
            raise Aborted
        window = None if purpose.builds_graph else self._forward_window
        self._endpoint = self._transport.open(epoch=self._member.epoch, window=window)
        rows = facts[ROWS]
        return self._member.agreed_rows() if rows is None else int(rows)

    def note_draws(self) -> None:
        self._member.amend({DRAWS: True})

    def agreed_data(self) -> dict[int, Any]:
        """Return what each rank was given for this call; every rank must ask."""
        return self._member.agreed_data()

    def tell(self, rank: int, number: int, value: Any) -> None:
        """Send a value to another rank; ``number`` tells the values of a call apart."""
        assert self._endpoint is not None
        self._endpoint.send(self._edge("D", self.rank, rank, number), leave(value)[0])

    def hear(self, rank: int, number: int) -> Any:
        """Wait for a value that another rank tells."""
        assert self._endpoint is not None
        return self._endpoint.receive(self._edge("D", rank, self.rank, number)).wait().value()

    def run(
        self,
        rows: Sequence[BoundRow],
        states: Mapping[int, StepState],
        observer: Observer | None,
        caller: CallerState | None = None,
    ) -> None:
        state, row = states[self.rank], rows[self.rank]
        assert self._endpoint is not None
        state.endpoint = self._endpoint
        before = torch.get_num_threads()
        if self._on_cpu and before > self._most_threads:
            use_threads(self._most_threads)
        self._member.doing = _Doing(row, state)
        try:
            with step_modes(state.builds_graph):
                run_row(row, state, observer)
        finally:
            self._member.doing = None
            use_threads(before)

    def share(self, value: Any, *, owner: int) -> Any:
        assert self._endpoint is not None
        if self.rank != owner:
            return self._endpoint.receive(self._edge("O", owner, self.rank)).wait().value()
        packet = leave(value)[0]
        for rank in range(self.num_ranks):
            if rank != owner:
                self._endpoint.send(self._edge("O", owner, rank), packet)
        return value

    def swap(
        self,
        number: int,
        outgoing: Mapping[int, Packet],
        readers: Mapping[int, Callable[[Packet], None]],
    ) -> None:
        assert self._endpoint is not None
        receipts = {
            rank: self._endpoint.receive(self._edge("T", rank, self.rank, number))
            for rank in readers
        }
        for rank, packet in outgoing.items():
            self._endpoint.send(self._edge("T", self.rank, rank, number), packet)
        for rank, receipt in receipts.items():
            receipt.read(readers[rank])

    def note_loss(self, loss: LossValues) -> None:
        self._loss = (loss, loss.text())

    def finish(self) -> LossValues | str | None:
        loss, text = self._loss
        told = self._member.finish_with(text)
        self._is_begun, self.is_over = False, True
        return next(iter(told.values()), None) if loss is None else loss

    def failed(self, error: BaseException) -> BaseException:
        if not self._is_begun:
            return error
        self._is_begun = False
        self._endpoint = None
        told = None if isinstance(error, Aborted) else self._tell(error)
        self.is_over = told is not None and self._member.is_committed(_GRACE)
        if self.is_over:  # too late to fail: the others go on, over the same channels
            return error
        failure = self._member.await_failure(_GRACE)
        self._transport.reset()
        if failure is None or failure == told or not _gives_way(error):
            return error
        # Of several failures all ranks raise the first: what failed here may be its consequence.
        made = failure.error()
        hint = getattr(error, "hint", "")
        if isinstance(made, StepError):
            made.hint = hint
        elif hint and not failure.is_final:
            made.args = (f"{made} {hint}",)
        return made

    def _tell(self, error: BaseException) -> Failure:
        doing = f"in {self._purpose.value}"
        told = Failure.of(error, rank=self.rank, epoch=self._member.epoch, doing=doing)
        self._member.fail(told)
        if isinstance(error, StagelineError):
            error.failure = told
        return told

    def close(self) -> None:
        self._closing()

    def _edge(self, letter: str, source: int, target: int, number: int = 0) -> Edge:
        return Edge(source, target, letter, number, source, target)


def _gives_way(error: BaseException) -> bool:
    """Whether another rank's failure may be raised instead; never instead of an interrupt."""
    return isinstance(error, (Exception, Aborted))


class _Doing:
    """What a rank is at, in a few words, asked by the thread that sends heartbeats."""

    def __init__(self, row: BoundRow, state: StepState) -> None:
        self._row = row
        self._state = state

    def __call__(self) -> str:
        return f"at {self._row.actions[self._state.position]}"


def _close(member: Member, transport: ProcessTransport) -> None:
    leaving.farewell(member)
    transport.close()
