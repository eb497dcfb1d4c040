"""Ranks share out the intra-op threads, and leave the process's setting as they found it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from stageline.running import cores


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Asks(nn.Module):
    """A stage that notes how many threads torch would use in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(torch.get_num_threads())
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("available", "ranks", "each"), [(2, 2, 1), (4, 2, 2), (1, 3, 1), (8, 3, 2)]
)
def test_ranks_divide_what_the_process_has(available: int, ranks: int, each: int) -> None:
    torch.set_num_threads(available)
    stages = [Asks() for _ in range(ranks)]
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=2, loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        pipe.step(torch.randn(4, 2), target=torch.randn(4, 2))
        assert [stage.seen for stage in stages] == [{each}] * ranks
        assert torch.get_num_threads() == available


def test_a_thread_that_comes_later_finds_what_the_user_had_chosen() -> None:
    """torch hands a process-wide value to each new thread; a step must not leave its own there."""
    torch.set_num_threads(4)
    pipe = sl.Pipeline.from_stages([Asks(), Asks()], num_microbatches=2)
    pipe.eval()(torch.randn(4, 2))
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [4]


def test_a_change_of_mind_between_steps_is_followed() -> None:
    torch.set_num_threads(4)
    stages = [Asks(), Asks()]
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=2)
    pipe.eval()(torch.randn(4, 2))
    torch.set_num_threads(2)
    stages[0].seen.clear()
    pipe(torch.randn(4, 2))
    assert stages[0].seen == {1}
    assert torch.get_num_threads() == 2


def test_a_failed_step_restores_them_too() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    torch.set_num_threads(4)
    pipe = sl.Pipeline.from_stages([nn.Identity(), fail], num_microbatches=2)
    with pytest.raises(sl.StepError):
        pipe(torch.randn(2, 2))
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(
    ("cpus", "neighbours", "allowed", "each"),
    [(2, "2", 2, 1), (8, "2", 8, 4), (8, "2", 1, 1), (2, "4", 2, 1), (8, None, 6, 6)],
)
def test_processes_of_one_host_divide_its_cores(
    cpus: int, neighbours: str | None, allowed: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    if neighbours is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", neighbours)
    torch.set_num_threads(allowed)
    assert cores.share_of_cores() == each


@pytest.mark.parametrize(("ranks", "looks_long"), [(1, True), (2, True), (3, False), (8, False)])
def test_only_who_has_a_core_to_himself_looks_for_long(
    monkeypatch: pytest.MonkeyPatch, ranks: int, looks_long: bool
) -> None:
    monkeypatch.setattr(cores, "_num_cores", lambda: 2)
    assert (cores.looks_before_sleep(ranks) > 100) is looks_long
    assert cores.looks_before_sleep(ranks) > 0


@pytest.mark.parametrize(("others", "looks"), [(0.0, 1000), (3e-3, 3)])
def test_who_looks_stops_when_others_want_the_core(
    monkeypatch: pytest.MonkeyPatch, others: float, looks: int
) -> None:
    """A host is shared: with loaders of data, with other jobs, with all the ranks of a test run."""
    clock, yields = [0.0], [0]

    def give_away() -> None:
        yields[0] += 1
        clock[0] += 5e-7 + (others if yields[0] == 3 else 0.0)

    monkeypatch.setattr(os, "sched_yield", give_away)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert len(list(cores.looking(1000))) == looks
