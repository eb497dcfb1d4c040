"""The threads that play the ranks of one process.

They are made once, sleep between steps, and hold nothing of a step once it is over. They end when
their pool is closed, collected, or when the interpreter exits; being daemons, they can never hold
it up.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

Job = Callable[[], None]
_Task = tuple[Job, "_Outcomes"] | None  # None: go home


class _Outcomes:
    """What jobs have come to, the earliest first.

    Attributes:
        raised: What each of those that have ended has raised, or None.
    """

    __slots__ = ("_ended", "raised")

    def __init__(self) -> None:
        self.raised: list[BaseException | None] = []
        self._ended: SimpleQueue[None] = SimpleQueue()

    def add(self, raised: BaseException | None) -> None:
        self.raised.append(raised)
        self._ended.put(None)

    def wait(self) -> None:
        """Wait for another one.

        Who is interrupted when one has just come has not lost it: it is in the list.
        """
        self._ended.get()


class WorkerPool:
    """A fixed number of threads that run one job each, together.

    Example:
        >>> pool = WorkerPool(2)
        >>> done = []
        >>> pool.run([lambda: done.append("a"), lambda: done.append("b")], on_failure=lambda: None)
        []
        >>> sorted(done)
        ['a', 'b']
        >>> pool.close()
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._process = os.getpid()
        self._tasks: list[SimpleQueue[_Task]] = [SimpleQueue() for _ in range(size)]
        # The threads know their queue and nothing else, or the pool could never be collected.
        threads = [
            threading.Thread(target=_work, args=(tasks,), name=f"stageline-rank-{i}", daemon=True)
            for i, tasks in enumerate(self._tasks)
        ]
        for thread in threads:
            thread.start()
        self.close = weakref.finalize(self, _send_home, self._tasks, threads)

    @property
    def usable(self) -> bool:
        """Whether the threads still exist: a forked child has inherited none of them."""
        return self.close.alive and self._process == os.getpid()

    def run(self, jobs: Sequence[Job], *, on_failure: Callable[[], None]) -> list[BaseException]:
        """Run all jobs and return what they raised, the earliest first.

        ``on_failure`` is called at the first exception, so that the other jobs can be told to
        stop. An interrupt of the caller counts as one; it is raised again when all jobs have
        stopped. A second interrupt does not wait for them.
        """
        outcomes = _Outcomes()
        try:
            for tasks, job in zip(self._tasks, jobs, strict=True):
                tasks.put((job, outcomes))
        except BaseException:  # an interrupt between two puts: nobody knows how many have started
            on_failure()
            self.close()
            raise
        return self._collect(len(jobs), outcomes, on_failure)

    def _collect(
        self, count: int, outcomes: _Outcomes, on_failure: Callable[[], None]
    ) -> list[BaseException]:
        interrupt: BaseException | None = None
        is_told = False
        while len(outcomes.raised) < count:
            try:
                outcomes.wait()
            except BaseException as caught:  # an interrupt
                on_failure()
                if interrupt is not None:
                    self.close()
                    raise
                interrupt = caught
                continue
            if not is_told and any(outcomes.raised):
                on_failure()
                is_told = True
        if interrupt is not None:
            raise interrupt
        return [each for each in outcomes.raised if each is not None]


def _work(tasks: SimpleQueue[_Task]) -> None:
    while (task := tasks.get()) is not None:
        job, outcomes = task
        failure: BaseException | None = None
        try:
            job()
        except BaseException as caught:
            failure = caught
        # Nothing of this step may stay alive while the thread sleeps.
        del task, job
        outcomes.add(failure)
        del outcomes, failure


def _send_home(tasks: Sequence[SimpleQueue[_Task]], threads: Sequence[threading.Thread]) -> None:
    for queue in tasks:
        queue.put(None)
    for thread in threads:
        # A thread in the middle of a long operation is left behind; it ends by itself afterwards.
        if thread is not threading.current_thread():
            thread.join(timeout=1.0)
