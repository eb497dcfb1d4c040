"""Four processes run a step of every schedule and see what is alive between its actions.

Started by run.py; the answer goes to a file.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from benchmarks.memory.held import Moment, Trace
from benchmarks.tools.world import free_port, world
from stageline.observing import measure_memory
from stageline.observing.memory import costs_of
from stageline.scheduling import Action, Kind

RANKS, MICROBATCHES, PAIRS, WIDTH, ROWS = 4, 8, 8, 64, 512
COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.RECOMPUTE)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (layer for _ in range(PAIRS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    return nn.Sequential(*layers)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(2, ROWS * MICROBATCHES, WIDTH)
    return x, y


def plain() -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the loss and the gradients of the model without a pipeline."""
    net, total = model(), torch.zeros(())
    x, y = batch()
    for one, target in zip(x.split(ROWS), y.split(ROWS), strict=True):
        loss = F.mse_loss(net(one), target) / MICROBATCHES
        loss.backward()
        total += loss.detach()
    return total, {name: parameter.grad for name, parameter in net.named_parameters()}


class Step:
    """A schedule with its pipeline: a step of it, watched."""

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank
        num_stages = sl.schedules.family(name).num_stages(RANKS)
        self._sizes = [2 * PAIRS // num_stages] * num_stages
        self._batch = batch()
        self._trace: Trace | None = None
        self._pipe = sl.Pipeline(
            model(),
            split=self._sizes,
            ranks=RANKS,
            num_microbatches=MICROBATCHES,
            schedule=name,
            loss_fn=F.mse_loss,
            observer=self._note,
        )
        self.schedule = self._pipe.schedule

    def _note(self, event: sl.ActionDone) -> None:
        if self._trace is not None:
            self._trace.mark(event.action)

    def run(self) -> dict[str, Any]:
        """Run it and compare with the plain model; then with the simulator."""
        wrong = self._is_wrong()
        x, y = self._batch
        # Gradients exist from now on, so that a step adds to them in place.
        with Trace() as trace:
            self._trace = trace
            trace.mark("begin")
            self._pipe.step(x, target=y)
            self._trace = None
        simulated = sl.simulate(self.schedule, self._costs())
        assert simulated.peak_bytes is not None
        return {
            "wrong": wrong,
            "simulated": simulated.peak[self.rank],
            "simulated bytes": float(simulated.peak_bytes[self.rank]),
            **counted(trace.moments),
        }

    def _is_wrong(self) -> bool:
        """Whether loss or gradients differ from the plain model's."""
        x, y = self._batch
        loss, gradients = plain()
        found = self._pipe.step(x, target=y).loss
        own = dict(self._pipe.named_parameters())
        right = own and all(_close(own[name].grad, gradients[name]) for name in own)
        return not right or not _close(found, loss)

    def _costs(self) -> sl.Costs:
        """Return what a stage holds of a microbatch; rows of the user's batch are not its own."""
        layers = iter(model())
        stages = [nn.Sequential(*islice(layers, size)) for size in self._sizes]
        first, *others = measure_memory(stages, self._batch[0][:ROWS])
        sizes: dict[str, Any] = costs_of([first, *others])
        sizes["activation_bytes"][0] -= first.input_bytes
        sizes["input_bytes"][0] = 0
        return sl.Costs(**sizes)

    def close(self) -> None:
        self._pipe.close()


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    assert one is not None
    assert other is not None
    return torch.allclose(one, other, rtol=1e-4, atol=1e-7)


def counted(seen: Sequence[Moment]) -> dict[str, Any]:
    """Return the most activations and bytes that are alive when an action is about to begin.

    An activation is alive as long as anything is that its F has allocated; or its R, where there is
    one, for then F leaves nothing but an input.
    """
    actions = {i: Action.parse(moment.mark) for i, moment in enumerate(seen) if i}
    again = {(a.stage, a.microbatch) for a in actions.values() if a.kind is Kind.RECOMPUTE}
    owners = {
        i: (a.stage, a.microbatch)
        for i, a in actions.items()
        if a.kind is Kind.RECOMPUTE
        or (a.kind is Kind.FORWARD and (a.stage, a.microbatch) not in again)
    }
    # What is on its way out is gone after the sends: look when the next action begins.
    between = [
        moment
        for i, moment in enumerate(seen)
        if i + 1 == len(seen) or actions[i + 1].kind in COMPUTE
    ]
    alive = [{owners[i] for i in moment.since if i in owners} for moment in between]
    return {
        "counted": max(map(len, alive)),
        "bytes": max(moment.held for moment in between),
        "within": max(moment.highest for moment in seen),
    }


def run_rank(rank: int, names: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        step = Step(name, rank)
        found[name] = step.run()
        step.close()
    return found


def main() -> None:
    """Fork the ranks: importing torch, and starting its profiler, take a second each."""
    answer, _, *names = sys.argv[1:]
    torch.set_num_threads(1)
    with Trace() as trace:
        trace.mark("warm")
    port, folder, children = free_port(), tempfile.mkdtemp(), []
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            os.environ.update(world(rank, RANKS, port))
            try:
                Path(folder, str(rank)).write_text(json.dumps(run_rank(rank, names)))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    answers = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    Path(answer).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
