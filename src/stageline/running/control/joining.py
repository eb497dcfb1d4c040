"""How the processes of a job find each other: through the rendezvous store, with a secret.

    1  every rank      writes its host into the store
    2  rank 0          opens a socket: a Unix socket if all share its host (on Linux one that has no
                       place in the file system), else one TCP port on the interface over which the
                       job's store is reached; writes address and secret
    3  other ranks     connect, and both sides prove that they know the secret (HMAC, never sent)
    4  rank 0          closes the socket once all are there: from then on nobody can come in

The store itself is torch's; whoever can read it can join the job, as with torch.distributed.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError

from stageline import log
from stageline.errors import PeerError
from stageline.running.control.messages import Connection, Message, Unreadable
from stageline.torch_private import Store

_SLICE = 0.25  # seconds: how often a wait looks around
_FIRST_NOTE = 10.0
_HANDSHAKE = 10.0  # seconds for the other side to answer
_FAILED = "failed"
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_BOOT = "/proc/sys/kernel/random/boot_id"


def host_key() -> str:
    """Return what only processes of one host share: its boot, its network and its memory files."""
    parts = [socket.gethostname()]
    if os.path.exists(_BOOT):
        parts.append(Path(_BOOT).read_text().strip())
    found = [os.stat(path) for path in ("/proc/self/ns/net", "/dev/shm") if os.path.exists(path)]
    parts += [f"{one.st_dev}:{one.st_ino}" for one in found]
    return " ".join(parts)


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one pipeline meet.

    Attributes:
        store: Theirs alone; a prefix of the job's.
        rank: This one.
        num_ranks: How many there are.
        timeout: Seconds to wait for a rank that does not come.
    """

    store: Store
    rank: int
    num_ranks: int
    timeout: float

    def introduce(self) -> None:
        """Say where this rank runs."""
        self.store.set(f"host/{self.rank}", host_key())

    def hosts(self) -> list[str]:
        """Wait for all ranks to say where they run."""
        keys = [f"host/{rank}" for rank in range(self.num_ranks)]
        self._wait_for(keys, lambda missing: f"rank {missing[0].removeprefix('host/')}")
        return [self.store.get(key).decode() for key in keys]

    def fail(self, text: str) -> PeerError:
        """Tell whoever still waits in the store, and return the error to raise here."""
        self.store.set(_FAILED, text)
        return PeerError(text)

    def raise_if_failed(self) -> None:
        """Raise what another rank has told in the store, if one has."""
        if self.store.check([_FAILED]):
            raise PeerError(self.store.get(_FAILED).decode())

    def publish(self, address: Message) -> None:
        self.store.set("hub", json.dumps(address))

    def hub_address(self) -> Message:
        self._wait_for(["hub"], lambda _: "rank 0")
        address: Message = json.loads(self.store.get("hub"))
        return address

    def _wait_for(self, keys: list[str], name: Callable[[list[str]], str]) -> None:
        start, patience = time.monotonic(), _FIRST_NOTE
        missing = list(keys)
        while missing:
            try:
                self.store.wait(missing[:1], timedelta(seconds=_SLICE))
                missing = missing[1:]
                continue
            except (DistStoreError, RuntimeError):
                missing = [key for key in missing if not self.store.check([key])]
            self.raise_if_failed()
            waited = time.monotonic() - start
            if missing and waited > self.timeout:
                raise self.fail(
                    f"{name(missing)} has not built this pipeline {waited:.0f} s after rank "
                    f"{self.rank} did (timeout={self.timeout:g}): its script has not started, has "
                    "failed before, or takes another way. Look at its own output"
                )
            if missing and waited > patience:
                patience *= 2
                log.warning(
                    self.rank, f"waits for {name(missing)} to build this pipeline, {waited:.0f} s"
                )


class Door:
    """The hub's open socket, for as long as ranks are expected."""

    def __init__(self, *, one_host: bool) -> None:
        self.secret = secrets.token_hex(32)
        self._folder: str | None = None
        if one_host and sys.platform == "linux":
            # Gone with the process, however that ends; a file would be left behind.
            self.address: Any = f"\0stageline-{secrets.token_hex(16)}"
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(self.address)
        elif one_host and hasattr(socket, "AF_UNIX"):
            self._folder = tempfile.mkdtemp(prefix="stageline-")  # mode 0700
            self.address = os.path.join(self._folder, "hub")
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(self.address)
        else:
            host = "127.0.0.1" if one_host else reachable_address()
            self._socket = socket.create_server((host, 0))
            self.address = self._socket.getsockname()[:2]
        self._socket.listen(128)
        self._socket.settimeout(_SLICE)

    def to_json(self) -> Message:
        return {"address": self.address, "secret": self.secret}

    def admit(self) -> tuple[int, Connection] | None:
        """Return the next rank that has proved itself, or None if nobody came in a while."""
        try:
            sock, _ = self._socket.accept()
        except TimeoutError:
            return None
        connection = Connection(sock)
        try:
            _refuse_other_users(sock)
            rank = _examine(connection, self.secret)
        except (OSError, EOFError, Unreadable, ValueError, KeyError, TypeError) as error:
            log.warning(0, f"somebody who is not of this job knocked and was sent away: {error!r}")
            connection.close()
            return None
        return rank, connection

    def close(self) -> None:
        self._socket.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _refuse_other_users(sock: socket.socket) -> None:
    """A socket without a file has no mode that would keep other users of this host out."""
    if sys.platform != "linux" or sock.family != socket.AF_UNIX:
        return
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise ValueError(f"it belongs to user {user}")


def _proof(secret: str, *parts: object) -> str:
    return hmac.new(secret.encode(), "|".join(map(str, parts)).encode(), "sha256").hexdigest()


def _examine(connection: Connection, secret: str) -> int:
    """Let a rank prove that it knows the secret, and prove it too."""
    connection.sock.settimeout(_HANDSHAKE)
    challenge = secrets.token_hex(16)
    connection.send({"challenge": challenge})
    answer = connection.receive_one()
    rank = int(answer["rank"])
    if not hmac.compare_digest(str(answer["proof"]), _proof(secret, challenge, rank)):
        raise ValueError("it does not know the secret")
    connection.send({"proof": _proof(secret, answer["challenge"])})
    connection.sock.settimeout(None)
    return rank


def knock(address: Message, rank: int) -> Connection:
    """Connect to the hub, and make sure that it is the hub."""
    where, secret = address["address"], address["secret"]
    family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET
    sock = socket.socket(family)
    sock.settimeout(_HANDSHAKE)
    try:
        sock.connect(where if isinstance(where, str) else tuple(where))
        connection = Connection(sock)
        challenge = secrets.token_hex(16)
        asked = connection.receive_one()["challenge"]
        connection.send(
            {"rank": rank, "proof": _proof(secret, asked, rank), "challenge": challenge}
        )
        if not hmac.compare_digest(
            str(connection.receive_one()["proof"]), _proof(secret, challenge)
        ):
            raise PeerError(f"rank {rank} reached something that is not rank 0 at {where}")
    except (OSError, EOFError, Unreadable) as cause:
        sock.close()
        if family == socket.AF_UNIX:
            raise PeerError(
                f"rank 0 ended while rank {rank} was joining it: look at its own output"
            ) from cause
        raise PeerError(
            f"rank {rank} cannot reach rank 0 at {where} ({cause}): if hosts have several "
            "networks, set STAGELINE_HOST on rank 0 to the address that the others can reach"
        ) from cause
    sock.settimeout(None)
    return connection


def reachable_address() -> str:
    """Return the address of this host on the network over which the job's store is reached."""
    named = os.environ.get("STAGELINE_HOST")
    if named:
        return named
    master = os.environ.get("MASTER_ADDR") or socket.gethostname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, int(os.environ.get("MASTER_PORT") or 1)))  # sends nothing
        address: str = probe.getsockname()[0]
    return address
