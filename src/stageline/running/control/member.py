"""One rank's side of the control plane: begins and ends calls, hears of failures, fails for all.

A call of the pipeline is an *epoch*, counted alike on every rank. One thread listens; whoever waits
for a peer, here or in a transport, is woken by the first failure anywhere.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from stageline import log
from stageline.errors import PipeError
from stageline.running.control.agreement import Facts, digest_of_call
from stageline.running.control.board import LONGEST, Board, BoardFiles
from stageline.running.control.failures import Aborted, Failure
from stageline.running.control.joining import Meeting
from stageline.running.control.messages import Message
from stageline.running.cores import looking, looks_before_sleep

_FIRST_NOTE = 10.0  # seconds of waiting after which a line is logged; then twice as many, ...


class Link(Protocol):
    """The way to the hub."""

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Bring a message to the hub."""

    def close(self) -> None:
        """Let go of it."""


class Member:
    """A rank among the ranks of a job.

    Attributes:
        rank: This one.
        num_ranks: How many there are.
        one_host: Whether all of them run on this host.
        store: Where they can leave things for each other.
        timeout: Seconds to wait for a rank that does not come.
        epoch: The call that runs, or ran last.
        doing: Says in a few words what this rank is at, for those who wait for it.
        on_failure: Called, in another thread, with the number of a call that failed somewhere.
        details: What to say of a fact, by name, if its digest is in doubt.
        waiting: The wait in which this rank cannot look at the clock itself.
        has_failed: Whether the call that runs has failed somewhere, as ``failure`` says.
    """

    def __init__(self, meeting: Meeting, *, one_host: bool) -> None:
        self.rank = meeting.rank
        self.num_ranks = meeting.num_ranks
        self.one_host = one_host
        self.store = meeting.store
        self.timeout = meeting.timeout
        self.epoch = -1
        self.doing: Callable[[], str] | None = None
        self.on_failure: Callable[[int], None] | None = None
        self.details: Mapping[str, Facts] = {}
        self.waiting: Slowness | None = None
        self._link: Link | None = None
        self._board: Board | None = None
        self._facts: Facts = {}
        self._is_told = True  # whether the hub has heard these facts, or need not
        self._changed = threading.Condition()
        self._commits: dict[int, dict[str, Any]] = {}
        self._rows: dict[int, int] = {}
        self._held: dict[int, dict[str, Any]] = {}
        self._posts: dict[tuple[int, str], tuple[Any, list[int]]] = {}
        self._failures: dict[int, Failure] = {}
        self._final: Failure | None = None
        self._others: Mapping[str, str] = {}
        self._process = os.getpid()
        self._looks = looks_before_sleep(meeting.num_ranks)
        # Readable once the call has failed: what a transport polls beside its own files.
        self.wake_file, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self.wake_file, False)
        self.has_failed = False

    def connect(self, link: Link, board: BoardFiles | None) -> None:
        """Say how the hub is reached, and where the board is, if there is one."""
        self._link = link
        if board is not None:
            self._board = Board(self.rank, self.num_ranks, board, self._raise_if_failed)

    # ---- calls -------------------------------------------------------------------------------

    def next_call(self) -> None:
        """Count the next call; all that follows, failures included, belongs to it."""
        with self._changed:
            self.epoch = epoch = self.epoch + 1
            self._is_told = True
            for known in (self._commits, self._rows, self._held, self._failures):
                for old in [number for number in known if number < epoch]:
                    del known[old]
            if self.has_failed:
                self.has_failed = False
                with suppress(BlockingIOError):
                    os.read(self.wake_file, 1024)
            if self.failure is not None:  # another rank was faster, and has failed
                self._wake_up()

    def begin(self, facts: Facts) -> None:
        """Begin the call that was counted; what the other ranks must agree with goes along."""
        with self._changed:
            self._facts, self._is_told = facts, False
        if self._board is None or self._board.begin(self.epoch, digest_of_call(facts)):
            self._tell_facts()

    def _tell_facts(self) -> None:
        """Tell the hub what this rank was given, once."""
        with self._changed:
            if self._is_told:
                return
            self._is_told = True
            message = {"kind": "begin", "epoch": self.epoch, "facts": self._facts}
        self._send(message)

    def amend(self, facts: Facts) -> None:
        """Tell more of what this rank has begun, where that turns out to be necessary."""
        with self._changed:
            if all(self._facts.get(name) == fact for name, fact in facts.items()):
                return
            self._facts = {**self._facts, **facts}
            was_told, self._is_told = self._is_told, False
        if was_told:
            self._tell_facts()

    def agreed_data(self) -> dict[int, Any]:
        """Return what each rank was given for this call, by rank; every rank must ask."""
        self._wait_until(lambda: self.epoch in self._held, "what every rank was given")
        return {int(rank): told for rank, told in self._held[self.epoch].items()}

    def agreed_rows(self) -> int:
        """Return how many rows the batch of this call has, as a rank that was given it says."""
        self._wait_until(lambda: self.epoch in self._rows, "the size of the batch")
        return self._rows[self.epoch]

    def finish(self, value: Any = None) -> dict[int, Any]:
        """End the call; return, once all ranks have ended it, what they gave, by rank."""
        told = self.finish_with(None if value is None else json.dumps(value))
        return {rank: json.loads(text) for rank, text in told.items()}

    def finish_with(self, text: str | None) -> dict[int, str]:
        """Do so with a text, as it is: what all ranks wait for is soon over then."""
        if self._board is not None:
            told = self._finish_on(self._board, "" if text is None else text)
            if told is not None:
                return told
            self._tell_facts()
        self._send({"kind": "done", "epoch": self.epoch, "value": text})
        self._wait_until(lambda: self.epoch in self._commits, "the end of the call")
        return {int(rank): given for rank, given in self._commits[self.epoch].items()}

    def _finish_on(self, board: Board, text: str) -> dict[int, str] | None:
        """End the call on the board, if it can be; None if it is for the hub to decide."""
        epoch = self.epoch
        if len(text) > LONGEST or not text.isascii():
            board.give_to_hub(epoch)
            return None
        board.done(epoch, text.encode())
        looks, slow = looking(self._looks), None
        while not board.is_over(epoch):
            if board.is_hubs(epoch):
                return None
            if self.failure is not None and board.withdraw(epoch):
                raise Aborted
            if next(looks, False):
                continue
            slow = slow or Slowness(self, "the end of the call")
            board.sleep(epoch, self.wake_file, slow.patience)
            slow.note()
        return {rank: given.decode() for rank, given in board.values().items()}

    def fail(self, failure: Failure) -> None:
        """Tell all ranks that this one has failed; a failure that was told before stands."""
        with suppress(OSError, PipeError, Aborted):
            if self._board is None or self._board.withdraw(self.epoch):
                self._send({"kind": "fail", "failure": failure.to_json()})

    def is_committed(self, seconds: float) -> bool:
        """Wait a little for the hub's word on the call: whether it is over, for all ranks."""
        self._await(lambda: self._is_over or self.failure is not None, seconds)
        return self._is_over

    @property
    def _is_over(self) -> bool:
        is_over = self._board is not None and self._board.is_over(self.epoch)
        return is_over or self.epoch in self._commits

    def _raise_if_failed(self) -> None:
        if self.failure is not None:
            raise Aborted

    @property
    def failure(self) -> Failure | None:
        """What has ended the call that runs; None if nothing has."""
        return self._failures.get(self.epoch) or self._final

    # ---- values for other ranks --------------------------------------------------------------

    def post(
        self, key: str, value: Any = None, *, to: int | None = None, files: Sequence[int] = ()
    ) -> None:
        """Send a small value, to one rank or to all others; files are handed over for good."""
        try:
            self._send({"kind": "post", "key": key, "value": value, "to": to}, files)
        finally:
            for file in files:
                os.close(file)

    def lookup(self, key: str, source: int) -> tuple[Any, list[int]]:
        """Wait for a value that another rank posts, and take it.

        Raises:
            Aborted: The call has failed somewhere; so do the other methods that wait.
        """
        wanted = (source, key)
        self._wait_until(lambda: wanted in self._posts, f"{key} of rank {source}")
        with self._changed:
            return self._posts.pop(wanted)

    def who_posted(self, key: str) -> list[int]:
        """Return the ranks whose value under a key is here and was not looked up."""
        with self._changed:
            return [source for source, posted in self._posts if posted == key]

    def forget_posts(self, is_old: Callable[[str], bool]) -> None:
        """Drop what was posted and will not be looked up any more."""
        with self._changed:
            for source, key in [place for place in self._posts if is_old(place[1])]:
                for file in self._posts.pop((source, key))[1]:
                    os.close(file)

    # ---- waiting -----------------------------------------------------------------------------

    def _wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        slow = Slowness(self, what)
        with self._changed:
            while not is_so():
                if self.failure is not None:
                    raise Aborted
                self._changed.wait(slow.patience)
                slow.note()

    def await_failure(self, seconds: float) -> Failure | None:
        """Wait a little for the reason of something that looks as if a peer had gone."""
        self._await(lambda: self.failure is not None, seconds)
        return self.failure

    def _await(self, is_so: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        with self._changed:
            while not is_so() and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)

    def what_others_do(self) -> str:
        """Return what other ranks said they are at, for people."""
        told = [f"rank {rank} is {text}" for rank, text in self._others.items() if text]
        return "; ".join(entry for entry in told if not entry.startswith(f"rank {self.rank} "))

    # ---- hearing -----------------------------------------------------------------------------

    def hear(self, message: Message, files: Sequence[int] = ()) -> None:
        """Take a message of the hub; called by the thread that listens."""
        kind = message["kind"]
        if kind == "fail":
            self._hear_failure(Failure.from_json(message["failure"]))
        elif kind == "detail":
            facts = self.details.get(message["what"], {})
            self._send({"kind": "detail", "epoch": message["epoch"], "facts": facts})
        elif kind == "ask":
            if message["epoch"] == self.epoch:
                self._tell_facts()
        elif kind == "beat":
            self._others = message["doing"]
        else:
            self._hear_news(kind, message, files)

    def _hear_news(self, kind: str, message: Message, files: Sequence[int]) -> None:
        """Take what somebody here may be waiting for."""
        with self._changed:
            if kind == "commit":
                self._commits[message["epoch"]] = message["values"]
            elif kind == "rows":
                self._rows[message["epoch"]] = message["rows"]
            elif kind == "held":
                self._held[message["epoch"]] = message["held"]
            elif kind == "post":
                self._posts[message["source"], message["key"]] = (message["value"], list(files))
            self._changed.notify_all()

    def lost(self, text: str) -> None:
        """Take notice that the hub is gone."""
        self._hear_failure(Failure(0, self.epoch, text, is_final=True))

    def _hear_failure(self, failure: Failure) -> None:
        with self._changed:
            if failure.is_final:
                self._final = self._final or failure
            elif failure.epoch >= self.epoch:
                self._failures.setdefault(failure.epoch, failure)
            if self.failure is None or self._is_over:
                return
            with suppress(OSError):
                self._wake_up()
            self._changed.notify_all()
            epoch = self.epoch
        if self.on_failure is not None:
            self.on_failure(epoch)

    def _wake_up(self) -> None:
        self.has_failed = True
        os.write(self._wake, b"!")

    def beat(self) -> None:
        """Show that this rank is alive, and what it is at."""
        waiting = self.waiting
        if waiting is not None:
            waiting.note()
        doing = self.doing() if self.doing is not None else "outside of a call"
        with suppress(OSError, PipeError):
            self._send({"kind": "beat", "doing": doing})

    # ---- leaving -----------------------------------------------------------------------------

    def leave(self, text: str, cause: Sequence[str] | None = None) -> None:
        """Say farewell; the pipeline is over for all ranks, with this as the reason."""
        if self._link is None or self._process != os.getpid():
            return
        with suppress(OSError, PipeError):
            self._send({"kind": "bye", "text": text, "cause": cause})
        link, self._link = self._link, None
        link.close()
        self.forget_posts(lambda _: True)
        os.close(self._wake)
        os.close(self.wake_file)
        if self._board is not None:
            self._board.close()

    def _send(self, message: Message, files: Sequence[int] = ()) -> None:
        if self._link is None:
            raise PipeError("this pipeline was closed on this rank: build another one")
        try:
            self._link.send(message, files)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            # The listener hears the same, and knows more; whoever waits is told by it.
            log.debug(self.rank, f"the hub could not be told {message['kind']}")


class Slowness:
    """Logs a line when a wait takes long: a slow peer is waited for, and named."""

    def __init__(self, member: Member, what: str) -> None:
        self._member = member
        self._what = what
        self._start = time.monotonic()
        self.patience = _FIRST_NOTE

    def note(self) -> None:
        waited = time.monotonic() - self._start
        if waited < self.patience:
            return
        self.patience *= 2
        doing = self._member.what_others_do() or "nobody said what they are doing"
        log.warning(self._member.rank, f"waits for {self._what}, {waited:.0f} s so far; {doing}")
