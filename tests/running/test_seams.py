"""What a front end can say of an ordinary pipeline: how it cuts, merges and fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import plain_step

pytestmark = pytest.mark.usefixtures("one_thread")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))


def batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 4), torch.randint(3, (rows,))


def chunk_sizes(rows: int, count: int) -> list[int]:
    """As torch.chunk cuts: 5 rows and 4 chunks make 2, 2 and 1."""
    return [len(part) for part in torch.empty(rows).chunk(count)]


@pytest.mark.parametrize("rows", [8, 7, 5, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_microbatches_of_other_sizes(rows: int, schedule: str) -> None:
    pipe = sl.Pipeline(
        net(), split=2, num_microbatches=4, microbatch_sizes=chunk_sizes, schedule=schedule
    )
    plain = net()
    x, y = batch(rows)
    got, want = pipe(x), torch.cat([plain(part) for part in x.chunk(4)])
    assert torch.equal(got, want)
    F.cross_entropy(got, y).backward()
    F.cross_entropy(want, y).backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_a_loss_weighs_microbatches_of_other_sizes_by_their_rows() -> None:
    model, plain = net(), net()
    pipe = sl.Pipeline(
        model,
        split=2,
        num_microbatches=2,
        microbatch_sizes=lambda rows, count: [1, rows - 1],
        loss_fn=F.cross_entropy,
    )
    x, y = batch(6)
    got = pipe.step(x, target=y)
    want = F.cross_entropy(plain(x), y)
    want.backward()
    torch.testing.assert_close(got.loss, want.detach())
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("sizes", [[4], [2, 2, 2], [5, 0], [3.0, 2.0], []])
def test_sizes_that_do_not_cut_the_batch(sizes: list[Any]) -> None:
    pipe = sl.Pipeline(
        net(), split=2, num_microbatches=2, microbatch_sizes=lambda rows, count: sizes
    )
    with pytest.raises(sl.BatchError, match=r"microbatch_sizes\(5, 2\) returned .*whose sum is 5"):
        pipe(batch(5)[0])


def test_outputs_are_merged_as_the_caller_wants() -> None:
    seen: list[Sequence[int]] = []

    def add(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
        seen.append(sizes)
        return sum(output.sum(0) for output in outputs)

    pipe = sl.Pipeline(
        net(),
        split=2,
        num_microbatches=2,
        merge_outputs=add,
        loss_fn=F.cross_entropy,
        keep_outputs=True,
    )
    plain = net()
    x, y = batch(5)
    want = sum(part.sum(0) for part in map(plain, x.tensor_split(2)))
    got = pipe(x)
    assert torch.equal(got, want)
    got.sum().backward()
    want.sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    with torch.no_grad():
        assert torch.equal(pipe(x), want)
    assert torch.equal(pipe.step(x, target=y).outputs, want)
    assert [list(sizes) for sizes in seen] == [[3, 2]] * 3


# Errors


class Fails(nn.Module):
    """Raises in its forward or in its backward."""

    def __init__(self, error: BaseException, where: str = "forward") -> None:
        super().__init__()
        self.error, self.where = error, where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise self.error
        x = x * 1
        if self.where == "backward":
            x.register_hook(self._fail)
        return x

    def _fail(self, gradient: Tensor) -> None:
        raise self.error


@pytest.mark.parametrize("error", [KeyError("mine"), SystemExit(3), AssertionError("mine")])
def test_errors_keep_their_type_where_that_is_asked_for(error: BaseException) -> None:
    pipe = sl.Pipeline.from_stages(
        [nn.Linear(4, 4), Fails(error)],
        num_microbatches=2,
        original_errors=True,
        loss_fn=F.cross_entropy,
    )
    x, y = batch(4)
    for call in (lambda: pipe(x), lambda: pipe.step(x, target=y)):
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error
    with torch.no_grad(), pytest.raises(type(error)):
        pipe(x)


def test_errors_keep_their_type_in_a_backward() -> None:
    error = KeyError("mine")
    pipe = sl.Pipeline.from_stages(
        [nn.Linear(4, 4), Fails(error, "backward")], num_microbatches=2, original_errors=True
    )
    out = pipe(batch(4)[0])
    with pytest.raises(KeyError) as caught:
        out.sum().backward()
    assert caught.value is error
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_the_place_of_an_error_is_a_note_of_it() -> None:
    error = ValueError("mine")
    if not hasattr(error, "__notes__") and not hasattr(error, "add_note"):
        return  # notes came with Python 3.11
    pipe = sl.Pipeline.from_stages([Fails(error)], num_microbatches=2, original_errors=True)
    with pytest.raises(ValueError, match="mine"):
        pipe(batch(4)[0])
    assert error.__notes__ == ["rank 0, stage 0, microbatch 0: action 0F0 failed: ValueError: mine"]


def test_errors_of_the_library_are_those_it_always_raises() -> None:
    pipe = sl.Pipeline(net(), split=2, num_microbatches=2, original_errors=True)
    with pytest.raises(sl.BatchError):
        pipe(torch.empty(0, 4))


@pytest.mark.parametrize("kind", ["call", "call without grad", "step", "step without grad"])
def test_a_failed_call_leaves_running_statistics_as_they_were(kind: str) -> None:
    """Those of a step were put back, and those of a call were of some of its microbatches."""
    fails = Fails(ValueError("asked to"), "never")
    norm = nn.BatchNorm1d(4)
    stages = [nn.Sequential(nn.Linear(4, 4), norm), fails, nn.Linear(4, 4)]
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=2, loss_fn=F.mse_loss)
    x, _ = batch(8)
    pipe(x)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    assert int(before["num_batches_tracked"]) == 2
    fails.where = "forward"
    grad = "without" not in kind
    with torch.set_grad_enabled(grad), pytest.raises(sl.StepError, match="asked to") as caught:
        pipe(x) if "call" in kind else pipe.step(x, target=x)
    assert "zero_grad" not in str(caught.value)  # it has made no gradient
    for name, buffer in norm.named_buffers():
        assert torch.equal(buffer, before[name]), name


class Counting(nn.Module):
    def __init__(self, failed: threading.Event) -> None:
        super().__init__()
        self.calls, self._failed = 0, failed

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            assert self._failed.wait(timeout=60)
        return x


class FailsAndTells(nn.Module):
    def __init__(self, failed: threading.Event) -> None:
        super().__init__()
        self._failed = failed

    def forward(self, x: Tensor) -> Tensor:
        threading.Timer(0.05, self._failed.set).start()
        raise ValueError("asked to")


def test_a_failure_stops_earlier_stages() -> None:
    """A rank that waits for nothing ran its whole row: all 50 microbatches of a dead call."""
    failed = threading.Event()
    counting = Counting(failed)
    pipe = sl.Pipeline.from_stages(
        [counting, FailsAndTells(failed)], num_microbatches=50, schedule="gpipe"
    )
    with pytest.raises(sl.StepError, match="asked to"):
        pipe(torch.randn(50, 4))
    assert counting.calls <= 3


# The order of backwards


def test_gradients_of_a_call_are_summed_before_they_are_accumulated() -> None:
    """Autograd sums what one backward gives; adding part by part rounds otherwise."""
    pipe, plain = sl.Pipeline(net(), split=2, num_microbatches=4), net()
    for rows in (8, 7, 6):
        x, y = batch(rows)
        F.cross_entropy(pipe(x), y).backward()
        F.cross_entropy(torch.cat([plain(part) for part in x.tensor_split(4)]), y).backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_a_failed_backward_leaves_gradients_as_they_were() -> None:
    fails = Fails(ValueError("asked to"), "never")
    pipe = sl.Pipeline.from_stages([nn.Linear(4, 4), nn.Linear(4, 4), fails], num_microbatches=2)
    x, _ = batch(4)
    pipe(x).sum().backward()
    before = [
        (parameter.grad, parameter.grad.clone())
        for parameter in pipe.parameters()
        if parameter.grad is not None
    ]
    assert len(before) == 4
    fails.where = "backward"
    out = pipe(x)
    with pytest.raises(sl.StepError, match="asked to"):
        out.sum().backward()
    for parameter, (gradient, value) in zip(pipe.parameters(), before, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, value)


def test_a_step_takes_its_microbatches_first_to_last() -> None:
    """As the plain model that accumulates over microbatches does; a call goes the other way."""
    pipe, plain = sl.Pipeline(net(), split=2, num_microbatches=4, loss_fn=F.cross_entropy), net()
    for rows in (8, 7):
        x, y = batch(rows)
        pipe.step(x, target=y)
        plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.cross_entropy)
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


# ---- which microbatch runs -------------------------------------------------------------------


class Numbered(nn.Module):
    """Adds the number of the microbatch, and writes down which it was asked for."""

    draws_nothing = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[int | None] = []
        self.in_backward: list[tuple[int, int | None]] = []

    def forward(self, x: Tensor) -> Tensor:
        number = sl.current_microbatch()
        self.seen.append(number)
        assert number is not None
        made: Tensor = self.layer(x) + number
        made.register_hook(lambda _: self.in_backward.append((number, sl.current_microbatch())))
        return made


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_stage_may_ask_which_microbatch_it_runs(recompute: Any) -> None:
    stages = [Numbered(), Numbered()]
    pipe = sl.Pipeline.from_stages(
        stages, num_microbatches=3, loss_fn=nn.functional.mse_loss, recompute=recompute
    )
    for _ in range(5):  # small pipelines without recomputation come to run in turn
        for stage in stages:
            stage.seen.clear()
        pipe.step(torch.ones(3, 2), target=torch.ones(3, 2))
        runs = 2 if recompute == "always" else 1
        assert [sorted(stage.seen) for stage in stages] == [sorted([0, 1, 2] * runs)] * 2  # type: ignore[type-var]
    assert sl.current_microbatch() is None


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "varuna"])
def test_code_in_a_backward_is_told_its_own_microbatch(schedule: str) -> None:
    """It was told the number of the forward before it: 1 in the backward of microbatch 0."""
    stages = [Numbered(), Numbered()]
    pipe = sl.Pipeline.from_stages(
        stages, num_microbatches=3, loss_fn=nn.functional.mse_loss, schedule=schedule
    )
    pipe.step(torch.ones(3, 2), target=torch.ones(3, 2))
    assert [sorted(set(stage.in_backward)) for stage in stages] == [[(0, 0), (1, 1), (2, 2)]] * 2


class RunsAnother(nn.Module):
    """Runs a pipeline of its own inside of a stage, which is allowed where nothing is followed."""

    draws_nothing = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = sl.Pipeline(nn.Sequential(nn.Linear(2, 2)), split=1, num_microbatches=1)
        self.seen: list[int | None] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            made: Tensor = self.inner(x)
        self.seen.append(sl.current_microbatch())
        return made


def test_a_pipeline_inside_of_a_stage_does_not_change_its_number() -> None:
    stage = RunsAnother()
    pipe = sl.Pipeline.from_stages([stage], num_microbatches=3)
    with torch.no_grad():
        pipe(torch.ones(3, 2))
    assert stage.seen == [0, 1, 2]
