"""A channel from one process to another: slabs of shared memory, and a ring that tells of them.

sender    lays a packet into a free slab     ── record ──▶
receiver  copies it out                      ◀── "read" ──    the slab is free again
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from stageline import log
from stageline.errors import PeerError
from stageline.running.boundary import Packet
from stageline.running.control.member import Member, Slowness
from stageline.running.cores import has_own_core, looking, looks_before_sleep
from stageline.running.slabs import SMALLEST, Slab, whole_size
from stageline.running.transports.barriers import fenced_by_others
from stageline.running.transports.base import Aborted, Edge
from stageline.running.transports.packing import Kind, Packed, Place, Repeated, pack
from stageline.running.transports.rings import CAPACITY, Reader, Writer

# epoch, edge (stages, letter, microbatch), slab, bytes of the header, of this piece, of the whole.
# A header that the slab holds from the packet before is not written again: it has 0 bytes.
_RECORD = struct.Struct("<iiiciIIQQ")
# Per channel: each is an open file until the receiver has mapped it. Every unread record has one.
_MOST_SLABS = CAPACITY // 2
_BACKSTOP = 0.25  # seconds after which a sleeper looks by itself
_GRACE = 2.0  # seconds in which the control plane says why a peer is gone

WaitForRoom = Callable[["Outgoing", str], None]
"""Sleeps until the receiver has read something; the text says to people what is waited for."""


class Outgoing:
    """The sending side of a channel: the slabs belong to it.

    Attributes:
        ring: Where records are written.
    """

    def __init__(self, member: Member, target: int, generation: int, wait: WaitForRoom) -> None:
        self._member = member
        self._target = target
        self._generation = generation
        self._wait = wait
        self._slabs: dict[int, Slab] = {}
        self._headers: dict[int, bytes] = {}
        self._last: Repeated | None = None
        self._free: list[int] = []
        self._under_way: deque[int] = deque()
        self._num_read = 0
        self._is_full = False
        first, file = Slab.create(SMALLEST)
        self._slabs[0] = first
        self._free.append(0)
        try:
            fences = not (has_own_core(member.num_ranks) and fenced_by_others())
            self.ring = Writer(_RECORD, fences=fences)
        except OSError:
            os.close(file)
            raise
        told, files = [first.size, fences], [*self.ring.files, file]
        member.post(channel_key(generation), told, to=target, files=files)

    def send(self, edge: Edge, epoch: int, packet: Packet, window: int | None) -> None:
        if window is None and self._is_sent_like_the_last(edge, epoch, packet):
            return
        packed = pack(packet, edge)
        while window is not None and len(self._under_way) >= window:
            self._reclaim(edge)
        slab = self._slab_for(packed.size)
        if slab is None:
            self._send_in_pieces(edge, epoch, packed)
            return
        header = packed.header
        has_header = self._headers.get(slab) is header
        packed.copy_to(self._slabs[slab].address, has_header=has_header)
        self._headers[slab] = header
        header_size = 0 if has_header else len(header)
        self._announce(edge, epoch, slab, header_size, packed.size, packed.size)
        # What comes once per step, such as the gradients of tied weights, is not what comes next.
        self._last = Repeated.of(packet, packed) or self._last

    def _is_sent_like_the_last(self, edge: Edge, epoch: int, packet: Packet) -> bool:
        """Send a packet through a slab that holds its header, if it looks like the last one.

        Nearly all do, and every hop waits for this: it takes few instructions.
        """
        last = self._last
        tensor = None if last is None else last.tensor_of(packet)
        if tensor is None:
            return False
        assert last is not None
        free, headers, header = self._free, self._headers, last.header
        if not (free and headers.get(free[-1]) is header):
            self.take_back()
        if free and headers.get(free[-1]) is header:
            slab = free.pop()
        else:  # one of the others: those of another kind, gradients of tied weights, lie on top
            fitting = [place for place in range(len(free)) if headers.get(free[place]) is header]
            if not fitting:
                return False
            slab = free.pop(fitting[-1])
        ctypes.memmove(self._slabs[slab].address + last.start, tensor.data_ptr(), last.num_bytes)
        self._announce(edge, epoch, slab, 0, last.size, last.size)
        return True

    def _send_in_pieces(self, edge: Edge, epoch: int, packed: Packed) -> None:
        """Send a packet through whatever slabs there are, one after the other."""
        whole = ctypes.create_string_buffer(packed.size)
        packed.copy_to(ctypes.addressof(whole))
        sent = 0
        while sent < packed.size:
            while not self._free:
                self._reclaim(edge)
            slab = self._free.pop()
            self._headers.pop(slab, None)
            piece = min(packed.size - sent, self._slabs[slab].size)
            ctypes.memmove(self._slabs[slab].address, ctypes.addressof(whole) + sent, piece)
            self._announce(edge, epoch, slab, len(packed.header), piece, packed.size)
            sent += piece

    def _slab_for(self, size: int) -> int | None:
        """Take a free slab that is large enough, or make one; None if there can be no more."""
        if not self._free:
            self.take_back()
        if self._free and self._slabs[self._free[-1]].size == whole_size(size):
            return self._free.pop()  # the same kind of packet as the last one
        chosen = self._smallest_for(size)
        if chosen is None and self.take_back():
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

    def _announce(
        self, edge: Edge, epoch: int, slab: int, header_size: int, size: int, whole: int
    ) -> None:
        source, target, letter, microbatch, _, _ = edge
        self._under_way.append(slab)
        self.ring.put(
            epoch, source, target, letter.encode(), microbatch, slab, header_size, size, whole
        )

    def take_back(self) -> bool:
        """Note which slabs the receiver has read; return whether there were any."""
        read = self.ring.num_read
        if read == self._num_read:
            return False
        for _ in range(read - self._num_read):
            self._free.append(self._under_way.popleft())
        self._num_read = read
        return True

    @property
    def has_news(self) -> bool:
        """Whether the receiver has read something since slabs were taken back."""
        return self.ring.num_read != self._num_read

    def _reclaim(self, edge: Edge) -> None:
        """Sleep until the receiver has read something."""
        if not self.take_back():
            self._wait(self, f"rank {self._target} to take what was sent before edge {edge}")

    def gone(self) -> BaseException:
        """Return what to raise if the receiver has ended."""
        return _gone(self._member, self._target, "the next packet")

    def close(self) -> None:
        for slab in self._slabs.values():
            slab.close()
        self.ring.close()


class Incoming:
    """The receiving side of a channel.

    Attributes:
        ring: Where records are read.
    """

    def __init__(self, member: Member, source: int, generation: int) -> None:
        self._member = member
        self._source = source
        self._generation = generation
        (size, fences), (*files, slab) = member.lookup(channel_key(generation), source)
        fences = fences or not fenced_by_others()
        self.ring = Reader(_RECORD, files, fences=fences)
        self._slabs = {0: _mapped(slab, size)}
        self._places: dict[int, Place] = {}  # by slab: what the last packet in it was like
        self._arrived: dict[tuple[Any, ...], Packet] = {}
        self._pieces: bytearray | None = None
        self._looks = looks_before_sleep(member.num_ranks)
        self._poll = select.poll()
        self._poll.register(self.ring.bell, select.POLLIN)
        self._poll.register(member.wake_file, select.POLLIN)

    def wait_for(self, edge: Edge, epoch: int) -> Packet:
        """Return the packet of an edge; others that come before are kept."""
        source, target, letter, microbatch, _, _ = edge
        wanted = (epoch, source, target, letter.encode(), microbatch)
        arrived = self._arrived
        while wanted not in arrived:
            record = self.ring.look()
            if record is None:
                self._look_and_sleep(edge)
                continue
            packet = self._taken(record)
            if record[:5] == wanted and packet is not None:  # as nearly always
                return packet
            if packet is not None:
                arrived[record[:5]] = packet
        return arrived.pop(wanted)

    def read(self, edge: Edge, epoch: int, use: Callable[[Packet], None]) -> None:
        """Call a function with the packet of an edge as it lies in its slab, where it can."""
        source, target, letter, microbatch, _, _ = edge
        wanted = (epoch, source, target, letter.encode(), microbatch)
        if wanted not in self._arrived and not self.ring.has_news:
            self._look_and_sleep(edge)
        record = self.ring.look()
        place = None if record is None or record[:5] != wanted else self._place_of(record)
        packet = None if place is None or wanted in self._arrived else place.in_place()
        if packet is None:
            use(self.wait_for(edge, epoch))
            return
        try:
            use(packet)
        finally:
            self.ring.free()

    def _look_and_sleep(self, edge: Edge) -> None:
        """Return when there is news; look for a while before sleeping."""
        ring = self.ring
        for _ in looking(self._looks):
            if ring.has_news:
                return
        slow = Slowness(self._member, f"edge {edge} from rank {self._source}")
        while not ring.has_news:
            if self._member.failure is not None:
                raise Aborted
            ring.lie_down()
            if not ring.has_news:
                self._poll.poll(min(slow.patience, _BACKSTOP) * 1000)
            is_there = ring.get_up()
            if not is_there and not ring.has_news:
                raise self.gone(edge)
            slow.note()

    def take_in(self) -> None:
        """Copy out the next packet, or a piece of it, for whoever will ask."""
        record = self.ring.look()
        packet = None if record is None else self._taken(record)
        if record is not None and packet is not None:
            self._arrived[record[:5]] = packet

    def _taken(self, record: tuple[Any, ...]) -> Packet | None:
        """Copy out the packet of a record; None where it is not whole yet."""
        # As nearly always, it lies where the last one did.
        place = self._place_of(record) if record[6] else self._places[record[5]]
        packet = self._with_piece(*record[5:]) if place is None else place.copy()
        self.ring.free()
        return packet

    def _place_of(self, record: tuple[Any, ...]) -> Place | None:
        """Return where the packet of a record lies; None if it is only a piece of one."""
        number, header_size, size, whole = record[5:]
        if not header_size:
            return self._places[number]
        if size != whole:
            return None
        address = self._address_of(number)
        place = self._places[number] = Place(Kind.at(address, header_size), address)
        return place

    def _address_of(self, number: int) -> int:
        slab = self._slabs.get(number)
        if slab is None:
            posted, (file,) = self._member.lookup(f"slab {self._generation} {number}", self._source)
            slab = self._slabs[number] = _mapped(file, posted)
        return slab.address

    def _with_piece(self, number: int, header_size: int, size: int, whole: int) -> Packet | None:
        """Add a piece to those that came before; return the packet once it is whole."""
        self._pieces = self._pieces or bytearray()
        self._pieces += ctypes.string_at(self._address_of(number), size)
        if len(self._pieces) < whole:
            return None
        held = (ctypes.c_char * whole).from_buffer(self._pieces)
        self._pieces = None
        address = ctypes.addressof(held)
        return Kind.at(address, header_size).rebuild(address)

    @property
    def has_news(self) -> bool:
        """Whether there is something to take in."""
        return self.ring.has_news

    def gone(self, edge: Edge | None = None) -> BaseException:
        """Return what to raise if the sender has ended."""
        return _gone(self._member, self._source, edge)

    def close(self) -> None:
        for slab in self._slabs.values():
            slab.close()
        self.ring.close()


def sleep_beside(channels: list[Outgoing | Incoming], member: Member, seconds: float) -> None:
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
        poll.poll(min(seconds, _BACKSTOP) * 1000)
    ended = [channel for channel in channels if not channel.ring.get_up()]
    if member.failure is not None:
        raise Aborted
    for channel in ended:
        if not channel.has_news:
            raise channel.gone()


def channel_key(generation: int) -> str:
    """Return the name under which the files of a channel are posted."""
    return f"channel {generation}"


def generation_of(key: str) -> int:
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
