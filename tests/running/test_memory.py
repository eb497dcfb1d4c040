"""What is alive, and when: the activations that the schedule says, and nothing afterwards."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from stageline.running.events import ActionDone
from stageline.running.transports.base import (
    Edge,
    Endpoint,
    Exchange,
    Receipt,
    ThreadTransport,
)
from stageline.running.transports.memory import MemoryTransport
from stageline.scheduling import Action, Kind
from stageline.testing import OrderedTransport, RankPool

STAGES, MICROBATCHES, WIDTH = 4, 7, 6


class Ledger:
    """Counts the activations that are alive, stage by stage."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.saved: dict[int, int] = defaultdict(int)

    def add(self, stage: int, change: int) -> None:
        with self._lock:
            self.saved[stage] += change


class _Saved:
    """Lives as long as the graph of one call."""

    def __init__(self, ledger: Ledger, stage: int) -> None:
        ledger.add(stage, +1)
        weakref.finalize(self, ledger.add, stage, -1)


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: _Saved) -> Tensor:
        ctx.saved = saved
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.saved = None
        return gradients[0], None


class Counted(nn.Module):
    """A stage whose graph is counted."""

    def __init__(self, ledger: Ledger, index: int) -> None:
        super().__init__()
        self.ledger = ledger
        self.index = index
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = _Keep.apply  # untyped in torch
        return apply(self.linear(x), _Saved(self.ledger, self.index))  # type: ignore[no-any-return]


def held_after(row: tuple[Action, ...]) -> list[int]:
    """Return how many activations a rank holds after each action, as its row says."""
    held, after = 0, []
    for action in row:
        held += action.kind is Kind.FORWARD
        held -= action.kind is Kind.BACKWARD
        after.append(held)
    return after


def greedy(ranks: int) -> str:
    """Two microbatches at a time, all the way there and back."""
    per_rank = STAGES // ranks
    lines = []
    for rank in range(ranks):
        mine = range(rank * per_rank, (rank + 1) * per_rank)
        row: list[str] = []
        for first in range(0, MICROBATCHES, 2):
            both = [m for m in (first, first + 1) if m < MICROBATCHES]
            row += [f"{stage}F{m}" for m in both for stage in mine]
            row += [f"{stage}B{m}" for m in both for stage in reversed(mine)]
        lines.append(" ".join(row))
    return "\n".join(lines)


@pytest.mark.parametrize("transport", ["memory", "ordered"])
@pytest.mark.parametrize("ranks", [STAGES, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "sequential", "greedy"])
def test_live_activations_at_every_moment_are_what_the_schedule_says(
    schedule: str, ranks: int, transport: str
) -> None:
    """The count follows the rows: ``greedy`` is the text of a schedule nobody has built in."""
    ledger = Ledger()
    counted: dict[int, list[int]] = defaultdict(list)
    placement: tuple[int, ...] = ()

    def observe(event: ActionDone) -> None:
        action = Action.parse(event.action)
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            mine = [stage for stage, rank in enumerate(placement) if rank == event.rank]
            counted[event.rank].append(sum(ledger.saved[stage] for stage in mine))

    pipe = sl.Pipeline(
        nn.Sequential(*(Counted(ledger, index) for index in range(STAGES))),
        split=STAGES,
        num_microbatches=MICROBATCHES,
        schedule=greedy(ranks) if schedule == "greedy" else schedule,
        ranks=ranks,
        loss_fn=nn.functional.mse_loss,
        observer=observe,
        transport=OrderedTransport() if transport == "ordered" else transport,
    )
    placement = pipe.schedule.placement
    pipe.step(torch.randn(14, WIDTH), target=torch.randn(14, WIDTH))
    for rank in range(ranks):
        assert counted[rank] == held_after(pipe.schedule.row(rank)), f"rank {rank}"
    assert max(counted[0]) == sl.simulate(pipe.schedule).peak[0]


def _tensors_alive() -> list[Tensor]:
    gc.collect()
    # type(), not isinstance(): some objects of torch warn when asked for their class.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


@pytest.mark.parametrize("keep_outputs", [False, True])
@pytest.mark.parametrize("purpose", ["train", "evaluate", "infer", "differentiate"])
def test_nothing_outlives_a_step_but_parameters_and_gradients(
    purpose: str, keep_outputs: bool
) -> None:
    torch.manual_seed(0)
    pipe = sl.Pipeline(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES))),
        split=STAGES,
        num_microbatches=MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
        keep_outputs=keep_outputs,
    )
    x, y = torch.randn(14, WIDTH), torch.randn(14, WIDTH)

    def call() -> None:
        pipe.train(purpose in ("train", "differentiate"))
        if purpose in ("train", "evaluate"):
            pipe.step(x, target=y)
        elif purpose == "infer":
            pipe(x)
        else:
            pipe(x).sum().backward()

    call()
    before = _tensors_alive()  # held, so that no new tensor can take an old one's id
    known = {id(tensor) for tensor in before}
    for _ in range(3):
        call()
    allowed = {id(parameter) for parameter in pipe.parameters()}
    allowed |= {id(parameter.grad) for parameter in pipe.parameters()}
    left = [tensor.shape for tensor in _tensors_alive() if id(tensor) not in known | allowed]
    assert left == []


class _Packets(ThreadTransport):
    """Watches how many packets are alive between send and use, over another transport."""

    def __init__(self, inner: ThreadTransport) -> None:
        self.inner = inner
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def open(self, num_ranks: int, *, window: int | None) -> Any:
        outer, exchange = self, self.inner.open(num_ranks, window=window)

        class _Endpoint(Endpoint):
            def __init__(self, endpoint: Endpoint) -> None:
                self.endpoint = endpoint

            def send(self, edge: Edge, packet: Any) -> None:
                for leaf in packet.leaves:
                    outer.alive.add(leaf)
                self.endpoint.send(edge, packet)

            def receive(self, edge: Edge) -> Receipt:
                return self.endpoint.receive(edge)

        class _Exchange(Exchange):
            def endpoint(self, rank: int) -> Endpoint:
                return _Endpoint(exchange.endpoint(rank))

            def abort(self) -> None:
                exchange.abort()

        return _Exchange()


def test_boundary_tensors_are_dropped_as_soon_as_nobody_needs_them() -> None:
    """Linear keeps its input, so a boundary tensor lives from F to B on the receiving stage.

    The sender keeps none: its roots are edges of the graph, not tensors. Gradients are gone once
    used.
    """
    transport = _Packets(MemoryTransport())
    most = 0

    def observe(event: ActionDone) -> None:
        nonlocal most
        if event.rank == 1:
            most = max(most, len(transport.alive))

    pipe = sl.Pipeline(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
        split=2,
        num_microbatches=32,
        schedule="1f1b",
        loss_fn=nn.functional.mse_loss,
        observer=observe,
        transport=transport,
    )
    pipe.step(torch.randn(32, WIDTH), target=torch.randn(32, WIDTH))
    # Rank 0 is at most two forwards ahead, and one gradient may be on its way.
    assert most <= 3
    assert len(transport.alive) == 0


def test_a_forward_only_run_holds_a_constant_number_of_packets() -> None:
    transport = _Packets(MemoryTransport())
    most = 0

    def slow_last(x: Tensor) -> Tensor:
        nonlocal most
        most = max(most, len(transport.alive))
        return x.sum(1, keepdim=True)

    pipe = sl.Pipeline.from_stages(
        [lambda x: x * 2, lambda x: x + 1, slow_last], num_microbatches=500, transport=transport
    )
    pipe.eval()(torch.randn(500, 3))
    # Two channels with a window of two each, and what each receiver works on.
    assert most <= 2 * (2 + 1)


def _boundary_tensors(rank: int, transport: str) -> list[int]:
    """Count tensors of a size that only boundary values have, in a process, after each action."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, width, count = 3, 1009, 8
    seen: list[int] = []

    def observe(event: ActionDone) -> None:
        if "F" in event.action or "B" in event.action:
            storages = {
                thing.untyped_storage().data_ptr()
                for thing in gc.get_objects()
                if issubclass(type(thing), Tensor) and thing.numel() == rows * width
            }
            seen.append(len(storages))

    pipe = sl.Pipeline(
        nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)),
        split=2,
        num_microbatches=count,
        schedule="1f1b",
        loss_fn=nn.functional.mse_loss,
        observer=observe,
        transport=transport,
        timeout=30,
    )
    pipe.step(torch.randn(rows * count, 4), target=torch.randn(rows * count, 4))
    pipe.close()
    return seen


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
def test_boundary_buffers_between_processes_follow_the_schedule(
    transport: str, two_ranks: RankPool
) -> None:
    """A naive runtime keeps a receive buffer and a sent activation per microbatch: 8 and 8.

    Here rank 0 has what it has sent and not yet been told is taken, rank 1 what it works on.
    """
    first, second = two_ranks.run(_boundary_tensors, transport)
    assert max(first) <= 4
    assert max(second) <= 4
