"""Ranks are processes; packets travel over a ``torch.distributed`` group (gloo).

Every channel (peer, letter) is a FIFO: both ends issue in the order of ``order_transfers``, and
the n-th header that is sent is the n-th that is received. The header says which edge it carries,
so ranks that have lost step are found at once instead of computing with the wrong value.

gloo finishes a send only when somebody waits for it, and keeps its memory until then. Waiting is
the job of one small thread, so that compute never waits and a sent activation is freed as soon as
it has arrived.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stageline import log
from stageline.errors import PeerError
from stageline.running.boundary import Packet
from stageline.running.control.member import Member, Slowness
from stageline.running.transports import wire
from stageline.running.transports.base import Aborted, Edge, Endpoint, ProcessTransport, Receipt
from stageline.torch_private import PrefixStore, connect_gloo, own_connection

# What travels, each on a tag of its own: activations, gradients, outputs, gradients of tied
# parameters, data that a rank was not given.
LETTERS = ("F", "B", "O", "T", "D")
_ABORT_TAG = len(LETTERS)
_FIRST_BODY_TAG = 16
_BODY_TAGS = 1 << 16  # far more than can be under way at once
_AHEAD = 2  # receives per channel that are posted before their turn
_FOREVER = timedelta(days=365)  # the control plane ends a wait, not a clock
_READY = "ready to connect"
_AT_ONCE = timedelta(milliseconds=1)
_SLICE = 0.05  # seconds
_GRACE = 2.0  # seconds in which the control plane says why a peer is gone

_Posted = tuple[Tensor, dist.Work]


class ProcessGroupTransport(ProcessTransport):
    """Carries packets between processes, on any number of hosts.

    The group is this pipeline's own, so that its messages meet no others. gloo cannot cancel a
    receive: after a failed call the group is dropped, and the next call makes another one.

    Args:
        member: This rank's side of the control plane.
    """

    name = "gloo"

    def __init__(self, member: Member) -> None:
        self.member = member
        self.rank = member.rank
        self._generation = 0
        self._group: Any = None  # torch does not describe it
        self._changing = threading.Lock()  # guards the next two: another thread aborts
        self._epoch: int | None = None  # the call that may be aborted
        self._is_broken = False
        self._sent: dict[tuple[int, str], int] = defaultdict(int)
        self._expected: dict[tuple[int, str], int] = defaultdict(int)
        self._posted: dict[tuple[int, str], deque[_Posted]] = defaultdict(deque)
        self._outbox: SimpleQueue[_Shipment | None] = SimpleQueue()
        self._reaper = threading.Thread(
            target=_finish_sends,
            args=(self.rank, self._outbox),
            name="stageline-sends",
            daemon=True,
        )
        self._reaper.start()

    def open(self, *, epoch: int, window: int | None) -> Endpoint:
        with self._changing:
            self._epoch, self._is_broken = epoch, False
        if self.member.failure is not None:  # it came before there was anything to abort
            raise Aborted
        if self._group is None:
            self._group = self._connect()
        return ProcessGroupEndpoint(self, epoch, window)

    def _connect(self) -> Any:
        """Connect to all other ranks; they do the same at the same call."""
        self._await_all()
        made: SimpleQueue[Any] = SimpleQueue()
        prefix, size = f"gloo/{self._generation}", self.member.num_ranks
        timeout = timedelta(seconds=self.member.timeout)

        def connect() -> None:
            try:
                # A store of its own: whoever waits for a key in one keeps it for himself.
                store = PrefixStore(prefix, own_connection(self.member.store))
                made.put(connect_gloo(store, self.rank, size, timeout))
            except BaseException as error:
                made.put(error)

        # In a thread of its own: a rank that fails meanwhile is heard of, not waited for.
        threading.Thread(target=connect, name="stageline-connect", daemon=True).start()
        while True:
            try:
                result = made.get(timeout=_SLICE)
                break
            except Empty:
                if self.member.failure is not None:
                    raise Aborted from None
        if isinstance(result, BaseException):
            if self.member.await_failure(_GRACE) is not None:
                raise Aborted from result
            raise PeerError(
                f"rank {self.rank} cannot connect to the other ranks over gloo "
                f"({_first_line(result)}): set GLOO_SOCKET_IFNAME to the network that hosts share"
            ) from result
        return result

    def _await_all(self) -> None:
        """Wait until all ranks are about to connect: gloo cannot be told to give one up."""
        ready = f"{_READY} {self._generation}"
        self.member.post(ready)
        for rank in range(self.member.num_ranks):
            if rank != self.rank:
                self.member.lookup(ready, rank)

    def ship(
        self, edge: Edge, epoch: int, packet: Packet, room: threading.Semaphore | None
    ) -> None:
        """Start the sends of a packet."""
        assert self._group is not None
        encoded = wire.encode(packet, edge, epoch)
        peer, letter = edge.target_rank, edge.letter
        body_tag = _body_tag(letter, self._sent[peer, letter])
        self._sent[peer, letter] += 1
        rest = [] if encoded.rest is None else [encoded.rest]
        messages = [(encoded.first, LETTERS.index(letter))]
        messages += [(tensor, body_tag) for tensor in (*rest, *encoded.tensors)]
        try:
            works = [self._group.send([tensor], peer, tag) for tensor, tag in messages]
        except RuntimeError as cause:
            raise self._why(cause, edge) from cause
        self._outbox.put(_Shipment(edge, works, [tensor for tensor, _ in messages], room))

    def expect(self, edge: Edge, epoch: int) -> Receipt:
        """Post the receive of a header, and of those that come next on its channel.

        gloo sends once it knows that the receiver is ready. Told of it only now, a sender that is
        busy by then would answer late: three wake-ups instead of one.
        """
        peer, letter = edge.source_rank, edge.letter
        body_tag = _body_tag(letter, self._expected[peer, letter])
        self._expected[peer, letter] += 1
        posted = self._posted[peer, letter]
        while len(posted) <= _AHEAD:
            buffer = torch.empty(wire.HEADER_BYTES, dtype=torch.uint8, device="cpu")
            posted.append((buffer, self.post(buffer, edge, LETTERS.index(letter))))
        first, work = posted.popleft()
        return _ProcessGroupReceipt(self, edge, epoch, first, work, body_tag)

    def post(self, buffer: Tensor, edge: Edge, tag: int) -> dist.Work:
        """Begin a receive."""
        assert self._group is not None
        if self._is_broken:
            raise Aborted
        try:
            work: dist.Work = self._group.recv([buffer], edge.source_rank, tag)
            return work
        except RuntimeError as cause:
            raise self._why(cause, edge) from cause

    def finish(self, work: dist.Work, edge: Edge) -> None:
        """Wait for a receive; a failure elsewhere, or the end of the peer, ends the wait."""
        self.member.waiting = Slowness(self.member, f"edge {edge} from rank {edge.source_rank}")
        try:
            work.wait(_FOREVER)
        except RuntimeError as cause:
            raise self._why(cause, edge) from cause
        finally:
            self.member.waiting = None

    def _why(self, cause: RuntimeError, edge: Edge) -> BaseException:
        """Return what to raise where gloo has failed: the control plane usually knows why."""
        if self.member.await_failure(_GRACE) is not None:
            return Aborted()
        return PeerError(
            f"rank {self.rank} lost its connections at edge {edge} ({_first_line(cause)}), and no "
            "rank has failed: look at the network between the hosts"
        )

    def abort(self, epoch: int) -> None:
        """End all waits of a call.

        A receive that times out closes all its connections, and whoever waits on them is told;
        gloo has no other way.
        """
        with self._changing:
            if epoch != self._epoch:
                return
            group, self._is_broken = self._group, True
        if group is not None:
            for peer in range(self.member.num_ranks):
                if peer != self.rank:
                    with suppress(RuntimeError):
                        group.recv([torch.empty(1, device="cpu")], peer, _ABORT_TAG).wait(_AT_ONCE)

    def reset(self) -> None:
        with self._changing:
            self._group = self._epoch = None
        self.member.forget_posts(lambda key: key == f"{_READY} {self._generation}")
        self._generation += 1
        self._sent.clear()
        self._expected.clear()
        self._posted.clear()

    def close(self) -> None:
        self._outbox.put(None)
        if threading.current_thread() is not self._reaper:  # which may collect the garbage
            self._reaper.join(_GRACE)
        self._group = None


class _Shipment:
    """Sends under way, and the memory they read from."""

    __slots__ = ("edge", "room", "tensors", "works")

    def __init__(
        self,
        edge: Edge,
        works: Sequence[dist.Work | None],
        tensors: list[Tensor],
        room: threading.Semaphore | None,
    ) -> None:
        self.edge = edge
        self.works = works
        self.tensors = tensors
        self.room = room


def _finish_sends(rank: int, outbox: SimpleQueue[_Shipment | None]) -> None:
    while (shipment := outbox.get()) is not None:
        try:
            for work in shipment.works:
                if work is not None:
                    work.wait(_FOREVER)
        except RuntimeError as error:
            # The rank itself meets the same peer at its next receive and reports it there.
            log.debug(rank, f"edge {shipment.edge} was not taken: {_first_line(error)}")
        if shipment.room is not None:
            shipment.room.release()
        del shipment


def _body_tag(letter: str, sequence: int) -> int:
    return _FIRST_BODY_TAG + (sequence % _BODY_TAGS) * len(LETTERS) + LETTERS.index(letter)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


class ProcessGroupEndpoint(Endpoint):
    """This process's side of one step."""

    def __init__(self, transport: ProcessGroupTransport, epoch: int, window: int | None) -> None:
        self._transport = transport
        self._epoch = epoch
        self._room: dict[int, threading.Semaphore] | None = None
        if window is not None:
            self._room = defaultdict(lambda: threading.Semaphore(window))

    def send(self, edge: Edge, packet: Packet) -> None:
        member = self._transport.member
        if member.failure is not None:
            raise Aborted
        room = None if self._room is None else self._room[edge.target_rank]
        if room is not None:
            before = f"rank {edge.target_rank} to take what was sent before edge {edge}"
            slow = Slowness(member, before)
            while not room.acquire(timeout=_SLICE):
                if member.failure is not None:
                    raise Aborted
                slow.note()
        self._transport.ship(edge, self._epoch, packet, room)

    def receive(self, edge: Edge) -> Receipt:
        return self._transport.expect(edge, self._epoch)


class _ProcessGroupReceipt(Receipt):
    __slots__ = ("_body_tag", "_edge", "_epoch", "_first", "_transport", "_work")

    def __init__(
        self,
        transport: ProcessGroupTransport,
        edge: Edge,
        epoch: int,
        first: Tensor,
        work: Any,
        body_tag: int,
    ) -> None:
        self._transport = transport
        self._edge = edge
        self._epoch = epoch
        self._first = first
        self._work = work
        self._body_tag = body_tag

    def wait(self) -> Packet:
        self._transport.finish(self._work, self._edge)
        missing = wire.missing_bytes(self._first)
        rest = (
            self._body(torch.empty(missing, dtype=torch.uint8, device="cpu")) if missing else None
        )
        first = wire.decode(self._first, rest)
        self._check(first)
        if first.is_whole:
            return first.header.packet(first.tensors())
        bodies = [self._body(layout.empty_bytes()) for layout in first.header.layouts]
        return first.header.packet(bodies)

    def _body(self, buffer: Tensor) -> Tensor:
        work = self._transport.post(buffer, self._edge, self._body_tag)
        self._transport.finish(work, self._edge)
        return buffer

    def _check(self, first: wire.First) -> None:
        if first.edge == self._edge and first.epoch == self._epoch:
            return
        rank, peer = self._edge.target_rank, self._edge.source_rank
        raise PeerError(
            f"rank {rank} waited for edge {self._edge} of step {self._epoch}, but rank {peer} "
            f"sent {Edge(*first.edge)} of step {first.epoch}: every rank must run the same "
            "script with the same model, split, schedule and number of steps"
        )
