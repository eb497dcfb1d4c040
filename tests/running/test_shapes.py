"""Batch size, length and type may change from step to step; buffers are bounded all the while."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from stageline.running.slabs import Slab
from stageline.testing import OrderedTransport, RankPool
from tests.running.shapes import KINDS, Found, differences, piped, plain

THREADED = {"memory": lambda: "memory", "ordered": OrderedTransport}
PROCESSES = ("shared-memory", "process-group")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", THREADED)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_every_step_equals_the_plain_model_on_threads(
    schedule: str, transport: str, kind: str
) -> None:
    found = piped(kind, THREADED[transport](), schedule=schedule)
    assert differences(plain(kind), [found], KINDS[kind][2]) == []


def _piped(rank: int, kind: str, transport: str, schedule: str) -> Found:
    return piped(kind, transport, schedule=schedule, ranks=2)


@pytest.mark.processes
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("transport", "schedule"), [("shared-memory", "1f1b"), ("process-group", "gpipe")]
)
def test_every_step_equals_the_plain_model_between_processes(
    transport: str, schedule: str, kind: str, two_ranks: RankPool
) -> None:
    parts = two_ranks.run(_piped, kind, transport, schedule)
    assert differences(plain(kind), parts, KINDS[kind][2]) == []


# ---- a long forward-only run ---------------------------------------------------------------------

COUNT, LOOKS = 10_000, 4
WIDTH = 1009  # a size that nothing else has


def _alive() -> int:
    """Return how many boundary tensors live in this process."""
    return len(
        {
            thing.untyped_storage().data_ptr()
            for thing in gc.get_objects()
            if issubclass(type(thing), Tensor) and thing.numel() == WIDTH
        }
    )


class Watched(nn.Module):
    """The last stage: looks around now and then, and returns one number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % (COUNT // LOOKS) == 0:
            self.seen.append(_alive())
        return x[:, :1] + x[:, -1:]


def _long_run(num_ranks: int, transport: Any) -> tuple[list[int], bool, int]:
    """Run 10,000 rows through three stages.

    Return the tensors seen alive, whether the sums are right, and how many slabs were made.
    """
    torch.set_num_threads(1)
    watched, slabs, real = Watched(), [0], Slab.create

    def create(size: int) -> Any:
        slabs[0] += 1
        return real(size)

    stages: list[Any] = [lambda x: x.expand(-1, WIDTH) * 1, lambda x: x + 1, watched]
    Slab.create = create  # type: ignore[method-assign]  # in a process of a pool
    try:
        pipe = sl.Pipeline.from_stages(
            stages, num_microbatches=COUNT, transport=transport, ranks=num_ranks, timeout=60
        )
        x = torch.arange(float(COUNT)).view(COUNT, 1)
        result = pipe.eval()(x)
        pipe.close()
    finally:
        Slab.create = real  # type: ignore[method-assign]
    return watched.seen, torch.equal(result, 2 * (x + 1)), slabs[0]


@pytest.mark.parametrize("transport", ["memory", pytest.param("ordered", marks=pytest.mark.slow)])
def test_10000_microbatches_hold_a_constant_number_of_packets_on_threads(transport: str) -> None:
    seen, right, _ = _long_run(3, THREADED[transport]())
    assert right
    assert len(seen) == LOOKS
    # Two channels with a window of two each, and what each of three stages has in its hands.
    assert max(seen) <= 2 * 2 + 3 * 2


def _long_run_on(rank: int, transport: str) -> tuple[list[int], bool, int]:
    return _long_run(2, transport)


@pytest.mark.processes
@pytest.mark.parametrize(
    "transport", ["shared-memory", pytest.param("process-group", marks=pytest.mark.slow)]
)
def test_10000_microbatches_hold_a_constant_number_of_packets_between_processes(
    transport: str, two_ranks: RankPool
) -> None:
    (_, first_right, first_slabs), (seen, right, _) = two_ranks.run(_long_run_on, transport)
    assert first_right
    assert right
    assert len(seen) == LOOKS
    assert max(seen) <= 6
    if transport == "shared-memory":
        assert first_slabs <= 3
