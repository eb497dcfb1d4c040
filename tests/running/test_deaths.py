"""Processes that die, stop, leave or never come: every other rank is told which and why."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from tests.running.mortals import Life, Mortals, Teller, join_world, shared_files

pytestmark = pytest.mark.processes

TRANSPORTS = ("shared-memory", "process-group")
BOUND = 10.0  # seconds from a death to the last raise; 2 are promised, these cores are shared
SILENCE = 1.5  # seconds: heartbeat_timeout where a process is stopped


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.05)  # it takes a moment to stop


ENDS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "os._exit": lambda: os._exit(7),
    "abort": os.abort,
    "stop": _stop,
}


class Mortal(nn.Module):
    """A layer that ends its process in a certain call."""

    def __init__(self, end: Callable[[], None], at_call: int | None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._end = end
        self._left = at_call

    def forward(self, x: Tensor) -> Tensor:
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self._end()
        y: Tensor = self.linear(x)
        return y


def train(
    rank: int, size: int, store: str, tell: Teller, end: str, when: str, settings: dict[str, Any]
) -> None:
    """Take three steps; rank ``settings["victim"]`` ends during the second, or elsewhere."""
    join_world(rank, size, store)
    settings = dict(settings)
    is_victim = rank == settings.pop("victim")

    def die() -> None:
        tell("fault", time.monotonic())
        ENDS[end]()

    def wrap(module: nn.Module, index: int) -> nn.Module:
        if is_victim and when == "construction":
            die()
        return module

    torch.manual_seed(0)
    at_call = 6 if is_victim and when == "step" else None
    model = nn.Sequential(*(Mortal(die, at_call) for _ in range(size)))
    x = torch.randn(8, 4)
    try:
        pipe = sl.Pipeline(
            model,
            split=size,
            num_microbatches=4,
            loss_fn=F.mse_loss,
            wrap_stage=wrap,
            timeout=20,
            **settings,
        )
        for step in range(3):
            pipe.step(x, target=x)
            if is_victim and when == "between" and step == 0:
                die()
    except BaseException as error:
        tell("raised", type(error).__name__, str(error), time.monotonic())


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = shared_files()
    yield
    assert shared_files() - before == set()


def survivors_raised(lives: dict[int, Life], victim: int, *words: str) -> list[float]:
    """Check what the other ranks raised; return the seconds after which they did."""
    fault = lives[victim].first("fault")
    assert fault is not None
    delays = []
    for rank, life in lives.items():
        if rank == victim:
            continue
        raised = life.first("raised")
        assert raised is not None, (rank, life)
        kind, text, when = raised
        assert kind == "PeerError", raised
        assert all(word in text for word in words), raised
        assert life.exit_code == 0
        delays.append(when - fault[0])
    assert max(delays) < BOUND
    return delays


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("when", ["step", "between", "construction"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("end", ["kill", "terminate", "os._exit"])
def test_a_process_ends(end: str, victim: int, when: str, transport: str) -> None:
    job = Mortals(train, 3, end, when, {"victim": victim, "transport": transport})
    lives = job.bury()
    survivors_raised(lives, victim, f"rank {victim} ")


def train_behind_a_door(rank: int, size: int, store: str, tell: Teller) -> None:
    """Rank 0 is killed while it waits for the others to come in."""
    if rank == 0:
        from stageline.running.control.joining import Door

        def admit(door: Door) -> None:
            tell("fault", time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

        Door.admit = admit  # type: ignore[assignment,method-assign]  # in this process alone
    train(rank, size, store, tell, "kill", "never", {"victim": 0})


def test_rank_0_dies_while_others_are_joining() -> None:
    """Its socket had a name in the temporary folder, and nobody was left to remove it."""
    job = Mortals(train_behind_a_door, 2)
    lives = job.bury()
    survivors_raised(lives, 0, "rank 0 ")
