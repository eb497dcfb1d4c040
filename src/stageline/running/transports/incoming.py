"""The receiving side of a channel.

A packet that comes before its turn, ahead of the one that is waited for, stays where it lies until
somebody asks for it: a copy would be more memory. Only if its sender cannot go on without the slab
is it copied out sooner.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Callable
from typing import Any, Protocol

from stageline.running.boundary import Packet
from stageline.running.control.member import Member, Slowness
from stageline.running.cores import looking, looks_before_sleep
from stageline.running.slabs import Slab
from stageline.running.transports.barriers import fenced_by_others
from stageline.running.transports.base import Aborted, Edge
from stageline.running.transports.channels import BACKSTOP, RECORD, channel_key, gone, slab_key
from stageline.running.transports.packing import Kind, Place
from stageline.running.transports.rings import Reader

Record = tuple[Any, ...]


class Others(Protocol):
    """All channels to this rank.

    Attributes:
        may_wait: Whether packets may stay in their slabs, and this rank take in what it need not.
    """

    may_wait: bool

    def make_room(self, waiting: Incoming) -> None:
        """Copy out what has come through the other channels whose senders need a slab."""


class Incoming:
    """The receiving side of a channel.

    Attributes:
        ring: Where records are read.
    """

    def __init__(self, member: Member, source: int, generation: int, others: Others) -> None:
        self._member = member
        self._others = others
        self._source = source
        self._generation = generation
        (size, fences), (*files, slab) = member.lookup(channel_key(generation), source)
        fences = fences or not fenced_by_others()
        self.ring = Reader(RECORD, files, fences=fences)
        self._slabs = {0: _mapped(slab, size)}
        self._places: dict[int, Place] = {}  # by slab: what the last packet in it was like
        # What came before its turn: in its slab, or copied out.
        self._early: dict[Record, Record | Packet] = {}
        self._pieces: bytearray | None = None
        self._looks = looks_before_sleep(member.num_ranks)
        self._poll = select.poll()
        self._poll.register(self.ring.bell, select.POLLIN)
        self._poll.register(member.wake_file, select.POLLIN)

    def wait_for(self, edge: Edge, epoch: int) -> Packet:
        """Return the packet of an edge; others that come before are kept."""
        source, target, letter, microbatch, _, _ = edge
        wanted = (epoch, source, target, letter.encode(), microbatch)
        early = self._early
        while wanted not in early:
            record = self.ring.next()
            if record is None:
                self._look_and_sleep(edge)
            elif record[:5] != wanted:
                self._keep(record)
            else:  # as nearly always
                packet = self._taken(record)
                if packet is not None:
                    return packet
        kept = early.pop(wanted)
        return kept if isinstance(kept, Packet) else self._copied(kept)

    def read(self, edge: Edge, epoch: int, use: Callable[[Packet], None]) -> None:
        """Call a function with the packet of an edge as it lies in its slab, where it can."""
        source, target, letter, microbatch, _, _ = edge
        wanted = (epoch, source, target, letter.encode(), microbatch)
        while wanted not in self._early:
            record = self.ring.next()
            if record is None:
                self._look_and_sleep(edge)
            else:
                self._keep(record, is_wanted=record[:5] == wanted)
        kept = self._early.pop(wanted)
        if isinstance(kept, Packet):
            use(kept)
            return
        packet = self._places[kept[5]].in_place()
        if packet is None:
            use(self._copied(kept))
            return
        try:
            use(packet)
        finally:
            self.ring.free(kept[5])

    def _keep(self, record: Record, *, is_wanted: bool = False) -> None:
        """Leave a packet in its slab, if it may stay there; of pieces, copy each."""
        is_piece = self._place_of(record) is None
        if is_piece or not (is_wanted or self._others.may_wait):
            self._copy_out(record)
        else:
            self._early[record[:5]] = record

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
            if ring.is_waited_for:
                self._copy_out_early()
            timeout = min(slow.patience, BACKSTOP) * 1000
            if not ring.has_news and not self._poll.poll(timeout):
                self._others.make_room(self)
            is_there = ring.get_up()
            if not is_there and not ring.has_news:
                raise self.gone(edge)
            slow.note()

    @property
    def is_waited_for(self) -> bool:
        """Whether the sender cannot go on without a slab of those that it has filled."""
        return self.ring.is_waited_for

    def take_in(self) -> None:
        """Copy out all that has come, for whoever will ask."""
        self._copy_out_early()
        while (record := self.ring.next()) is not None:
            self._copy_out(record)

    def _copy_out_early(self) -> None:
        for key, kept in self._early.items():
            if not isinstance(kept, Packet):
                self._early[key] = self._copied(kept)

    def _copy_out(self, record: Record) -> None:
        packet = self._taken(record)
        if packet is not None:
            self._early[record[:5]] = packet

    def _copied(self, record: Record) -> Packet:
        """Copy out a packet that was left in its slab."""
        packet = self._taken(record)
        assert packet is not None  # pieces are not left
        return packet

    def _taken(self, record: Record) -> Packet | None:
        """Copy out the packet of a record; None where it is not whole yet."""
        # As nearly always, it lies where the last one did.
        place = self._place_of(record) if record[6] else self._places[record[5]]
        packet = self._with_piece(*record[5:]) if place is None else place.copy()
        self.ring.free(record[5])
        return packet

    def _place_of(self, record: Record) -> Place | None:
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
            posted, (file,) = self._member.lookup(slab_key(self._generation, number), self._source)
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
        return gone(self._member, self._source, edge)

    def close(self) -> None:
        for slab in self._slabs.values():
            slab.close()
        self.ring.close()


def _mapped(file: int, size: int) -> Slab:
    slab = Slab(file, size)
    os.close(file)
    return slab
