"""Packets as bytes: what cannot travel is refused where it is sent, by name."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stageline.errors import EdgeError
from stageline.running.boundary import leave
from stageline.running.transports import wire
from stageline.running.transports.base import Edge

EDGE = Edge(0, 1, "F", 3, 0, 1)


def there_and_back(value: Any) -> Any:
    """Encode and decode without a transport, copying every message as a network would."""
    encoded = wire.encode(leave(value)[0], EDGE, epoch=7)
    first = encoded.first.clone()
    missing = wire.missing_bytes(first)
    assert missing == (0 if encoded.rest is None else encoded.rest.numel())
    message = wire.decode(first, None if encoded.rest is None else encoded.rest.clone())
    assert message.edge == EDGE
    assert message.epoch == 7
    if message.is_whole:
        assert encoded.tensors == []
        return message.header.packet(message.tensors()).value()
    buffers = []
    for layout, sent in zip(message.header.layouts, encoded.tensors, strict=True):
        buffer = layout.empty_bytes()
        buffer.copy_(sent)
        buffers.append(buffer)
    return message.header.packet(buffers).value()


@st.composite
def strided_tensors(draw: st.DrawFn) -> Tensor:
    """Tensors as views make them: permuted, sliced, expanded, offset, empty."""
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    dtype = draw(
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
    )
    tensor = torch.arange(int(np.prod([2 * size + 1 for size in shape], initial=1))).to(dtype)
    tensor = tensor.view([2 * size + 1 for size in shape])
    for dim, size in enumerate(shape):
        step = draw(st.integers(1, 2))
        tensor = tensor[(slice(None),) * dim + (slice(draw(st.integers(0, 1)), None, step),)]
        tensor = tensor.narrow(dim, 0, min(size, tensor.shape[dim]))
    permutes: bool = draw(st.booleans())
    if shape and permutes:
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    expands: bool = draw(st.booleans())
    if expands:
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)
    return tensor


@settings(max_examples=200, deadline=None, derandomize=True)
@given(strided_tensors())
def test_values_dtype_strides_and_alignment_survive(tensor: Tensor) -> None:
    got = there_and_back(tensor)
    assert got.dtype is tensor.dtype
    assert torch.equal(got, tensor)
    assert got.shape == tensor.shape
    assert got.stride() == tensor.stride()
    if tensor.numel():
        assert got.data_ptr() % 64 == tensor.data_ptr() % 64


def test_overlapping_elements_keep_their_values() -> None:
    windows = torch.arange(10.0).unfold(0, 3, 1)
    assert torch.equal(there_and_back(windows), windows)


def test_complex_numbers_and_their_lazy_conjugate() -> None:
    tensor = torch.randn(4, 5, dtype=torch.complex64).conj()
    assert torch.equal(there_and_back(tensor), tensor.resolve_conj())


def test_a_header_longer_than_the_first_message() -> None:
    value = {f"a rather long name for leaf {index}": torch.full((3,), index) for index in range(60)}
    got = there_and_back(value)
    assert list(got) == list(value)
    assert all(torch.equal(got[name], tensor) for name, tensor in value.items())


def test_numbers_come_back_exactly() -> None:
    value = [0.1, 1e-320, float("inf"), 2**70, -1, True, None, "ü"]
    assert there_and_back(value) == value
    assert [type(item) for item in there_and_back(value)] == [type(item) for item in value]


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize("value", [Colour.RED, np.float64(1.5), object(), torch.float32, 1j])
def test_what_would_arrive_as_something_else_is_refused(value: object) -> None:
    with pytest.raises(EdgeError, match=r"edge 0->1 F3: leaf 1 is a .*: pass tensors, numbers"):
        there_and_back([torch.zeros(1), value])


def test_a_structure_that_json_changes_is_refused() -> None:
    with pytest.raises(EdgeError, match=r"edge 0->1 F3: the structure cannot cross .*\(1, 2\)"):
        there_and_back({(1, 2): torch.zeros(1)})


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(EdgeError, match="only plain dense tensors"):
        there_and_back(torch.eye(3).to_sparse())


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_a_tensor_hidden_in_an_object_is_refused_on_every_transport() -> None:
    """Its graph would cross the cut unseen, and backward would run on the wrong rank."""
    with pytest.raises(
        EdgeError, match=r"returned a Holder with a tensor in \.tensor: return a tuple"
    ):
        leave(Holder(torch.zeros(1)))


def test_packets_of_one_kind_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON was written and read for every packet: a tenth of a millisecond each."""
    there_and_back(torch.zeros(3, 5))
    monkeypatch.delattr(wire, "describe")
    monkeypatch.delattr("json.loads")
    sent = torch.arange(15.0).view(3, 5)
    assert torch.equal(there_and_back(sent), sent)
