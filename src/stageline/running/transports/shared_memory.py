"""Ranks are processes of one host; packets travel through memory that both have mapped.

Slabs are made when there is none that fits, so their number is what the schedule has under way at
once; a sender that is very far ahead waits. Nothing here has a name in the file system. A packet
that somebody keeps is copied out: a slab that was reused before its backward gave a wrong gradient
without an error. Only ``Receipt.read`` sees it where it lies, and the slab is free when it returns.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import TypeVar

from stageline.errors import PipeError
from stageline.running.boundary import Packet
from stageline.running.control.member import Member, Slowness
from stageline.running.slabs import can_share_memory
from stageline.running.transports.base import (
    Aborted,
    Edge,
    Endpoint,
    ProcessTransport,
    Receipt,
)
from stageline.running.transports.channels import BACKSTOP, channel_key, generation_of
from stageline.running.transports.incoming import Incoming
from stageline.running.transports.outgoing import Outgoing

_SLICE = 0.05  # seconds

__all__ = ["SharedMemoryTransport", "can_share_memory"]


_Channel = TypeVar("_Channel")


class _Channels(dict[int, _Channel]):
    """The channels to other ranks, or from them; one is made when it is first asked for."""

    def __init__(self, make: Callable[[int], _Channel]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, rank: int) -> _Channel:
        channel: _Channel = self._make(rank)
        self[rank] = channel
        return channel


class SharedMemoryTransport(ProcessTransport):
    """Carries packets between the processes of one host.

    Args:
        member: This rank's side of the control plane; channels are set up through it.

    Attributes:
        may_wait: Whether packets may stay in their slabs, and this rank take in what it need not.
    """

    name = "shared memory"

    def __init__(self, member: Member) -> None:
        self.member = member
        self._generation = 0
        self.outgoing = _Channels(self._make_outgoing)
        self.incoming = _Channels(self._make_incoming)
        self.may_wait = True

    def open(self, *, epoch: int, window: int | None) -> Endpoint:
        # Windows are for packets that travel one way: nobody can wait for each other, and whoever
        # took in more than it needs would take the bound away. A packet that stayed in its slab
        # would count as one under way, and keep others from coming.
        self.may_wait = window is None
        return _SharedMemoryEndpoint(self, epoch, window)

    def prepare(self, target: int) -> None:
        """Make the channel to another rank ahead of its first packet.

        Raises:
            OSError: There is not enough shared memory.
        """
        self.outgoing[target] = Outgoing(self.member, target, self._generation, self._wait_for_room)

    def _make_outgoing(self, target: int) -> Outgoing:
        try:
            return Outgoing(self.member, target, self._generation, self._wait_for_room)
        except OSError as cause:
            raise PipeError(
                f"rank {self.member.rank} has no shared memory for its channel to rank "
                f"{target} ({cause.strerror}): enlarge /dev/shm, or use "
                "transport='process-group'"
            ) from cause

    def _make_incoming(self, source: int) -> Incoming:
        return Incoming(self.member, source, self._generation, self)

    def _wait_for_room(self, channel: Outgoing, what: str) -> None:
        """Sleep until a receiver has read something; take in, meanwhile, what others send here.

        Two ranks that wait for each other's memory would otherwise wait for ever.
        """
        slow = Slowness(self.member, what)
        while not channel.take_back():
            incoming = self._channels_to_take_in()
            for one in incoming:
                one.take_in()
            # A channel that is yet to be made wakes nobody, so look again soon.
            patience = min(slow.patience, _SLICE) if self.may_wait else slow.patience
            _sleep_beside([channel, *incoming], self.member, patience)
            slow.note()

    def make_room(self, waiting: Incoming) -> None:
        """Copy out what has come through the other channels whose senders need a slab.

        A rank that waits for another may keep a third one from sending, which that one waits for.
        What comes through the channel itself is news to it, and nobody else may read that.
        """
        for channel in self._channels_to_take_in():
            if channel is not waiting and channel.is_waited_for:
                channel.take_in()

    def _channels_to_take_in(self) -> list[Incoming]:
        if not self.may_wait:
            return []
        for source in self.member.who_posted(channel_key(self._generation)):
            self.incoming[source]  # is made
        return list(self.incoming.values())

    def reset(self) -> None:
        """Drop all channels with what is still in them; new ones are made when needed."""
        self._generation += 1
        for sending in self.outgoing.values():
            sending.close()
        for receiving in self.incoming.values():
            receiving.close()
        self.member.forget_posts(lambda key: generation_of(key) < self._generation)
        self.outgoing.clear()
        self.incoming.clear()

    def close(self) -> None:
        self.reset()


class _SharedMemoryEndpoint(Endpoint):
    """This process's side of one call."""

    def __init__(self, transport: SharedMemoryTransport, epoch: int, window: int | None) -> None:
        self._transport = transport
        self._epoch = epoch
        self._window = window

    def send(self, edge: Edge, packet: Packet) -> None:
        transport = self._transport
        if transport.member.has_failed:
            raise Aborted
        transport.outgoing[edge.target_rank].send(edge, self._epoch, packet, self._window)

    def receive(self, edge: Edge) -> Receipt:
        return _SharedMemoryReceipt(self._transport, edge, self._epoch)


class _SharedMemoryReceipt(Receipt):
    __slots__ = ("_edge", "_epoch", "_transport")

    def __init__(self, transport: SharedMemoryTransport, edge: Edge, epoch: int) -> None:
        self._transport = transport
        self._edge = edge
        self._epoch = epoch

    def wait(self) -> Packet:
        edge = self._edge
        return self._transport.incoming[edge.source_rank].wait_for(edge, self._epoch)

    def read(self, use: Callable[[Packet], None]) -> None:
        edge = self._edge
        self._transport.incoming[edge.source_rank].read(edge, self._epoch, use)


def _sleep_beside(channels: Sequence[Outgoing | Incoming], member: Member, seconds: float) -> None:
    """Sleep until there is news on one of several channels.

    Raises:
        Aborted: A rank has failed.
    """
    poll = select.poll()
    poll.register(member.wake_file, select.POLLIN)
    for channel in channels:
        poll.register(channel.ring.bell, select.POLLIN)
        channel.ring.lie_down()
    if not any(channel.has_news for channel in channels):
        poll.poll(min(seconds, BACKSTOP) * 1000)
    ended = [channel for channel in channels if not channel.ring.get_up()]
    if member.failure is not None:
        raise Aborted
    for channel in ended:
        if not channel.has_news:
            raise channel.gone()
