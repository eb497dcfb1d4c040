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
from stageline.running.transports import process_group
from tests.running.faults import note_delays
from tests.running.mortals import Life, Mortals, Teller, free_port, join_world, shared_files

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
    settings = dict(settings)
    port = settings.pop("port", None)
    if port is None:
        join_world(rank, size, store)
    else:  # as torchrun does it
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
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
            **{"timeout": 20, **settings},
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


MOMENTS = ("step", "between", "construction")
DEATHS = [
    (end, victim, when, transport)
    for end in ("kill", "terminate", "os._exit", "abort")
    for victim in range(3)
    for when in MOMENTS
    for transport in TRANSPORTS
]


def is_in_the_sample(number: int) -> bool:
    """One in six: every way with every victim, and all moments and transports among them."""
    block, place = divmod(number, 6)
    return place == block * 5 % 6


@pytest.mark.parametrize(
    ("end", "victim", "when", "transport"),
    [
        pytest.param(*death, marks=() if is_in_the_sample(number) else pytest.mark.slow)
        for number, death in enumerate(DEATHS)
    ],
)
def test_a_process_ends(end: str, victim: int, when: str, transport: str) -> None:
    job = Mortals(train, 3, end, when, {"victim": victim, "transport": transport})
    lives = job.bury()
    delays = survivors_raised(lives, victim, f"rank {victim} ")
    note_delays(transport, f"{end} {when}", delays)


def test_the_sample_of_deaths_covers_them() -> None:
    sample = [death for number, death in enumerate(DEATHS) if is_in_the_sample(number)]
    for one, other in ((0, 1), (2, 3)):
        wanted = {(death[one], death[other]) for death in DEATHS}
        assert {(death[one], death[other]) for death in sample} == wanted


def train_behind_a_door(rank: int, size: int, store: str, tell: Teller) -> None:
    """Rank 0 is killed while it waits for the others to come in."""
    if rank == 0:
        from stageline.running.control.joining import Door

        def admit(door: Door) -> None:
            tell("fault", time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

        Door.admit = admit  # type: ignore[assignment,method-assign]  # in this process alone
    train(rank, size, store, tell, "kill", "elsewhere", {"victim": 0})


def test_rank_0_dies_while_others_are_joining() -> None:
    """Its socket had a name in the temporary folder, and nobody was left to remove it."""
    job = Mortals(train_behind_a_door, 2)
    lives = job.bury()
    survivors_raised(lives, 0, "rank 0 ")


def wait_in_a_step(
    rank: int, size: int, store: str, tell: Teller, sleeper: int, settings: dict[str, Any]
) -> None:
    """Take a step in which one rank sleeps, so that all others wait for it."""
    join_world(rank, size, store)

    def sleep() -> None:
        tell("sleeps", time.monotonic())
        time.sleep(settings["seconds"])

    torch.manual_seed(0)
    model = nn.Sequential(*(Mortal(sleep, 6 if rank == sleeper else None) for _ in range(size)))
    x = torch.randn(8, 4)
    given = {name: value for name, value in settings.items() if name != "seconds"}
    try:
        pipe = sl.Pipeline(
            model, split=size, num_microbatches=4, loss_fn=F.mse_loss, timeout=20, **given
        )
        losses = [pipe.step(x, target=x).loss.item() for _ in range(3)]
        tell("done", losses, time.monotonic())
    except BaseException as error:
        tell("raised", type(error).__name__, str(error), time.monotonic())


@pytest.mark.parametrize(
    ("victim", "transport"),
    [(0, "process-group"), (2, "process-group"), (0, "shared-memory"), (2, "shared-memory")],
)
def test_a_process_that_waits_is_terminated(victim: int, transport: str) -> None:
    """While a thread waits in gloo, Python calls no handler of a signal."""
    settings = {"seconds": 4.0, "transport": transport}
    job = Mortals(wait_in_a_step, 3, 1, settings)
    job.hear(1, "sleeps")
    time.sleep(0.3)  # so that the others wait
    start = time.monotonic()
    job.send_signal(victim, signal.SIGTERM)
    kind, text, when = job.hear(2 - victim, "raised")
    job.send_signal(1, signal.SIGKILL)
    lives = job.bury()
    assert kind == "PeerError"
    assert text == f"rank {victim} was ended by SIGTERM"
    note_delays(transport, "terminate while it waits", [when - start])
    assert when - start < 2.5, "it was told when the sleeping rank woke up"
    assert lives[victim].exit_code == -signal.SIGTERM


@pytest.mark.parametrize(
    ("victim", "transport"),
    [
        (0, "shared-memory"),
        (1, "process-group"),
        pytest.param(0, "process-group", marks=pytest.mark.slow),
        pytest.param(1, "shared-memory", marks=pytest.mark.slow),
        pytest.param(2, "process-group", marks=pytest.mark.slow),
        pytest.param(2, "shared-memory", marks=pytest.mark.slow),
    ],
)
def test_a_process_is_stopped_and_goes_on_after_it_was_given_up(
    victim: int, transport: str
) -> None:
    settings = {"victim": victim, "transport": transport, "heartbeat_timeout": SILENCE}
    job = Mortals(train, 3, "stop", "step", settings)
    for rank in {0, 1, 2} - {victim}:
        kind, text, when = job.hear(rank, "raised")
        assert (kind, text[:17]) == ("PeerError", f"rank {victim} is silent:"[:17])
        delay = when - job.hear(victim, "fault")[0]
        note_delays(transport, f"stop (heartbeat_timeout {SILENCE})", [delay])
        assert delay < SILENCE + BOUND
    job.send_signal(victim, signal.SIGCONT)
    kind, text, _ = job.hear(victim, "raised")
    job.bury()
    assert kind == "PeerError"
    assert "silent" in text
    assert f"rank {victim}" in text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slow_process_is_waited_for(transport: str) -> None:
    settings = {"seconds": 1.5, "transport": transport, "heartbeat_timeout": 0.6}
    lives = Mortals(wait_in_a_step, 3, 1, settings).bury()
    assert [life.first("raised") for life in lives.values()] == [None] * 3
    assert len({str(life.first("done")[0]) for life in lives.values()}) == 1  # type: ignore[index]


@pytest.mark.parametrize("absent", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_process_never_starts(absent: int) -> None:
    settings = {"victim": -1, "timeout": 2.0, "port": free_port()}
    lives = Mortals(train, 3, "kill", "elsewhere", settings, absent=[absent]).bury()
    for life in lives.values():
        kind, text, _ = life.first("raised")  # type: ignore[misc]
        assert kind == "PeerError"
        assert "a process has not started" in text


def train_with_a_child(rank: int, size: int, store: str, tell: Teller, transport: str) -> None:
    """Fork a process that outlives the rank, as the workers of a DataLoader do."""

    def fork_and_die() -> None:
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        tell("child", child)
        tell("fault", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)

    ENDS["fork"] = fork_and_die
    train(rank, size, store, tell, "fork", "step", {"victim": size - 1, "transport": transport})


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_process_dies_before_its_children(transport: str) -> None:
    """They hold copies of its open files, so that its connections did not end with it."""
    job = Mortals(train_with_a_child, 2, transport)
    try:
        job.hear(0, "raised")
    finally:
        os.kill(job.hear(1, "child")[0], signal.SIGKILL)
    survivors_raised(job.bury(), 1, "rank 1 is gone")


def terminate_a_child(rank: int, size: int, store: str, tell: Teller) -> None:
    """End a forked child by SIGTERM; it is not the rank."""
    join_world(rank, size, store)
    pipe = sl.Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), loss_fn=F.mse_loss)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    tell("child", os.WTERMSIG(status))
    x = torch.zeros(8, 4)
    tell("loss", pipe.step(x, target=x).loss.item())


def test_a_child_that_is_terminated_takes_nobody_along() -> None:
    lives = Mortals(terminate_a_child, 2).bury()
    for life in lives.values():
        assert life.first("child") == (signal.SIGTERM,)
        assert life.first("loss") is not None
        assert life.exit_code == 0


def connect_in_vain(rank: int, size: int, store: str, tell: Teller, port: int) -> None:
    """Rank 1 cannot connect over gloo in the first step, and can in the second."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    def refuse(*args: Any) -> Any:
        raise RuntimeError("no network today")

    patch = pytest.MonkeyPatch()
    if rank == 1:
        patch.setattr(process_group, "connect_gloo", refuse)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = sl.Pipeline(model, loss_fn=F.mse_loss, transport="process-group", timeout=40)
    x = torch.zeros(8, 4)
    try:
        pipe.step(x, target=x)
    except sl.PeerError as error:
        tell("raised", str(error))
    patch.undo()
    start = time.monotonic()
    tell("loss", pipe.step(x, target=x).loss.item())
    tell("seconds", time.monotonic() - start)


def test_a_connection_fails_and_the_next_one_works() -> None:
    """The first try of rank 0 went on in a thread, and kept the store for itself until its end."""
    lives = Mortals(connect_in_vain, 2, free_port()).bury()
    for life in lives.values():
        (text,) = life.first("raised") or ("",)
        assert text.startswith("rank 1 cannot connect to the other ranks over gloo (no network")
        (seconds,) = life.first("seconds") or (99.0,)
        assert seconds < 20
