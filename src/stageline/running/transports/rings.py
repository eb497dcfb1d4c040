"""Records in memory that two processes share: one writes them, the other reads them, in order.

            ┌──────┬──────┬──────┬──────┐
    tail ─▶ │ read │      │      │ free │ ◀─ head        both only count upwards
            └──────┴──────┴──────┴──────┘

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
_HEAD, _TAIL, _READER_SLEEPS, _WRITER_SLEEPS = 0, 8, 16, 24
_FIRST = 256  # byte at which records begin
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
        self._words = self._records[:_FIRST].cast("Q")
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
    """The side that writes; it makes the ring. No more than ``CAPACITY`` records may be unread.

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
    def num_read(self) -> int:
        """How many records the other side has read so far, and needs no more."""
        return self._words[_TAIL]


class Reader(Ring):
    """The side that reads; ``files`` are those that the writer has handed over."""

    def __init__(self, layout: struct.Struct, files: list[int], *, fences: bool = True) -> None:
        file, bell, their_bell = files
        super().__init__(file, bell, their_bell, _READER_SLEEPS, _WRITER_SLEEPS, fences)
        os.close(file)
        self._unpack = layout.unpack_from
        self._read = 0

    @property
    def has_news(self) -> bool:
        """Whether there is a record that was not read."""
        return self._words[_HEAD] != self._read

    def look(self) -> tuple[Any, ...] | None:
        """Return the next record, if there is one; all that belongs to it stays until ``free``."""
        read = self._read
        if self._words[_HEAD] == read:
            return None
        if not KEEPS_ORDER:
            fence()
        return self._unpack(self._records, _FIRST + read % CAPACITY * _PLACE)

    def free(self) -> None:
        """Say that the record which was looked at is needed no more."""
        words = self._words
        words[_TAIL] = self._read = self._read + 1
        if self._fences:
            fence()
        if words[self._others]:  # it sleeps
            self._wake_other()
