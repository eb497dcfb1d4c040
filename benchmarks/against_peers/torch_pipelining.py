"""torch.distributed.pipelining: two processes over gloo, stages made by hand.

The same script runs on stageline's door: only the home of its imports is another.
"""

from __future__ import annotations

from importlib import import_module
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from contestant import Contestant
from models import Case


def build(
    case: Case,
    dropout: float,
    schedule: str = "1F1B",
    stages: int = 2,
    home: str = "torch.distributed.pipelining",
) -> Contestant:
    """Build the stages of this rank and their schedule.

    Args:
        case: What to train.
        dropout: How much of it.
        schedule: Its name.
        stages: How many in all.
        home: Where the names are imported from.
    """
    pipelining, schedules = import_module(home), import_module(f"{home}.schedules")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, x, y = dist.get_rank(), *case.batch()
    parts = _cut(case.layers(dropout), case.cuts[stages])
    mine = _placed("V" in schedule, stages)[rank]
    others = _placed("V" in schedule, stages)[1 - rank]
    shared = _shared([parts[i] for i in mine], [parts[i] for i in others])
    kind = schedules.get_schedule_class(schedule)
    built = [pipelining.PipelineStage(parts[i], i, stages, torch.device("cpu")) for i in mine]
    # A parameter of several stages would be divided once for each of them: divide the loss instead.
    share = 1 / case.num_microbatches

    def share_of_loss(output: Tensor, target: Tensor) -> Tensor:
        return case.loss(output, target) * share

    runs = kind(
        built[0] if issubclass(kind, schedules.PipelineScheduleSingle) else built,
        case.num_microbatches,
        loss_fn=share_of_loss if shared else case.loss,
        scale_grads=not shared,
    )
    holds_last = stages - 1 in mine
    parameters = {id(p): p for i in mine for p in parts[i].parameters()}
    optimizer = torch.optim.SGD(list(parameters.values()), lr=case.rate)

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        arguments = (x,) if 0 in mine else ()
        if holds_last:
            runs.step(*arguments, target=y, losses=losses, return_outputs=False)
        else:
            runs.step(*arguments, return_outputs=False)
        for parameter in shared:  # the package does not: each process would train its own copy
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if not losses:
            return None
        total = torch.stack([loss.detach() for loss in losses])
        return total.sum() if shared else total.mean()

    return Contestant(step)


def _placed(in_v: bool, stages: int) -> tuple[list[int], list[int]]:
    if in_v:
        return [0, 3], [1, 2]
    return list(range(0, stages, 2)), list(range(1, stages, 2))


def _cut(layers: nn.Sequential, counts: list[int]) -> list[nn.Sequential]:
    children = iter(layers)
    return [nn.Sequential(*islice(children, count)) for count in counts]


def _shared(mine: list[nn.Sequential], others: list[nn.Sequential]) -> list[nn.Parameter]:
    """Return the parameters that both ranks use; both find them in the same order."""
    there = {id(p) for part in others for p in part.parameters()}
    found = {id(p): p for part in mine for p in part.parameters() if id(p) in there}
    return list(found.values())
