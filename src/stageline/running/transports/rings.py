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
import platform
import struct
import threading
from contextlib import suppress
from typing import Any

from stageline.running.slabs import Slab, nameless_file

CAPACITY = 256  # records
_PLACE = 64  # bytes of a record
# Words, each in a cache line of its own: they are written by different sides.
_HEAD, _TAIL, _READER_SLEEPS, _WRITER_SLEEPS = 0, 8, 16, 24
_FIRST = 256  # byte at which records begin
_SIZE = _FIRST + CAPACITY * _PLACE
_ALL = 1 << 16  # bytes: more than a pipe holds

# These processors let others see writes in the order in which they were made, and read in order;
# for others, a fence lets writes before it be seen before writes after it, and the same for reads.
_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")

_barrier = threading.Lock()


def _fence() -> None:
    """Let all writes before it be seen by the other process before any read after it is done.

    Taking a lock is the one such instruction that Python has. Nobody ever waits for this one.
    """
    if _barrier.acquire(blocking=False):
        _barrier.release()


class Ring:
    """What both sides have in common.

    Attributes:
        bell: The file to listen to while asleep.
    """

    def __init__(self, file: int, bell: int, their_bell: int, sleeps: int, others: int) -> None:
        self.bell = bell
        self._their_bell = their_bell
        self._memory = Slab(file, _SIZE)
        self._words = (ctypes.c_uint64 * (_FIRST // 8)).from_address(self._memory.address)
        self._records = (ctypes.c_char * _SIZE).from_address(self._memory.address)
        self._sleeps = sleeps
        self._others = others
        for end in (bell, their_bell):
            os.set_blocking(end, False)

    def lie_down(self) -> None:
        """Say that this side sleeps; look for news once more before doing so."""
        self._words[self._sleeps] = 1
        _fence()

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
    """The side that writes; it makes the ring. No more than ``CAPACITY`` records may be unread."""

    def __init__(self, layout: struct.Struct) -> None:
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
        super().__init__(file, bell, their_bell, _WRITER_SLEEPS, _READER_SLEEPS)
        self._layout = layout
        self._written = 0
        self.files = [file, theirs, theirs_too]  # what the other side needs, to be handed over

    def put(self, *fields: Any) -> None:
        """Write a record."""
        words, written = self._words, self._written
        self._layout.pack_into(self._records, _FIRST + written % CAPACITY * _PLACE, *fields)
        if not _KEEPS_ORDER:
            _fence()
        words[_HEAD] = self._written = written + 1
        _fence()
        if words[self._others]:  # it sleeps
            self._wake_other()

    @property
    def num_read(self) -> int:
        """How many records the other side has read so far, and needs no more."""
        return self._words[_TAIL]


class Reader(Ring):
    """The side that reads; ``files`` are those that the writer has handed over."""

    def __init__(self, layout: struct.Struct, files: list[int]) -> None:
        file, bell, their_bell = files
        super().__init__(file, bell, their_bell, _READER_SLEEPS, _WRITER_SLEEPS)
        os.close(file)
        self._layout = layout
        self._read = 0

    @property
    def has_news(self) -> bool:
        """Whether there is a record that was not read."""
        return self._words[_HEAD] != self._read

    def look(self) -> tuple[Any, ...]:
        """Return the next record; it stays, and all that belongs to it, until ``free``."""
        if not _KEEPS_ORDER:
            _fence()
        where = _FIRST + self._read % CAPACITY * _PLACE
        return self._layout.unpack_from(self._records, where)

    def free(self) -> None:
        """Say that the record which was looked at is needed no more."""
        words = self._words
        words[_TAIL] = self._read = self._read + 1
        _fence()
        if words[self._others]:  # it sleeps
            self._wake_other()
