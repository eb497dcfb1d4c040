"""Records in memory that two processes share: one writes them, the other reads them, in order.

    records   │ read │ read │ unread │      │ ◀─ head: how many were written
    things    │ free │      │ free   │ free │            what records tell of, by number

Reading a record is one thing, giving back what it tells of another: that may be done in any order.
While both sides are awake, neither makes a system call. A side that goes to sleep says so in the
memory and listens to its bell, a pipe; the other one rings it. A pipe also ends when the process at
its other end does, which is how a dead neighbour is noticed.
"""

from __future__ import annotations

import ctypes
import os
import struct
from contextlib import suppress
from typing import Any

from stageline.running.slabs import Slab, nameless_file
from stageline.running.transports.barriers import KEEPS_ORDER, fence, fence_others

CAPACITY = 256  # records
_PLACE = 64  # bytes of a record
# Words, each in a cache line of its own: they are written by different sides.
_HEAD, _NUM_FREED, _READER_SLEEPS, _WRITER_SLEEPS = 0, 8, 16, 24
_FREED = 256  # byte that says of the first thing whether it was given back; others follow
_FIRST = _FREED + CAPACITY  # byte at which records begin
_SIZE = _FIRST + CAPACITY * _PLACE
_ALL = 1 << 16  # bytes: more than a pipe holds


class Ring:
    """What both sides have in common.

    Attributes:
        bell: The file to listen to while asleep.
    """

    def __init__(
        self, file: int, bell: int, their_bell: int, sleeps: int, others: int, fences: bool
    ) -> None:
        self.bell = bell
        self._their_bell = their_bell
        self._memory = Slab(file, _SIZE)
        # Views and not arrays of ctypes, which take twice as long once they have left the caches.
        whole = memoryview((ctypes.c_char * _SIZE).from_address(self._memory.address))
        self._records = whole.cast("B")
        self._words = self._records[:_FREED].cast("Q")
        self._fences = fences
        self._sleeps = sleeps
        self._others = others
        for end in (bell, their_bell):
            os.set_blocking(end, False)

    def lie_down(self) -> None:
        """Say that this side sleeps; look for news once more before doing so."""
        self._words[self._sleeps] = 1
        fence()
        if not self._fences:
            fence_others()

    def get_up(self) -> bool:
        """Say that this side is awake; return whether the other side still is there."""
        self._words[self._sleeps] = 0
        try:
            return bool(os.read(self.bell, _ALL))
        except BlockingIOError:
            return True

    def _wake_other(self) -> None:
        # Full: it has been called often enough. Broken: whoever listens hears of that.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._their_bell, b"!")

    def close(self) -> None:
        self._memory.close()
        os.close(self.bell)
        os.close(self._their_bell)


class Writer(Ring):
    """The side that writes; it makes the ring.

    Records tell of things with numbers below ``CAPACITY``, each of which is told of again only once
    it was given back: so no more than ``CAPACITY`` records are ever unread.

    Args:
        layout: Of a record.
        fences: Whether each side fences itself at every record, and not the other when it goes to
            sleep; both sides must do the same.
    """

    def __init__(self, layout: struct.Struct, *, fences: bool = True) -> None:
        assert layout.size <= _PLACE
        opened = [nameless_file(_SIZE)]
        try:
            opened += os.pipe()
            opened += os.pipe()
        except OSError:  # too many are open
            for each in opened:
                os.close(each)
            raise
        file, theirs, their_bell, bell, theirs_too = opened
        super().__init__(file, bell, their_bell, _WRITER_SLEEPS, _READER_SLEEPS, fences)
        self._pack = layout.pack_into
        self._written = 0
        self.files = [file, theirs, theirs_too]  # what the other side needs, to be handed over

    def put(self, *fields: Any) -> None:
        """Write a record."""
        words, written = self._words, self._written
        self._pack(self._records, _FIRST + written % CAPACITY * _PLACE, *fields)
        if not KEEPS_ORDER:
            fence()
        words[_HEAD] = self._written = written + 1
        if self._fences:
            fence()
        if words[self._others]:  # it sleeps
            self._wake_other()

    @property
    def num_freed(self) -> int:
        """How often the other side has given something back so far."""
        return self._words[_NUM_FREED]

    def takes_back(self, number: int) -> bool:
        """Take a thing back, if it was given back."""
        place = _FREED + number
        if not KEEPS_ORDER:
            fence()
        if not self._records[place]:
            return False
        self._records[place] = 0
        return True

    def lie_down(self) -> None:
        """Say that this side sleeps until something is given back, also to a reader who sleeps."""
        super().lie_down()
        if self._words[self._others]:
            self._wake_other()


class Reader(Ring):
    """The side that reads; ``files`` are those that the writer has handed over."""

    def __init__(self, layout: struct.Struct, files: list[int], *, fences: bool = True) -> None:
        file, bell, their_bell = files
        super().__init__(file, bell, their_bell, _READER_SLEEPS, _WRITER_SLEEPS, fences)
        os.close(file)
        self._unpack = layout.unpack_from
        self._read = 0
        self._num_freed = 0

    @property
    def has_news(self) -> bool:
        """Whether there is a record that was not read."""
        return self._words[_HEAD] != self._read

    def next(self) -> tuple[Any, ...] | None:
        """Read a record, if there is one; what it tells of stays as it is until ``free``."""
        read = self._read
        if self._words[_HEAD] == read:
            return None
        if not KEEPS_ORDER:
            fence()
        self._read = read + 1
        return self._unpack(self._records, _FIRST + read % CAPACITY * _PLACE)

    def free(self, number: int) -> None:
        """Give back a thing that a record has told of."""
        words = self._words
        if not KEEPS_ORDER:  # it has been read before it is given back, and given back when counted
            fence()
        self._records[_FREED + number] = 1
        if not KEEPS_ORDER:
            fence()
        words[_NUM_FREED] = self._num_freed = self._num_freed + 1
        if self._fences:
            fence()
        if words[self._others]:  # it sleeps
            self._wake_other()

    @property
    def is_waited_for(self) -> bool:
        """Whether the other side sleeps until something is given back."""
        return bool(self._words[self._others])
