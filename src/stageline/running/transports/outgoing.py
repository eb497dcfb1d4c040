"""The sending side of a channel."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from itertools import islice

from stageline import log
from stageline.running.boundary import Packet
from stageline.running.control.member import Member
from stageline.running.cores import has_own_core
from stageline.running.slabs import SMALLEST, Slab, whole_size
from stageline.running.transports.barriers import fenced_by_others
from stageline.running.transports.base import Edge
from stageline.running.transports.channels import MOST_SLABS, RECORD, channel_key, gone, slab_key
from stageline.running.transports.packing import Packed, Repeated, pack
from stageline.running.transports.rings import Writer

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
        self._under_way: list[int] = []
        self._num_freed = 0
        self._is_full = False
        first, file = Slab.create(SMALLEST)
        self._slabs[0] = first
        self._free.append(0)
        try:
            fences = not (has_own_core(member.num_ranks) and fenced_by_others())
            self.ring = Writer(RECORD, fences=fences)
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

        Nearly all do, and every hop waits for this: it takes few instructions, none of them in a
        function of its own that could be here.
        """
        last = self._last
        tensor = None if last is None else last.tensor_of(packet)
        if tensor is None:
            return False
        assert last is not None
        free, under_way, headers = self._free, self._under_way, self._headers
        header = last.header
        if free and headers.get(free[-1]) is header:
            slab = free.pop()
        elif (
            under_way and headers.get(under_way[0]) is header and self.ring.takes_back(under_way[0])
        ):  # what was sent first has been read, as nearly always
            slab = under_way.pop(0)
            self._num_freed += 1
        else:
            found = self._free_slab_with(header)
            if found is None:
                return False
            slab = found
        ctypes.memmove(self._slabs[slab].address + last.start, tensor.data_ptr(), last.num_bytes)
        source, target, letter, microbatch, _, _ = edge
        under_way.append(slab)
        size = last.size
        self.ring.put(epoch, source, target, letter.encode(), microbatch, slab, 0, size, size)
        return True

    def _free_slab_with(self, header: bytes) -> int | None:
        """Take a free slab that holds a header; those of other kinds may lie on top of it."""
        self.take_back()
        free = self._free
        for place in reversed(range(len(free))):
            if self._headers.get(free[place]) is header:
                return free.pop(place)
        return None

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
        if self._is_full or len(self._slabs) >= MOST_SLABS:
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
        key = slab_key(self._generation, number)
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
        count = self.ring.num_freed - self._num_freed
        if count <= 0:  # less where a slab was taken back before the receiver had counted it
            return False
        self._num_freed += count
        takes_back = self.ring.takes_back
        back = list(islice(filter(takes_back, self._under_way), count))
        for slab in back:
            self._under_way.remove(slab)
        self._free += back
        return True

    @property
    def has_news(self) -> bool:
        """Whether the receiver has read something since slabs were taken back."""
        return self.ring.num_freed > self._num_freed

    def _reclaim(self, edge: Edge) -> None:
        """Sleep until the receiver has read something."""
        if not self.take_back():
            self._wait(self, f"rank {self._target} to take what was sent before edge {edge}")

    def gone(self) -> BaseException:
        """Return what to raise if the receiver has ended."""
        return gone(self._member, self._target, "the next packet")

    def close(self) -> None:
        for slab in self._slabs.values():
            slab.close()
        self.ring.close()
