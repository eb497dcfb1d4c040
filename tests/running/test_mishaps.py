"""Failures at awkward moments: ranks that come late, close early, run out of room, or are slow."""

from __future__ import annotations

import gc
import logging
import re
import resource
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stageline as sl
from stageline.running.control import member as members
from stageline.running.transports import outgoing
from stageline.testing import RankPool
from tests.running.faults import Bench, Fault, Outcome

pytestmark = pytest.mark.processes

TRANSPORTS = ("shared-memory", "process-group")


def _comes_late(rank: int, transport: str) -> tuple[Outcome, list[str]]:
    bench = Bench(rank, 2, transport=transport)
    bench.what_is_wrong()
    time.sleep(0.5 * rank)
    outcome = bench.suffer(Fault("forward", 0, 0))
    return outcome, bench.what_is_wrong()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_step_fails_before_another_rank_has_begun_it(transport: str, two_ranks: RankPool) -> None:
    (first, wrong), (second, also_wrong) = two_ranks.run(_comes_late, transport, timeout=30)
    assert first.place == second.place == (0, 0, 0, "0F0")
    assert first.raise_time < second.raise_time - 0.3  # it did not wait for the late one
    assert wrong == also_wrong == []


def _leaves_early(rank: int, transport: str, way: str) -> str:
    bench = Bench(rank, 2, transport=transport)
    bench.what_is_wrong()
    if rank == 1:
        if way == "close":
            bench.pipe.close()
        else:
            del bench
            gc.collect()
            return ""
    with pytest.raises(sl.PipeError) as caught:
        bench.call()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("way", ["close", "drop"])
def test_a_rank_leaves_early(way: str, transport: str, two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_leaves_early, transport, way, timeout=30)
    assert first.startswith("PeerError: rank 1 has left: its script has ended, or has closed or")
    if way == "close":
        assert second.startswith("PipeError: this pipeline was closed on this rank")


def _two_pipelines(rank: int, transport: str) -> list[list[str]]:
    one, other = Bench(rank, 2, transport=transport), Bench(rank, 2, transport=transport)
    wrong = []
    for fault in (Fault("forward", 1, 2), Fault("backward", 0, 1), Fault("look", 1)):
        one.suffer(fault)
        wrong += [other.what_is_wrong(), one.what_is_wrong()]
    other.pipe.close()
    wrong.append(one.what_is_wrong())
    one.pipe.close()
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failure_stays_in_its_pipeline(transport: str, two_ranks: RankPool) -> None:
    assert two_ranks.run(_two_pipelines, transport, timeout=30) == [[[]] * 7] * 2


def _full_windows_and_pieces(rank: int, transport: str) -> list[Any]:
    """Packets of 128 KiB; no more shared memory than one slab for each channel."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outgoing, "whole_size", lambda size: 1 << 60)
        bench = Bench(rank, 2, transport=transport, rows=1 << 15)
        found += bench.what_is_wrong()
        for mode in ("step", "evaluate", "infer"):
            for microbatch in range(4):
                outcome = bench.suffer(Fault("forward", 1, microbatch, mode=mode))
                if outcome.place != (1, 1, microbatch, f"1F{microbatch}"):
                    found.append(outcome)
                found += bench.what_is_wrong()
        bench.pipe.close()
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receiver_fails_while_its_sender_waits_for_room(
    transport: str, two_ranks: RankPool
) -> None:
    assert two_ranks.run(_full_windows_and_pieces, transport, timeout=50) == [[], []]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class _Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.8)
        return x * 1


def _slow(rank: int, transport: str) -> list[str]:
    handler = _Lines()
    logging.getLogger("stageline").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members, "_FIRST_NOTE", 0.5)
        torch.manual_seed(0)
        pipe = sl.Pipeline(
            nn.Sequential(nn.Linear(4, 4), nn.Sequential(_Slow(), nn.Linear(4, 4))),
            split=2,
            num_microbatches=2,
            loss_fn=F.mse_loss,
            transport=transport,
            heartbeat_timeout=0.6,
        )
        x = torch.zeros(4, 4)
        pipe.step(x, target=x)
        pipe.close()
    logging.getLogger("stageline").removeHandler(handler)
    return handler.lines


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slow_rank_is_named_in_the_log(transport: str, two_ranks: RankPool) -> None:
    first, _ = two_ranks.run(_slow, transport, timeout=30)
    assert first
    # On a busy machine rank 0 may come late for the first packet, and wait for the next one only.
    told = re.fullmatch(
        r"rank 0: waits for edge 1->0 B(\d) from rank 1, 1 s so far; rank 1 is at 1F(\d)", first[0]
    )
    assert told
    assert told[1] == told[2]


def _too_many_files(rank: int, transport: str, victim: int) -> str:
    """No rank may open another file from the first step on."""
    bench = Bench(rank, 2, transport=transport)
    bench.what_is_wrong()
    bench.suffer(Fault("forward", 0, 0))  # channels are made anew in the next step
    gc.collect()  # gloo ends the process where what is left of an earlier group finds no file
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == victim:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        bench.call()
    except sl.StagelineError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        bench.pipe.close()
    return ""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_has_too_many_open_files(victim: int, transport: str, two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_too_many_files, transport, victim, timeout=30)
    # gloo does not say why it cannot connect.
    reason = "oo many open files" if transport == "shared-memory" else "cannot connect to the other"
    assert reason in first
    assert reason in second
