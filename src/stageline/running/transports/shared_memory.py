"""Ranks are processes of one host; packets travel through memory that both have mapped.

    sender    lays a packet into a free slab     ── record ──▶    pipe: what lies where
    receiver  copies it out                      ◀─ slab id ──    pipe: the slab is free again

Slabs are made when there is none that fits, so their number is what the schedule has under way at
once; a sender that is very far ahead waits. The pipes wake whoever sleeps, and end when the other
process does. Nothing here has a name in the file system. A packet is always copied out: a slab that
was reused before its backward gave a wrong gradient without an error.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from stageline import log
from stageline.errors import PeerError, PipeError
from stageline.running.boundary import Packet
from stageline.running.control.member import Member, Slowness
from stageline.running.cores import looks_before_sleep
from stageline.running.slabs import SMALLEST, Slab, can_share_memory, whole_size
from stageline.running.transports.base import (
    Aborted,
    Edge,
    Endpoint,
    ProcessTransport,
    Receipt,
)
from stageline.running.transports.packing import Packed, pack, unpack

# epoch, edge (stages, letter, microbatch), slab, bytes of the header, of this piece, of the whole
_RECORD = struct.Struct("<iiiciIIQQ")
_FREED = struct.Struct("<I")
_MOST_SLABS = 128  # per channel: each is an open file until the receiver has mapped it
_ALL = 1 << 16  # bytes: more than a pipe holds
_SLICE = 0.05  # seconds
_GRACE = 2.0  # seconds in which the control plane says why a peer is gone

Wait = Callable[[int, int, str], None]
"""Sleeps until a file is ready for an event; the text says to people what is waited for."""

__all__ = ["SharedMemoryTransport", "can_share_memory"]


class SharedMemoryTransport(ProcessTransport):
    """Carries packets between the processes of one host.

    Args:
        member: This rank's side of the control plane; channels are set up through it.
    """

    name = "shared memory"

    def __init__(self, member: Member) -> None:
        self.member = member
        self._generation = 0
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._takes_in = True

    def open(self, *, epoch: int, window: int | None) -> Endpoint:
        # Windows are for packets that travel one way: nobody can wait for each other, and whoever
        # took in more than it needs would take the bound away.
        self._takes_in = window is None
        return _SharedMemoryEndpoint(self, epoch, window)

    def prepare(self, target: int) -> None:
        """Make the channel to another rank ahead of its first packet.

        Raises:
            OSError: There is not enough shared memory.
        """
        self._outgoing[target] = _Outgoing(self.member, target, self._generation, self._wait)

    def outgoing(self, target: int) -> _Outgoing:
        channel = self._outgoing.get(target)
        if channel is None:
            try:
                self.prepare(target)
            except OSError as cause:
                raise PipeError(
                    f"rank {self.member.rank} has no shared memory for its channel to rank "
                    f"{target} ({cause.strerror}): enlarge /dev/shm, or use "
                    "transport='process-group'"
                ) from cause
            channel = self._outgoing[target]
        return channel

    def incoming(self, source: int) -> _Incoming:
        channel = self._incoming.get(source)
        if channel is None:
            channel = self._incoming[source] = _Incoming(self.member, source, self._generation)
        return channel

    def _wait(self, file: int, event: int, what: str) -> None:
        """Sleep until a file is ready; take in, meanwhile, what other ranks send here.

        Two ranks that wait for each other's memory would otherwise wait for ever.
        """
        slow = Slowness(self.member, what)
        while True:
            channels = self._channels_to_take_in()
            poll = select.poll()
            poll.register(file, event)
            poll.register(self.member.wake_file, select.POLLIN)
            for channel in channels:
                poll.register(channel.file, select.POLLIN)
            # A channel that is yet to be made wakes nobody, so look again soon.
            patience = min(slow.patience, _SLICE) if self._takes_in else slow.patience
            ready = [one for one, _ in poll.poll(patience * 1000)]
            slow.note()
            if self.member.wake_file in ready:
                raise Aborted
            if file in ready:
                return
            for channel in channels:
                if channel.file in ready:
                    channel.take_in()

    def _channels_to_take_in(self) -> list[_Incoming]:
        if not self._takes_in:
            return []
        for source in self.member.who_posted(_channel_key(self._generation)):
            self.incoming(source)
        return list(self._incoming.values())

    def reset(self) -> None:
        """Drop all channels with what is still in them; new ones are made when needed."""
        self._generation += 1
        for sending in self._outgoing.values():
            sending.close()
        for receiving in self._incoming.values():
            receiving.close()
        self.member.forget_posts(lambda key: _generation_of(key) < self._generation)
        self._outgoing.clear()
        self._incoming.clear()

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
        if transport.member.failure is not None:
            raise Aborted
        transport.outgoing(edge.target_rank).send(edge, self._epoch, packet, self._window)

    def receive(self, edge: Edge) -> Receipt:
        return _SharedMemoryReceipt(self._transport, edge, self._epoch)


class _SharedMemoryReceipt(Receipt):
    __slots__ = ("_edge", "_epoch", "_transport")

    def __init__(self, transport: SharedMemoryTransport, edge: Edge, epoch: int) -> None:
        self._transport = transport
        self._edge = edge
        self._epoch = epoch

    def wait(self) -> Packet:
        channel = self._transport.incoming(self._edge.source_rank)
        return channel.wait_for(self._edge, self._epoch)


class _Outgoing:
    """The sending side of a channel: the slabs belong to it."""

    def __init__(self, member: Member, target: int, generation: int, wait: Wait) -> None:
        self._member = member
        self._target = target
        self._generation = generation
        self._wait = wait
        self._slabs: dict[int, Slab] = {}
        self._free: list[int] = []
        self._used = 0
        self._is_full = False
        first, file = Slab.create(SMALLEST)
        self._slabs[0] = first
        self._free.append(0)
        theirs, self._records = os.pipe()
        self._freed, theirs_too = os.pipe()
        os.set_blocking(self._records, False)
        os.set_blocking(self._freed, False)
        files = [theirs, theirs_too, file]
        member.post(_channel_key(generation), first.size, to=target, files=files)

    def send(self, edge: Edge, epoch: int, packet: Packet, window: int | None) -> None:
        packed = pack(packet, edge)
        while window is not None and self._used >= window:
            self._reclaim(edge)
        slab = self._slab_for(packed.size)
        if slab is None:
            self._send_in_pieces(edge, epoch, packed)
            return
        packed.copy_to(self._slabs[slab].address)
        self._announce(edge, epoch, slab, (len(packed.header), packed.size, packed.size))

    def _send_in_pieces(self, edge: Edge, epoch: int, packed: Packed) -> None:
        """Send a packet through whatever slabs there are, one after the other."""
        whole = ctypes.create_string_buffer(packed.size)
        packed.copy_to(ctypes.addressof(whole))
        sent = 0
        while sent < packed.size:
            while not self._free:
                self._reclaim(edge)
            slab = self._free.pop()
            piece = min(packed.size - sent, self._slabs[slab].size)
            ctypes.memmove(self._slabs[slab].address, ctypes.addressof(whole) + sent, piece)
            self._announce(edge, epoch, slab, (len(packed.header), piece, packed.size))
            sent += piece

    def _slab_for(self, size: int) -> int | None:
        """Take a free slab that is large enough, or make one; None if there can be no more."""
        if not self._free and self._used:
            self._take_back()
        if self._free and self._slabs[self._free[-1]].size == whole_size(size):
            return self._free.pop()  # the same kind of packet as the last one
        chosen = self._smallest_for(size)
        if chosen is None and self._used and self._take_back():
            chosen = self._smallest_for(size)
        if chosen is not None:
            self._free.remove(chosen)
            return chosen
        if self._is_full or len(self._slabs) >= _MOST_SLABS:
            return None
        try:
            slab, file = Slab.create(whole_size(size))
        except OSError as error:
            self._is_full = True
            log.warning(
                self._member.rank,
                f"no shared memory for {size} more bytes ({error.strerror}): packets travel in "
                "pieces, and slower. Enlarge /dev/shm, or use transport='process-group'",
            )
            return None
        number = len(self._slabs)
        self._slabs[number] = slab
        key = f"slab {self._generation} {number}"
        self._member.post(key, slab.size, to=self._target, files=[file])
        return number

    def _smallest_for(self, size: int) -> int | None:
        fitting = [slab for slab in self._free if self._slabs[slab].size >= size]
        return min(fitting, key=lambda slab: self._slabs[slab].size, default=None)

    def _announce(self, edge: Edge, epoch: int, slab: int, sizes: tuple[int, int, int]) -> None:
        record = _RECORD.pack(
            epoch, edge.source, edge.target, edge.letter.encode(), edge.microbatch, slab, *sizes
        )
        self._used += 1
        while not self._is_written(record, edge):
            self._wait(self._records, select.POLLOUT, f"rank {self._target} to read what was sent")

    def _is_written(self, record: bytes, edge: Edge) -> bool:
        try:
            os.write(self._records, record)
        except BlockingIOError:
            return False
        except BrokenPipeError:
            raise _gone(self._member, self._target, edge) from None
        return True

    def _take_back(self) -> bool:
        """Note which slabs the receiver has freed; return whether there were any."""
        try:
            data = os.read(self._freed, _ALL)
        except BlockingIOError:
            return False
        freed = [slab for (slab,) in _FREED.iter_unpack(data)]
        self._free += freed
        self._used -= len(freed)
        return bool(freed)

    def _reclaim(self, edge: Edge) -> None:
        """Sleep until the receiver has freed something."""
        if not self._take_back():
            what = f"rank {self._target} to take what was sent before edge {edge}"
            self._wait(self._freed, select.POLLIN, what)
            if not self._take_back():  # readable, and nothing there: the other end was closed
                raise _gone(self._member, self._target, edge)

    def close(self) -> None:
        for slab in self._slabs.values():
            slab.close()
        os.close(self._records)
        os.close(self._freed)


class _Incoming:
    """The receiving side of a channel."""

    def __init__(self, member: Member, source: int, generation: int) -> None:
        self._member = member
        self._source = source
        self._generation = generation
        size, (self.file, self._freed, slab) = member.lookup(_channel_key(generation), source)
        self._slabs = {0: _mapped(slab, size)}
        self._arrived: dict[tuple[Any, ...], Packet] = {}
        self._pieces: bytearray | None = None
        self._looks = looks_before_sleep(member.num_ranks)
        os.set_blocking(self.file, False)
        self._poll = select.poll()
        self._poll.register(self.file, select.POLLIN)
        self._poll.register(member.wake_file, select.POLLIN)

    def wait_for(self, edge: Edge, epoch: int) -> Packet:
        """Return the packet of an edge; others that come before are kept."""
        wanted = (epoch, edge.source, edge.target, edge.letter.encode(), edge.microbatch)
        slow: Slowness | None = None
        looks = self._looks
        while wanted not in self._arrived:
            if self._member.failure is not None:
                raise Aborted
            if self.take_in(edge):
                continue
            if looks:
                looks -= 1
                os.sched_yield()
                continue
            slow = slow or Slowness(self._member, f"edge {edge} from rank {self._source}")
            self._poll.poll(slow.patience * 1000)
            slow.note()
        return self._arrived.pop(wanted)

    def take_in(self, edge: Edge | None = None) -> bool:
        """Copy out the next packet, or a piece of it; return whether there was any."""
        try:
            data = os.read(self.file, _RECORD.size)
        except BlockingIOError:
            return False
        if not data:
            raise _gone(self._member, self._source, edge)
        *key, number, header_size, size, whole = _RECORD.unpack(data)
        slab = self._slabs.get(number)
        if slab is None:
            posted, (file,) = self._member.lookup(f"slab {self._generation} {number}", self._source)
            slab = self._slabs[number] = _mapped(file, posted)
        packet = None
        if size == whole:
            packet = unpack(slab.address, header_size)
        else:
            self._pieces = self._pieces or bytearray()
            self._pieces += ctypes.string_at(slab.address, size)
            if len(self._pieces) == whole:
                held = (ctypes.c_char * whole).from_buffer(self._pieces)
                packet = unpack(ctypes.addressof(held), header_size)
                self._pieces = None
        with suppress(BrokenPipeError):  # the sender has left after its last packet
            os.write(self._freed, _FREED.pack(number))
        if packet is not None:
            self._arrived[tuple(key)] = packet
        return True

    def close(self) -> None:
        for slab in self._slabs.values():
            slab.close()
        os.close(self.file)
        os.close(self._freed)


def _channel_key(generation: int) -> str:
    return f"channel {generation}"


def _generation_of(key: str) -> int:
    """Return the generation of a posted channel or slab; other posts belong to none that is old."""
    kind, _, rest = key.partition(" ")
    return int(rest.split()[0]) if kind in ("channel", "slab") else sys.maxsize


def _mapped(file: int, size: int) -> Slab:
    slab = Slab(file, size)
    os.close(file)
    return slab


def _gone(member: Member, peer: int, edge: object) -> BaseException:
    """Return what to raise when a pipe has ended: the control plane usually knows why."""
    if member.await_failure(_GRACE) is not None:
        return Aborted()
    return PeerError(
        f"rank {peer} closed its channel to rank {member.rank} at {edge}: every rank must make the "
        "same calls; look at the output of that rank"
    )
