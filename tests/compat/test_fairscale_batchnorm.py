"""DeferredBatchNorm: running statistics as if each batch had been seen whole, once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.compat.fairscale.nn import Pipe
from stageline.compat.fairscale.nn.pipe import is_recomputing
from stageline.compat.fairscale.nn.pipe.batchnorm import DeferredBatchNorm
from tests.compat.loops import plain

convert = DeferredBatchNorm.convert_deferred_batch_norm

pytestmark = pytest.mark.usefixtures("one_thread")


def batch(rows: int = 16) -> Tensor:
    """Return channels of different means and variances; the means are far from 0."""
    scale = torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    return torch.randn(rows, 3, 4, 4) * scale + 30 * scale + torch.arange(rows)[:, None, None, None]


def assert_same_statistics(one: nn.Module, other: nn.Module) -> None:
    for name in ("running_mean", "running_var"):
        mine, theirs = getattr(one, name), getattr(other, name)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, msg=name)
    assert int(one.num_batches_tracked) == int(other.num_batches_tracked)  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("rows", [16, 13, 5])
def test_a_pipe_keeps_the_statistics_of_whole_batches(
    rows: int, momentum: float | None, checkpoint: str
) -> None:
    """The original commits nothing after 5 rows in 4 chunks, and adds them to the next batch."""
    norm = nn.BatchNorm2d(3, momentum=momentum)
    model = nn.Sequential(copy.deepcopy(norm), nn.ReLU())
    pipe = Pipe(model, [1, 1], chunks=4, checkpoint=checkpoint, deferred_batch_norm=True)
    for _ in range(3):
        x = batch(rows)
        pipe(x).sum().backward()
        norm(x)
    assert_same_statistics(pipe[0], norm)
    x = batch(rows)
    torch.testing.assert_close(pipe.eval()(x), norm.eval()(x).relu(), rtol=1e-5, atol=1e-5)


def test_each_microbatch_is_normalised_by_itself() -> None:
    norm = nn.BatchNorm2d(3)
    x = batch()
    pipe = Pipe(nn.Sequential(copy.deepcopy(norm)), [1], chunks=4, deferred_batch_norm=True)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    output, wanted = pipe(mine), plain(norm, theirs, 4)
    assert torch.equal(output, wanted)
    output.square().mean().backward()
    wanted.square().mean().backward()
    for (name, ours), original in zip(pipe[0].named_parameters(), norm.parameters(), strict=True):
        assert ours.grad is not None
        assert original.grad is not None
        assert torch.equal(ours.grad, original.grad), name
    assert mine.grad is not None
    assert theirs.grad is not None
    assert torch.equal(mine.grad, theirs.grad)


def test_a_failed_call_changes_nothing() -> None:
    fails = [True]

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fails[0] and len(x) == 1 and not is_recomputing():  # the last microbatch
                raise RuntimeError("expected")
            return x

    norm = nn.BatchNorm2d(3)
    model = nn.Sequential(copy.deepcopy(norm), Fails())
    pipe = Pipe(model, [1, 1], chunks=4, deferred_batch_norm=True)
    x = batch(13)
    before = copy.deepcopy(pipe.state_dict())
    with pytest.raises(RuntimeError, match="expected"):
        pipe(x)
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
    fails[0] = False
    pipe(x)
    norm(x)
    assert_same_statistics(pipe[0], norm)


def test_a_recomputation_puts_no_statistics_back() -> None:
    """A call in another thread may end, and change them, while this one recomputes."""

    class Meanwhile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if is_recomputing():
                norm.get_buffer("running_mean").data.fill_(7)
            return x

    model = nn.Sequential(nn.BatchNorm2d(3), Meanwhile())
    pipe = Pipe(model, [2], chunks=2, checkpoint="always", deferred_batch_norm=True)
    norm = pipe[0]
    assert isinstance(norm, DeferredBatchNorm)
    pipe(batch()).sum().backward()
    assert torch.equal(norm.get_buffer("running_mean"), torch.full((3,), 7.0))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_alone_it_changes_with_every_chunks_th_call(momentum: float | None) -> None:
    norm = nn.BatchNorm2d(3, momentum=momentum)
    deferred = convert(copy.deepcopy(norm), chunks=4)
    for number in range(1, 3):
        x = batch()
        norm(x)
        plain(deferred, x, 4)
        assert int(deferred.num_batches_tracked) == number  # type: ignore[arg-type]
    assert_same_statistics(deferred, norm)


def test_values_without_further_dimensions() -> None:
    norm = nn.BatchNorm1d(5)
    deferred = convert(copy.deepcopy(norm), chunks=2)
    x = torch.randn(9, 5)
    norm(x)
    plain(deferred, x, 2)
    assert_same_statistics(deferred, norm)


def test_half_precision_is_summed_in_single_precision() -> None:
    layer = DeferredBatchNorm(3)
    x = batch()
    norm = nn.BatchNorm2d(3)
    norm(x.bfloat16().float())
    layer(x.bfloat16())
    assert_same_statistics(layer, norm)


def test_what_is_converted() -> None:
    inner = nn.BatchNorm2d(3, affine=False, eps=0.5, momentum=0.7).eval()
    nested = nn.Sequential(inner)
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nested, nn.BatchNorm2d(3, track_running_stats=False)
    )
    before: list[Any] = list(model)
    made = convert(model, chunks=3)
    assert made is model
    assert made[0] is before[0]
    assert made[3] is before[3]
    deferred = made[1]
    assert isinstance(deferred, DeferredBatchNorm)
    assert deferred.chunks == 3
    assert deferred.weight is before[1].weight
    assert deferred.running_mean is before[1].running_mean
    assert deferred.training
    second = nested[0]
    assert isinstance(second, DeferredBatchNorm)
    assert (second.affine, second.eps, second.momentum) == (False, 0.5, 0.7)
    assert second.running_var is inner.running_var
    assert not second.training
    assert convert(deferred, chunks=3) is deferred
    assert convert(deferred, chunks=4) is not deferred


def test_its_state_dict_has_the_keys_of_the_original() -> None:
    layer = DeferredBatchNorm(3, chunks=2)
    assert list(layer.state_dict()) == [
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "sum",
        "sum_squares",
    ]
    layer(batch().requires_grad_())
    assert not layer.sum.requires_grad
    assert not layer.sum.any()


def test_a_state_dict_without_the_sums_loads() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())
    model(batch())
    pipe = Pipe(copy.deepcopy(model), [1, 1], deferred_batch_norm=True)
    pipe.load_state_dict(model.state_dict())
    assert_same_statistics(pipe[0], model[0])
