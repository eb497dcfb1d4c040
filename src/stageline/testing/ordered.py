"""A transport as strict as NCCL: per pair of ranks one FIFO, rendezvous, no tags.

NCCL joins two ranks by one channel. What both sides issue there is matched by position alone: the
n-th operation of one side meets the n-th of the other, and neither starts before all earlier ones
are done. A send that meets a send, or a receive that meets another edge's send, would hang or
deliver the wrong tensor; here it is an error that names both. A schedule that runs on this
transport runs on such a channel.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from stageline.errors import EdgeError
from stageline.running.boundary import Packet
from stageline.running.transports.base import (
    Aborted,
    Edge,
    Endpoint,
    Exchange,
    Receipt,
    ThreadTransport,
)


class OrderedTransport(ThreadTransport):
    """Stands in for NCCL in tests, without a GPU."""

    def open(self, num_ranks: int, *, window: int | None) -> Exchange:
        return _OrderedExchange(window)


@dataclass
class _Operation:
    """What one side issued at one position of a pair's FIFO."""

    rank: int
    edge: Edge
    sends: bool
    packet: Packet | None = None


@dataclass
class _Pair:
    """The FIFO of two ranks: issued by each side, and how many have met."""

    issued: dict[int, list[_Operation]] = field(default_factory=dict)
    met: int = 0


class _OrderedExchange(Exchange):
    def __init__(self, window: int | None) -> None:
        self.window = window
        self.changed = threading.Condition()
        self.aborted = False
        self._pairs: dict[frozenset[int], _Pair] = {}
        self._arrived: dict[Edge, Packet] = {}
        self._taken: set[Edge] = set()

    def endpoint(self, rank: int) -> Endpoint:
        return _OrderedEndpoint(self, rank)

    def abort(self) -> None:
        with self.changed:
            self.aborted = True
            self.changed.notify_all()

    def issue(self, operation: _Operation) -> None:
        """Append to the FIFO, and let every position meet that both sides have reached."""
        edge = operation.edge
        with self.changed:
            pair = self._pairs.setdefault(frozenset((edge.source_rank, edge.target_rank)), _Pair())
            for rank in (edge.source_rank, edge.target_rank):
                pair.issued.setdefault(rank, [])
            pair.issued[operation.rank].append(operation)
            left, right = pair.issued.values()
            while pair.met < min(len(left), len(right)):
                self._meet(left[pair.met], right[pair.met])
                pair.met += 1
            self.changed.notify_all()

    def _meet(self, one: _Operation, other: _Operation) -> None:
        if one.sends == other.sends or one.edge != other.edge:
            raise EdgeError(
                f"ranks {one.rank} and {other.rank} meet out of order: {_told(one)}, {_told(other)}"
            )
        sender = one if one.sends else other
        assert sender.packet is not None
        self._arrived[sender.edge] = sender.packet
        sender.packet = None  # rendezvous: from here on the packet is the receiver's

    def wait(self, edge: Edge) -> Packet:
        with self.changed:
            self.changed.wait_for(lambda: self.aborted or edge in self._arrived)
            if edge not in self._arrived:
                raise Aborted
            packet = self._arrived.pop(edge)
            self._taken.add(edge)
            self.changed.notify_all()
            return packet

    def wait_for_room(self, sent: list[Edge]) -> None:
        """Wait until at most ``window`` of these have not been taken."""
        if self.window is None or len(sent) < self.window:
            return
        oldest = sent[-self.window]
        with self.changed:
            self.changed.wait_for(lambda: self.aborted or oldest in self._taken)
            if self.aborted:
                raise Aborted


def _told(operation: _Operation) -> str:
    verb = "sends" if operation.sends else "receives"
    return f"rank {operation.rank} {verb} {operation.edge}"


class _OrderedEndpoint(Endpoint):
    directions_are_apart = False

    def __init__(self, exchange: _OrderedExchange, rank: int) -> None:
        self._exchange = exchange
        self._rank = rank
        self._sent: dict[int, list[Edge]] = {}

    def send(self, edge: Edge, packet: Packet) -> None:
        sent = self._sent.setdefault(edge.target_rank, [])
        self._exchange.wait_for_room(sent)
        sent.append(edge)
        self._exchange.issue(_Operation(self._rank, edge, sends=True, packet=packet))

    def receive(self, edge: Edge) -> Receipt:
        self._exchange.issue(_Operation(self._rank, edge, sends=False))
        return _OrderedReceipt(self._exchange, edge)


class _OrderedReceipt(Receipt):
    def __init__(self, exchange: _OrderedExchange, edge: Edge) -> None:
        self._exchange = exchange
        self._edge = edge

    def wait(self) -> Packet:
        return self._exchange.wait(self._edge)
