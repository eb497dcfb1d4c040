"""Ranks are threads of one process; a tensor is handed over without a copy.

Every rank has one inbox. A rank that waits for an edge takes what comes and keeps the rest for
later, so there is one queue per rank and no lock of our own.
"""

from __future__ import annotations

from queue import SimpleQueue

from stageline.running.boundary import Packet
from stageline.running.transports.base import (
    Aborted,
    Edge,
    Endpoint,
    Exchange,
    Receipt,
    ThreadTransport,
)

_Letter = tuple[Edge, Packet] | None  # None: the step was aborted


class MemoryTransport(ThreadTransport):
    """Hands packets over between the threads of one process."""

    def open(self, num_ranks: int, *, window: int | None) -> Exchange:
        return _MemoryExchange(num_ranks, window)


class _MemoryExchange(Exchange):
    def __init__(self, num_ranks: int, window: int | None) -> None:
        self.inboxes: list[SimpleQueue[_Letter]] = [SimpleQueue() for _ in range(num_ranks)]
        self.window = window
        # A rank that only sends would run its whole row after another one has failed.
        self.is_over = False
        # What a sender must take before it sends, and a receiver gives back once it has the packet.
        self.credits: dict[tuple[int, int], SimpleQueue[bool]] = {}
        if window is not None:
            pairs = ((a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b)
            self.credits = {pair: _filled(window) for pair in pairs}

    def endpoint(self, rank: int) -> Endpoint:
        return _MemoryEndpoint(self, self.inboxes[rank])

    def abort(self) -> None:
        self.is_over = True
        for inbox in self.inboxes:
            inbox.put(None)
        for credit in self.credits.values():
            credit.put(False)


def _filled(count: int) -> SimpleQueue[bool]:
    queue: SimpleQueue[bool] = SimpleQueue()
    for _ in range(count):
        queue.put(True)
    return queue


class _MemoryEndpoint(Endpoint):
    def __init__(self, exchange: _MemoryExchange, inbox: SimpleQueue[_Letter]) -> None:
        self._exchange = exchange
        self._inbox = inbox
        self._waiting: dict[Edge, Packet] = {}

    def send(self, edge: Edge, packet: Packet) -> None:
        exchange = self._exchange
        if exchange.is_over:
            raise Aborted
        if (
            exchange.window is not None
            and not exchange.credits[edge.source_rank, edge.target_rank].get()
        ):
            raise Aborted
        exchange.inboxes[edge.target_rank].put((edge, packet))

    def receive(self, edge: Edge) -> Receipt:
        return _MemoryReceipt(self, edge)

    def take(self, wanted: Edge) -> Packet:
        if self._exchange.is_over:
            raise Aborted
        packet = self._waiting.pop(wanted, None)
        while packet is None:
            letter = self._inbox.get()
            if letter is None:
                raise Aborted
            edge, arrived = letter
            if edge == wanted:
                packet = arrived
            else:
                self._waiting[edge] = arrived
        if self._exchange.window is not None:
            self._exchange.credits[wanted.source_rank, wanted.target_rank].put(True)
        return packet


class _MemoryReceipt(Receipt):
    __slots__ = ("_edge", "_endpoint")

    def __init__(self, endpoint: _MemoryEndpoint, edge: Edge) -> None:
        self._endpoint = endpoint
        self._edge = edge

    def wait(self) -> Packet:
        return self._endpoint.take(self._edge)
