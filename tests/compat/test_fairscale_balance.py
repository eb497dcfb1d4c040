"""balance_by_time and balance_by_size: an even cut, and a model that stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.compat.fairscale.nn import Pipe
from stageline.compat.fairscale.nn.pipe import balance
from stageline.compat.fairscale.nn.pipe.balance import balance_by_size, balance_by_time
from stageline.compat.fairscale.nn.pipe.skip import Namespace, pop, skippable, stash
from stageline.compat.fairscale.nn.pipe.skip.skippable import Skippable
from tests.compat.test_fairscale_skip import Pop, Stash, skipping


class Works(nn.Module):
    """Lets time pass on a clock."""

    def __init__(self, clock: list[float], seconds: Callable[[float], float]) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock[0] += self.seconds(self.clock[0])
        return x

    def __deepcopy__(self, memo: object) -> Works:
        return self  # all copies have one clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(balance, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


class Keeps(nn.Module):
    """Keeps as many results for its backward as it is told."""

    def __init__(self, count: int, size: int = 1) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = (x * self.weight[0]).exp()
        return x


def test_layers_are_balanced_by_their_time(clock: list[float]) -> None:
    model = nn.Sequential(*(Works(clock, lambda _, i=i: i) for i in range(1, 7)))  # type: ignore[misc]
    assert balance_by_time(2, model, torch.ones(1)) == [4, 2]


def test_a_machine_that_is_slow_for_a_while_slows_all_layers(clock: list[float]) -> None:
    """Layers were measured one after the other: the first of these four looked 10 times as slow."""
    layers = [Works(clock, lambda now: 10 if now < 40 else 1) for _ in range(4)]
    assert balance_by_time(2, nn.Sequential(*layers), torch.ones(1), timeout=100) == [2, 2]


def test_the_cut_is_exact() -> None:
    """The original cuts 7 equal layers in 4 as [1, 1, 1, 4]."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(7)))
    assert sorted(balance_by_size(4, model, torch.ones(4, 8))) == [1, 2, 2, 2]


@pytest.mark.parametrize(("counts", "wanted"), [(range(1, 7), [4, 2]), (range(6, 0, -1), [2, 4])])
def test_layers_are_balanced_by_their_activations(counts: range, wanted: list[int]) -> None:
    model = nn.Sequential(*(Keeps(count) for count in counts))
    assert balance_by_size(2, model, torch.zeros(1000)) == wanted


def test_layers_are_balanced_by_their_parameters() -> None:
    model = nn.Sequential(*(nn.Linear(i + 1, i + 2) for i in range(6)))
    assert balance_by_size(2, model, torch.ones(7, 1), param_scale=100) == [4, 2]


@pytest.mark.parametrize(
    ("chunks", "param_scale", "wanted"), [(1, 0.0, [2, 4]), (1, 100.0, [4, 2]), (1000, 2.0, [4, 2])]
)
def test_chunks_and_scale_weigh_activations_against_parameters(
    chunks: int, param_scale: float, wanted: list[int]
) -> None:
    model = nn.Sequential(*(Keeps(7 - i, size=10 * i) for i in range(1, 7)))
    sample = torch.zeros(100, requires_grad=True)
    found = balance_by_size(2, model, sample, chunks=chunks, param_scale=param_scale)
    assert found == wanted


def test_the_model_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    state = torch.get_rng_state()
    balance_by_time(2, model, torch.randn(5, 3, generator=torch.Generator()), timeout=0)
    balance_by_size(2, model, torch.randn(5, 3, generator=torch.Generator()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(layer.training for layer in model)
    assert torch.equal(torch.get_rng_state(), state)


class Twin(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.detach()


class Add(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


MODELS = {
    "tuples": nn.Sequential(Twin(), Add(), nn.Linear(4, 4)),
    "in place": nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
    "skips": skipping(),
}


@pytest.mark.parametrize("name", MODELS)
def test_any_model_of_a_pipe_can_be_measured(name: str) -> None:
    model = MODELS[name]
    sample = torch.randn(8, 4, requires_grad=name == "tuples")
    for found in (
        balance_by_time(2, model, sample, timeout=0),
        balance_by_size(2, model, sample, chunks=2),
    ):
        assert sum(found) == len(model)
        assert Pipe(copy.deepcopy(model), found, chunks=2)(sample).shape == (8, 4)


def test_skips_in_a_namespace_can_be_measured() -> None:
    """torchgpipe 0.0.7 ends with a KeyError in some of these."""
    one, two = Namespace(), Namespace()
    layers = [Stash(), Stash(), Pop(), Pop()]
    for layer, namespace in zip(layers, (one, two, two, one), strict=True):
        assert isinstance(layer, Skippable)
        layer.isolate(namespace)
    assert sum(balance_by_time(2, nn.Sequential(*layers), torch.ones(1), timeout=0)) == 4


@skippable(stash=["large"])
class StashLarge(nn.Module):
    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("large", x.repeat(1000))
        return x.exp()


@skippable(pop=["large"])
class PopLarge(nn.Module):
    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        large = yield pop("large")
        return x + large[0]


def test_a_skip_counts_for_the_layer_that_makes_it() -> None:
    """It counted for every layer up to the one that pops it."""
    model = nn.Sequential(StashLarge(), *(Keeps(1) for _ in range(4)), PopLarge())
    assert balance_by_size(2, model, torch.ones(1)) == [1, 5]


def test_a_model_with_gradients_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="some parameter already has gradient"):
        balance_by_time(1, model, torch.ones(1, 2))


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"partitions": 0}, ValueError, r"partitions must be a positive integer \(0 < 1\)"),
        (
            {"partitions": 2},
            ValueError,
            r"sequence is shorter than intended partitions \(1 < 2\): a partition has at least",
        ),
        ({"module": nn.Linear(2, 2)}, TypeError, "module must be nn.Sequential"),
        ({"sample": [torch.ones(1, 2)]}, TypeError, "expected Tensor, but got list"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], kind: type[Exception], text: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    of_both = {"partitions": 1, "module": model, "sample": torch.ones(1, 2), **arguments}
    with pytest.raises(kind, match=text):
        balance_by_time(**of_both)
    with pytest.raises(kind, match=text):
        balance_by_size(of_both["partitions"], of_both["module"], of_both["sample"])
    with pytest.raises(ValueError, match="number of chunks must be positive integer"):
        balance_by_size(1, model, torch.ones(1, 2), chunks=0)
