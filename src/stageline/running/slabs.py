"""Memory that two processes share: nameless files in /dev/shm, handed over open.

A file that never had a name cannot be left behind: it is gone with the last process that has it
open or mapped, however that process ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache
from typing import Any
from weakref import finalize

FOLDER = "/dev/shm"
SMALLEST = 1 << 16
_FAILED = ctypes.c_void_p(-1).value


def can_share_memory() -> bool:
    """Whether this system has such files."""
    return sys.platform == "linux" and hasattr(os, "O_TMPFILE") and os.path.isdir(FOLDER)


def whole_size(size: int) -> int:
    """Return the size of the slab for so many bytes: few sizes, so that slabs are used again."""
    return max(SMALLEST, 1 << (size - 1).bit_length())


def nameless_file(size: int) -> int:
    """Return a new file of so many bytes, all zero.

    Raises:
        OSError: There is not so much memory. Without reserving it now, the first write to a page
            that does not exist would end the process (SIGBUS).
    """
    file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
    except BaseException:
        os.close(file)
        raise
    return file


class Slab:
    """A piece of shared memory, mapped. The file may be closed; the mapping stays.

    Attributes:
        address: Where it begins in this process.
        size: Its bytes.
    """

    def __init__(self, file: int, size: int) -> None:
        self.size = size
        self.address = _map(file, size)
        # A slab that is dropped without close() is unmapped too, but not at the end of the
        # interpreter: somebody may still be copying.
        self._unmap = finalize(self, _libc().munmap, self.address, size)
        self._unmap.atexit = False

    @classmethod
    def create(cls, size: int) -> tuple[Slab, int]:
        """Return a new slab and its file, which the other process needs.

        Raises:
            OSError: There is not so much memory.
        """
        file = nameless_file(size)
        try:
            return cls(file, size), file
        except BaseException:
            os.close(file)
            raise

    def close(self) -> None:
        """Unmap it; the memory is freed once the other side has done so too."""
        self._unmap()


def _map(file: int, size: int) -> int:
    """Map a file; Python's own mmap would keep a copy of the file open for every slab."""
    address: int | None = _libc().mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0
    )
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
