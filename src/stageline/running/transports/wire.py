"""How a packet travels between processes: a small JSON header, then the bytes of each tensor.

    first message, always HEADER_BYTES long        then, where it did not fit in there
    ┌────────┬───────────────┬──────────────┐      ┌──────────────────┐ ┌────────┐ ┌────────┐
    │ label  │ JSON          │ small bytes  │      │ rest of the JSON │ │ tensor │ │ tensor │
    └────────┴───────────────┴──────────────┘      └──────────────────┘ └────────┘ └────────┘

The label says which edge of which call this is. The JSON says what it consists of: packets of one
kind have one, which is written and read once, then looked up.

No pickle. dtype, strides and alignment travel too: a channels_last tensor that arrived contiguous,
or a row that lost its alignment, would take another kernel and differ from the plain model in the
last bit.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from stageline import torch_private as trees
from stageline.errors import EdgeError
from stageline.running.boundary import Packet
from stageline.running.transports.base import Edge

HEADER_BYTES = 8192  # a body of its own costs another round trip; so many bytes cost a microsecond
# Bytes of the JSON, epoch, edge: stages, letter, microbatch, ranks.
_LABEL = struct.Struct("<Iiiiciii")
_ROOM = HEADER_BYTES - _LABEL.size
_ALIGNMENT = 64
MOST_KINDS = 1024  # that are remembered; models with changing sizes have many
# Exactly these: a subclass (an IntEnum, a numpy float) would arrive as something else.
_PLAIN = (type(None), bool, int, float, str)

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor lie: enough to rebuild it with the same strides and alignment.

    Attributes:
        shape: Its sizes.
        strides: Its strides; 0 in expanded dimensions.
        alignment: Its address modulo 64.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        if _overlaps(shape, strides):  # as unfold() makes them: nothing to keep
            strides = tuple(torch.empty(shape, device="meta").stride())
        return cls(tensor.dtype, shape, strides, tensor.data_ptr() % _ALIGNMENT)

    @property
    def core(self) -> tuple[int, ...]:
        """The sizes without expanded dimensions: what really lies in memory."""
        return tuple(
            min(size, 1) if stride == 0 else size
            for size, stride in zip(self.shape, self.strides, strict=True)
        )

    @property
    def order(self) -> list[int]:
        """The dimensions, slowest first: the order in which the elements travel."""
        return sorted(range(len(self.shape)), key=lambda dim: (-self.strides[dim], dim))

    @cached_property
    def num_bytes(self) -> int:
        return math.prod(self.core) * self.dtype.itemsize

    @property
    def is_plain(self) -> bool:
        """Whether torch itself would lay out a new tensor of this shape in this way."""
        return self.strides == tuple(torch.empty(self.shape, device="meta").stride())

    def to_json(self) -> list[Any]:
        name = str(self.dtype).removeprefix("torch.")
        return [name, self.shape, self.strides, self.alignment]

    @classmethod
    def from_json(cls, fields: list[Any]) -> Layout:
        name, shape, strides, alignment = fields
        return cls(_DTYPES[name], tuple(shape), tuple(strides), alignment)

    def flatten(self, tensor: Tensor) -> Tensor:
        """Return the bytes that travel, in memory order; a view where the tensor is dense."""
        core = tensor
        for dim, size in enumerate(self.core):
            if size != tensor.shape[dim]:
                core = core.narrow(dim, 0, size)
        return _as_bytes(core.permute(self.order).contiguous())

    def empty_bytes(self, count: int | None = None) -> Tensor:
        """Return a buffer for the bytes whose address has the sender's alignment."""
        count = self.num_bytes if count is None else count
        buffer = torch.empty(count + _ALIGNMENT, dtype=torch.uint8, device="cpu")
        offset = (self.alignment - buffer.data_ptr()) % _ALIGNMENT
        if offset % self.dtype.itemsize:
            offset = 0
        return buffer[offset : offset + count]

    def rebuild(self, received: Tensor) -> Tensor:
        """Return the tensor whose bytes these are, on top of them where it is dense."""
        if not self.num_bytes:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")
        typed = received.view(self.dtype)
        order = self.order
        dense = typed.view([self.core[dim] for dim in order]).permute(_inverse(order))
        result = dense
        if self._has_gaps(dense):
            reach = 1 + sum(
                (size - 1) * stride for size, stride in zip(self.core, self.strides, strict=True)
            )
            spread = self.empty_bytes(reach * self.dtype.itemsize).view(self.dtype)
            result = spread.as_strided(self.core, self.strides, spread.storage_offset())
            result.copy_(dense)
        return result.as_strided(self.shape, self.strides, result.storage_offset())

    def _has_gaps(self, dense: Tensor) -> bool:
        return any(
            size > 1 and mine != wanted
            for size, mine, wanted in zip(self.core, dense.stride(), self.strides, strict=True)
        )


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements share an address in another way than by expanding a dimension."""
    reach = 1
    for stride, size in sorted(
        (st, si) for st, si in zip(strides, shape, strict=True) if si > 1 and st > 0
    ):
        if stride < reach:
            return True
        reach = stride * size
    return False


@dataclass(frozen=True)
class Encoded:
    """A packet as messages: the first, the rest of a long header, and the tensors that follow."""

    first: Tensor
    rest: Tensor | None
    tensors: list[Tensor]


_texts: dict[Any, bytes] = {}


def encode(packet: Packet, edge: Edge, epoch: int) -> Encoded:
    """Turn a packet into bytes."""
    plain = plain_tensors(packet)
    if plain is not None:
        text = text_of_plain(packet, plain, edge)
        tensors = [_as_bytes(tensor) for tensor in plain if tensor.numel()]
    else:
        fields, tensors = describe(packet, edge)
        text = json.dumps(fields).encode()
    source, target, letter, *rest = edge
    return _arrange(
        _LABEL.pack(len(text), epoch, source, target, letter.encode(), *rest), text, tensors
    )


def plain_tensors(packet: Packet) -> list[Tensor] | None:
    """Return the tensors of nearly all packets: a few, whose memory can be copied as it is.

    None if there is something else in it. Most packets have one, gradients of tied weights several.
    """
    leaves = packet.leaves
    if packet.spec is not None or not leaves or not all(map(_lies_plainly, leaves)):
        return None
    return leaves


def _lies_plainly(leaf: Any) -> bool:
    return (
        type(leaf) is Tensor
        and leaf.is_cpu
        and leaf.layout is torch.strided
        and leaf.is_contiguous()
        and not (leaf.is_conj() or leaf.is_neg() or leaf.is_quantized)
    )


def text_of_plain(packet: Packet, tensors: Sequence[Tensor], edge: Edge) -> bytes:
    """Return the JSON of a packet of tensors that lie plainly; packets that look alike have one."""
    looks = [(t.dtype, t.shape, t.stride(), t.data_ptr() % _ALIGNMENT) for t in tensors]
    key = (*looks, *packet.differentiable)
    known = _texts.get(key)
    if known is None:
        known = json.dumps(describe(packet, edge)[0]).encode()
        if len(_texts) < MOST_KINDS:
            _texts[key] = known
    return known


def _as_bytes(dense: Tensor) -> Tensor:
    # Not reshape(-1): that may leave a stride of 0 where there is only one element.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def describe(packet: Packet, edge: Edge) -> tuple[dict[str, Any], list[Tensor]]:
    """Return what JSON can say of a packet, and the bytes of its tensors, where they have any."""
    leaves: list[dict[str, Any]] = []
    tensors: list[Tensor] = []
    for index, leaf in enumerate(packet.leaves):
        if isinstance(leaf, Tensor):
            plain = _on_the_wire(leaf, edge, index)
            layout = Layout.of(plain)
            leaves.append({"tensor": layout.to_json()})
            tensors.append(layout.flatten(plain))
        elif type(leaf) in _PLAIN:
            leaves.append({"value": leaf})
        else:
            raise EdgeError(
                f"edge {edge}: leaf {index} is a {type(leaf).__name__}, which cannot cross between "
                "processes: pass tensors, numbers, strings, booleans or None"
            )
    fields = {
        "spec": None if packet.spec is None else _dump_spec(packet.spec, edge),
        "differentiable": list(packet.differentiable),
        "repeats": list(packet.repeats),
        "overlaps": list(packet.overlaps),
        "leaves": leaves,
    }
    return fields, [tensor for tensor in tensors if tensor.numel()]


def _on_the_wire(tensor: Tensor, edge: Edge, index: int) -> Tensor:
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_quantized
    if tensor.layout is not torch.strided or not is_plain:
        raise EdgeError(
            f"edge {edge}: leaf {index} is a {type(tensor).__name__} of layout {tensor.layout}; "
            "only plain dense tensors can cross between processes: convert it, or keep it within "
            "one stage"
        )
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def _dump_spec(spec: trees.TreeSpec, edge: Edge) -> str:
    try:
        text = trees.treespec_dumps(spec)
        if _load_spec(text) != spec:  # a tuple as key of a dict would come back as a list
            raise ValueError(f"{spec} does not survive the way through JSON")
        return text
    except Exception as cause:  # torch names the class that it does not know
        raise EdgeError(
            f"edge {edge}: the structure cannot cross between processes ({cause}): use tuples, "
            "lists and dicts, or register the class with a serialized_type_name"
        ) from cause


@lru_cache(maxsize=256)
def _load_spec(text: str) -> trees.TreeSpec:
    return trees.treespec_loads(text)


def _arrange(label: bytes, text: bytes, tensors: list[Tensor]) -> Encoded:
    first = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu")
    address = first.data_ptr()
    ctypes.memmove(address, label + text[:_ROOM], _LABEL.size + min(len(text), _ROOM))
    if len(text) + sum(tensor.numel() for tensor in tensors) <= _ROOM:
        address += _LABEL.size + len(text)
        for tensor in tensors:
            ctypes.memmove(address, tensor.data_ptr(), tensor.numel())
            address += tensor.numel()
        tensors = []
    tail = text[_ROOM:]
    rest = torch.frombuffer(bytearray(tail), dtype=torch.uint8) if tail else None
    return Encoded(first, rest, tensors)


@dataclass(frozen=True)
class Header:
    """What the JSON says: how packets of one kind are rebuilt."""

    spec: trees.TreeSpec | None
    differentiable: list[bool]
    repeats: list[tuple[int, int]]
    overlaps: list[int]
    leaves: list[Any]  # a Layout where a tensor belongs

    @cached_property
    def layouts(self) -> list[Layout]:
        """The layouts of the tensors that have bytes, in the order in which they travel."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Layout) and leaf.num_bytes]

    @cached_property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(layout.num_bytes for layout in self.layouts)

    def packet(self, buffers: Sequence[Tensor]) -> Packet:
        """Return the packet, its tensors on top of the received buffers."""
        received = iter(buffers)
        leaves = [
            leaf
            if not isinstance(leaf, Layout)
            else leaf.rebuild(next(received) if leaf.num_bytes else leaf.empty_bytes())
            for leaf in self.leaves
        ]
        return Packet(leaves, self.spec, self.differentiable, self.repeats, self.overlaps)


class First:
    """The first message of a packet.

    Attributes:
        edge: Whose it is.
        epoch: Of which call.
        header: What it consists of.
    """

    def __init__(
        self, edge: tuple[Any, ...], epoch: int, header: Header, message: Tensor, start: int
    ) -> None:
        self.edge = edge
        self.epoch = epoch
        self.header = header
        self._message = message
        self._start = start

    @property
    def is_whole(self) -> bool:
        """Whether the tensors came inside it."""
        return self._start + self.header.num_bytes <= HEADER_BYTES

    def tensors(self) -> list[Tensor]:
        """Return the bytes of the tensors that came inside it."""
        buffers, address = [], self._message.data_ptr() + self._start
        for layout in self.header.layouts:
            buffer = layout.empty_bytes()
            ctypes.memmove(buffer.data_ptr(), address, layout.num_bytes)
            buffers.append(buffer)
            address += layout.num_bytes
        return buffers


def missing_bytes(first: Tensor) -> int:
    """Return how many bytes of the JSON come in a second message."""
    length: int = _label(first)[0]
    return max(0, length - _ROOM)


def _label(first: Tensor) -> tuple[Any, ...]:
    return _LABEL.unpack(ctypes.string_at(first.data_ptr(), _LABEL.size))


def decode(first: Tensor, rest: Tensor | None) -> First:
    """Read a first message, and the rest of its JSON."""
    length, epoch, source, target, letter, *others = _label(first)
    text = ctypes.string_at(first.data_ptr() + _LABEL.size, min(length, _ROOM))
    if rest is not None:
        text += rest.numpy().tobytes()
    edge = (source, target, letter.decode(), *others)
    return First(edge, epoch, read(text), first, _LABEL.size + length)


@lru_cache(maxsize=MOST_KINDS)
def read(text: bytes) -> Header:
    """Return what ``describe`` has said."""
    fields = json.loads(text)
    spec = fields["spec"]
    return Header(
        spec=None if spec is None else _load_spec(spec),
        differentiable=fields["differentiable"],
        repeats=fields["repeats"],
        overlaps=fields["overlaps"],
        leaves=[
            Layout.from_json(leaf["tensor"]) if "tensor" in leaf else leaf["value"]
            for leaf in fields["leaves"]
        ],
    )
