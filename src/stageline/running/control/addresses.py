"""Where a rank runs, and at which address the other hosts can reach it.

STAGELINE_HOST       the address at which rank 0 listens, where hosts have several networks
STAGELINE_HOST_KEY   processes with different ones count as different hosts, whatever they
                     share: for containers that must not share memory, and for tests
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

_BOOT = "/proc/sys/kernel/random/boot_id"
_SHARED = ("/proc/self/ns/net", "/dev/shm")


def host_key() -> str:
    """Return what only processes of one host share: its boot, its network and its memory files."""
    parts = [socket.gethostname(), os.environ.get("STAGELINE_HOST_KEY", "")]
    if os.path.exists(_BOOT):
        parts.append(Path(_BOOT).read_text().strip())
    found = [os.stat(path) for path in _SHARED if os.path.exists(path)]
    parts += [f"{one.st_dev}:{one.st_ino}" for one in found]
    return " ".join(parts)


def own_address(peers: Sequence[str] = ()) -> str:
    """Return the address of this host on the network over which the job's other hosts are reached.

    Args:
        peers: Addresses of other hosts. They are asked where the host of the job's store, which is
            usually this one, has a name that leads back to itself: many systems write their own
            name next to 127.0.1.1.
    """
    named = os.environ.get("STAGELINE_HOST")
    if named:
        return named
    master = os.environ.get("MASTER_ADDR") or socket.gethostname()
    found = [_address_towards(host) for host in (master, *peers)]
    known = [address for address in found if address is not None]
    outside = [address for address in known if not ip_address(address).is_loopback]
    return next(iter([*outside, *known]), "127.0.0.1")


def family_of(address: str) -> socket.AddressFamily:
    """Return whether this is an address of IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _address_towards(host: str) -> str | None:
    """Return the address from which this host would speak to another; nothing is sent."""
    with suppress(OSError):
        for family, _, _, _, where in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(where)
                address: str = probe.getsockname()[0]
                return address
    return None
