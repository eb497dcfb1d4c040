"""Tied parameters between processes: every holder has a copy, and all copies stay equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import RankPool
from tests.running.tied import (
    CASES,
    WIDTH,
    batch,
    differences,
    first_and_last,
    gradients,
    linears,
    made,
    pipeline,
    plain,
    tie,
    tied_names,
    wanted_gradients,
)

pytestmark = pytest.mark.processes


Report = tuple[dict[str, Tensor], dict[str, Tensor], list[str]]


def _two_steps(rank: int, name: str) -> Report:
    make, settings = CASES[name]
    torch.set_num_threads(1)
    pipe = pipeline(make, timeout=20, **settings)
    for seed in (1, 2):
        x, y = batch(make, seed)
        pipe.step(x, target=y)
    found = gradients(pipe)
    again = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    for seed in range(5):
        again.step()
        again.zero_grad()
        x, y = batch(make, seed)
        pipe.step(x, target=y)
    pipe.close()
    state = {key: value.clone() for key, value in pipe.state_dict().items()}
    return found, state, [key for key, _ in pipe.named_parameters()]


def _check_processes(name: str, reports: list[Report]) -> None:
    make, _ = CASES[name]
    model, tied = made(make), tied_names(make)
    for seed in (1, 2):
        plain(make, model, *batch(make, seed))
    wanted = wanted_gradients(model)
    for found, _, names in reports:
        assert len(set(names)) == len(names)
        mine = {key: wanted[key] for key in found}
        assert differences(found, mine, tied) == []
    assert set().union(*(found for found, _, _ in reports)) == set(wanted)
    states = [state for _, state, _ in reports]
    assert set().union(*states) == set(model.state_dict())
    for key in model.state_dict():
        values = [state[key] for state in states if key in state]
        assert all(torch.equal(value, values[0]) for value in values), key


@pytest.mark.parametrize(
    "name", ["two stages", "three stages on two ranks", "a holder that has two stages"]
)
def test_two_processes(name: str, two_ranks: RankPool) -> None:
    _check_processes(name, two_ranks.run(_two_steps, name))


@pytest.mark.parametrize(
    "name", ["first and last", "two parameters over one tensor", "embedding and head"]
)
def test_four_processes(name: str, four_ranks: RankPool) -> None:
    reports = four_ranks.run(_two_steps, name)
    _check_processes(name, reports)
    names = [list(state) for _, state, _ in reports]
    assert {"0.weight", "3.weight"} <= set(names[0])
    assert {"0.weight", "3.weight"} <= set(names[3])
    assert "0.weight" not in names[1] + names[2]


def _crossing_ties(rank: int) -> dict[str, Tensor]:
    """Each of two ranks adds for the other: rank 0 for the weight, rank 1 for the bias."""
    torch.set_num_threads(1)
    pipe = pipeline(crossing, timeout=20, split=4, schedule=ZIGZAG)
    x, y = batch(crossing)
    pipe.step(x, target=y)
    pipe.close()
    return gradients(pipe)


def crossing() -> nn.Sequential:
    return tie(tie(linears(), 1, 0), 2, 1, "bias")


# Stages 0 and 2 on rank 0, 1 and 3 on rank 1.
ZIGZAG = """
    0F0 2F0 0F1 2F1 0F2 2F2 0F3 2F3 2B0 0B0 2B1 0B1 2B2 0B2 2B3 0B3
    1F0 3F0 1F1 3F1 1F2 3F2 1F3 3F3 3B0 1B0 3B1 1B1 3B2 1B2 3B3 1B3"""


def test_ranks_that_add_for_each_other_do_not_wait_for_each_other(two_ranks: RankPool) -> None:
    model = made(crossing)
    plain(crossing, model, *batch(crossing))
    wanted = wanted_gradients(model)
    tied = {"0.weight", "1.bias"}
    for found in two_ranks.run(_crossing_ties):
        assert tied <= set(found)
        assert differences(found, {key: wanted[key] for key in found}, tied) == []


def _three_holders(rank: int, transport: str) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    pipe = pipeline(three_of_four, timeout=20, transport=transport)
    for seed in (1, 2):
        x, y = batch(three_of_four, seed)
        pipe.step(x, target=y)
    pipe.close()
    return gradients(pipe)


def three_of_four() -> nn.Sequential:
    return tie(tie(linears(), 1, 0), 3, 0)


@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
def test_one_of_three_holders_adds_for_all(transport: str, four_ranks: RankPool) -> None:
    model = made(three_of_four)
    for seed in (1, 2):
        plain(three_of_four, model, *batch(three_of_four, seed))
    wanted = wanted_gradients(model)
    found = four_ranks.run(_three_holders, transport)
    assert [list(one) for one in found[:2]] == [["0.weight", "0.bias"], ["0.weight", "1.bias"]]
    for one in found:
        assert differences(one, {key: wanted[key] for key in one}, {"0.weight"}) == []
    assert torch.equal(found[0]["0.weight"], found[1]["0.weight"])
    assert torch.equal(found[0]["0.weight"], found[3]["0.weight"])


def _kept_gradient(rank: int, transport: str) -> list[bool]:
    torch.set_num_threads(1)
    pipe = pipeline(first_and_last, split=2, timeout=20, transport=transport)
    own = next(p for name, p in pipe.named_parameters() if name == "0.weight")
    x, y = batch(first_and_last)
    pipe.step(x, target=y)
    kept = own.grad
    assert kept is not None
    before = kept.clone()
    pipe.zero_grad()
    pipe.step(x, target=y)
    second, is_kept = own.grad, torch.equal(kept, before)
    pipe.step(2 * x, target=y)  # which is added, in place
    pipe.close()
    assert own.grad is not None
    return [is_kept, second is own.grad, not torch.equal(kept, own.grad)]


@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
def test_gradients_that_the_user_has_change_as_in_the_plain_model(
    transport: str, two_ranks: RankPool
) -> None:
    """A sum has memory of its own, or is added to what was there."""
    assert two_ranks.run(_kept_gradient, transport) == [[True, True, True]] * 2


class Scaled(nn.Module):
    """Autograd gives both parameters views of one memory as their gradients."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.shared = shared
        self.own = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * (self.shared.squeeze(0) + self.own.squeeze(0)))


def scaled_twice() -> nn.Sequential:
    shared = nn.Parameter(torch.randn(1, WIDTH))
    return nn.Sequential(Scaled(shared), Scaled(shared))


def _one_memory_for_two_gradients(rank: int, transport: str) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    pipe = pipeline(scaled_twice, split=2, num_microbatches=1, timeout=20, transport=transport)
    x, y = batch(scaled_twice)
    pipe.step(x, target=y)
    pipe.close()
    return gradients(pipe)


@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
def test_a_sum_does_not_reach_other_gradients_in_the_same_memory(
    transport: str, two_ranks: RankPool
) -> None:
    """When sums were made in the memory of a part, the other parameter's gradient was the sum."""
    model = made(scaled_twice)
    x, y = batch(scaled_twice)
    F.mse_loss(model(x), y).backward()
    wanted = wanted_gradients(model)
    for found in two_ranks.run(_one_memory_for_two_gradients, transport):
        assert differences(found, {key: wanted[key] for key in found}, {"0.shared"}) == []


def _different_seeds(rank: int) -> str:
    model = made(first_and_last, seed=rank)
    torch.manual_seed(0)
    pipe = pipeline(first_and_last, model, split=2, timeout=20)
    x, y = batch(first_and_last)
    own = next(p for name, p in pipe.named_parameters() if name == "0.weight")
    with pytest.raises(sl.PeerError) as caught:
        pipe.step(x, target=y)
    assert own.grad is None
    # A checkpoint makes them equal, and the next step works.
    pipe.load_state_dict(made(first_and_last).state_dict())
    pipe.step(x, target=y)
    assert own.grad is not None
    pipe.close()
    return str(caught.value)


def test_copies_that_differ_are_found_in_the_first_step(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_different_seeds)
    assert first == second
    assert first.startswith("ranks 0, 1 have different values in 0.weight, which is tied")


def _frozen(rank: int) -> bool:
    pipe = pipeline(first_and_last, split=2, timeout=20)
    for name, parameter in pipe.named_parameters():
        parameter.requires_grad_(name != "0.weight")
    x, y = batch(first_and_last)
    pipe.step(x, target=y)
    pipe.close()
    return all((p.grad is None) == (name == "0.weight") for name, p in pipe.named_parameters())


def test_a_frozen_tie_between_processes(two_ranks: RankPool) -> None:
    assert two_ranks.run(_frozen) == [True, True]
