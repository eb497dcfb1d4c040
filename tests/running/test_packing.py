"""A packet that looks like the last one is sent without being described anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.running.boundary import Packet
from stageline.running.transports.base import Edge
from stageline.running.transports.packing import Kind, Place, Repeated, pack
from stageline.torch_private import tree_flatten

EDGE = Edge(0, 1, "F", 0, 0, 1)
SHAPE = (2, 1, 4)


def aligned(dtype: torch.dtype = torch.float32, offset: int = 0) -> Tensor:
    """Return a tensor that begins so many elements after a whole line of memory."""
    memory = torch.zeros(128, dtype=dtype)
    skipped = -memory.data_ptr() % 64 // memory.element_size()
    return memory[skipped + offset :][:8].view(SHAPE)


def repeated(tensor: Tensor, differentiable: tuple[bool, ...] = (True,)) -> Repeated:
    packet = Packet([tensor], None, differentiable)
    found = Repeated.of(packet, pack(packet, EDGE))
    assert found is not None
    return found


def test_a_tensor_that_looks_the_same_is_found() -> None:
    other = aligned()
    assert repeated(aligned()).tensor_of(Packet([other], None, (True,))) is other


DIFFERENT: dict[str, Any] = {
    "dtype": aligned(torch.int32),
    "shape": aligned().view(4, 2),
    "strides": torch.as_strided(aligned(), SHAPE, (4, 1, 1)),
    "alignment": aligned(offset=1),
    "negated": aligned(torch.complex64).conj().imag,
    "sparse": aligned().to_sparse(),
    "a parameter": nn.Parameter(aligned()),
    "no tensor": 1.0,
}


@pytest.mark.parametrize("leaf", DIFFERENT.values(), ids=DIFFERENT)
def test_what_looks_different_is_described_anew(leaf: Any) -> None:
    assert repeated(aligned()).tensor_of(Packet([leaf], None, (True,))) is None


def test_a_conjugated_tensor_is_described_anew() -> None:
    last = repeated(aligned(torch.complex64))
    assert last.tensor_of(Packet([aligned(torch.complex64).conj()], None, (True,))) is None


def test_a_negated_tensor_of_the_same_strides_is_described_anew() -> None:
    """Its memory holds the opposite of its values."""
    numbers = torch.zeros(64, dtype=torch.complex64)
    plain = numbers.imag[:8].view(SHAPE)
    negated = numbers.conj().imag[:8].view(SHAPE)
    assert negated.is_neg()
    assert negated.stride() == plain.stride()
    packet = Packet([aligned()], None, (True,))
    last = Repeated(Packet([plain], None, (True,)), plain, pack(packet, EDGE))
    assert last.tensor_of(Packet([plain], None, (True,))) is plain
    assert last.tensor_of(Packet([negated], None, (True,))) is None


def test_another_tree_or_need_for_gradients_is_described_anew() -> None:
    last = repeated(aligned())
    leaves, spec = tree_flatten([aligned()])
    assert last.tensor_of(Packet(leaves, spec, (True,))) is None
    assert last.tensor_of(Packet([aligned(), aligned()], None, (True,))) is None
    assert last.tensor_of(Packet([aligned()], None, (False,))) is None


def sent(packet: Packet) -> Packet:
    """Return a packet as it comes out of a slab."""
    packed = pack(packet, EDGE)
    memory = torch.zeros(packed.size, dtype=torch.uint8)
    packed.copy_to(memory.data_ptr())
    return Place(Kind.of(packed.header), memory.data_ptr()).copy()


SEVERAL: dict[str, list[Any]] = {
    "two": [aligned(), aligned(torch.int64) + 3],
    "one in the middle of a line": [aligned(), aligned(offset=1), aligned()],
    "one that is empty": [torch.zeros(0, 4), aligned() + 1],
    "one that is turned": [aligned().permute(2, 1, 0), aligned()],
    "one that is missing": [None, aligned()],
}


@pytest.mark.parametrize("leaves", SEVERAL.values(), ids=SEVERAL)
def test_several_tensors_arrive_as_they_were(leaves: list[Any]) -> None:
    arrived = sent(Packet(leaves)).leaves
    assert len(arrived) == len(leaves)
    for came, leaf in zip(arrived, leaves, strict=True):
        if leaf is None:
            assert came is None
            continue
        assert torch.equal(came, leaf)
        assert (came.dtype, came.stride()) == (leaf.dtype, leaf.stride())
        assert came.numel() == 0 or came.data_ptr() % 64 == leaf.data_ptr() % 64


def test_several_tensors_that_look_alike_are_described_once() -> None:
    """The gradients of tied weights travel at the end of every step, and all ranks wait for it."""
    headers = [pack(Packet([aligned(), aligned(torch.int64)]), EDGE).header for _ in range(2)]
    assert headers[0] is headers[1]
    others = [
        Packet([aligned(torch.int64), aligned()]),
        Packet([aligned(), aligned(torch.int64)], None, (True, False)),
        Packet([aligned()]),
    ]
    found = {pack(packet, EDGE).header for packet in others}
    assert len(found | {headers[0]}) == 4


def test_a_place_gives_copies_of_what_lies_there_now_and_the_thing_itself() -> None:
    packed = pack(Packet([aligned() + 1], None, (True,)), EDGE)
    memory = torch.zeros(packed.size + 64, dtype=torch.uint8)
    address = memory.data_ptr()
    packed.copy_to(address)
    place = Place(Kind.of(packed.header), address)
    before = place.copy()
    pack(Packet([aligned() + 2], None, (True,)), EDGE).copy_to(address)
    after, itself = place.copy(), place.in_place()
    assert before.leaves[0].unique().tolist() == [1]
    assert after.leaves[0].unique().tolist() == [2]
    assert after.differentiable == [True]
    assert itself is not None
    memory.zero_()
    assert itself.leaves[0].unique().tolist() == [0]
    assert after.leaves[0].unique().tolist() == [2]


@pytest.mark.parametrize("leaf", [torch.zeros(4, 2).t(), aligned(offset=1), "a word"])
def test_what_a_clone_would_not_be_is_rebuilt(leaf: Any) -> None:
    packed = pack(Packet([leaf]), EDGE)
    memory = torch.zeros(packed.size, dtype=torch.uint8)
    packed.copy_to(memory.data_ptr())
    assert Place(Kind.of(packed.header), memory.data_ptr()).in_place() is None
