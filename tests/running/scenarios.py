"""What every transport must do, written for two ranks: a scenario returns what went wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stageline.running.boundary import Packet, leave
from stageline.running.transports.base import Edge, Endpoint

Scenario = Callable[[int, Endpoint], list[str]]


def edge(microbatch: int, *, source: int = 0, letter: str = "F") -> Edge:
    target = 1 - source
    return Edge(source, target, letter, microbatch, source, target)


def _unlike(got: Tensor, wanted: Tensor) -> bool:
    return not (
        torch.equal(got, wanted)
        and got.dtype == wanted.dtype
        and got.stride() == wanted.stride()
        and got.data_ptr() % 64 == wanted.data_ptr() % 64
    )


def _samples() -> list[Tensor]:
    own = torch.Generator().manual_seed(0)  # both ranks may be threads of one process
    return [
        torch.randn(3, 4, generator=own),
        torch.randn(300, 40, generator=own).t(),
        torch.randn(2, 3, 8, 8, generator=own).to(memory_format=torch.channels_last),
        torch.randn(5, 1, generator=own).expand(5, 300),
        torch.randn(8, 100, generator=own)[:, ::2],
        torch.randn(8, 50, generator=own)[:, 3:9],
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.randn(5, generator=own) > 0,
        torch.randn(700, generator=own).to(torch.bfloat16),
        torch.randn(20, 30, dtype=torch.complex64, generator=own),
        torch.arange(9)[2:],
        torch.randint(-5, 5, (400,), dtype=torch.int8, generator=own),
        torch.randn(1 << 18, generator=own),
    ]


def tensors_arrive_as_they_were(rank: int, endpoint: Endpoint) -> list[str]:
    wrong = []
    for index, sample in enumerate(_samples()):
        if rank == 0:
            endpoint.send(edge(index), leave(sample)[0])
        else:
            got = endpoint.receive(edge(index)).wait().value()
            if _unlike(got, sample):
                wrong.append(f"sample {index}: {got.dtype} {got.shape} {got.stride()}")
    return wrong


def trees_arrive_as_they_were(rank: int, endpoint: Endpoint) -> list[str]:
    x = torch.arange(6.0)
    value = {"a": [x, None, 3], "b": (True, "text", {"c": x.view(2, 3)}), "d": 0.25}
    if rank == 0:
        endpoint.send(edge(0), leave(value)[0])
        endpoint.send(edge(1), Packet([None, x, None]))
        endpoint.send(edge(2), Packet([]))
        return []
    got = endpoint.receive(edge(0)).wait().value()
    wrong = [] if str(got) == str(value) else [f"tree: {got}"]
    none, tensor, none_too = endpoint.receive(edge(1)).wait().leaves
    if none is not None or none_too is not None or not torch.equal(tensor, x):
        wrong.append("gradients with holes")
    if endpoint.receive(edge(2)).wait().leaves != []:
        wrong.append("an empty packet")
    return wrong


def what_needs_a_gradient_is_told(rank: int, endpoint: Endpoint) -> list[str]:
    if rank == 0:
        x = torch.ones(2, requires_grad=True)
        endpoint.send(edge(0), leave((x * 2, x.detach(), torch.arange(2)))[0])
        return []
    packet = endpoint.receive(edge(0)).wait()
    wrong = [] if list(packet.differentiable) == [True, False, False] else ["flags"]
    if any(leaf.requires_grad for leaf in packet.leaves):
        wrong.append("a graph came along")
    return wrong


def receives_may_be_posted_early_and_waited_for_in_another_order(
    rank: int, endpoint: Endpoint
) -> list[str]:
    count = 12
    if rank == 0:
        for index in range(count):
            # Every other one is too large for a header of the wire, so both ways are taken.
            size = 4 if index % 2 else 4000
            endpoint.send(edge(index), leave(torch.full((size,), float(index)))[0])
        return []
    receipts = [endpoint.receive(edge(index)) for index in range(count)]
    got = {index: receipts[index].wait().value() for index in reversed(range(count))}
    return [f"packet {index}" for index in range(count) if got[index][0] != index]


def a_send_does_not_wait_for_its_receiver(rank: int, endpoint: Endpoint) -> list[str]:
    """Both ranks send everything before either receives anything."""
    other = 1 - rank
    for index in range(4):
        endpoint.send(edge(index, source=rank), leave(torch.full((4000,), float(rank)))[0])
    got = [endpoint.receive(edge(index, source=other)).wait().value() for index in range(4)]
    return [f"packet {i}" for i, value in enumerate(got) if value[0] != other]


def forward_and_backward_do_not_mix(rank: int, endpoint: Endpoint) -> list[str]:
    """A conversation: an activation out, its gradient back, as a pipeline has it."""
    for index in range(5):
        if rank == 0:
            endpoint.send(edge(index), leave(torch.tensor([float(index)]))[0])
            back = endpoint.receive(edge(index, source=1, letter="B")).wait().leaves[0]
            if back.item() != index * 10:
                return [f"gradient {index}: {back}"]
        else:
            there = endpoint.receive(edge(index)).wait().value()
            endpoint.send(edge(index, source=1, letter="B"), Packet([there * 10]))
    return []


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        tensors_arrive_as_they_were,
        trees_arrive_as_they_were,
        what_needs_a_gradient_is_told,
        receives_may_be_posted_early_and_waited_for_in_another_order,
        forward_and_backward_do_not_mix,
    )
}


def many_packets_through_a_window(rank: int, endpoint: Endpoint) -> list[str]:
    """Run with a window of 2: the sender may never be more than that ahead, and nothing is lost."""
    count = 50
    if rank == 0:
        for index in range(count):
            endpoint.send(edge(index), leave(torch.full((2000,), float(index)))[0])
        return []
    got = [endpoint.receive(edge(index)).wait().value()[0].item() for index in range(count)]
    return [] if got == list(range(count)) else [f"got {got}"]
