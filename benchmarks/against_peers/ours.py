"""stageline: two ranks, as processes over shared memory or as threads of one process."""

from __future__ import annotations

import torch
from torch import Tensor

import stageline as sl
from contestant import Contestant
from models import Case


def build(
    case: Case,
    dropout: float,
    schedule: str = "1f1b",
    stages: int = 2,
    ahead: int = 0,
    calls: int = 0,
) -> Contestant:
    """Build a pipeline; where the environment names a rank, it is one of two processes.

    Args:
        case: What to train.
        dropout: How much of it.
        schedule: Its name.
        stages: How many in all; 8 means one per call of the block that repeats.
        ahead: Of 1F1B, how far ranks are ahead of the next one beyond what they have to be.
        calls: Whether to train by ``pipe(x)`` and a backward, instead of ``pipe.step``.
    """
    x, y = case.batch()
    counts, count = case.cuts[stages], case.num_microbatches
    split = {case.each: "end"} if case.each and len(counts) == 8 else counts
    pipe = sl.Pipeline(
        case.model(dropout),
        example_args=(x[: case.rows],) if case.each else None,
        split=split,
        ranks=2,
        num_microbatches=count,
        schedule=sl.schedules.one_f_one_b(2, count, ahead=ahead) if ahead else schedule,
        loss_fn=case.loss,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=case.rate)

    def step() -> Tensor:
        if calls:
            loss = case.loss(pipe(x), y)
            loss.backward()
        else:
            loss = pipe.step(x, target=y).loss
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Contestant(step, pipe.close)
