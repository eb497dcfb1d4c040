"""Memory that two processes share: nameless files in /dev/shm, handed over open.

A file that never had a name cannot be left behind: it is gone with the last process that has it
open, however that process ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

FOLDER = "/dev/shm"
SMALLEST = 1 << 16


def can_share_memory() -> bool:
    """Whether this system has such files."""
    return sys.platform == "linux" and hasattr(os, "O_TMPFILE") and os.path.isdir(FOLDER)


def whole_size(size: int) -> int:
    """Return the size of the slab for so many bytes: few sizes, so that slabs are used again."""
    return max(SMALLEST, 1 << (size - 1).bit_length())


class Slab:
    """A piece of shared memory, mapped.

    Attributes:
        address: Where it begins in this process.
        size: Its bytes.
    """

    def __init__(self, file: int, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(file, size)
        self._view = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._view)

    @classmethod
    def create(cls, size: int) -> tuple[Slab, int]:
        """Return a new slab and its file, which the other process needs.

        Raises:
            OSError: There is not so much memory. Without reserving it now, the first write to a
                page that does not exist would end the process (SIGBUS).
        """
        file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            return cls(file, size), file
        except BaseException:
            os.close(file)
            raise

    def close(self) -> None:
        """Unmap it; the memory is freed once the other side has done so too."""
        del self._view
        self._map.close()
