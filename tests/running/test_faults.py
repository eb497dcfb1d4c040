"""An exception anywhere, in real processes: every rank raises it, and the next step is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stageline as sl
from stageline.running.control import Member
from stageline.testing import RankPool
from tests.running.faults import (
    MICROBATCHES,
    Bench,
    Fault,
    Outcome,
    campaign,
    fail_again_and_again,
    note_delays,
)

pytestmark = pytest.mark.processes

TRANSPORTS = ("shared-memory", "process-group")
SCHEDULES = ("gpipe", "1f1b", "sequential")
BOUND = 10.0  # seconds from a fault to the last raise; 2 are promised, these cores are shared


def every_action(size: int) -> list[Fault]:
    """All forwards, backwards and losses of a step."""
    places = [(rank, microbatch) for rank in range(size) for microbatch in range(MICROBATCHES)]
    return [
        *(Fault("forward", rank, microbatch) for rank, microbatch in places),
        *(Fault("backward", rank, microbatch) for rank, microbatch in places),
        *(Fault("loss", size - 1, microbatch) for microbatch in range(MICROBATCHES)),
    ]


def other_ways(size: int) -> list[Fault]:
    """Everything but an exception in an action of a training step, on every rank."""
    last = size - 1
    faults = [Fault("look", rank) for rank in range(size)]
    faults += [Fault("send", rank, rank % MICROBATCHES) for rank in range(last)]
    for mode in ("evaluate", "infer"):
        faults += [Fault("forward", rank, (rank + 1) % 4, mode=mode) for rank in range(size)]
        faults += [Fault("look", last, mode=mode)]
    faults += [Fault("loss", last, 2, mode="evaluate")]
    whats = ("empty", "exit", "interrupt", "unprintable", "unpicklable", "long", "surrogate")
    for index, what in enumerate(whats):
        faults += [
            Fault("forward", index % size, index % 4, what),
            Fault("backward", (index + 1) % size, index % 3, what),
        ]
    faults += [Fault("forward", 0, 1, also=last), Fault("backward", last, 1, also=0)]
    return faults


def check(fault: Fault, outcomes: Sequence[Outcome]) -> list[str]:
    """Return what is wrong in what the ranks saw of a fault."""
    victims = {fault.rank, fault.also} - {None}
    times = [one.fault_time for one in outcomes if one.fault_time is not None]
    findings = []
    for rank, one in enumerate(outcomes):
        about = f"{fault}, rank {rank}"
        findings += [f"{about}: afterwards {wrong}" for wrong in one.wrong]
        if one.raise_time - min(times) > BOUND:
            findings.append(f"{about}: {one.raise_time - min(times):.1f} s late")
        findings += [f"{about}: {text}" for text in _check_error(fault, rank in victims, one)]
    return findings


def _check_error(fault: Fault, is_victim: bool, one: Outcome) -> list[str]:
    said = f"{one.kind}: {one.text}"
    if fault.where in ("look", "tied") or fault.what == "interrupt":
        raised = {"look": "BatchError", "tied": "Boom"}.get(fault.where, "KeyboardInterrupt")
        wanted = raised if is_victim else f"PeerError: rank {fault.rank} failed"
        return [] if said.startswith(wanted) else [said]
    if one.place is None:
        return [said]
    rank, stage, microbatch, action = one.place
    wrong = []
    if fault.also is None and one.place[:3] != (fault.rank, fault.rank, fault.microbatch):
        wrong.append(f"it names {one.place}")
    if fault.also is None and action != fault.action:
        wrong.append(f"it names {action} instead of {fault.action}")
    if f"rank {rank}, stage {stage}, microbatch {microbatch}: action {action}" not in one.text:
        wrong.append(said)
    return wrong if is_victim else [*wrong, *_check_cause(fault, one)]


def _check_cause(fault: Fault, one: Outcome) -> list[str]:
    kind, trace = one.cause or ("none", "")
    if not kind.startswith("remote "):
        return [f"its cause is {kind}"]
    frame = "in describe" if fault.where == "send" else "in pull"
    return [] if frame in trace else [f"its cause has no traceback: {trace}"]


def run(
    pool: RankPool, faults: Sequence[Fault], *, timeout: float = 120, **settings: Any
) -> list[list[Outcome]]:
    """Run a campaign; return what the ranks saw, fault by fault, after checking all of it."""
    seen = pool.run(campaign, pool.world_size, faults, settings, timeout=timeout)
    by_fault = list(map(list, zip(*seen, strict=True)))
    for fault, outcomes in zip(faults, by_fault, strict=True):
        times = [one.fault_time for one in outcomes if one.fault_time is not None]
        delays = [one.raise_time - min(times) for one in outcomes if one.fault_time is None]
        note_delays(settings["transport"], f"{fault.mode} {fault.where} {fault.what}", delays)
    found = [check(fault, outcomes) for fault, outcomes in zip(faults, by_fault, strict=True)]
    assert [finding for findings in found for finding in findings] == []
    return by_fault


# Every rank, microbatch, place, kind of error and call at least once over each transport.
FOR_TWO = [
    Fault("forward", 0, 0),
    Fault("forward", 1, 3, "unprintable"),
    Fault("backward", 1, 0, "exit"),
    Fault("backward", 0, 3),
    Fault("loss", 1, 2),
    Fault("loss", 1, 1, mode="evaluate"),
    Fault("send", 0, 1),
    Fault("look", 1),
    Fault("look", 0, mode="infer"),
    Fault("forward", 1, 2, "interrupt"),
    Fault("forward", 0, 2, "long", mode="evaluate"),
    Fault("forward", 1, 1, mode="infer"),
    Fault("forward", 0, 1, "unpicklable", also=1),
]
FOR_FOUR = [
    Fault("forward", 2, 1),
    Fault("backward", 1, 2, "surrogate"),
    Fault("backward", 3, 0),
    Fault("loss", 3, 3, "empty"),
    Fault("send", 2, 0),
    Fault("look", 2, mode="evaluate"),
    Fault("forward", 3, 0, mode="infer"),
    Fault("backward", 0, 1, "interrupt"),
    Fault("backward", 3, 2, also=1),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_faults_of_two_ranks(transport: str, two_ranks: RankPool) -> None:
    run(two_ranks, FOR_TWO[::2], transport=transport, schedule="1f1b")
    run(two_ranks, FOR_TWO[1::2], transport=transport, schedule="gpipe")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_faults_of_four_ranks(transport: str, four_ranks: RankPool) -> None:
    run(four_ranks, FOR_FOUR, transport=transport, schedule="1f1b")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_faults_where_tied_gradients_are_added(transport: str, four_ranks: RankPool) -> None:
    """Ranks 0 and 3 share a weight; the others have no part in the sum, and are told as well."""
    faults = [Fault("tied", 0), Fault("tied", 3), Fault("backward", 0, 3), Fault("forward", 2, 2)]
    run(four_ranks, faults, transport=transport, tied=True)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_action_of_two_ranks(transport: str, schedule: str, two_ranks: RankPool) -> None:
    run(two_ranks, every_action(2), transport=transport, schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_action_of_four_ranks(transport: str, schedule: str, four_ranks: RankPool) -> None:
    run(four_ranks, every_action(4), transport=transport, schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_other_way(transport: str, two_ranks: RankPool, four_ranks: RankPool) -> None:
    run(two_ranks, other_ways(2), transport=transport)
    run(four_ranks, other_ways(4), transport=transport)


@pytest.mark.parametrize("where", ["forward", "backward", "look"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_piles_up(transport: str, where: str, two_ranks: RankPool) -> None:
    """Threads and open files after 10 and after 50 failures, once gloo has let go."""
    faults = [Fault(where, rank, 1) for rank in range(2)]
    settings = {"transport": transport}
    for counts, wrong in two_ranks.run(fail_again_and_again, 2, faults, 25, settings):
        assert wrong == []
        for kind in (0, 1):  # of threads, of files
            early = max(count[kind] for count in counts[:5])
            late = min(count[kind] for count in counts[20:])
            assert late <= early + 2, counts


def _hook_on_one_rank(rank: int, transport: str) -> tuple[str, list[str]]:
    bench = Bench(rank, 2, tied=True, transport=transport)
    weight = bench.stages[0].linear.weight
    handle = weight.register_hook(lambda gradient: gradient) if rank == 1 else None
    with pytest.raises(sl.PipeError) as caught:
        bench.call()
    if handle is not None:
        handle.remove()
    wrong = bench.what_is_wrong()
    bench.pipe.close()
    return f"{type(caught.value).__name__}: {caught.value}", wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_refused_on_one_rank_fails_on_all(transport: str, two_ranks: RankPool) -> None:
    """It was refused before the step was counted: the other rank waited for ever."""
    first, second = two_ranks.run(_hook_on_one_rank, transport, timeout=30)
    assert first == (f"PeerError: rank 1 failed in a training step: {second[0][11:]}", [])
    assert second[0].startswith("PipeError: 0.linear.weight is used by stages of several ranks")
    assert second[1] == []


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "code": (
        {"width": 5},
        "the parameters: 1.weight is float32 (4, 4) on rank 0 and float32 (5, 4)",
    ),
    "split": ({"split": [2, 2]}, "the arguments: split is [1, 3] on rank 0 and [2, 2] on rank 1"),
    "schedule": ({"schedule": "gpipe"}, "differ in the schedule: the row of rank"),
    "microbatches": (
        {"num_microbatches": 3},
        "the number of microbatches: it is 4 on rank 0 and 3 on rank 1",
    ),
    "seed": ({"seed": 5}, "rank 1 has another seed than rank 0: torch.manual_seed was called with"),
    "batch": ({"batch_seed": 5}, "rank 1 was given another batch than rank 0: args[0] is [1.84"),
}


def _differs(rank: int, transport: str, said: dict[str, Any]) -> str:
    """Build and run a pipeline; return what was raised."""
    given: dict[str, Any] = {"width": 4, "seed": 0, "batch_seed": 1, "split": [1, 3]}
    given |= {"schedule": "1f1b", "num_microbatches": 4, **(said if rank == 1 else {})}
    width, seed, batch_seed = given.pop("width"), given.pop("seed"), given.pop("batch_seed")
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 4), nn.Linear(4, width), nn.Linear(width, 4), nn.Dropout()]
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(batch_seed))
    try:
        pipe = sl.Pipeline(
            nn.Sequential(*layers), loss_fn=F.mse_loss, transport=transport, timeout=20, **given
        )
        pipe.step(x, target=x)
    except sl.PeerError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_are_told_in_what(what: str, transport: str, two_ranks: RankPool) -> None:
    said, wanted = DIFFERENCES[what]
    first, second = two_ranks.run(_differs, transport, said, timeout=30)
    assert first == second
    assert wanted in first


def _interrupted_after_the_end(rank: int, transport: str) -> tuple[str, list[str]]:
    bench = Bench(rank, 2, transport=transport)

    finish = Member.finish_with

    def interrupted(member: Member, text: str | None) -> Any:
        finish(member, text)
        raise KeyboardInterrupt

    raised = ""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(Member, "finish_with", interrupted)
        try:
            bench.call()
        except KeyboardInterrupt:
            raised = "interrupt"
    bench.pipe.zero_grad()
    wrong = bench.what_is_wrong()
    bench.pipe.close()
    return raised, wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_interrupt_when_a_call_is_over_for_all(transport: str, two_ranks: RankPool) -> None:
    """Channels were made anew on the rank that was interrupted, and by nobody else."""
    answers = two_ranks.run(_interrupted_after_the_end, transport, timeout=20)
    assert answers == [("interrupt", []), ("", [])]
