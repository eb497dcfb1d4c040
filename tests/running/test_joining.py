"""How ranks meet: strangers are sent away, a false hub is not believed, and the door is closed."""

from __future__ import annotations

import json
import os
import socket
import struct
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import repeat
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]  # without being listed

from stageline.errors import PeerError
from stageline.running.control import Member, job, joining, leaving
from stageline.running.control.joining import knock
from stageline.running.control.messages import Connection
from stageline.torch_private import PrefixStore
from tests.running.sockets import listening

NUM_RANKS = 3
HOST_KEY = "stageline.running.control.joining.host_key"


class Party:
    """Ranks that meet as threads of this process, each one when it is called."""

    def __init__(self, timeout: float = 20.0) -> None:
        self.store = HashStore()
        self.timeout = timeout
        self.members: dict[int, Member] = {}
        self.errors: dict[int, BaseException] = {}
        self._threads: list[threading.Thread] = []

    def call(self, *ranks: int) -> None:
        for rank in ranks:
            thread = threading.Thread(target=self._join, args=(rank,), name=f"host of {rank}")
            self._threads.append(thread)
            thread.start()

    def _join(self, rank: int) -> None:
        try:
            self.members[rank] = job.join(
                self.store, rank, NUM_RANKS, timeout=self.timeout, heartbeat_timeout=5.0
            )
        except BaseException as error:
            self.errors[rank] = error

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def all_are_there(self) -> None:
        self.wait()
        assert self.errors == {}
        for member in self.members.values():
            member.next_call()
            member.begin({})
        threads = [threading.Thread(target=m.finish) for m in self.members.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()

    def address(self) -> Any:
        """Let rank 0 open its door, with nobody but strangers in front of it."""
        for rank in range(1, NUM_RANKS):
            joining.Meeting(PrefixStore("stageline/1", self.store), rank, NUM_RANKS, 20).introduce()
        self.call(0)
        return json.loads(self.store.get("stageline/1/hub"))

    def close(self) -> None:
        for member in self.members.values():
            member.leave("the test is over")


@pytest.fixture
def party(monkeypatch: pytest.MonkeyPatch) -> Iterator[Party]:
    # All ranks build their first pipeline.
    monkeypatch.setattr(job, "_numbers", defaultdict(lambda: repeat(1)))
    monkeypatch.setattr(leaving, "remember", lambda member: None)  # hooks are for whole processes
    party = Party()
    yield party
    party.close()


@pytest.fixture(params=["one host", "several hosts"])
def hosts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On one host ranks meet at a Unix socket, else at a TCP port of one interface."""
    if request.param == "one host":
        monkeypatch.setattr(HOST_KEY, lambda: "the only one")
    else:
        monkeypatch.setattr(HOST_KEY, lambda: threading.current_thread().name)
        monkeypatch.setenv("STAGELINE_HOST", "127.0.0.2")
    return str(request.param)


def connect(address: Any) -> socket.socket:
    where = address["address"]
    is_path = isinstance(where, str)
    sock = socket.socket(socket.AF_UNIX if is_path else socket.AF_INET)
    sock.settimeout(20)
    sock.connect(where if is_path else tuple(where))
    return sock


def test_ranks_meet_and_can_work(hosts: str, party: Party) -> None:
    party.call(0, 1, 2)
    party.all_are_there()
    assert {member.one_host for member in party.members.values()} == {hosts == "one host"}


def test_while_ranks_are_expected_only_one_place_is_open(hosts: str, party: Party) -> None:
    before = listening()
    party.address()
    (opened,) = listening() - before
    wanted = "unix:@stageline-" if hosts == "one host" else "127.0.0.2:"
    assert opened.startswith(wanted)
    party.call(1, 2)
    party.all_are_there()


def test_after_joining_nothing_listens_and_no_folder_is_left(hosts: str, party: Party) -> None:
    before, left = listening(), _left_in_the_temporary_folder()
    party.call(0, 1, 2)
    party.all_are_there()
    assert listening() == before
    assert _left_in_the_temporary_folder() <= left


def _left_in_the_temporary_folder() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("stageline-")}


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


RUBBISH = {
    "nothing": b"",
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "a list": framed(b"[]"),
    "no rank": framed(b'{"proof": "x", "challenge": "x"}'),
    "a wrong proof": framed(b'{"rank": 1, "proof": "00", "challenge": "x"}'),
    "a proof that is no text": framed(b'{"rank": 1, "proof": ["\xc3\xbc"], "challenge": "x"}'),
    "a proof that is not ASCII": framed(b'{"rank": 1, "proof": "\xc3\xbc", "challenge": "x"}'),
    "too deep": framed(b"[" * 3000),
    "an endless message": struct.pack(">I", 1 << 29) + b"x" * 1000,
}


@pytest.mark.parametrize("what", RUBBISH)
def test_a_stranger_is_sent_away_and_the_job_goes_on(hosts: str, what: str, party: Party) -> None:
    """A list instead of an object ended rank 0 with an AttributeError, and with it the job."""
    stranger = connect(party.address())
    stranger.sendall(RUBBISH[what])
    stranger.shutdown(socket.SHUT_WR)
    while stranger.recv(4096):  # a challenge, then the end
        pass
    stranger.close()
    party.call(1, 2)
    party.all_are_there()


def test_a_stranger_who_says_nothing_holds_nobody_up(hosts: str, party: Party) -> None:
    """Ranks were let in one after the other: with a silent stranger in front, all gave up."""
    address = party.address()
    strangers = [connect(address) for _ in range(5)]
    party.call(1, 2)
    party.all_are_there()
    for stranger in strangers:
        stranger.close()


def test_a_stranger_learns_nothing_that_lets_another_one_in(hosts: str, party: Party) -> None:
    """Neither the secret nor a proof is ever sent to somebody who has not proved himself."""
    address = party.address()
    stranger = Connection(connect(address))
    asked = stranger.receive_one()
    assert list(asked) == ["challenge"]
    stranger.send({"rank": 1, "proof": asked["challenge"], "challenge": asked["challenge"]})
    with pytest.raises(EOFError):
        stranger.receive_one()
    stranger.close()
    party.call(1, 2)
    party.all_are_there()


def test_who_knows_the_secret_may_still_not_take_a_place_that_is_none(
    hosts: str, party: Party
) -> None:
    """As a rank of another job would, that uses the same store: rank 7 of 3 counted as one more."""
    address = party.address()
    with pytest.raises(PeerError):
        knock(address, 7)
    with pytest.raises(PeerError):
        knock(address, 0)
    party.call(1, 2)
    party.all_are_there()


FALSE_HUBS: dict[str, Callable[[Connection], None]] = {
    "has no proof": lambda hub: hub.send({"proof": "00"}),
    "answers with what it was sent": lambda hub: hub.send({"proof": hub.receive_one()["proof"]}),
    "says nothing that belongs here": lambda hub: hub.send({"hello": 1}),
    "sends no text": lambda hub: hub.send({"proof": "ü"}),
    "hangs up": lambda hub: hub.close(),
}


@pytest.mark.parametrize("what", FALSE_HUBS)
def test_a_false_hub_is_not_trusted(what: str) -> None:
    """Somebody who took the address before rank 0 did; what he says is not believed."""
    server = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        hub = Connection(server.accept()[0])
        hub.sock.settimeout(20)
        hub.send({"challenge": "x"})
        FALSE_HUBS[what](hub)
        with suppress(EOFError):  # comes once the other side has turned away
            while True:
                hub.receive()
        hub.close()

    thread = threading.Thread(target=pretend)
    thread.start()
    address = {"address": server.getsockname(), "secret": "s"}
    with pytest.raises(
        PeerError, match=r"rank 1 (reached something that is not|cannot reach) rank"
    ):
        knock(address, 1)
    thread.join(30)
    assert not thread.is_alive()
    server.close()


def test_an_address_that_cannot_be_had_is_told_to_all(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others waited for half an hour for a hub that had ended with an OSError."""
    monkeypatch.setattr(HOST_KEY, lambda: threading.current_thread().name)
    monkeypatch.setenv("STAGELINE_HOST", "192.0.2.7")
    party.call(0, 1, 2)
    party.wait()
    assert {type(error) for error in party.errors.values()} == {PeerError}
    for error in party.errors.values():
        assert str(error).startswith("rank 0 cannot listen at 192.0.2.7 (")
        assert "STAGELINE_HOST" in str(error)


def test_a_rank_that_cannot_reach_the_hub_is_told_to_all(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waited for its whole timeout for a rank that had already given up."""
    monkeypatch.setattr(HOST_KEY, lambda: threading.current_thread().name)
    monkeypatch.setenv("STAGELINE_HOST", "127.0.0.2")
    real = joining.knock

    def no_route(address: Any, rank: int) -> Connection:
        if rank == 2:
            address = {**address, "address": ["127.0.0.3", 1]}
        return real(address, rank)

    monkeypatch.setattr(job, "knock", no_route)
    party.call(0, 1, 2)
    party.wait()
    assert sorted(party.errors) == [0, 1, 2]
    for error in party.errors.values():
        assert isinstance(error, PeerError)
        assert str(error).startswith("rank 2 cannot reach rank 0 at 127.0.0.3:1 ")


def test_a_rank_that_never_comes_is_named(party: Party) -> None:
    party.timeout = 0.5
    party.call(0, 1)
    party.wait()
    for error in party.errors.values():
        assert str(error).startswith("rank 2 has not built this pipeline")


def test_a_temporary_folder_with_a_long_name_is_no_obstacle(
    party: Party, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The path of a Unix socket may be no longer than 107 bytes; on clusters TMPDIR often is."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    party.call(0, 1, 2)
    party.all_are_there()
    assert os.listdir(long) == []


class _LostStore(PrefixStore):
    """A store whose process ends after the introduction."""

    def wait(self, *_: Any) -> None:
        raise DistNetworkError("Failed to recv, got 0 bytes.")

    check = wait  # type: ignore[assignment]  # it never answers


def test_a_store_that_ends_is_told_as_what_it_is(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a DistNetworkError with a page of addresses in native code."""
    monkeypatch.setattr(job, "PrefixStore", _LostStore)
    party.call(1)
    party.wait()
    assert isinstance(party.errors[1], PeerError)
    assert str(party.errors[1]).startswith("rank 1 lost the store of the job while it joined")
