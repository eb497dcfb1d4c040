"""Several ranks at work at the same time, until the slowest has done enough."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from stageline.observing.shares import Samples, Share
from stageline.running.caller import CallerState
from stageline.running.cores import use_threads
from stageline.running.workers import WorkerPool

_WARM_UP = 1


class Players:
    """Threads that run a share each; none stops before all have run often enough.

    Args:
        shares: What each runs.
        repeats: How often, at least; the first rounds do not count.
        threads: How many intra-op threads each has.
        advance: Called when all have run once more.
    """

    def __init__(
        self, shares: Sequence[Share], repeats: int, threads: int, advance: Callable[[], None]
    ) -> None:
        self._shares = shares
        self._repeats = repeats
        self._threads = threads
        self._advance = advance
        self._rounds = [0] * len(shares)
        self._told = _WARM_UP
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def play(self) -> Samples:
        """Run all shares at once; return all times."""
        caller = CallerState.capture()
        before = torch.get_num_threads()
        threads = self._threads
        pool = WorkerPool(len(self._shares))
        jobs = [
            partial(_act, caller, partial(self._act, index), threads)
            for index in range(len(self._shares))
        ]
        try:
            failures = pool.run(jobs, on_failure=self._stop.set)
        finally:
            pool.close()
            if threads != before:
                torch.set_num_threads(before)
        if failures:
            raise failures[0]
        merged: Samples = {}
        for share in self._shares:
            for what, times in share.samples.items():
                merged.setdefault(what, []).extend(times)
        return merged

    def _act(self, index: int) -> None:
        share = self._shares[index]
        while not self._stop.is_set() and min(self._rounds) < self._repeats + _WARM_UP:
            share.run_round()
            self._rounds[index] += 1
            if self._rounds[index] == _WARM_UP:
                share.samples.clear()
            self._tell()

    def _tell(self) -> None:
        with self._lock:
            while self._told < min(self._rounds):
                self._told += 1
                self._advance()


def _act(caller: CallerState, act: Callable[[], None], threads: int) -> None:
    use_threads(threads)
    caller.run(act, builds_graph=True)
