"""Where the ranks of one host agree on a call without a message: memory that all have mapped.

    rank 0   begun 7   digest 5be1…   done ─┐
    rank 1   begun 7   digest 5be1…   done ─┼─▶  over: 7       by the last one that is done
    rank 2   begun 7   digest 5be1…   done ─┘

Whatever is not that plain is the hub's: ranks whose digests differ (they were given different
things, or only parts of a batch), and failures. A call that was given to the hub is never over
here, and one that is over here cannot fail: both are decided under one lock, which the kernel takes
back from a process that is killed. A message to the hub and back takes 300 us, this a few.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

from stageline.running.slabs import Slab, can_share_memory, nameless_file

_WORD = 8  # bytes
# Words of the head; epochs are written plus one, since 0 is what a new file holds.
_OVER, _FAILED, _HUBS, _COUNTED, _COUNT, _ASLEEP, _RUNG = range(7)  # the last one has two words
_HEAD = 16
# Words of a rank's place.
_BEGUN, _DIGEST, _LENGTH, _VALUE = range(4)
_PLACE = 64
LONGEST = (_PLACE - _VALUE) * _WORD  # bytes of a value
_LONGEST_SLEEP = 0.2  # seconds: a bell may have been silenced
_PATIENCE = 1.0  # seconds: a lock is held for microseconds, unless its holder was stopped


class BoardFiles(NamedTuple):
    """What a process needs to see a board: its memory, and two bells that wake who sleeps.

    A call rings the bell of its parity. The bell is silenced when the next call but one begins:
    by then no rank sleeps beside it, unless the call between has failed before that rank was awake.
    """

    memory: int
    even: int
    odd: int

    @classmethod
    def make(cls, num_ranks: int) -> BoardFiles | None:
        """Return new files; None where there are none of this kind, or no memory."""
        if not (can_share_memory() and hasattr(os, "eventfd")):
            return None
        opened: list[int] = []
        try:
            opened.append(nameless_file(_size(num_ranks)))
            os.close(_opened_again(opened[0]))
            opened.append(_bell())
            opened.append(_bell())
        except OSError:
            for file in opened:
                os.close(file)
            return None
        return cls(*opened)

    def copies(self) -> BoardFiles:
        return BoardFiles(*map(os.dup, self))

    def close(self) -> None:
        for file in self:
            os.close(file)


def _size(num_ranks: int) -> int:
    return (_HEAD + num_ranks * _PLACE) * _WORD


class Board:
    """One rank's view of the board; used by one thread of it.

    Args:
        rank: This rank.
        num_ranks: How many there are.
        files: The board's, which it closes when it is closed.
        give_up: Raises if there is no point in waiting any longer for the lock.
    """

    def __init__(
        self, rank: int, num_ranks: int, files: BoardFiles, give_up: Callable[[], None]
    ) -> None:
        self._num_ranks = num_ranks
        self._memory = Slab(files.memory, _size(num_ranks))
        count = _size(num_ranks) // _WORD
        self._words = (ctypes.c_uint64 * count).from_address(self._memory.address)
        self._mine = _place(rank)
        self._bells = (files.even, files.odd)
        # A lock belongs to an opened file: with the one that was handed over, all would have it.
        self._lock = _Lock(_opened_again(files.memory), give_up)
        os.close(files.memory)

    def begin(self, epoch: int, digest: int) -> bool:
        """Note that this rank begins a call; return whether the hub must hear of it.

        Args:
            epoch: The call.
            digest: Of what this rank was given; 0 if only the hub can compare it.
        """
        words = self._words
        with self._lock:
            rung = words[_RUNG + epoch % 2]
            if rung and rung != epoch + 1:
                self._silence(epoch)
            words[self._mine + _BEGUN], words[self._mine + _DIGEST] = epoch + 1, digest
            if not digest or self._differs(epoch, digest):
                self._raise_to(_HUBS, epoch)
                self._ring(epoch)
            return bool(words[_HUBS] > epoch)

    def _differs(self, epoch: int, digest: int) -> bool:
        words = self._words
        for rank in range(self._num_ranks):
            place = _place(rank)
            if words[place + _BEGUN] == epoch + 1 and words[place + _DIGEST] != digest:
                return True
        return False

    def done(self, epoch: int, value: bytes) -> None:
        """Note that this rank is done; the last one of all ends the call, if it still can be.

        Args:
            epoch: The call.
            value: For all ranks; at most ``LONGEST`` bytes.
        """
        words = self._words
        with self._lock:
            words[self._mine + _LENGTH] = len(value)
            ctypes.memmove(self._memory.address + (self._mine + _VALUE) * _WORD, value, len(value))
            if words[_FAILED] > epoch or words[_HUBS] > epoch:
                return
            if words[_COUNTED] != epoch + 1:
                words[_COUNTED], words[_COUNT] = epoch + 1, 0
            words[_COUNT] += 1
            if words[_COUNT] == self._num_ranks:
                words[_OVER] = epoch + 1
                self._ring(epoch)

    def is_over(self, epoch: int) -> bool:
        """Whether all ranks are done, and none of them can fail any more."""
        return bool(self._words[_OVER] == epoch + 1)

    def is_hubs(self, epoch: int) -> bool:
        """Whether the hub decides on this call."""
        return bool(self._words[_HUBS] > epoch)

    def give_to_hub(self, epoch: int) -> None:
        """Let the hub decide on this call, unless it is over."""
        with self._lock:
            if self._words[_OVER] != epoch + 1:
                self._raise_to(_HUBS, epoch)
                self._ring(epoch)

    def withdraw(self, epoch: int) -> bool:
        """Fail a call here; return whether that was possible: one that is over stays so."""
        with self._lock:
            if self._words[_OVER] == epoch + 1:
                return False
            self._raise_to(_FAILED, epoch)
            return True

    def values(self) -> dict[int, bytes]:
        """Return what ranks have said when they were done, by rank, where they have said it."""
        found = {}
        with self._lock:
            for rank in range(self._num_ranks):
                place = _place(rank)
                length = self._words[place + _LENGTH]
                if length:
                    address = self._memory.address + (place + _VALUE) * _WORD
                    found[rank] = ctypes.string_at(address, length)
        return found

    def sleep(self, epoch: int, wake_file: int, seconds: float) -> None:
        """Sleep until something about this call changes, or the file is readable; or a little."""
        words = self._words
        with self._lock:
            if words[_OVER] == epoch + 1 or words[_HUBS] > epoch:
                return
            words[_ASLEEP] = epoch + 1
        poll = select.poll()
        poll.register(self._bells[epoch % 2], select.POLLIN)
        poll.register(wake_file, select.POLLIN)
        poll.poll(min(seconds, _LONGEST_SLEEP) * 1000)

    def _raise_to(self, word: int, epoch: int) -> None:
        """Note the latest call of a kind; a rank that is behind says nothing new."""
        self._words[word] = max(self._words[word], epoch + 1)

    def _ring(self, epoch: int) -> None:
        if self._words[_ASLEEP] == epoch + 1:
            self._words[_RUNG + epoch % 2] = epoch + 1
            os.eventfd_write(self._bells[epoch % 2], 1)

    def _silence(self, epoch: int) -> None:
        self._words[_RUNG + epoch % 2] = 0
        with suppress(BlockingIOError):
            os.eventfd_read(self._bells[epoch % 2])

    def close(self) -> None:
        """Let go of its files; the memory goes with the object, as another thread may be in it."""
        self._lock.close()
        for bell in self._bells:
            os.close(bell)


def _bell() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def _opened_again(file: int) -> int:
    return os.open(f"/proc/self/fd/{file}", os.O_RDWR)


def _place(rank: int) -> int:
    return _HEAD + rank * _PLACE


class _Lock:
    """Excludes every other process, and every other opening of the same file."""

    def __init__(self, file: int, give_up: Callable[[], None]) -> None:
        self._file = file
        self._give_up = give_up

    def __enter__(self) -> None:
        if not self._is_taken():
            self._wait()

    def _wait(self) -> None:
        start = time.monotonic()
        while not self._is_taken():
            if time.monotonic() - start > _PATIENCE:
                self._give_up()
            os.sched_yield()

    def _is_taken(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._file)
