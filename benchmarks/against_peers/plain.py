"""The plain model: the same microbatches in a loop, their gradients added up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from contestant import Contestant
from models import CHECKED, Case


def build(case: Case, dropout: float) -> Contestant:
    return _trained(case, case.model(dropout))


def reference(case: Case, *, tied: bool) -> list[float]:
    """Return the losses of the first steps without dropout: what every contestant must find."""
    model = case.model(0.0) if tied else case.layers(0.0, tied=False)
    contestant = _trained(case, model)
    losses = [contestant.step() for _ in range(CHECKED)]
    return [float(loss) for loss in losses if loss is not None]


def _trained(case: Case, model: nn.Module) -> Contestant:
    parts, share = case.microbatches(), 1 / case.num_microbatches
    optimizer = torch.optim.SGD(model.parameters(), lr=case.rate)

    def step() -> Tensor:
        total = torch.zeros(())
        for x, y in parts:
            loss = case.loss(model(x), y) * share
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Contestant(step)
