"""What is alive with I, W and R: what the rows say, and nothing afterwards."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import nn

import stageline as sl
from stageline.observing import StageMemory, costs_of, measure_memory
from stageline.running.events import ActionDone
from stageline.scheduling import Action, Kind
from tests.running.placements import SMALL
from tests.running.test_memory import Counted, Ledger, _tensors_alive

STAGES, MICROBATCHES, WIDTH = 4, 5, 6


def _held_after(row: tuple[Action, ...]) -> dict[str, int]:
    """Return how many graphs a rank holds after each action that computes, as its row says.

    What is counted is an operation that is not deferred: I lets it go, and so does the end of F
    where R follows.
    """
    recomputed = {(a.stage, a.microbatch) for a in row if a.kind is Kind.RECOMPUTE}
    held, after = 0, {}
    for action in row:
        is_dropped = (action.stage, action.microbatch) in recomputed
        held += action.kind is Kind.RECOMPUTE or (action.kind is Kind.FORWARD and not is_dropped)
        held -= action.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT)
        after[str(action)] = held
    return after


@pytest.mark.parametrize("name", SMALL)
def test_live_graphs_at_every_moment_are_what_the_schedule_says(name: str) -> None:
    ledger = Ledger()
    counted: dict[int, dict[str, int]] = defaultdict(dict)
    placement: tuple[int, ...] = ()

    def observe(event: ActionDone) -> None:
        if Action.parse(event.action).kind.is_compute:
            mine = [stage for stage, rank in enumerate(placement) if rank == event.rank]
            counted[event.rank][event.action] = sum(ledger.saved[stage] for stage in mine)

    pipe = sl.Pipeline(
        nn.Sequential(*(Counted(ledger, index) for index in range(STAGES))),
        split=STAGES,
        num_microbatches=MICROBATCHES,
        schedule=SMALL[name](MICROBATCHES),
        loss_fn=nn.functional.mse_loss,
        observer=observe,
    )
    placement = pipe.schedule.placement
    x = torch.randn(10, WIDTH, requires_grad=True)  # or I of stage 0 has nothing to do
    pipe.step(x, target=torch.randn(10, WIDTH))
    for rank in range(pipe.schedule.num_ranks):
        assert counted[rank] == _held_after(pipe.schedule.row(rank)), f"rank {rank}"
    pipe.close()


@pytest.mark.parametrize("name", ["zb-v", "varuna", "zb-v, R", "one rank, I W"])
def test_nothing_outlives_a_step_but_parameters_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(STAGES)]
    pipe = sl.Pipeline(
        nn.Sequential(*layers),
        split=STAGES,
        num_microbatches=MICROBATCHES,
        schedule=SMALL[name](MICROBATCHES),
        loss_fn=nn.functional.mse_loss,
    )
    x, y = torch.randn(10, WIDTH), torch.randn(10, WIDTH)
    pipe.step(x, target=y)
    before = _tensors_alive()  # held, so that no new tensor can take an old one's id
    known = {id(tensor) for tensor in before}
    for _ in range(3):
        pipe.step(x, target=y)
    allowed = {id(parameter) for parameter in pipe.parameters()}
    allowed |= {id(parameter.grad) for parameter in pipe.parameters()}
    left = [tensor.shape for tensor in _tensors_alive() if id(tensor) not in known | allowed]
    assert left == []
    pipe.close()


def test_what_a_stage_holds_is_measured_to_the_byte() -> None:
    """Products need their inputs and the gradients of their outputs; GELU its input, until I."""
    size = 64 * WIDTH * 4
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    given = torch.randn(64, WIDTH)
    before = [parameter.detach().clone() for parameter in stage.parameters()]
    first, second = measure_memory([stage, stage], given)
    # Input, input of GELU, its output; then the two inputs and the two gradients of the products.
    assert second == StageMemory(size, 3 * size, 4 * size, 0)
    # Nobody waits for the gradient of the first stage's input: I only keeps what came.
    assert first == StageMemory(size, 3 * size, 4 * size, 0)
    assert costs_of([second])["input_gradient_frees"] == [-size]
    assert all(parameter.grad is None for parameter in stage.parameters())
    assert all(map(torch.equal, before, stage.parameters()))


def test_attention_weights_are_released_by_i() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, activation="gelu", batch_first=True)
    _, memory = measure_memory([nn.Linear(16, 16), layer], torch.randn(2, 32, 16))
    assert memory.after_weight_gradient == 0
    assert 0.3 < memory.released_by_i < 0.9
    assert "I releases" in str(memory)
