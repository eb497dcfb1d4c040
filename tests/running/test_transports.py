"""One contract, four transports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from stageline.errors import EdgeError, PeerError
from stageline.running.boundary import leave
from stageline.running.control import Failure
from stageline.running.transports.base import Aborted, Endpoint, Exchange, ThreadTransport
from stageline.running.transports.memory import MemoryTransport
from stageline.running.workers import WorkerPool
from stageline.testing import OrderedTransport, RankPool
from tests.running.carriers import CARRIERS, carrier, member_of_the_job
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


def on_a_process(rank: int, transport: str, name: str, window: int | None = None) -> list[str]:
    with carrier(transport) as opened:
        return _scenario(name)(rank, opened.open(epoch=0, window=window))


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("transport", THREAD_TRANSPORTS)
def test_contract_on_threads(transport: str, name: str) -> None:
    assert on_threads(THREAD_TRANSPORTS[transport], name) == [[], []]


@pytest.mark.processes
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("transport", CARRIERS)
def test_contract_on_processes(transport: str, name: str, two_ranks: RankPool) -> None:
    assert two_ranks.run(on_a_process, transport, name) == [[], []]


# On the strict transport this very order is an error, as it would be a deadlock on NCCL.
def test_sends_do_not_wait_in_memory() -> None:
    name = a_send_does_not_wait_for_its_receiver.__name__
    assert on_threads(MemoryTransport, name) == [[], []]


@pytest.mark.processes
@pytest.mark.parametrize("transport", CARRIERS)
def test_sends_do_not_wait_between_processes(transport: str, two_ranks: RankPool) -> None:
    name = a_send_does_not_wait_for_its_receiver.__name__
    assert two_ranks.run(on_a_process, transport, name) == [[], []]


def test_two_sends_that_face_each_other_are_an_error_on_the_strict_transport() -> None:
    with pytest.raises(EdgeError, match=r"meet out of order: rank . sends .*, rank . sends"):
        on_threads(OrderedTransport, a_send_does_not_wait_for_its_receiver.__name__)


@pytest.mark.parametrize("transport", THREAD_TRANSPORTS)
def test_a_window_loses_nothing_on_threads(transport: str) -> None:
    name = many_packets_through_a_window.__name__
    assert on_threads(THREAD_TRANSPORTS[transport], name, window=2) == [[], []]


@pytest.mark.processes
@pytest.mark.parametrize("transport", CARRIERS)
def test_a_window_loses_nothing_between_processes(transport: str, two_ranks: RankPool) -> None:
    name = many_packets_through_a_window.__name__
    assert two_ranks.run(on_a_process, transport, name, 2) == [[], []]


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
    with carrier("process-group") as transport:
        endpoint = transport.open(epoch=1, window=None)
        if rank == 0:
            endpoint.send(edge(5), leave(torch.zeros(1))[0])
            return ""
        with pytest.raises(PeerError) as caught:
            endpoint.receive(edge(4)).wait()
        return str(caught.value)


@pytest.mark.processes
def test_ranks_that_lost_step_are_told(two_ranks: RankPool) -> None:
    _, message = two_ranks.run(_expect_something_else)
    assert message.startswith("rank 1 waited for edge 0->1 F4 of step 1, but rank 0 sent 0->1 F5")
    assert "same script" in message


def _wait_for_rank_0(endpoint: Endpoint, what: str) -> None:
    if what == "receive":
        endpoint.receive(edge(4)).wait()
    for index in range(3):
        endpoint.send(edge(index, source=1), leave(torch.zeros(1))[0])


def _wait_for_a_rank_that_fails(rank: int, name: str, what: str) -> str:
    with member_of_the_job() as member:
        transport = CARRIERS[name](member)
        member.on_failure = transport.abort
        endpoint = transport.open(epoch=0, window=1)
        if rank == 0:
            time.sleep(0.2)
            member.fail(Failure(0, 0, "rank 0 has no more paper"))
            assert member.await_failure(5) is not None
        else:
            with pytest.raises(Aborted):
                _wait_for_rank_0(endpoint, what)
        assert member.failure is not None
        transport.close()
        return member.failure.text


@pytest.mark.processes
@pytest.mark.parametrize("name", CARRIERS)
@pytest.mark.parametrize("what", ["receive", "window"])
def test_a_failure_elsewhere_wakes_who_waits(name: str, what: str, two_ranks: RankPool) -> None:
    """gloo can neither cancel a receive nor ask whether it is done."""
    assert (
        two_ranks.run(_wait_for_a_rank_that_fails, name, what) == ["rank 0 has no more paper"] * 2
    )
