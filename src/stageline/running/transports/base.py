"""What carries packets between ranks: one interface, one contract test.

    rank 0                                  rank 1
    endpoint.send(edge, packet)  ·······▶   receipt = endpoint.receive(edge)   (early, in row order)
                                            packet  = receipt.wait()           (when the
                                            consumer starts)

Promises of every transport:

1. ``send`` does not wait for the receiver, except where a window bounds what is under way.
2. Sends and receives between two ranks are issued in one order at both ends (``order_transfers``);
   a transport may rely on it and need not look for a match. Only where it says so, by
   ``directions_are_apart``, a send may pass a receive (and never another send).
3. What arrives equals what was sent: values, dtype, shape and strides.
4. A wait ends: with the packet, with ``Aborted`` when another rank failed, or with an error that
   names the edge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Protocol

from stageline.running.boundary import Packet
from stageline.running.control.failures import Aborted

__all__ = [
    "Aborted",
    "Edge",
    "Endpoint",
    "Exchange",
    "ProcessTransport",
    "Receipt",
    "ThreadTransport",
]


class Edge(NamedTuple):
    """A value that crosses ranks: ``1->2 F3`` is microbatch 3 from stage 1 to stage 2."""

    source: int
    target: int
    letter: str
    microbatch: int
    source_rank: int
    target_rank: int

    def __str__(self) -> str:
        return f"{self.source}->{self.target} {self.letter}{self.microbatch}"


class Receipt(Protocol):
    """A packet that will come. One that is here already is its own receipt."""

    __slots__ = ()

    @abstractmethod
    def wait(self) -> Packet:
        """Return the packet as soon as it is here."""

    def read(self, use: Callable[[Packet], None]) -> None:
        """Call a function with the packet, whose tensors may be gone as soon as it returns."""
        use(self.wait())


class Endpoint(ABC):
    """One rank's side of a transport during one step.

    Attributes:
        directions_are_apart: Whether what comes and what goes have an order of their own each, so
            that a gradient may leave in the middle of B, ahead of a receive in its row.
    """

    directions_are_apart = True

    @abstractmethod
    def send(self, edge: Edge, packet: Packet) -> None:
        """Hand a packet over for its journey."""

    @abstractmethod
    def receive(self, edge: Edge) -> Receipt:
        """Announce that a packet is expected."""


class Exchange(ABC):
    """The endpoints of all ranks that live in this process, for one step."""

    @abstractmethod
    def endpoint(self, rank: int) -> Endpoint:
        """Return the side of one rank."""

    @abstractmethod
    def abort(self) -> None:
        """Wake every rank that waits; its wait raises ``Aborted``."""


class ThreadTransport(ABC):
    """A transport between the ranks of one process."""

    @abstractmethod
    def open(self, num_ranks: int, *, window: int | None) -> Exchange:
        """Return fresh endpoints for one step; ``window`` bounds the packets per channel."""


class ProcessTransport(ABC):
    """A transport between processes; this one plays a single rank.

    Attributes:
        name: What people call it.
    """

    name: str

    @abstractmethod
    def open(self, *, epoch: int, window: int | None) -> Endpoint:
        """Begin a call; ranks count alike, so packets of different calls never match."""

    def abort(self, epoch: int) -> None:
        """Wake whoever waits in a call that has failed somewhere; called from another thread.

        By then this rank may have left that call, or even begun the next one, which goes on.
        """
        return

    @abstractmethod
    def reset(self) -> None:
        """Drop what a failed call has left on its way."""

    @abstractmethod
    def close(self) -> None:
        """Let go of memory, files and threads."""
