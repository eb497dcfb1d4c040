"""Faults 2 and 3 of the strongest peer are those of its split backward; here with I and W.

That replicas are reduced after W, the other half of fault 3, is in test_placements.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import plain_step
from tests.exactness.cases import same
from tests.running.placements import SMALL

pytestmark = pytest.mark.usefixtures("one_thread")

MICROBATCHES = 4
SPLIT = [name for name in SMALL if "I" in SMALL[name](MICROBATCHES)]


def _stages() -> list[nn.Module]:
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    return [*stages, nn.Sequential(nn.Linear(4, 2))]


def _batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 4), torch.randint(2, (rows,))


def _pipe(stages: Sequence[nn.Module], schedule: str, **settings: Any) -> sl.Pipeline:
    return sl.Pipeline.from_stages(
        stages,
        num_microbatches=MICROBATCHES,
        schedule=schedule,
        loss_fn=F.cross_entropy,
        timeout=30,
        **settings,
    )


def _differing(stages: Sequence[nn.Module], schedule: str) -> list[str]:
    plain = copy.deepcopy(nn.Sequential(*stages))
    x, y = _batch()
    pipe = _pipe(stages, schedule)
    pipe.step(x, target=y)
    plain_step(plain, x, target=y, num_microbatches=MICROBATCHES, loss_fn=F.cross_entropy)
    wanted = dict(plain.named_parameters())
    assert any(parameter.grad is not None for parameter in wanted.values())
    pipe.close()
    return [n for n, p in pipe.named_parameters() if not same(p.grad, wanted[n].grad)]


@pytest.mark.parametrize("frozen", [[0], [0, 1], [1], [0, 2], [3]])
@pytest.mark.parametrize("schedule", SPLIT)
def test_fault_2_frozen_stages_do_not_starve_the_others(frozen: list[int], schedule: str) -> None:
    """There, with stage 0 frozen, stage 1 gets no gradient: no path leads from its input."""
    stages = _stages()
    for index in frozen:
        stages[index].requires_grad_(False)
    assert _differing(stages, SMALL[schedule](MICROBATCHES)) == []


class _Prompted(nn.Module):
    """Parameters that reach the output without crossing any path from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(4))
        self.project = nn.Linear(4, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + torch.tanh(self.project(self.prompt))
        return out


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("schedule", SPLIT)
def test_fault_2_parameters_beside_the_path_of_the_input(place: int, schedule: str) -> None:
    stages = _stages()
    stages[place] = _Prompted()
    assert _differing(stages, SMALL[schedule](MICROBATCHES)) == []


@pytest.mark.parametrize("schedule", SPLIT)
def test_fault_3_hooks_on_parameters_see_every_gradient_once(schedule: str) -> None:
    """There, weight gradients are written by hand, and DDP, which lives on hooks, sees none."""
    stages = _stages()
    seen: dict[str, int] = {}
    for name, parameter in nn.Sequential(*stages).named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: seen.__setitem__(name, seen.get(name, 0) + 1)
        )
    x, y = _batch()
    _pipe(stages, SMALL[schedule](MICROBATCHES)).step(x, target=y)
    assert seen == {name: MICROBATCHES for name, _ in nn.Sequential(*stages).named_parameters()}
