"""How the processes of a job find each other: through the rendezvous store, with a secret.

    1  every rank      writes its host into the store
    2  rank 0          opens a socket: a Unix socket if all share its host, else one TCP port on the
                       interface over which the other hosts are reached; writes address and secret
    3  other ranks     connect, and both sides prove that they know the secret (HMAC, never sent)
    4  rank 0          closes the socket once all are there: from then on nobody can come in

The Unix socket has a name that is no file (an abstract one), so that nothing is left behind by a
process that is killed, and no folder must be shared; systems without such names use the loopback
interface. The store itself is torch's; whoever can read it can join the job, as with
torch.distributed.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import DistStoreError

from stageline import log
from stageline.errors import PeerError
from stageline.running.control.addresses import family_of, host_key, own_address
from stageline.running.control.messages import LONGEST, Connection, Message
from stageline.torch_private import Store

_SLICE = 0.25  # seconds: how often a wait looks around
_FIRST_NOTE = 10.0
_MOMENT = 2.0  # seconds for the others to hear why
_HANDSHAKE = 30.0  # seconds for the other side to prove itself
_SHORT = 4096  # bytes that are listened to before that
_FAILED = "failed"
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Host(NamedTuple):
    """Where a rank runs: what only processes of its host share, and its address."""

    key: str
    address: str


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
        self.store.set(f"host/{self.rank}", json.dumps([host_key(), own_address()]))

    def hosts(self) -> list[Host]:
        """Wait for all ranks to say where they run."""
        return [Host(*json.loads(self.store.get(key))) for key in self._wait_for_all()]

    def fail(self, text: str) -> PeerError:
        """Tell whoever still waits, through the store; return the error to raise here."""
        self.store.set(_FAILED, text)
        self._let_all_hear()
        return PeerError(text)

    @property
    def has_failed(self) -> bool:
        """Whether some rank has told that it cannot join."""
        return bool(self.store.check([_FAILED]))

    def raise_if_failed(self) -> None:
        """Raise what another rank has told in the store, if one has."""
        if self.has_failed:
            text = self.store.get(_FAILED).decode()
            self._let_all_hear()
            raise PeerError(text)

    def _let_all_hear(self) -> None:
        """Stay for a moment: the store may end with the process of rank 0."""
        if self.rank:
            self.store.set(f"heard/{self.rank}", "")
            return
        others = [f"heard/{rank}" for rank in range(1, self.num_ranks)]
        with suppress(DistStoreError, RuntimeError):
            self.store.wait(others, timedelta(seconds=_MOMENT))

    def publish(self, address: Message) -> None:
        self.store.set("hub", json.dumps(address))

    def hub_address(self) -> Message:
        """Wait for rank 0 to open its door, which it does when all ranks are known."""
        self._wait_for_all()
        self._wait_for(["hub"], lambda _: "rank 0")
        address: Message = json.loads(self.store.get("hub"))
        return address

    def _wait_for_all(self) -> list[str]:
        keys = [f"host/{rank}" for rank in range(self.num_ranks)]
        self._wait_for(keys, lambda missing: f"rank {missing[0].removeprefix('host/')}")
        return keys

    def _wait_for(self, keys: list[str], name: Callable[[list[str]], str]) -> None:
        start, patience = time.monotonic(), _FIRST_NOTE
        missing = list(keys)
        while missing:
            try:
                self.store.wait(missing, timedelta(seconds=_SLICE))
                return
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


@dataclass
class _Visitor:
    """Somebody who has connected and not yet proved himself."""

    connection: Connection
    challenge: str
    deadline: float


class Door:
    """The hub's open socket, for as long as ranks are expected.

    Visitors are listened to all at once: one who says nothing holds nobody up.

    Args:
        hosts: Where each rank runs; rank 0 is here.

    Attributes:
        address: Where ranks must connect.
        expected: Those that have not come yet.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.secret = secrets.token_hex(32)
        self.expected = set(range(1, len(hosts)))
        self._socket, self.address = _open(hosts)
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._visitors: dict[socket.socket, _Visitor] = {}

    def to_json(self) -> Message:
        return {"address": self.address, "secret": self.secret}

    def admit(self) -> dict[int, Connection]:
        """Wait a while; return the ranks that have proved themselves meanwhile."""
        admitted = {}
        for key, _ in self._selector.select(_SLICE):
            if key.fileobj is self._socket:
                self._greet()
                continue
            visitor: _Visitor = key.data
            try:
                rank = self._examine(visitor)
            except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
                self._send_away(visitor, repr(error))
                continue
            if rank is not None:
                self._forget(visitor)
                visitor.connection.longest = LONGEST
                self.expected.remove(rank)
                admitted[rank] = visitor.connection
        now = time.monotonic()
        for visitor in [one for one in self._visitors.values() if one.deadline < now]:
            self._send_away(visitor, "it said nothing")
        return admitted

    def _greet(self) -> None:
        with suppress(OSError):
            sock, _ = self._socket.accept()
            sock.setblocking(True)
            visitor = _Visitor(
                Connection(sock), secrets.token_hex(16), time.monotonic() + _HANDSHAKE
            )
            visitor.connection.longest = _SHORT
            self._visitors[sock] = visitor
            self._selector.register(sock, selectors.EVENT_READ, visitor)
            visitor.connection.send({"challenge": visitor.challenge})

    def _examine(self, visitor: _Visitor) -> int | None:
        """Return the rank of a visitor who knows the secret; None if he has not said all yet."""
        _refuse_other_users(visitor.connection.sock)
        messages = visitor.connection.receive()
        if not messages:
            return None
        answer, _ = messages[0]
        rank = int(answer["rank"])
        if not _is_proof(answer["proof"], self.secret, visitor.challenge, rank):
            raise ValueError("it does not know the secret")
        if rank not in self.expected:
            raise ValueError(f"it says that it is rank {rank}, which is not expected")
        visitor.connection.send({"proof": _proof(self.secret, answer["challenge"])})
        return rank

    def _send_away(self, visitor: _Visitor, why: str) -> None:
        log.warning(0, f"somebody who is not of this job knocked and was sent away: {why}")
        self._forget(visitor)
        visitor.connection.close()

    def _forget(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.connection.sock)
        del self._visitors[visitor.connection.sock]

    def close(self) -> None:
        for visitor in list(self._visitors.values()):
            self._send_away(visitor, "it said nothing")
        self._selector.close()
        self._socket.close()


def _open(hosts: Sequence[Host]) -> tuple[socket.socket, Any]:
    """Return a socket that listens, and its address.

    Raises:
        PeerError: There is no such address here.
    """
    one_host = len({host.key for host in hosts}) == 1
    if one_host and sys.platform == "linux":
        name = f"\0stageline-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(name)
        sock.listen(128)
        return sock, name
    others = [host.address for host in hosts if host.key != hosts[0].key]
    address = "127.0.0.1" if one_host else own_address(others)
    try:
        sock = socket.create_server((address, 0), family=family_of(address), backlog=128)
    except OSError as cause:
        raise PeerError(
            f"rank 0 cannot listen at {address} ({cause}): set STAGELINE_HOST on rank 0 to an "
            "address of its host that the others can reach"
        ) from cause
    return sock, sock.getsockname()[:2]


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


def _is_proof(given: object, secret: str, *parts: object) -> bool:
    return hmac.compare_digest(str(given).encode(), _proof(secret, *parts).encode())


def knock(address: Message, rank: int) -> Connection:
    """Connect to the hub, and make sure that it is the hub.

    Raises:
        PeerError: It cannot be reached, or it is somebody else.
    """
    where = address["address"]
    is_unix = isinstance(where, str)
    sock = socket.socket(socket.AF_UNIX if is_unix else family_of(where[0]))
    connection = Connection(sock)
    try:
        sock.settimeout(_HANDSHAKE)
        sock.connect(where if is_unix else tuple(where))
        connection.longest = _SHORT
        _introduce(connection, address["secret"], rank)
    except (OSError, EOFError) as cause:
        connection.close()
        if is_unix:
            raise PeerError(
                f"rank 0 ended while rank {rank} was joining it: look at its own output"
            ) from cause
        raise PeerError(
            f"rank {rank} cannot reach rank 0 at {readable(where)} ({cause}): if hosts have "
            "several networks, set STAGELINE_HOST on rank 0 to the address that the others can "
            "reach"
        ) from cause
    except (KeyError, TypeError, ValueError) as cause:
        connection.close()
        raise PeerError(
            f"rank {rank} reached something that is not rank 0 at {readable(where)}: start the "
            "job again, on ports that nobody else uses"
        ) from cause
    connection.longest = LONGEST
    sock.settimeout(None)
    return connection


def _introduce(connection: Connection, secret: str, rank: int) -> None:
    """Prove to the hub who this is, and let it prove that it is the hub."""
    asked = connection.receive_one()["challenge"]
    challenge = secrets.token_hex(16)
    connection.send({"rank": rank, "proof": _proof(secret, asked, rank), "challenge": challenge})
    if not _is_proof(connection.receive_one()["proof"], secret, challenge):
        raise ValueError("it does not know the secret")


def readable(address: Any) -> str:
    if isinstance(address, str):
        return address.replace("\0", "@")
    return f"{address[0]}:{address[1]}"
