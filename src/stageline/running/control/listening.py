"""The thread that listens to other ranks, and shows them that this one is alive."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Listener(threading.Thread):
    """The thread that listens, sends heartbeats, and looks for silence.

    Args:
        name: For people who look at threads.
        interval: Seconds between heartbeats.
    """

    def __init__(self, name: str, interval: float) -> None:
        super().__init__(name=name, daemon=True)
        self._interval = interval
        self._selector = selectors.DefaultSelector()
        self._stopped = False
        # Not self._stop: a method of threads, which Python calls in children, and in join().
        self._end, self._wake = os.pipe()
        self._selector.register(self._end, selectors.EVENT_READ, None)
        self.on_beat: Callable[[float], None] = lambda _: None

    def watch(self, file: Any, callback: Callable[[], None]) -> None:
        """Call back whenever something can be read."""
        self._selector.register(file, selectors.EVENT_READ, callback)

    def forget(self, file: Any) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def stop(self) -> None:
        """End the thread soon; it may be the one that calls."""
        if not self._stopped:
            self._stopped = True
            with suppress(OSError):
                os.write(self._wake, b"!")

    def run(self) -> None:
        last = time.monotonic()
        while not self._stopped:
            ready = self._selector.select(max(0.0, last + self._interval - time.monotonic()))
            for key, _ in ready:
                if key.data is not None:
                    key.data()
            now = time.monotonic()
            if now - last >= self._interval and not self._stopped:
                self.on_beat(now - last)
                last = now
        self._selector.close()
        os.close(self._end)
        os.close(self._wake)
