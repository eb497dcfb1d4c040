"""Where a rank runs, and at which address it listens."""

from __future__ import annotations

import socket

import pytest

from stageline.running.control import addresses
from stageline.running.control.addresses import family_of, host_key, own_address

WAYS = {
    "node0": "127.0.1.1",  # as Debian writes a host's own name into /etc/hosts
    "node0.cluster": "10.0.0.4",
    "10.0.0.5": "10.0.0.4",
    "192.168.7.2": "192.168.7.1",
    "fd00::5": "fd00::4",
}


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_address_towards", WAYS.get)
    monkeypatch.delenv("STAGELINE_HOST", raising=False)


@pytest.mark.parametrize(
    ("master", "peers", "wanted"),
    [
        ("node0.cluster", ["192.168.7.2"], "10.0.0.4"),
        ("node0", ["10.0.0.5"], "10.0.0.4"),
        ("node0", ["127.0.0.1", "192.168.7.2"], "192.168.7.1"),
        ("node0", ["fd00::5"], "fd00::4"),
        ("node0", [], "127.0.1.1"),
        ("nobody", ["10.0.0.5"], "10.0.0.4"),
        ("nobody", [], "127.0.0.1"),
    ],
)
def test_rank_0_listens_where_the_other_hosts_can_reach_it(
    master: str, peers: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host whose own name leads back to itself listened at 127.0.1.1, where nobody came."""
    monkeypatch.setenv("MASTER_ADDR", master)
    assert own_address(peers) == wanted


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node0.cluster")
    monkeypatch.setenv("STAGELINE_HOST", "192.168.7.1")
    assert own_address(["10.0.0.5"]) == "192.168.7.1"


def test_the_way_to_an_address_is_found_without_sending_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    assert addresses._address_towards("127.0.0.1") == "127.0.0.1"
    assert addresses._address_towards("no such host.") is None


def test_families() -> None:
    assert family_of("10.0.0.4") == socket.AF_INET
    assert family_of("fd00::4") == socket.AF_INET6


def test_a_host_is_one_host_until_somebody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    here = host_key()
    assert here == host_key()
    monkeypatch.setenv("STAGELINE_HOST_KEY", "container 2")
    assert host_key() != here
