"""What goes wrong in a Pipe: exceptions of layers keep their type, the rest is said clearly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stageline.compat.fairscale.nn import Pipe
from stageline.compat.fairscale.nn.pipe import is_recomputing
from stageline.errors import CaptureError, EdgeError, PipeError, StepError
from tests.compat.loops import differences, plain, twins

pytestmark = pytest.mark.usefixtures("one_thread")


class Expected(Exception):
    """What a test's layer raises."""


class Raises(nn.Module):
    def __init__(self, when: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        if self.when():
            raise Expected("from a layer")
        return x


def test_an_exception_keeps_its_type_and_the_pipe_goes_on() -> None:
    fails = [True]
    model = nn.Sequential(nn.Linear(2, 2), Raises(lambda: fails[0]), nn.Linear(2, 2))
    pipe, twin = twins(model, [1, 1, 1], chunks=3)
    x = torch.randn(6, 2)
    with pytest.raises(Expected, match="from a layer"):
        pipe(x)
    fails[0] = False
    pipe(x).sum().backward()
    plain(twin, x, 3).sum().backward()
    assert list(differences(pipe, twin)) == []


def test_an_exception_of_a_recompute_keeps_its_type() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), Raises(is_recomputing)), [1, 1], chunks=2)
    output = pipe(torch.randn(4, 2))
    with pytest.raises(Expected, match="from a layer"):
        output.sum().backward()


class FailsBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Expected("from a backward")


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_an_exception_of_a_backward_keeps_its_type(checkpoint: str) -> None:
    fails = [True]
    apply: Any = FailsBackwards.apply  # untyped in torch

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return apply(x) if fails[0] else x

    model = nn.Sequential(nn.Linear(2, 2), Layer(), nn.Linear(2, 2))
    pipe, twin = twins(model, [1, 1, 1], chunks=3, checkpoint=checkpoint)
    x = torch.randn(6, 2)
    output = pipe(x)
    with pytest.raises(Expected, match="from a backward"):
        output.sum().backward()
    fails[0] = False
    pipe.zero_grad()
    pipe(x).sum().backward()
    plain(twin, x, 3).sum().backward()
    assert list(differences(pipe, twin)) == []


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_is_no_exception_does_not_hang(kind: type[BaseException]) -> None:
    """In both originals the worker dies of it and the caller waits for ever."""

    class Leaves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise kind

    with pytest.raises(kind):
        Pipe(nn.Sequential(nn.Linear(2, 2), Leaves()), [1, 1], chunks=2)(torch.randn(4, 2))


def test_a_failure_stops_earlier_partitions() -> None:
    failed, calls = threading.Event(), [0]

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if calls[0]:
                failed.wait(10)
                time.sleep(0.01)  # the failure is on its way
            calls[0] += 1
            return x

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            failed.set()
            raise Expected

    pipe = Pipe(nn.Sequential(Counts(), Fails()), [1, 1], chunks=50)
    with pytest.raises(Expected):
        pipe(torch.randn(50, 1))
    assert calls[0] < 50


class Counts(nn.Module):
    """Counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class DrawsFromNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.rand())


@pytest.mark.parametrize(("kind", "cause"), [(Counts, EdgeError), (DrawsFromNumpy, CaptureError)])
def test_what_cannot_be_recomputed_is_refused(
    kind: type[nn.Module], cause: type[Exception]
) -> None:
    """In both originals the gradient is silently that of another forward, or counts are twice."""
    x = torch.randn(4, 2)
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), kind()), [1, 1], chunks=2)
    with pytest.raises(StepError, match='checkpoint="never" recomputes nothing') as caught:
        pipe(x)
    assert isinstance(caught.value.__cause__, cause)
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), kind()), [1, 1], chunks=2, checkpoint="never")
    pipe(x).sum().backward()


def test_a_first_layer_that_writes_into_its_input() -> None:
    """It changes the caller's batch. In both originals a recomputation fails in the backward."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2))
    pipe, twin = twins(model, [1, 1], chunks=2, checkpoint="never")
    x = torch.randn(4, 2)
    positive = x.relu()
    pipe(x).sum().backward()
    assert torch.equal(x, positive)
    plain(twin[1], positive, 2).sum().backward()
    assert list(differences(pipe, twin)) == []
    pipe.checkpoint = "always"
    with pytest.raises(StepError, match="the model's arguments, in place"):
        pipe(x)


def test_outputs_that_cannot_be_joined_are_refused() -> None:
    class Grows(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            self.calls += 1
            return (x,) * self.calls

    with pytest.raises(ValueError, match="tuples of different lengths"):
        Pipe(nn.Sequential(Grows()), [1], chunks=2)(torch.randn(4, 2))


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_a_pipe_inside_of_a_pipe_is_refused(checkpoint: str) -> None:
    inner = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1])
    pipe = Pipe(nn.Sequential(inner, nn.Identity()), [1, 1], chunks=2, checkpoint=checkpoint)
    with pytest.raises(StepError, match="cannot follow into the threads of the ranks") as caught:
        pipe(torch.randn(4, 2))
    assert ("recomputes nothing" in str(caught.value)) == (checkpoint != "never")


def test_what_a_pipe_cannot_do_is_an_error() -> None:
    pipe = Pipe(
        nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), [1, 1], chunks=2, checkpoint="never"
    )
    x = torch.randn(4, 6, requires_grad=True)
    loss = pipe(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(PipeError, match="Call the pipeline again; retain_graph=True does not"):
        loss.backward()
    with pytest.raises(PipeError, match="cannot be differentiated twice"):
        pipe(x).sum().backward(create_graph=True)
    loss = pipe(x).sum()
    with torch.no_grad():
        x.zero_()
    with pytest.raises(PipeError, match="the batch was modified in place"):
        loss.backward()


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_gradients_can_be_asked_for(checkpoint: str) -> None:
    """Theirs gives them with checkpoint="never" alone."""
    layers = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    x = torch.randn(4, 6, requires_grad=True)
    loss = torch.cat([layers(part) for part in x.chunk(2)]).sum()
    wanted = torch.autograd.grad(loss, [x, *layers.parameters()])
    pipe = Pipe(layers, [1, 1], chunks=2, checkpoint=checkpoint)
    found = torch.autograd.grad(pipe(x).sum(), [x, *pipe.parameters()])
    assert all(map(torch.equal, found, wanted))
    assert all(each.grad is None for each in (x, *pipe.parameters()))


def test_transforms_of_torch_func_are_refused() -> None:
    """The process crashed: threads of ranks met a tensor of a transform that they are not in."""
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    x = torch.randn(4, 2)
    with pytest.raises(PipeError, match=r"transform of torch\.func, .* use torch.autograd"):
        torch.func.grad(lambda x: pipe(x).sum())(x)
    pipe(x).sum().backward()


def test_two_pipes_with_dropout_run_at_the_same_time() -> None:
    """The seed of the second call was taken for a random number that a layer of the first drew."""
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert go_on.wait(30)
            return x

    first = Pipe(nn.Sequential(nn.Dropout(0.5), Waits()), [1, 1], chunks=2)
    second = Pipe(nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2)), [1, 1], chunks=2)
    x = torch.ones(4, 2, requires_grad=True)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(first, x)
        assert inside.wait(30)
        second(x).sum().backward()
        go_on.set()
        output = waiting.result(30)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(output, gradient)  # what was dropped is dropped again
