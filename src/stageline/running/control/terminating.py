"""SIGTERM: last words, then the end that the signal asks for.

Python calls a handler only between two of its instructions: not while the main thread waits in
gloo, or computes. But the file to which it writes the numbers of signals is written at once, and a
thread of ours reads it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

_NUMBER = signal.SIGTERM


def watch(last_words: Callable[[], None]) -> None:
    """End this process on SIGTERM as it would end anyway, but call something before.

    Does nothing where somebody else looks after the signal. For the main thread.
    """
    if signal.getsignal(_NUMBER) is signal.SIG_DFL:
        _Watch(last_words)


class _Watch:
    def __init__(self, last_words: Callable[[], None]) -> None:
        self._last_words = last_words
        self._process = os.getpid()
        signal.signal(_NUMBER, self._handle)
        self._file, end = os.pipe()
        os.set_blocking(end, False)
        somebodys = signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        self._has_thread = somebodys == -1
        if self._has_thread:
            os.register_at_fork(after_in_child=self._leave_alone)
            threading.Thread(target=self._listen, name="stageline-signals", daemon=True).start()
        else:  # asyncio's, say: the handler must do
            signal.set_wakeup_fd(somebodys)

    @property
    def _is_in_charge(self) -> bool:
        return signal.getsignal(_NUMBER) == self._handle

    def _handle(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:
            _end()
        elif not self._has_thread:  # else that was woken by the same signal
            self._last_words()
            _end()

    def _listen(self) -> None:
        while received := os.read(self._file, 64):
            if _NUMBER in received and self._is_in_charge:
                self._last_words()
                _end()

    def _leave_alone(self) -> None:
        """In a child process, which has no such thread, and whose signals are its own."""
        if self._is_in_charge:
            signal.set_wakeup_fd(-1)
            signal.signal(_NUMBER, signal.SIG_DFL)


def _end() -> None:
    # Python's own signal.signal is for the main thread, which may be busy for long.
    ctypes.CDLL(None).signal(_NUMBER.value, 0)
    os.kill(os.getpid(), _NUMBER)
