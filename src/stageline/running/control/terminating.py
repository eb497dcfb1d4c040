"""SIGTERM: last words, then the end that the signal asks for.

Python calls a handler only between two of its instructions: not while the main thread waits in
gloo, or computes. But the file that it writes the number of a signal to is written at once, and a
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
    if signal.getsignal(_NUMBER) is not signal.SIG_DFL:
        return
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    process = os.getpid()
    somebodys = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    is_taken = somebodys != -1
    if is_taken:  # asyncio's, say
        signal.set_wakeup_fd(somebodys)

    def handle(number: int, frame: Any) -> None:
        if is_taken:
            last_words()
        if is_taken or os.getpid() != process:
            _end()
        # Else the thread below has been woken by the same signal.

    def listen() -> None:
        while received := os.read(ours, 64):
            if _NUMBER in received and signal.getsignal(_NUMBER) is handle:
                last_words()
                _end()

    def in_child() -> None:
        if signal.getsignal(_NUMBER) is handle:
            signal.set_wakeup_fd(-1)
            signal.signal(_NUMBER, signal.SIG_DFL)

    signal.signal(_NUMBER, handle)
    if not is_taken:
        os.register_at_fork(after_in_child=in_child)
        threading.Thread(target=listen, name="stageline-signals", daemon=True).start()


def _end() -> None:
    # Python's own signal.signal is for the main thread, which may be busy for long.
    ctypes.CDLL(None).signal(_NUMBER.value, 0)
    os.kill(os.getpid(), _NUMBER)
