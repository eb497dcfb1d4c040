"""The hub of the control plane: hears every rank, decides, and tells all of them.

    rank 1 ── begin 7 ──▶ ┌─────┐ ── fail 7 ───▶ every rank     the first failure of a call wins
    rank 2 ── done 7 ───▶ │ hub │ ── commit 7 ─▶ every rank     once all are done, and agree
    rank 3 ── (silence) ─ └─────┘ ── fail ─────▶ every rank     a process that is gone

It lives in the process of rank 0. A call is over for all ranks or for none: nobody returns from it
before the commit.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stageline import log
from stageline.running.control.agreement import (
    HELD,
    ROWS,
    WHOLE,
    Facts,
    built_differently,
    differing_digest,
    disagreement,
    seeds_differ,
)
from stageline.running.control.failures import Failure
from stageline.running.control.messages import Message

Tell = Callable[[Message, Sequence[int]], None]

_MOST_TOLD = 64  # ranks about which a heartbeat says what they are doing


@dataclass
class _Call:
    """What is known of one call: facts by rank, results by rank, and who asked for the rows."""

    facts: dict[int, Facts] = field(default_factory=dict)
    done: dict[int, Any] = field(default_factory=dict)
    asking: list[int] = field(default_factory=list)
    details: dict[int, Facts] = field(default_factory=dict)
    doubted: str | None = None
    failure: Failure | None = None
    is_committed: bool = False
    is_asked: bool = False


def silence(rank: int, limit: float) -> str:
    """Return the sentence for a rank that was not heard for too long."""
    return (
        f"rank {rank} is silent: no sign of life for {limit:g} s (its process is stopped, its host "
        "is down or unreachable). Start the job again, or allow more with heartbeat_timeout"
    )


class Hub:
    """Decides for all ranks; its methods may be called from any thread.

    Args:
        num_ranks: How many ranks there are.
        tell: For each rank, what brings a message to it.
        drop: Ends the connection of a rank.
        has_board: Whether ranks come here only with what they cannot agree on by themselves.
    """

    def __init__(
        self,
        num_ranks: int,
        tell: dict[int, Tell],
        drop: Callable[[int], None],
        *,
        has_board: bool = False,
    ) -> None:
        self._num_ranks = num_ranks
        self._tell = tell
        self._drop = drop
        self._has_board = has_board
        self._lock = threading.RLock()
        self._calls: dict[int, _Call] = {}
        self._begun = dict.fromkeys(range(num_ranks), -1)
        self._final: Failure | None = None
        self._heard = dict.fromkeys(range(num_ranks), time.monotonic())
        self._doing: dict[int, str] = {}

    def hear(self, rank: int, message: Message, files: Sequence[int] = ()) -> None:
        """Take a message of a rank."""
        handlers: dict[str, Callable[[int, Message], None]] = {
            "begin": self._begin,
            "done": self._done,
            "fail": self._fail,
            "detail": self._detail,
            "beat": self._beat,
            "bye": self._bye,
        }
        with self._lock:
            self._heard[rank] = time.monotonic()
            if message["kind"] == "post":
                self._forward(rank, message, files)
            else:
                handlers[message["kind"]](rank, message)

    def lost(self, rank: int) -> None:
        """Take notice that the connection of a rank has ended without a farewell."""
        self._end(
            rank,
            f"rank {rank} is gone: its process ended without a word (killed, out of memory, or "
            "crashed in native code). Look at its own output, and start the job again",
        )

    def look_for_silence(self, limit: float, pause: float) -> None:
        """Give up ranks that were not heard for too long; ``pause``: since this was last asked."""
        now = time.monotonic()
        with self._lock:
            if pause > limit / 2:  # it was this process that slept
                self._heard = dict.fromkeys(self._heard, now)
                return
            silent = [rank for rank in self._tell if now - self._heard[rank] > limit and rank]
        for rank in silent:
            self.give_up(rank, silence(rank, limit))

    def give_up(self, rank: int, text: str) -> None:
        """End the connection of a rank; it is told, as it may be alive, or go on some day."""
        self._end(rank, text, listens=True)
        self._drop(rank)

    def beat(self) -> None:
        """Show all ranks that this one is alive, and what the others are doing."""
        with self._lock:
            doing = self._doing if self._num_ranks <= _MOST_TOLD else {}
            self._tell_all({"kind": "beat", "doing": doing})

    def _begin(self, rank: int, message: Message) -> None:
        epoch, facts = message["epoch"], message["facts"]
        call = self._calls.setdefault(epoch, _Call())
        call.facts[rank] = facts
        self._begun[rank] = epoch
        self._forget()
        if self._final is not None or call.failure is not None:
            failure = self._final or call.failure
            assert failure is not None
            self._send(rank, {"kind": "fail", "failure": failure.to_json()})
            return
        self._compare(epoch, call, rank)
        self._answer_rows(epoch, call, rank)
        self._answer_held(epoch, call)
        if self._has_board and not call.is_asked:
            call.is_asked = True
            for other in sorted(self._tell.keys() - {rank}):
                self._send(other, {"kind": "ask", "epoch": epoch})

    def _compare(self, epoch: int, call: _Call, rank: int) -> None:
        """Compare a rank with those that came before; large facts with one that knows the batch."""
        others = [r for r, facts in call.facts.items() if r != rank and facts.get(ROWS) is not None]
        others += [r for r in call.facts if r != rank]
        if not others or call.doubted is not None:
            return
        # One that was given everything stands for all, but for seeds: where nothing draws, that of
        # a rank may be another one.
        whole = [other for other in others if call.facts[other].get(WHOLE)][:1] or others
        for other in dict.fromkeys([*whole, *others]):
            low, high = sorted((rank, other))
            compare = disagreement if other in whole else seeds_differ
            text = compare(high, call.facts[high], low, call.facts[low])
            if text is not None:
                self._fails(Failure(high, epoch, text))
                return
        low, high = sorted((rank, others[0]))
        call.doubted = differing_digest(call.facts[high], call.facts[low])
        if call.doubted is not None:
            for one in (low, high):
                self._send(one, {"kind": "detail", "epoch": epoch, "what": call.doubted})

    def _detail(self, rank: int, message: Message) -> None:
        call = self._calls.get(message["epoch"])
        if call is None or call.doubted is None or call.failure is not None:
            return
        call.details[rank] = message["facts"]
        if len(call.details) == 2:
            (one, mine), (other, theirs) = sorted(call.details.items())
            text = built_differently(call.doubted, one, mine, other, theirs)
            self._fails(Failure(other, message["epoch"], text))

    def _answer_rows(self, epoch: int, call: _Call, rank: int) -> None:
        if call.facts[rank].get(ROWS) is None:
            call.asking.append(rank)
        known = [facts[ROWS] for facts in call.facts.values() if facts.get(ROWS) is not None]
        if known:
            for asking in call.asking:
                self._send(asking, {"kind": "rows", "epoch": epoch, "rows": known[0]})
            call.asking = []

    def _answer_held(self, epoch: int, call: _Call) -> None:
        """Tell all ranks what each was given, if they wait for that, once all have said it."""
        held = {str(rank): facts[HELD] for rank, facts in call.facts.items() if HELD in facts}
        if not held or len(call.facts) < self._num_ranks or call.failure is not None:
            return
        other = next((rank for rank in call.facts if str(rank) not in held), None)
        if other is None:
            self._tell_all({"kind": "held", "epoch": epoch, "held": held})
            return
        text = (
            f"rank {other} has made such a call before, rank {next(iter(held))} has not: every "
            "rank must make the same calls in the same order"
        )
        self._fails(Failure(other, epoch, text))

    def _done(self, rank: int, message: Message) -> None:
        call = self._calls.setdefault(message["epoch"], _Call())
        call.done[rank] = message.get("value")
        if len(call.done) == self._num_ranks and not call.failure and not call.doubted:
            call.is_committed = True
            values = {str(r): value for r, value in call.done.items() if value is not None}
            self._tell_all({"kind": "commit", "epoch": message["epoch"], "values": values})

    def _fail(self, rank: int, message: Message) -> None:
        self._fails(Failure.from_json(message["failure"]))

    def _fails(self, failure: Failure) -> None:
        """The first failure of a call is the one that all ranks hear of."""
        call = self._calls.setdefault(failure.epoch, _Call())
        if call.failure is None and not call.is_committed and self._final is None:
            call.failure = failure
            self._tell_all({"kind": "fail", "failure": failure.to_json()})

    def _beat(self, rank: int, message: Message) -> None:
        self._doing[rank] = message["doing"]

    def _bye(self, rank: int, message: Message) -> None:
        self._end(rank, message["text"], cause=message.get("cause"))

    def _end(
        self, rank: int, text: str, cause: Sequence[str] | None = None, *, listens: bool = False
    ) -> None:
        with self._lock:
            if not listens:
                self._tell.pop(rank, None)
            if self._final is None:
                told = None if cause is None else (cause[0], cause[1], cause[2])
                epoch = self._begun[rank]
                self._final = Failure(rank, epoch, text, is_final=True, cause=told)
                log.debug(0, text)
                self._tell_all({"kind": "fail", "failure": self._final.to_json()})
            self._tell.pop(rank, None)

    def _forward(self, rank: int, message: Message, files: Sequence[int]) -> None:
        to = message.pop("to", None)
        forwarded = {**message, "source": rank}
        for other in list(self._tell) if to is None else [to]:
            if other != rank:
                self._send(other, forwarded, files)
        for file in files:  # the receiver has its own by now; the hub's own rank took a copy
            os.close(file)

    def _tell_all(self, message: Message) -> None:
        # Its own process last: once that has heard of a failure, it may end, and the hub with it.
        for rank in sorted(self._tell, reverse=True):
            self._send(rank, message)

    def _send(self, rank: int, message: Message, files: Sequence[int] = ()) -> None:
        tell = self._tell.get(rank)
        if tell is None:
            return
        try:
            tell(message, files)
        except OSError as error:
            if rank == 0:  # it has run out of files, and would wait for this one
                self._end(0, f"rank 0 cannot go on: {error}", listens=True)
                return
            # Its end is noticed by whoever listens to it.
            log.debug(0, f"rank {rank} could not be told {message['kind']}: {error}")

    def _forget(self) -> None:
        """Drop the calls that every rank has left behind."""
        oldest = min(self._begun.values())
        for epoch in [epoch for epoch in self._calls if epoch < oldest]:
            del self._calls[epoch]
