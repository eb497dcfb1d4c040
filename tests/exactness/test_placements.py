"""Schedules with I, W and R, and stages anywhere on the ranks: equal to the plain model too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from allpairspy import AllPairs
from torch import nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import OrderedTransport, RankPool, plain_step
from tests.exactness.cases import (
    BATCHES,
    MODELS,
    Case,
    differences,
    differences_in_process,
    thread_transport,
)
from tests.exactness.recorded_cases import CASES as RECORDED
from tests.exactness.replicas import replica_faults
from tests.exactness.test_recorded import differences as recorded_differences
from tests.exactness.test_recorded import gradients, pipeline, plain
from tests.running.placements import SMALL, build, looped, loops, recomputed, snake, zb_h1
from tests.running.tied import CASES as TIED
from tests.running.tied import batch as tied_batch
from tests.running.tied import made as tied_model

pytestmark = pytest.mark.usefixtures("one_thread")

STAGES = 4
TOLERANCE = 1e-6


def _case(model: str, schedule: str, batch: str, precision: str) -> Case:
    _, microbatches = BATCHES[batch]
    return Case(model, STAGES, SMALL[schedule](microbatches), batch, precision)


def _name(values: object) -> str:
    return "-".join(map(str, values)) if isinstance(values, (list, tuple)) else str(values)


TWO_RANKS = [name for name in SMALL if build(name, 4).num_ranks == 2]
FOUR_RANKS = [name for name in SMALL if build(name, 4).num_ranks == 4]
THREAD_AXES: list[list[Any]] = [
    [*SMALL],
    [*MODELS],
    [*BATCHES],
    ["fp32", "bf16"],
    ["memory", "ordered"],
]
PROCESS_TRANSPORTS = ["shared-memory", "process-group"]
PROCESS_AXES: list[list[Any]] = [
    TWO_RANKS,
    [*MODELS],
    [*BATCHES],
    ["fp32", "bf16"],
    PROCESS_TRANSPORTS,
]


def _every(axes: list[list[Any]]) -> Callable[[Any], Any]:
    return pytest.mark.parametrize("values", list(product(*axes)), ids=_name)


def _pairs(axes: list[list[Any]]) -> Callable[[Any], Any]:
    return pytest.mark.parametrize("values", [list(v) for v in AllPairs(axes)], ids=_name)


@_pairs(THREAD_AXES)
def test_threads_equal_the_plain_model(values: list[str]) -> None:
    schedule, model, batch, precision, transport = values
    case = _case(model, schedule, batch, precision)
    assert differences(case, thread_transport(transport)) == []


@pytest.mark.slow
@_every(THREAD_AXES)
def test_threads_equal_the_plain_model_in_every_combination(values: list[str]) -> None:
    test_threads_equal_the_plain_model(values)


@pytest.mark.processes
@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
@pytest.mark.parametrize("schedule", TWO_RANKS)
def test_two_processes_equal_the_plain_model(
    schedule: str, transport: str, two_ranks: RankPool
) -> None:
    model = "transformer, dropout" if transport == "shared-memory" else "resnet"
    case = _case(model, schedule, "uneven", "fp32")
    assert two_ranks.run(differences_in_process, case, transport) == [[], []]


@pytest.mark.slow
@pytest.mark.processes
@_pairs(PROCESS_AXES)
def test_two_processes_equal_the_plain_model_in_every_pair(
    values: list[str], two_ranks: RankPool
) -> None:
    schedule, model, batch, precision, transport = values
    case = _case(model, schedule, batch, precision)
    assert two_ranks.run(differences_in_process, case, transport) == [[], []]


@pytest.mark.processes
@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
@pytest.mark.parametrize("schedule", FOUR_RANKS)
def test_four_processes_equal_the_plain_model(
    schedule: str, transport: str, four_ranks: RankPool
) -> None:
    case = _case("random mlp", schedule, "even", "fp32")
    assert four_ranks.run(differences_in_process, case, transport) == [[]] * 4


@pytest.mark.processes
@pytest.mark.parametrize("wrapper", ["hooks", "DDP"])
def test_replicas_are_reduced_after_w(wrapper: str, two_ranks: RankPool) -> None:
    """Fault 3 of the peer: with a split backward, what reduces gradients is never called."""
    assert two_ranks.run(replica_faults, wrapper) == [[], []]


def _is_close(got: nn.Parameter, want: nn.Parameter) -> bool:
    assert got.grad is not None
    assert want.grad is not None
    return bool((got.grad - want.grad).abs().max() <= TOLERANCE * want.grad.abs().max())


def _far(pipe: sl.Pipeline, model: nn.Module) -> list[str]:
    wanted = dict(model.named_parameters())
    return [name for name, p in pipe.named_parameters() if not _is_close(p, wanted[name])]


@pytest.mark.parametrize("letters", ["B", "IW", "RB"])
@pytest.mark.parametrize("placement", [loops(2, 2), snake(2, 2)], ids=["loops", "snake"])
def test_descending_backwards_are_right_to_the_last_bits(placement: Any, letters: str) -> None:
    """Gradients are added in another order than in the plain loop, which goes up."""
    case = Case("transformer", STAGES, "", "uneven", "fp32")
    text = looped(placement, 2, case.num_microbatches, descending=True, letters=letters)
    model, x, y = case.build()
    twin, _, _ = case.build()
    pipe = sl.Pipeline(
        model,
        split=STAGES,
        num_microbatches=case.num_microbatches,
        schedule=text,
        loss_fn=F.cross_entropy,
        transport=OrderedTransport(),
    )
    got = pipe.step(x, target=y)
    wanted = plain_step(
        twin, x, target=y, num_microbatches=case.num_microbatches, loss_fn=F.cross_entropy
    )
    assert torch.equal(got.loss, wanted.loss)
    assert _far(pipe, twin) == []
    pipe.close()


@pytest.mark.parametrize("schedule", SMALL)
def test_tied_weights(schedule: str) -> None:
    make, _ = TIED["first and last"]
    model, twin = tied_model(make), tied_model(make)
    x, y = tied_batch(make)
    pipe = sl.Pipeline(
        model,
        split=STAGES,
        num_microbatches=4,
        schedule=SMALL[schedule](4),
        loss_fn=F.mse_loss,
        transport=OrderedTransport(),
    )
    for step in range(2):
        pipe.step(x, target=y)
        plain_step(twin, x, target=y, num_microbatches=4, loss_fn=F.mse_loss, step=step)
    assert _far(pipe, twin) == []
    pipe.close()


def _row(stages: int, kind: str) -> str:
    if kind == "zb-h1":
        return zb_h1(stages, 3)
    placed = looped(lambda rank: range(rank, stages, 2), 2, 3, letters="IW")
    return recomputed(placed) if kind == "loops, R" else placed


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) for kind in ("zb-h1", "loops")] + ["loops, R"],
)
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_models(name: str, kind: str) -> None:
    """Skips, late inputs, early outputs, values changed in place, shared layers, draws."""
    case = RECORDED[name]
    plan = pipeline(case)
    count = len(plan.plan.stages)
    plan.close()
    pipe = pipeline(case, schedule=_row(count, kind), transport=OrderedTransport())
    inputs, target = case.batch(7)
    if name == "regions" and kind == "loops, R":
        with pytest.raises(sl.StepError, match="changes one of its buffers"):
            pipe.step(**inputs, target=target)
        return
    model, loss, _ = plain(case)
    result = pipe.step(**inputs, target=target)
    assert torch.equal(result.loss, loss)
    assert recorded_differences(gradients(pipe), model, case.tied) == []
    buffers = dict(pipe.named_buffers())
    assert all(torch.equal(buffers[name], value) for name, value in model.named_buffers())
    pipe.close()
