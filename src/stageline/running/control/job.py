"""Joining a job: the hub in the process of rank 0, a member in every process."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count

from torch.distributed import DistNetworkError

from stageline.errors import PeerError, told
from stageline.running.control import leaving
from stageline.running.control.board import BoardFiles
from stageline.running.control.hub import Hub, Tell, silence
from stageline.running.control.joining import Door, Meeting, knock, readable
from stageline.running.control.listening import Listener
from stageline.running.control.member import Member
from stageline.running.control.messages import Connection, Message
from stageline.torch_private import PrefixStore, Store

# Pipelines of the same processes are built in the same order on all of them, so these agree.
_numbers: defaultdict[str, Iterator[int]] = defaultdict(count)


def join(
    store: Store,
    rank: int,
    num_ranks: int,
    *,
    timeout: float,
    heartbeat_timeout: float,
    name: str = "stageline",
) -> Member:
    """Meet the other ranks of a pipeline; return this rank's side of the control plane.

    Args:
        store: The store of the job.
        rank: This rank.
        num_ranks: How many there are.
        timeout: Seconds to wait for ranks that do not come.
        heartbeat_timeout: Seconds of silence after which a rank counts as dead.
        name: What these ranks call themselves.

    Raises:
        PeerError: Some rank did not come; all that came raise it.
    """
    own = PrefixStore(f"{name}/{next(_numbers[name])}", store)
    meeting = Meeting(own, rank, num_ranks, timeout)
    listener = Listener(f"stageline-control-{rank}", interval=heartbeat_timeout / 10)
    meet = _visit if rank else _host
    try:
        meeting.introduce()
        member = meet(meeting, listener, heartbeat_timeout)
    except DistNetworkError as cause:
        raise PeerError(
            f"rank {rank} lost the store of the job while it joined: the process that keeps it "
            "(that of rank 0, or torchrun on its host) has ended. Look at its own output"
        ) from cause
    listener.start()
    leaving.remember(member)
    return member


class _LocalLink:
    """From rank 0 to the hub in its own process."""

    def __init__(self, hub: Hub, connections: Sequence[Connection], listener: Listener) -> None:
        self._hub = hub
        self._connections = connections
        self._listener = listener

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        self._hub.hear(0, message, [os.dup(file) for file in files])

    def close(self) -> None:
        self._listener.stop()
        for connection in self._connections:
            self._listener.forget(connection.sock)
            connection.close()


class _RemoteLink:
    """From another rank to the hub."""

    def __init__(self, connection: Connection, listener: Listener) -> None:
        self._connection = connection
        self._listener = listener
        self.send = connection.send

    def close(self) -> None:
        self._listener.stop()
        self._listener.forget(self._connection.sock)
        self._connection.close()


def _host(meeting: Meeting, listener: Listener, heartbeat_timeout: float) -> Member:
    """Open the door, wait for all ranks, and be the hub."""
    hosts = meeting.hosts()
    one_host = len({host.key for host in hosts}) == 1
    try:
        door = Door(hosts)
    except PeerError as error:
        raise meeting.fail(str(error)) from error
    member = Member(meeting, one_host=one_host)
    connections = _gather(meeting, door)

    def tell_here(message: Message, files: Sequence[int]) -> None:
        member.hear(message, [os.dup(file) for file in files])

    tell: dict[int, Tell] = {0: tell_here}
    tell.update((rank, connection.send) for rank, connection in connections.items())

    def drop(rank: int) -> None:
        listener.forget(connections[rank].sock)
        connections[rank].close()

    board = BoardFiles.make(meeting.num_ranks) if one_host else None
    hub = Hub(meeting.num_ranks, tell, drop, has_board=board is not None)
    for rank, connection in connections.items():
        listener.watch(connection.sock, _hearing(hub, rank, connection, listener))
        connection.send({"kind": "ready", "one_host": one_host}, board or ())

    def beat(pause: float) -> None:
        member.beat()
        hub.beat()
        hub.look_for_silence(heartbeat_timeout, pause)

    listener.on_beat = beat
    member.connect(_LocalLink(hub, list(connections.values()), listener), board)
    return member


def _gather(meeting: Meeting, door: Door) -> dict[int, Connection]:
    """Wait until every rank has come through the door."""
    connections: dict[int, Connection] = {}
    deadline = time.monotonic() + meeting.timeout
    try:
        meeting.publish(door.to_json())
        while door.expected and not meeting.has_failed and time.monotonic() < deadline:
            connections.update(door.admit())
    finally:
        door.close()
        if door.expected:
            for connection in connections.values():
                connection.close()
    if not door.expected:
        return connections
    meeting.raise_if_failed()
    raise meeting.fail(
        f"rank {min(door.expected)} knows of this pipeline and did not reach rank 0 within "
        f"{meeting.timeout:g} s: can its host connect to {readable(door.address)}?"
    )


def _hearing(hub: Hub, rank: int, connection: Connection, listener: Listener) -> Callable[[], None]:
    def hear() -> None:
        try:
            for message, files in connection.receive():
                hub.hear(rank, message, files)
        except Exception as error:  # of any kind, or nobody would listen, and all would wait
            listener.forget(connection.sock)
            if type(error) is EOFError:
                hub.lost(rank)
            else:
                hub.give_up(rank, f"rank 0 cannot hear rank {rank} any more: {told(error)}")

    return hear


def _visit(meeting: Meeting, listener: Listener, heartbeat_timeout: float) -> Member:
    """Go to the hub, and wait until all others are there too."""
    address = meeting.hub_address()
    try:
        connection = knock(address, meeting.rank)
    except PeerError as error:
        meeting.raise_if_failed()
        raise meeting.fail(str(error)) from error
    connection.sock.settimeout(meeting.timeout)
    try:
        first, files = connection.receive_one_with_files()
    except (EOFError, TimeoutError) as cause:
        connection.close()
        meeting.raise_if_failed()
        raise PeerError(
            f"rank 0 ended while rank {meeting.rank} was joining it: look at its own output"
        ) from cause
    connection.sock.settimeout(None)
    member = Member(meeting, one_host=first["one_host"])
    member.connect(_RemoteLink(connection, listener), BoardFiles(*files) if files else None)
    hub = _FarHub(connection, member, listener, heartbeat_timeout)
    if connection.has_more:
        hub.hear()
    listener.watch(connection.sock, hub.hear)
    listener.on_beat = hub.beat
    return member


_GONE = (
    "rank 0 is gone: its process ended without a word (killed, out of memory, or crashed in native "
    "code), or it gave this rank up as dead. Look at its own output, and start the job again"
)


class _FarHub:
    """The hub as another rank sees it: heard, or silent, or gone."""

    def __init__(
        self, connection: Connection, member: Member, listener: Listener, limit: float
    ) -> None:
        self._connection = connection
        self._member = member
        self._listener = listener
        self._limit = limit
        self._heard = time.monotonic()
        self._is_given_up = False

    def hear(self) -> None:
        self._heard = time.monotonic()
        try:
            for message, files in self._connection.receive():
                self._member.hear(message, files)
        except Exception as error:  # of any kind, or nobody would listen, and all would wait
            self._listener.forget(self._connection.sock)
            here = self._member.rank
            if type(error) is EOFError:
                self._member.lost(_GONE)
            else:
                self._give_up(f"rank {here} cannot hear rank 0 any more: {told(error)}")

    def beat(self, pause: float) -> None:
        self._member.beat()
        if pause > self._limit / 2:  # it was this process that slept
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > self._limit and not self._is_given_up:
            self._is_given_up = True
            self._give_up(silence(0, self._limit))

    def _give_up(self, text: str) -> None:
        with suppress(OSError):  # it may be alive, or go on some day, and should know
            self._connection.send({"kind": "bye", "text": text})
        self._member.lost(text)
