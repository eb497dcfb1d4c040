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
import weakref
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stageline import log
from stageline.errors import PeerError
from stageline.running.boundary import Packet
from stageline.running.transports import wire
from stageline.running.transports.base import Edge, Endpoint, Receipt

# What travels, each on a tag of its own: activations, gradients, the signature of a step, losses,
# outputs, gradients of tied parameters.
LETTERS = ("F", "B", "S", "L", "O", "T")
_FIRST_BODY_TAG = 16
_BODY_TAGS = 1 << 16  # far more than can be under way at once


class ProcessGroupTransport:
    """Carries packets between the processes of a group.

    Args:
        group: A group of this pipeline's own, so that its messages meet no others.
        timeout: Seconds after which a wait for a peer is given up.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout: float) -> None:
        self.group = group
        self.timeout = timedelta(seconds=timeout)
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._epoch = 0
        self._sent: dict[tuple[int, str], int] = defaultdict(int)
        self._expected: dict[tuple[int, str], int] = defaultdict(int)
        self._patience = [timeout]  # a list, so that the finalizer sees it change
        self._start()

    def set_patient(self, patient: bool) -> None:
        """Say whether closing waits for peers to take what was sent; some never will."""
        self._patience[0] = self.timeout.total_seconds() if patient else 0.0

    def _start(self) -> None:
        self._outbox: SimpleQueue[_Shipment | None] = SimpleQueue()
        reaper = threading.Thread(
            target=_finish_sends,
            args=(self.rank, self._outbox, self.timeout),
            name="stageline-sends",
            daemon=True,
        )
        reaper.start()
        # What was sent last must arrive, also when the script ends right after.
        self.close = weakref.finalize(self, _drain, self._outbox, reaper, self._patience)

    def open(self, *, window: int | None) -> ProcessGroupEndpoint:
        """Begin a step; ranks count alike, so messages of different steps never match."""
        if not self.close.alive:  # closed and used again
            self._start()
        self._epoch += 1
        return ProcessGroupEndpoint(self, self._epoch, window)

    def ship(
        self, edge: Edge, epoch: int, packet: Packet, room: threading.Semaphore | None
    ) -> None:
        """Start the sends of a packet."""
        encoded = wire.encode(packet, edge, epoch)
        peer, letter = edge.target_rank, edge.letter
        body_tag = _body_tag(letter, self._sent[peer, letter])
        self._sent[peer, letter] += 1
        rest = [] if encoded.rest is None else [encoded.rest]
        messages = [(encoded.first, LETTERS.index(letter))]
        messages += [(tensor, body_tag) for tensor in (*rest, *encoded.tensors)]
        works = [
            dist.isend(tensor, group=self.group, group_dst=peer, tag=tag)
            for tensor, tag in messages
        ]
        self._outbox.put(_Shipment(edge, works, [tensor for tensor, _ in messages], room))

    def expect(self, edge: Edge, epoch: int) -> Receipt:
        """Post the receive of a header."""
        peer, letter = edge.source_rank, edge.letter
        body_tag = _body_tag(letter, self._expected[peer, letter])
        self._expected[peer, letter] += 1
        first = torch.empty(wire.HEADER_BYTES, dtype=torch.uint8)
        work = self.post(first, peer, LETTERS.index(letter))
        return _ProcessGroupReceipt(self, edge, epoch, first, work, body_tag)

    def post(self, buffer: Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.irecv(buffer, group=self.group, group_src=peer, tag=tag)
        assert work is not None  # only for processes outside the group
        return work

    def finish(self, work: dist.Work, edge: Edge) -> None:
        """Wait for a receive, and say what was waited for if it fails."""
        try:
            work.wait(self.timeout)
        except RuntimeError as cause:
            peer = edge.source_rank
            raise PeerError(
                f"rank {self.rank} waited for edge {edge} from rank {peer}, and it did not come "
                f"({_first_line(cause)}): look at the output of rank {peer}, which failed, ended "
                f"or is slower than timeout={self.timeout.total_seconds():g} s"
            ) from cause


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


def _finish_sends(rank: int, outbox: SimpleQueue[_Shipment | None], timeout: timedelta) -> None:
    while (shipment := outbox.get()) is not None:
        try:
            for work in shipment.works:
                if work is not None:
                    work.wait(timeout)
        except RuntimeError as error:
            # The rank itself meets the same peer at its next receive and reports it there.
            log.debug(rank, f"edge {shipment.edge} was not taken: {_first_line(error)}")
        if shipment.room is not None:
            shipment.room.release()
        del shipment


def _drain(
    outbox: SimpleQueue[_Shipment | None], reaper: threading.Thread, patience: list[float]
) -> None:
    outbox.put(None)
    reaper.join(patience[0])


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
        room = None if self._room is None else self._room[edge.target_rank]
        timeout = self._transport.timeout.total_seconds()
        if room is not None and not room.acquire(timeout=timeout):
            raise PeerError(
                f"rank {edge.source_rank} waited {timeout:g} s for rank {edge.target_rank} to "
                f"take what was sent before edge {edge}: look at the output of rank "
                f"{edge.target_rank}"
            )
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
        rest = self._body(torch.empty(missing, dtype=torch.uint8)) if missing else None
        header = wire.decode(self._first, rest)
        self._check(header)
        if header.is_whole:
            return header.packet(header.unpack_inline())
        return header.packet([self._body(layout.empty_bytes()) for layout in header.layouts()])

    def _body(self, buffer: Tensor) -> Tensor:
        work = self._transport.post(buffer, self._edge.source_rank, self._body_tag)
        self._transport.finish(work, self._edge)
        return buffer

    def _check(self, header: wire.Header) -> None:
        if header.edge == tuple(self._edge) and header.epoch == self._epoch:
            return
        rank, peer = self._edge.target_rank, self._edge.source_rank
        raise PeerError(
            f"rank {rank} waited for edge {self._edge} of step {self._epoch}, but rank {peer} "
            f"sent {Edge(*header.edge)} of step {header.epoch}: every rank must run the same "
            "script with the same model, split, schedule and number of steps"
        )
