"""Faults on purpose, in real processes: a pipeline whose stages fail where and how they are told.

A campaign runs in a pool of processes. For every fault all ranks take a step that fails, tell what
they raised and when, and take another one, which must give the plain model's gradients.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.errors import RemoteCause
from stageline.testing import plain_step

MICROBATCHES, ROWS, WIDTH = 4, 8, 4

PAUSES = (0.0, 0.002, 0.03)
"""Seconds between a failed step and the next, in turn: news of a failure may come in between."""


class Boom(Exception):
    """What a faulty stage raises."""


class Unprintable(Exception):
    """Raises again when somebody asks what it says."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unpicklable(Exception):
    """Holds what no other process could hold."""

    def __init__(self) -> None:
        super().__init__("it holds a lock")
        self.lock = threading.Lock()


class Unsendable:
    """What no transport takes."""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "error": lambda: Boom("the cause"),
    "empty": Boom,
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "unprintable": Unprintable,
    "unpicklable": Unpicklable,
    "long": lambda: Boom("very " * 1_000_000 + "long"),
    "surrogate": lambda: Boom("half a letter: \udc80, and \N{GRINNING FACE}"),
}


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        where: In "forward", "backward", "loss" or "send" of a microbatch; before the step has
            begun ("look"); where tied gradients are added ("tied").
        rank: On which rank.
        microbatch: At which microbatch.
        what: How: a name in ``ERRORS``.
        mode: In which call: "step", "evaluate" or "infer".
        also: Another rank that fails in the same way.
    """

    where: str
    rank: int
    microbatch: int = 0
    what: str = "error"
    mode: str = "step"
    also: int | None = None

    @property
    def action(self) -> str:
        """The action that raises, where stages and ranks coincide."""
        if self.where == "send":
            return f"{self.rank}F{self.microbatch}>{self.rank + 1}"
        letter = "B" if self.where == "backward" else "F"
        return f"{self.rank}{letter}{self.microbatch}"


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of one fault.

    Attributes:
        kind: The type of what it raised.
        text: What that said.
        place: Of a StepError: rank, stage, microbatch and action.
        cause: The type of its cause, or the name that a RemoteCause gives, and its traceback.
        fault_time: When the fault was set off, on the rank that had it.
        raise_time: When the call raised.
        wrong: What was not as it should be in the call after it.
    """

    kind: str
    text: str
    place: tuple[int, int, int, str] | None
    cause: tuple[str, str] | None
    fault_time: float | None
    raise_time: float
    wrong: list[str]


class Trigger:
    """Decides in each stage whether it is time to fail."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._fault: Fault | None = None
        self.time: float | None = None

    def arm(self, fault: Fault | None) -> None:
        self._fault, self.time = fault, None

    def is_due(self, where: str, microbatch: int) -> bool:
        fault = self._fault
        return (
            fault is not None
            and self._rank in (fault.rank, fault.also)
            and (fault.where, fault.microbatch) == (where, microbatch)
        )

    def pull(self, where: str, microbatch: int = 0) -> None:
        if self.is_due(where, microbatch):
            assert self._fault is not None
            self.time = time.monotonic()
            raise ERRORS[self._fault.what]()


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trigger: Trigger, microbatch: int) -> Tensor:
        ctx.trigger, ctx.microbatch = trigger, microbatch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.trigger.pull("backward", ctx.microbatch)
        return gradients[0], None, None


class Stage(nn.Module):
    """A layer that can be told to fail."""

    def __init__(self, trigger: Trigger) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.trigger = trigger
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        microbatch, self.calls = self.calls % MICROBATCHES, self.calls + 1
        self.trigger.pull("forward", microbatch)
        apply: Any = _Backward.apply  # untyped in torch
        y: Tensor = apply(self.linear(x), self.trigger, microbatch)
        if self.trigger.is_due("send", microbatch):
            self.trigger.time = time.monotonic()
            return y, Unsendable()
        return y


class Bench:
    """This process's pipeline, with a trigger in every stage, beside its plain model.

    Args:
        rank: This rank.
        size: How many there are.
        tied: Whether the first stage and the last share a weight.
        rows: Of the batch.
        settings: Of the pipeline.
    """

    def __init__(
        self, rank: int, size: int, *, tied: bool = False, rows: int = ROWS, **settings: Any
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.rank = rank
        self.trigger = Trigger(rank)
        self.stages = [Stage(self.trigger) for _ in range(size)]
        if tied:
            self.stages[-1].linear.weight = self.stages[0].linear.weight
        self.tied = tied
        self.model = nn.Sequential(*self.stages)
        self.x, self.y = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
        self._wanted = self._plain()
        self._losses = 0
        self.pipe = sl.Pipeline(
            self.model,
            **{
                "split": size,
                "num_microbatches": MICROBATCHES,
                "loss_fn": self._loss,
                "timeout": 30,
                **settings,
            },
        )

    def _plain(self) -> tuple[Tensor, dict[str, Tensor]]:
        loss = plain_step(
            self.model, self.x, target=self.y, num_microbatches=MICROBATCHES, loss_fn=F.mse_loss
        ).loss
        gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return loss, gradients

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        self._losses += 1
        self.trigger.pull("loss", self._losses - 1)
        return F.mse_loss(output, target)

    def call(self, mode: str = "step", *, rows: int | None = None) -> Any:
        """Run one call of the pipeline."""
        self._losses = 0
        for stage in self.stages:
            stage.calls = 0
        self.pipe.train(mode == "step")
        if mode == "infer":
            return self.pipe(self.x[:rows])
        return self.pipe.step(self.x[:rows], target=self.y[:rows])

    def suffer(self, fault: Fault) -> Outcome:
        """Take the call that fails, and tell what came of it."""
        self.trigger.arm(fault)
        rows = None
        if fault.where == "look" and self.rank == fault.rank:
            rows = 0
            self.trigger.time = time.monotonic()
        try:
            with _tied_gradients_fail(self.trigger, fault):
                self.call(fault.mode, rows=rows)
        except BaseException as error:
            return self._outcome(error)
        finally:
            self.trigger.arm(None)
        raise AssertionError(f"nothing was raised by {fault}")

    def _outcome(self, error: BaseException) -> Outcome:
        now = time.monotonic()
        place = None
        if isinstance(error, sl.StepError):
            place = (error.rank, error.stage, error.microbatch, error.action)
        cause, told = error.__cause__, None
        if isinstance(cause, RemoteCause):
            told = (f"remote {cause.kind}", cause.trace)
        elif cause is not None:
            told = (type(cause).__name__, "")
        return Outcome(type(error).__name__, str(error), place, told, self.trigger.time, now, [])

    def what_is_wrong(self) -> list[str]:
        """Take a step that should work, and compare it with the plain model."""
        loss, gradients = self._wanted
        wrong = [
            f"{n} has a gradient" for n, p in self.pipe.named_parameters() if p.grad is not None
        ]
        if not torch.equal(self.call().loss, loss):
            wrong.append("another loss")
        for name, parameter in self.pipe.named_parameters():
            got, wanted = parameter.grad, gradients[name]
            if got is None:
                wrong.append(f"{name} has no gradient")
            elif self.tied and name == "0.linear.weight":  # added in another order
                error = float((got - wanted).abs().max() / wanted.abs().max())
                wrong += [f"{name} is {error} off"] if error > 1e-6 else []
            elif not torch.equal(got, wanted):
                wrong.append(f"{name} has another gradient")
        self.pipe.zero_grad()
        return wrong


@contextmanager
def _tied_gradients_fail(trigger: Trigger, fault: Fault) -> Iterator[None]:
    """Fail where a rank tells others its part of a tied gradient."""
    from stageline.running import tied_gradients

    original = tied_gradients._dense
    if fault.where == "tied":

        def dense(gradient: Tensor | None) -> Tensor | None:
            trigger.pull("tied")
            return original(gradient)

        tied_gradients._dense = dense
    try:
        yield
    finally:
        tied_gradients._dense = original


def campaign(
    rank: int, size: int, faults: Sequence[Fault], settings: dict[str, Any]
) -> list[Outcome]:
    """Run all faults in one pipeline; every next step must be exact."""
    bench = Bench(rank, size, **settings)
    outcomes = []
    for number, fault in enumerate(faults):
        outcome = bench.suffer(fault)
        time.sleep(PAUSES[(number + rank) % len(PAUSES)])
        outcome.wrong.extend(bench.what_is_wrong())
        outcomes.append(outcome)
    bench.pipe.close()
    return outcomes


def held() -> tuple[int, int]:
    """Return the number of threads and of open files of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def fail_again_and_again(
    rank: int, size: int, faults: Sequence[Fault], times: int, settings: dict[str, Any]
) -> tuple[list[tuple[int, int]], list[str]]:
    """Fail many times, without a step that works in between; return what was held on the way."""
    bench = Bench(rank, size, **settings)
    bench.what_is_wrong()
    counts = []
    for _ in range(times):
        for fault in faults:
            bench.suffer(fault)
        counts.append(held())
    # What a traceback holds goes with the garbage; then gloo takes a moment, or more if busy.
    gc.collect()
    for _ in range(100):
        counts.append(held())
        if all(now <= max(early) for now, *early in zip(counts[-1], *counts[:5], strict=True)):
            break
        time.sleep(0.1)
    wrong = bench.what_is_wrong()
    bench.pipe.close()
    return counts, wrong


def note_delays(transport: str, kind: str, delays: Sequence[float]) -> None:
    """Write the seconds from a fault to the raise on every other rank, where somebody asks."""
    path = os.environ.get("STAGELINE_FAULT_TIMES")
    if path is not None:
        with open(path, "a") as file:
            file.write(json.dumps([transport, kind, list(delays)]) + "\n")
