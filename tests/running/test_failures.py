"""A failure in one process reaches the caller whole, and the next step works."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.running.transports.base import ThreadTransport
from stageline.testing import OrderedTransport, plain_step

STAGES, MICROBATCHES, ROWS = 3, 4, 8


class Boom(Exception):
    """What a faulty stage raises."""


class _BackwardFails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        ctx.microbatch = trap.microbatch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.trap.spring("backward", ctx.microbatch)
        return gradients[0], None


class Trap(nn.Module):
    """Raises in forward or backward of one microbatch, for as long as it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.armed: tuple[str, int, BaseException] | None = None
        self.calls = 0

    @property
    def microbatch(self) -> int:
        return (self.calls - 1) % MICROBATCHES

    def spring(self, where: str, microbatch: int) -> None:
        if self.armed is not None and self.armed[:2] == (where, microbatch):
            raise self.armed[2]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.spring("forward", self.microbatch)
        apply: Any = _BackwardFails.apply  # untyped in torch
        return apply(self.linear(x), self)  # type: ignore[no-any-return]


class Setup:
    """A pipeline whose stages can be made to fail, next to its plain model."""

    def __init__(self, transport: ThreadTransport | str, schedule: str = "1f1b") -> None:
        torch.manual_seed(0)
        self.traps = [Trap() for _ in range(STAGES)]
        self.model = nn.Sequential(*self.traps)
        self.loss_fault: tuple[int, BaseException] | None = None
        self.losses = 0
        self.x, self.y = torch.randn(ROWS, 4), torch.randn(ROWS, 4)
        self.pipe = sl.Pipeline(
            self.model,
            split=STAGES,
            num_microbatches=MICROBATCHES,
            schedule=schedule,
            loss_fn=self.loss,
            transport=transport,
        )

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.losses += 1
        if self.loss_fault is not None and self.losses - 1 == self.loss_fault[0]:
            raise self.loss_fault[1]
        return F.mse_loss(output, target)

    def arm(self, where: str, stage: int, microbatch: int, error: BaseException) -> None:
        if where == "loss":
            self.loss_fault = (microbatch, error)
        else:
            self.traps[stage].armed = (where, microbatch, error)

    def disarm(self) -> None:
        self.loss_fault = None
        for trap in self.traps:
            trap.armed, trap.calls = None, 0

    def step(self) -> sl.StepResult:
        self.losses = 0
        return self.pipe.step(self.x, target=self.y)

    def next_step_is_exact(self) -> None:
        self.disarm()
        assert all(parameter.grad is None for parameter in self.model.parameters())
        loss = self.step().loss
        got = {name: parameter.grad for name, parameter in self.pipe.named_parameters()}
        self.pipe.zero_grad()
        self.disarm()
        wanted = plain_step(
            self.model,
            self.x,
            target=self.y,
            num_microbatches=MICROBATCHES,
            loss_fn=F.mse_loss,
            num_threads=1,
        )
        assert torch.equal(loss, wanted.loss)
        for name, parameter in self.model.named_parameters():
            assert got[name] is not None
            assert parameter.grad is not None
            assert torch.equal(got[name], parameter.grad), name  # type: ignore[arg-type]


PLACES = [
    *(
        ("forward", stage, microbatch)
        for stage in range(STAGES)
        for microbatch in range(MICROBATCHES)
    ),
    *(
        ("backward", stage, microbatch)
        for stage in range(STAGES)
        for microbatch in range(MICROBATCHES)
    ),
    *(("loss", STAGES - 1, microbatch) for microbatch in range(MICROBATCHES)),
]


@pytest.mark.parametrize(("where", "stage", "microbatch"), PLACES)
def test_any_action_may_fail(where: str, stage: int, microbatch: int) -> None:
    setup = Setup("memory")
    error = Boom("the cause")
    setup.arm(where, stage, microbatch, error)
    with pytest.raises(sl.StepError) as caught:
        setup.step()
    failure = caught.value
    letter = "B" if where == "backward" else "F"
    assert (failure.rank, failure.stage, failure.microbatch) == (stage, stage, microbatch)
    assert failure.action == f"{stage}{letter}{microbatch}"
    assert failure.__cause__ is error
    assert str(failure) == (
        f"rank {stage}, stage {stage}, microbatch {microbatch}: action {failure.action} failed: "
        "Boom: the cause"
    )
    frames = traceback.extract_tb(error.__traceback__)
    assert frames[-1].name in ("spring", "loss")
    setup.next_step_is_exact()


@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), StopIteration()])
def test_what_is_no_exception_reaches_the_caller_too(where: str, error: BaseException) -> None:
    """A stage that calls sys.exit() would end a bare thread silently, and the step would hang."""
    setup = Setup("memory")
    setup.arm(where, 2, 1, error)
    with pytest.raises(sl.StepError) as caught:
        setup.step()
    assert caught.value.__cause__ is error
    setup.next_step_is_exact()


def test_an_interrupt_stays_an_interrupt() -> None:
    setup = Setup("memory")
    setup.arm("forward", 1, 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        setup.step()
    setup.next_step_is_exact()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "sequential"])
@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_on_the_strict_transport_and_every_schedule(where: str, schedule: str) -> None:
    setup = Setup(OrderedTransport(), schedule)
    setup.arm(where, 2, 1, Boom())
    with pytest.raises(sl.StepError):
        setup.step()
    setup.next_step_is_exact()


def test_inference_and_the_differentiable_call_fail_as_clearly() -> None:
    setup = Setup("memory")
    setup.arm("forward", 1, 2, Boom())
    with pytest.raises(sl.StepError, match="action 1F2 failed"):
        setup.pipe(setup.x)
    setup.pipe.eval()
    setup.disarm()
    setup.arm("forward", 1, 2, Boom())
    with pytest.raises(sl.StepError, match="action 1F2 failed"):
        setup.pipe(setup.x)
    setup.pipe.train()
    setup.disarm()
    setup.arm("backward", 1, 2, Boom())
    out = setup.pipe(setup.x)
    with pytest.raises(sl.StepError, match="action 1B2 failed"):
        F.mse_loss(out, setup.y).backward()
    setup.next_step_is_exact()


def test_gradients_from_before_are_named_when_a_step_fails() -> None:
    """Where gradients were accumulated before, a failed step may have added a part of itself."""
    setup = Setup("memory")
    setup.step()
    setup.disarm()
    setup.arm("backward", 1, 3, Boom())
    with pytest.raises(sl.StepError, match=r"zero_grad\(\) before the next one"):
        setup.step()


def test_two_failures_at_once_give_one_error() -> None:
    setup = Setup("memory", "gpipe")
    for stage in range(STAGES):
        setup.arm("forward", stage, 0, Boom(f"stage {stage}"))
    with pytest.raises(
        sl.StepError, match="stage 0, microbatch 0: action 0F0 failed: Boom: stage 0"
    ):
        setup.step()
    setup.next_step_is_exact()


def test_a_failed_step_leaves_no_statistics_behind() -> None:
    """BatchNorm counted the microbatches of a step that never was."""
    torch.manual_seed(0)
    trap = Trap()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), trap)
    pipe = sl.Pipeline(model, split=2, num_microbatches=MICROBATCHES, loss_fn=F.mse_loss)
    x, y = torch.randn(ROWS, 4), torch.randn(ROWS, 4)
    for _ in range(2):  # what is kept for the second one lies where that of the first lay
        pipe.step(x, target=y)
        pipe.zero_grad()
    _fails_without_a_trace(pipe, model, trap, x, y)
    # Statistics that look different from those of the step before.
    model.double()
    _fails_without_a_trace(pipe, model, trap, x.double(), y.double())


def _fails_without_a_trace(
    pipe: sl.Pipeline, model: nn.Module, trap: Trap, x: Tensor, y: Tensor
) -> None:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    trap.armed = ("backward", 3, Boom())
    with pytest.raises(sl.StepError):
        pipe.step(x, target=y)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
    trap.armed = None
    pipe.step(x, target=y)
    mean = dict(model.named_buffers())["1.running_mean"]
    assert not torch.equal(mean, before["1.running_mean"])
