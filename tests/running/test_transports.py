"""One contract, three transports."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from stageline.errors import EdgeError, PeerError
from stageline.running.boundary import leave
from stageline.running.transports.base import Aborted, Exchange, ThreadTransport
from stageline.running.transports.memory import MemoryTransport
from stageline.running.transports.process_group import ProcessGroupTransport
from stageline.running.workers import WorkerPool
from stageline.testing import OrderedTransport, RankPool
from tests.running.scenarios import (
    SCENARIOS,
    a_send_does_not_wait_for_its_receiver,
    edge,
    many_packets_through_a_window,
)

THREAD_TRANSPORTS = {"memory": MemoryTransport, "ordered": OrderedTransport}


def on_threads(
    make: Callable[[], ThreadTransport], name: str, window: int | None = None
) -> list[list[str]]:
    exchange = make().open(2, window=window)
    results: dict[int, list[str]] = {}

    def job(rank: int) -> None:
        results[rank] = _scenario(name)(rank, exchange.endpoint(rank))

    pool = WorkerPool(2)
    failures = pool.run([lambda: job(0), lambda: job(1)], on_failure=exchange.abort)
    pool.close()
    if failures:
        raise failures[0]
    return [results[0], results[1]]


EXTRA = {
    scenario.__name__: scenario
    for scenario in (a_send_does_not_wait_for_its_receiver, many_packets_through_a_window)
}


def _scenario(name: str) -> Callable[..., list[str]]:
    return {**SCENARIOS, **EXTRA}[name]


def on_a_process(rank: int, name: str, window: int | None = None) -> list[str]:
    transport = ProcessGroupTransport(dist.new_group(backend="gloo"), timeout=20)
    try:
        return _scenario(name)(rank, transport.open(window=window))
    finally:
        transport.close()


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("transport", THREAD_TRANSPORTS)
def test_contract_on_threads(transport: str, name: str) -> None:
    assert on_threads(THREAD_TRANSPORTS[transport], name) == [[], []]


@pytest.mark.processes
@pytest.mark.parametrize("name", SCENARIOS)
def test_contract_on_processes(name: str, two_ranks: RankPool) -> None:
    assert two_ranks.run(on_a_process, name) == [[], []]


# On the strict transport this very order is an error, as it would be a deadlock on NCCL.
def test_sends_do_not_wait_in_memory() -> None:
    name = a_send_does_not_wait_for_its_receiver.__name__
    assert on_threads(MemoryTransport, name) == [[], []]


@pytest.mark.processes
def test_sends_do_not_wait_between_processes(two_ranks: RankPool) -> None:
    name = a_send_does_not_wait_for_its_receiver.__name__
    assert two_ranks.run(on_a_process, name) == [[], []]


def test_two_sends_that_face_each_other_are_an_error_on_the_strict_transport() -> None:
    with pytest.raises(EdgeError, match=r"meet out of order: rank . sends .*, rank . sends"):
        on_threads(OrderedTransport, a_send_does_not_wait_for_its_receiver.__name__)


@pytest.mark.parametrize("transport", THREAD_TRANSPORTS)
def test_a_window_loses_nothing_on_threads(transport: str) -> None:
    name = many_packets_through_a_window.__name__
    assert on_threads(THREAD_TRANSPORTS[transport], name, window=2) == [[], []]


@pytest.mark.processes
def test_a_window_loses_nothing_between_processes(two_ranks: RankPool) -> None:
    name = many_packets_through_a_window.__name__
    assert two_ranks.run(on_a_process, name, 2) == [[], []]


@pytest.mark.parametrize("transport", THREAD_TRANSPORTS)
def test_a_window_holds_the_sender_back(transport: str) -> None:
    """The third send begins only when the first packet has been taken."""
    exchange = THREAD_TRANSPORTS[transport]().open(2, window=2)
    two_sent, taken = threading.Event(), threading.Event()
    order: list[str] = []

    def send() -> None:
        endpoint = exchange.endpoint(0)
        for index in range(3):
            endpoint.send(edge(index), leave(torch.zeros(1))[0])
            order.append(f"sent {index}" + (" after the first was taken" if taken.is_set() else ""))
            if index == 1:
                two_sent.set()

    def take() -> None:
        endpoint = exchange.endpoint(1)
        receipts = [endpoint.receive(edge(index)) for index in range(3)]
        assert two_sent.wait(10)
        taken.set()
        for receipt in receipts:
            receipt.wait()

    pool = WorkerPool(2)
    assert pool.run([send, take], on_failure=exchange.abort) == []
    pool.close()
    assert order == ["sent 0", "sent 1", "sent 2 after the first was taken"]


@pytest.mark.parametrize("transport", THREAD_TRANSPORTS)
@pytest.mark.parametrize("what", ["receive", "window"])
def test_abort_wakes_who_waits(transport: str, what: str) -> None:
    exchange: Exchange = THREAD_TRANSPORTS[transport]().open(2, window=1)

    def wait_for_ever() -> None:
        endpoint = exchange.endpoint(0)
        if what == "receive":
            endpoint.receive(edge(0, source=1)).wait()
        for index in range(3):
            endpoint.send(edge(index), leave(torch.zeros(1))[0])

    def fail() -> None:
        raise ZeroDivisionError

    pool = WorkerPool(2)
    first, second = pool.run([wait_for_ever, fail], on_failure=exchange.abort)
    pool.close()
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, Aborted)


def _expect_something_else(rank: int) -> str:
    transport = ProcessGroupTransport(dist.new_group(backend="gloo"), timeout=20)
    endpoint = transport.open(window=None)
    if rank == 0:
        endpoint.send(edge(5), leave(torch.zeros(1))[0])
        transport.close()
        return ""
    with pytest.raises(PeerError) as caught:
        endpoint.receive(edge(4)).wait()
    transport.close()
    return str(caught.value)


@pytest.mark.processes
def test_ranks_that_lost_step_are_told(two_ranks: RankPool) -> None:
    _, message = two_ranks.run(_expect_something_else)
    assert message.startswith("rank 1 waited for edge 0->1 F4 of step 1, but rank 0 sent 0->1 F5")
    assert "same script" in message


def _wait_for_nothing(rank: int) -> str:
    transport = ProcessGroupTransport(dist.new_group(backend="gloo"), timeout=0.2)
    message = ""
    if rank == 1:
        with pytest.raises(PeerError) as caught:
            transport.open(window=None).receive(edge(4)).wait()
        message = str(caught.value)
    transport.close()
    return message


@pytest.mark.processes
def test_a_wait_between_processes_has_a_deadline_and_a_name() -> None:
    pool = RankPool(2)
    try:
        _, message = pool.run(_wait_for_nothing)
    finally:
        pool.close()
    assert "rank 1 waited for edge 0->1 F4 from rank 0, and it did not come" in message
    assert "timeout=0.2 s" in message
