"""``result.microbatch_losses``: what loss_fn returned for each microbatch, on every rank."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.running.loss import Losses, LossFunction
from stageline.running.result import LossValues, StepResult
from stageline.testing import RankPool

pytestmark = pytest.mark.usefixtures("one_thread")

Reduction = Any


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 5), torch.randint(3, (rows,))


def rows_share(microbatch: sl.Batch, whole: sl.Batch) -> float:
    return (microbatch.rows + 1) / whole.rows


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def one_element(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target).reshape(1)


REDUCTIONS: dict[str, tuple[Reduction, LossFunction]] = {
    "mean": ("mean", F.cross_entropy),
    "sum": ("sum", summed),
    "callable": (rows_share, F.cross_entropy),
    "one element": ("mean", one_element),
}
SIZES = [(12, 4), (10, 4), (7, 3), (2, 4), (5, 1)]


def wanted(model: nn.Module, rows: int, count: int, loss_fn: LossFunction) -> list[Tensor]:
    """Return the loss of the plain model for each microbatch."""
    x, y = batch(rows)
    pairs = zip(x.tensor_split(min(rows, count)), y.tensor_split(min(rows, count)), strict=True)
    return [loss_fn(model(a), b).detach() for a, b in pairs]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
        assert one.dtype is other.dtype
        assert not one.requires_grad


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("rows", "count"), SIZES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_each_loss_is_that_of_the_plain_model(
    reduction: str, rows: int, count: int, trains: bool
) -> None:
    rule, loss_fn = REDUCTIONS[reduction]
    model, (x, y) = net(), batch(rows)
    want = wanted(copy.deepcopy(model), rows, count, loss_fn)
    pipe = sl.Pipeline(model, split=2, num_microbatches=count, loss_fn=loss_fn, loss_reduction=rule)
    result = pipe.train(trains).step(x, target=y)
    assert_equal(result.microbatch_losses, want)
    assert result.num_microbatches == len(want)
    again = pickle.loads(pickle.dumps(result))
    assert_equal(again.microbatch_losses, want)
    assert torch.equal(again.loss, result.loss)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_losses_have_the_dtype_of_the_loss(dtype: torch.dtype) -> None:
    model, (x, y) = net().to(dtype), batch(10)
    want = [
        F.cross_entropy(model(a), b).detach()
        for a, b in zip(x.to(dtype).tensor_split(4), y.tensor_split(4), strict=True)
    ]
    pipe = sl.Pipeline(model, split=2, num_microbatches=4, loss_fn=F.cross_entropy)
    assert_equal(pipe.step(x.to(dtype), target=y).microbatch_losses, want)


def test_a_microbatch_that_weighs_nothing_says_its_loss_all_the_same() -> None:
    def weight(microbatch: sl.Batch, whole: sl.Batch) -> float:
        return float((microbatch.target >= 0).sum() / (whole.target >= 0).sum())

    x, y = batch(8)
    y[4:] = -100
    pipe = sl.Pipeline(
        net(), split=2, num_microbatches=2, loss_fn=F.cross_entropy, loss_reduction=weight
    )
    first, second = pipe.step(x, target=y).microbatch_losses
    assert first.isfinite()
    assert second.isnan()


def test_losses_of_an_accelerator_are_kept_as_they_were() -> None:
    """There they stay tensors; what is changed in place later does not change them."""
    losses, given = Losses(), [torch.tensor(2.0), torch.tensor(3.0)]
    for index, loss in enumerate(given):
        losses._tensors[index] = (loss.clone(), 0.5)
        loss.zero_()
    assert torch.equal(losses.each(), torch.tensor([2.0, 3.0]))
    assert torch.equal(losses.total(), torch.tensor(2.5))


def test_losses_of_several_dtypes_lose_nothing() -> None:
    losses = Losses()
    losses.note(0, torch.tensor(0.1, dtype=torch.float32), 0.5)
    losses.note(1, torch.tensor(0.1, dtype=torch.float64), 0.5)
    assert losses.each().dtype is torch.float64
    assert losses.each()[1] == 0.1
    assert losses.each()[0].float() == torch.tensor(0.1)


def test_what_another_rank_has_told_is_read_when_it_is_asked_for() -> None:
    values = LossValues(torch.tensor(1.5), torch.tensor([1.0, 2.0]))
    result = StepResult(loss=values.text(), outputs=None, num_microbatches=2)
    with torch.inference_mode():
        assert not any(loss.is_inference() for loss in (result.loss, *result.microbatch_losses))
    assert torch.equal(result.loss, values.total)
    assert_equal(result.microbatch_losses, [torch.tensor(1.0), torch.tensor(2.0)])


def _on_every_rank(rank: int, reduction: str, count: int) -> list[list[Tensor]]:
    torch.set_num_threads(1)
    rule, loss_fn = REDUCTIONS[reduction]
    x, y = batch(10)
    pipe = sl.Pipeline(
        net(), split=2, num_microbatches=count, loss_fn=loss_fn, loss_reduction=rule, timeout=20
    )
    trained = pipe.step(x, target=y)
    evaluated = pipe.eval().step(x if rank == 0 else None, target=y if rank == 1 else None)
    pipe.close()
    return [trained.microbatch_losses, evaluated.microbatch_losses]


@pytest.mark.processes
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_process_has_them(reduction: str, two_ranks: RankPool) -> None:
    want = wanted(net(), 10, 4, REDUCTIONS[reduction][1])
    for answer in two_ranks.run(_on_every_rank, reduction, 4):
        for got in answer:
            assert_equal(got, want)


def _many(rank: int) -> list[Tensor]:
    torch.set_num_threads(1)
    x, y = batch(100)
    pipe = sl.Pipeline(net(), split=2, num_microbatches=100, loss_fn=F.cross_entropy, timeout=20)
    losses = pipe.step(x, target=y).microbatch_losses
    pipe.close()
    return losses


@pytest.mark.processes
def test_also_those_of_a_hundred_microbatches(two_ranks: RankPool) -> None:
    want = wanted(net(), 100, 100, F.cross_entropy)
    for got in two_ranks.run(_many):
        assert_equal(got, want)


# ---- outputs on request ----------------------------------------------------------------------


def test_outputs_are_kept_on_request_from_step_to_step() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    pipe = sl.Pipeline(model, split=1, num_microbatches=2, loss_fn=F.mse_loss)
    x, y = torch.ones(4, 4), torch.zeros(4, 2)
    found = []
    for keeps in (True, False, True):
        pipe.keep_outputs = keeps
        found.append(pipe.step(x, target=y).outputs)
    assert found[1] is None
    assert torch.equal(found[0], found[2])


def _kept(rank: int, shares: bool) -> str:
    pipe = sl.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
        num_microbatches=2,
        loss_fn=F.mse_loss,
        share_outputs=shares,
        timeout=30,
    )
    pipe.keep_outputs = rank == 1
    try:
        return str(pipe.step(torch.ones(4, 4), target=torch.zeros(4, 2)).outputs is not None)
    except sl.PeerError as error:
        return str(error).split(":")[0]
    finally:
        pipe.close()


@pytest.mark.processes
def test_ranks_that_share_outputs_must_agree_on_them(two_ranks: RankPool) -> None:
    """One of them would wait for outputs that the other does not keep."""
    told = "pipe.keep_outputs is True on rank 1 and False on rank 0"
    assert two_ranks.run(_kept, True) == [told, told]
    assert two_ranks.run(_kept, False) == ["False", "True"]
