"""A bar for what takes a while: only on a terminal, and only once it has taken a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_PATIENCE = 1.0  # seconds without a bar
_WIDTH = 30


class Progress:
    """Shows how much of some work is done, and about how long the rest will take.

    Example:
        >>> from io import StringIO
        >>> terminal, clock = StringIO(), iter([0, 2, 4])
        >>> with Progress(2, "working", show=True, stream=terminal, clock=clock.__next__) as bar:
        ...     bar.advance()
        ...     print(terminal.getvalue().strip())
        working  ###############---------------   50 %,  2 s left

    Args:
        total: How often ``advance`` will be called.
        title: What is done.
        show: Whether to show it; if None, on a terminal after a second.
        stream: Where to; stderr if None.
        clock: Returns seconds.
    """

    def __init__(
        self,
        total: int,
        title: str,
        *,
        show: bool | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._title = title
        self._show = show
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._done = 0
        self._length = 0

    def __enter__(self) -> Progress:
        self._start = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        if self._length:
            self._stream.write("\r" + " " * self._length + "\r")
            self._stream.flush()

    def advance(self) -> None:
        """Say that one more part is done."""
        self._done += 1
        if not self._is_shown():
            return
        spent = self._clock() - self._start
        left = spent / self._done * (self._total - self._done)
        filled = "#" * (_WIDTH * self._done // self._total)
        share = 100 * self._done // self._total
        line = f"{self._title}  {filled:-<{_WIDTH}}  {share:3} %, {left:2.0f} s left"
        self._length = max(self._length, len(line))
        self._stream.write(f"\r{line:<{self._length}}")
        self._stream.flush()

    def _is_shown(self) -> bool:
        if self._show is not None:
            return self._show
        return self._stream.isatty() and self._clock() - self._start > _PATIENCE
