"""The first stage of a schedule with I and W: priced as it runs.

In 0.1 a stage of several blocks was priced as the sum of its blocks, of which all but the first had
been measured with somebody waiting for I. But where the model's input is data, nobody waits for the
first stage: its I does nothing, its W is B, and until then it keeps everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import stageline as sl
from stageline.capturing.alive import Alive
from stageline.running.events import ActionDone
from stageline.scheduling import Action, Kind, parse

COUNTS = sl.Device("counts products", {"float32": 1e9}, bandwidth=1e30)
"""A nanosecond for each operation of a product, nothing for anything else."""

SIZES = (3, 2)
ROWS = 16
SCHEDULE = parse("0F0 1F0 1I0 1W0 0I0 0W0  0F1 0F2 1F1 1I1 0I1 1W1 1F2 1I2 0I2 1W2 0W1 0W2")
"""Both stages on one rank. The first microbatch runs alone, before anything is counted."""

BATCH = ROWS * SCHEDULE.num_microbatches


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(5)))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def frozen(model: nn.Sequential) -> nn.Sequential:
    """Freeze the first block: then nobody waits for the gradient of the second one's input."""
    model[0].requires_grad_(False)
    return model


def run(model: nn.Module, x: Tensor, mode: Any, look: Callable[[str, sl.Pipeline], None]) -> None:
    """Run a step under a mode, which is entered in the thread of the rank; look at every action."""

    def observe(event: ActionDone) -> None:
        if event.action == "0W0":
            mode.__enter__()
        if event.action.endswith(("1", "2")):
            look(event.action, pipe)
        if event.action == "0W2":
            mode.__exit__(None, None, None)

    pipe = sl.Pipeline(
        model,
        example_args=(example(x),),
        split=list(SIZES),
        schedule=SCHEDULE,
        loss_fn=loss_fn,
        observer=observe,
    )
    pipe.step(x, target=x.detach())
    pipe.close()


def example(x: Tensor) -> Tensor:
    """Return the first microbatch of a batch."""
    return x.detach()[:ROWS].requires_grad_(x.requires_grad)


@pytest.mark.parametrize("case", ["data", "an input with a gradient", "a frozen block"])
def test_work_of_i_and_w_is_what_a_run_counts(case: str) -> None:
    model = frozen(stack()) if case == "a frozen block" else stack()
    x = torch.randn(BATCH, 24, requires_grad=case == "an input with a gradient")
    counter = FlopCounterMode(display=False)
    counted: dict[tuple[Kind, int], int] = {}
    before = 0

    def look(name: str, pipe: sl.Pipeline) -> None:
        nonlocal before
        action, total = Action.parse(name), counter.get_total_flops()
        counted[action.kind, action.stage] = total - before
        before = total

    run(model, x, counter, look)
    graph = sl.capture(model, (example(x),))
    costs = sl.estimate_costs(graph, COUNTS, loss_fn=loss_fn, target=example(x).detach())
    told = costs.simulated(SIZES)
    for kind in (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT):
        for stage, time in enumerate(told.per_stage(kind, 2)):
            assert counted[kind, stage] == time, (kind, stage)
    does_nothing = not counted[Kind.INPUT_GRADIENT, 0]
    assert does_nothing == (not x.requires_grad)


def test_live_bytes_are_those_of_a_run() -> None:
    model, x = stack(), torch.randn(BATCH, 24)
    alive = Alive()
    held: dict[str, int] = {}

    def look(action: str, pipe: sl.Pipeline) -> None:
        parameters = [*pipe.parameters()]
        gradients = [parameter.grad for parameter in parameters]
        held[action] = alive.count([x, *parameters, *gradients])

    run(model, x, alive, look)
    graph = sl.capture(model, (example(x),))
    for costs in (
        sl.measure_costs(graph, repeats=1, busy=1, loss_fn=loss_fn, target=example(x)),
        sl.estimate_costs(graph, loss_fn=loss_fn, target=example(x)),
    ):
        told = costs.simulated(SIZES)
        assert isinstance(told.activation_bytes, tuple)
        assert isinstance(told.input_gradient_frees, tuple)
        kept, frees = told.activation_bytes[0], told.input_gradient_frees[0]
        few = 64  # losses, and their gradients
        # Two microbatches wait for W of the first stage, then one; the second stage holds nothing.
        assert held["1W2"] - few <= 2 * (kept - frees) <= held["1W2"]
        assert held["0W1"] - few <= kept - frees <= held["0W1"]
        assert frees == -example(x).nbytes  # I releases nothing, and keeps the gradient that came


def test_who_waits_for_a_gradient() -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 24)
            self.layers = stack()

        def forward(self, ids: Tensor) -> Tensor:
            made: Tensor = self.layers(self.embed(ids))
            return made

    x = torch.randn(4, 24)
    wanted = {
        "data": (sl.capture(stack(), (x,)), [0]),
        "gradient": (sl.capture(stack(), (x.clone().requires_grad_(),)), []),
        "frozen": (sl.capture(frozen(stack()), (x,)), [0, 1]),
        "integers": (sl.capture(Embeds(), (torch.arange(8).view(2, 4),)), [0]),
    }
    for name, (graph, unwanted) in wanted.items():
        for costs in (sl.measure_costs(graph, repeats=1, busy=1), sl.estimate_costs(graph)):
            blocks = enumerate(costs.blocks)
            assert [i for i, block in blocks if not block.wants_input_gradient] == unwanted, name
