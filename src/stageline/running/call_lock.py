"""One call of a pipeline at a time: a second thread waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from stageline.errors import PipeError


class CallLock:
    """Lets one call of a pipeline run at a time.

    Example:
        >>> lock = CallLock()
        >>> with lock.held(waits=True):
        ...     pass
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def held(self, *, waits: bool) -> Iterator[None]:
        """Run a call.

        Args:
            waits: Whether to wait for a call of another thread. With ranks in several processes
                that is refused: all would have to take the calls in the same order.

        Raises:
            PipeError: The call comes from a stage of the pipeline, or another thread runs one.
        """
        if any(lock is self for lock in _running.get()):
            raise PipeError(
                "a stage, or its loss, called the pipeline that it is a part of, which would wait "
                "for itself: call the model or one of its modules instead"
            )
        if not self._lock.acquire(blocking=waits):
            raise PipeError(
                "this pipeline is already running a call in another thread: wait for it, or "
                "build a second pipeline"
            )
        token = _running.set((*_running.get(), self))
        try:
            yield
        finally:
            _running.reset(token)
            self._lock.release()


_running: ContextVar[tuple[CallLock, ...]] = ContextVar("_running", default=())
"""The pipelines whose calls the current thread is in, as a caller or as a rank."""
