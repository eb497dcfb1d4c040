"""How a packet lies in shared memory: a header, then the bytes of each tensor.

    ┌───────────────┬──────────────┬──────────────┐
    │ header (JSON) │ tensor bytes │ tensor bytes │      every part begins at a multiple of 64
    └───────────────┴──────────────┴──────────────┘

Packets of one kind have one header: it is written and read once, then looked up. A packet may be
cut into pieces at any byte, which is how one travels that is larger than all memory there is.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from stageline.running.boundary import Packet
from stageline.running.transports import wire
from stageline.running.transports.base import Edge

_LINE = 64

Part = tuple[int, int, Any]
"""The bytes of a tensor: address, size, and whom they belong to."""


def on_lines(size: int) -> int:
    """Return a size rounded up to whole lines."""
    return -(-size // _LINE) * _LINE


class Packed:
    """A packet ready to be copied.

    Attributes:
        header: What it consists of.
        size: How many bytes it takes.
    """

    __slots__ = ("_parts", "header", "size")

    def __init__(self, header: bytes, size: int, parts: Sequence[Part]) -> None:
        self.header = header
        self.size = size
        self._parts = parts

    def copy_to(self, address: int, *, has_header: bool = False) -> None:
        """Lay it down at an address, where its header may lie already."""
        if not has_header:
            ctypes.memmove(address, self.header, len(self.header))
        address += on_lines(len(self.header))
        for source, size, _ in self._parts:
            ctypes.memmove(address, source, size)
            address += on_lines(size)


def pack(packet: Packet, edge: Edge) -> Packed:
    """Return a packet as bytes in place; nothing is copied where tensors are dense."""
    plain = wire.plain_tensors(packet)
    if plain is not None:
        header = wire.text_of_plain(packet, plain, edge)
        parts = [(tensor.data_ptr(), tensor.nbytes, tensor) for tensor in plain if tensor.nbytes]
    else:
        fields, tensors = wire.describe(packet, edge)
        header = json.dumps(fields).encode()
        parts = [(tensor.data_ptr(), tensor.numel(), tensor) for tensor in tensors]
    return Packed(header, _size(header, parts), parts)


def _size(header: bytes, parts: Sequence[Part]) -> int:
    return on_lines(len(header)) + sum(on_lines(size) for _, size, _ in parts)


class Repeated:
    """How a packet of one tensor lies: what it takes to send another one like it.

    Attributes:
        header: Its header.
        start: Where the tensor begins, after the header.
        num_bytes: Those of the tensor.
        size: Those of the packet.
    """

    __slots__ = (
        "_alignment",
        "_differentiable",
        "_is_complex",
        "_like",
        "header",
        "num_bytes",
        "size",
        "start",
    )

    def __init__(self, packet: Packet, tensor: Tensor, packed: Packed) -> None:
        self._differentiable = packet.differentiable
        self._like = (tensor.dtype, tensor.shape, tensor.stride())
        self._alignment = tensor.data_ptr() % _LINE
        self._is_complex = tensor.is_complex()
        self.header = packed.header
        self.start = on_lines(len(packed.header))
        self.num_bytes = tensor.nbytes
        self.size = packed.size

    @classmethod
    def of(cls, packet: Packet, packed: Packed) -> Repeated | None:
        """Return how a packet lies; None if it is more than one tensor."""
        plain = wire.plain_tensors(packet)
        return cls(packet, plain[0], packed) if plain is not None and len(plain) == 1 else None

    def tensor_of(self, packet: Packet) -> Tensor | None:
        """Return the tensor of a packet that looks the same; None if it does not.

        What follows from the same dtype and strides is not asked again: every hop waits for this.
        """
        leaves = packet.leaves
        if len(leaves) != 1 or packet.spec is not None:
            return None
        leaf = leaves[0]
        looks_the_same = (
            type(leaf) is Tensor
            and leaf.is_cpu
            and leaf.layout is torch.strided
            and (leaf.dtype, leaf.shape, leaf.stride()) == self._like
            and packet.differentiable == self._differentiable
            and leaf.data_ptr() % _LINE == self._alignment
            and not leaf.is_neg()
            and not (self._is_complex and leaf.is_conj())
        )
        return leaf if looks_the_same else None


class Kind:
    """What a header says: how packets of one kind are rebuilt."""

    def __init__(self, header: wire.Header, size: int) -> None:
        self._header = header
        self._start = on_lines(size)
        self._layouts = header.layouts
        # Whether there is nothing but tensors, as torch itself would lay them out.
        self._is_plain = (
            header.spec is None
            and len(header.leaves) == len(self._layouts)
            and all(layout.is_plain for layout in self._layouts)
        )

    @classmethod
    @lru_cache(maxsize=wire.MOST_KINDS)
    def of(cls, header: bytes) -> Kind:
        return cls(wire.read(header), len(header))

    @classmethod
    def at(cls, address: int, size: int) -> Kind:
        """Return the kind whose header, of so many bytes, lies at an address."""
        return cls.of(ctypes.string_at(address, size))

    def rebuild(self, address: int) -> Packet:
        """Return a copy of the packet that lies at an address, after its header."""
        buffers = []
        for layout, start in self._starts(address):
            buffer = layout.empty_bytes()
            ctypes.memmove(buffer.data_ptr(), start, layout.num_bytes)
            buffers.append(buffer)
        return self._header.packet(buffers)

    def _starts(self, address: int) -> Iterator[tuple[wire.Layout, int]]:
        """Yield how each tensor is laid out, and where it begins in a packet at an address."""
        address += self._start
        for layout in self._layouts:
            yield layout, address
            address += on_lines(layout.num_bytes)

    def plain_tensors(self, address: int) -> list[Tensor] | None:
        """Return the tensors of a packet at an address, in place; None if clones would differ."""
        if not self._is_plain:
            return None
        tensors = [
            layout.rebuild(torch.frombuffer(_memory(start, layout.num_bytes), dtype=torch.uint8))
            for layout, start in self._starts(address)
        ]
        try:
            aligned = [tensor.clone().data_ptr() % _LINE for tensor in tensors]
        except NotImplementedError:  # a dtype that torch can hold and not copy
            return None
        return tensors if aligned == [layout.alignment for layout in self._layouts] else None

    def beside_leaves(self) -> tuple[Any, ...]:
        """Return what packets of this kind are made of beside their leaves."""
        header = self._header
        return header.spec, header.differentiable, header.repeats, header.overlaps


def _memory(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


class Place:
    """Where packets of one kind lie, one after the other.

    Out of cache, one operation of torch that copies takes half as long as two that first make a
    tensor and then fill it: its tensors are there, over the memory that is copied.

    Args:
        kind: What lies there.
        address: Where it begins.
    """

    __slots__ = ("_address", "_kind", "_others", "_tensors")

    def __init__(self, kind: Kind, address: int) -> None:
        self._kind = kind
        self._address = address
        self._tensors = kind.plain_tensors(address)
        self._others = kind.beside_leaves()

    def in_place(self) -> Packet | None:
        """Return the packet that lies there now, where it lies; None if it has to be rebuilt."""
        return None if self._tensors is None else Packet([*self._tensors], *self._others)

    def copy(self) -> Packet:
        """Return a copy of the packet that lies there now."""
        tensors = self._tensors
        if tensors is None:
            return self._kind.rebuild(self._address)
        if len(tensors) == 1:  # nearly always
            return Packet([tensors[0].clone()], *self._others)
        return Packet([*map(_clone, tensors)], *self._others)


_clone = Tensor.clone
