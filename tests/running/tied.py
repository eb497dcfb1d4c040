"""Models in which a tensor is used by several stages, and how their gradients are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import plain_step

ROWS, WIDTH, MICROBATCHES = 8, 6, 4


def linears(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def tie(model: nn.Sequential, one: int, other: int, name: str = "weight") -> nn.Sequential:
    """Let one layer use the parameter of another one."""
    setattr(model[one], name, model.get_parameter(f"{other}.{name}"))
    return model


def weight(model: nn.Module, layer: int) -> nn.Parameter:
    return model.get_parameter(f"{layer}.weight")


def first_and_last() -> nn.Sequential:
    """A weight at both ends, as a language model ties its embedding and its head."""
    return tie(linears(), 3, 0)


def two_parameters() -> nn.Sequential:
    """Two Parameters over one tensor: nothing but the memory says that they are tied."""
    model = linears()
    model[3].weight = nn.Parameter(weight(model, 0).detach())
    return model


def three_times() -> nn.Sequential:
    """One block three times, with layers of their own between."""
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(
        block, nn.Linear(WIDTH, WIDTH), block, nn.Linear(WIDTH, WIDTH), block, nn.Tanh()
    )


def embedding() -> nn.Sequential:
    """Tokens in, tokens out."""
    model = nn.Sequential(
        nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11)
    )
    return tie(model, 3, 0)


Make = Callable[[], nn.Sequential]

CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "first and last": (first_and_last, {"split": 4}),
    "two stages": (first_and_last, {"split": 2}),
    "two parameters over one tensor": (two_parameters, {"split": 4}),
    "one module in three stages": (three_times, {"split": [2, 2, 2]}),
    "three stages on two ranks": (three_times, {"split": [2, 2, 2], "ranks": 2}),
    "a holder that has two stages": (first_and_last, {"split": 4, "ranks": 2}),
    "all on one rank": (three_times, {"split": [2, 2, 2], "ranks": 1}),
    "two parameters on one rank": (two_parameters, {"split": 4, "ranks": 1}),
    "embedding and head": (embedding, {"split": 4}),
}


def made(make: Make, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return make()


def batch(make: Make, seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    if make is embedding:
        return torch.randint(11, (ROWS,)), torch.randint(11, (ROWS,))
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def loss_of(make: Make) -> Any:
    return F.cross_entropy if make is embedding else F.mse_loss


def pipeline(make: Make, model: nn.Module | None = None, **settings: Any) -> sl.Pipeline:
    settings = {"split": 4, "num_microbatches": MICROBATCHES, "loss_fn": loss_of(make), **settings}
    return sl.Pipeline(made(make) if model is None else model, **settings)


def plain(make: Make, model: nn.Module, x: Tensor, y: Tensor) -> None:
    plain_step(
        model,
        x,
        target=y,
        num_microbatches=MICROBATCHES,
        loss_fn=loss_of(make),
        num_threads=1,
    )


def wanted_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of the plain model; those of Parameters over one memory are added."""
    wanted: dict[str, Tensor] = {}
    by_address: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        first = by_address.setdefault(parameter.data_ptr(), name)
        assert parameter.grad is not None
        wanted[first] = parameter.grad + wanted[first] if first in wanted else parameter.grad
    return wanted


def differences(got: dict[str, Tensor], wanted: dict[str, Tensor], tied: set[str]) -> list[str]:
    """What is not as it should be: within 1e-6 where tied (sums in another order), else equal."""
    faults = [] if list(got) == list(wanted) else [f"{list(got)} instead of {list(wanted)}"]
    for name in got.keys() & wanted.keys():
        a, b = wanted[name], got[name]
        error = float((a - b).abs().max() / a.abs().max())
        if error > 1e-6 if name in tied else not torch.equal(a, b):
            faults.append(f"{name}: {error}")
    return faults


def gradients(pipe: sl.Pipeline) -> dict[str, Tensor]:
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def tied_names(make: Make) -> set[str]:
    """First names of all that stands twice in a model."""
    model, seen, tied = made(make), dict[int, str](), set[str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = seen.setdefault(parameter.data_ptr(), name)
        if first != name:
            tied.add(first)
    return tied
