"""The same script makes an optimizer on every rank, also where there is nothing to optimize."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import stageline as sl
from stageline.running.placeholder import Placeholder
from stageline.testing import RankPool, plain_step

MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "in the middle": lambda: [nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Tanh(), nn.Linear(6, 3)],
    "first and last": lambda: [nn.Flatten(), nn.Linear(4, 6), nn.Linear(6, 3), nn.Tanh()],
    "matrices only": lambda: [nn.Flatten(), nn.Linear(4, 6, bias=False), nn.Tanh(), matrix()],
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": torch.optim.AdamW,
    "Adam, foreach": partial(torch.optim.Adam, foreach=True, amsgrad=True),
    "Adam, fused": partial(torch.optim.Adam, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
}
LARGE = 1e6  # larger than any norm here, so that clipping changes nothing


def matrix() -> nn.Module:
    return nn.Linear(6, 3, bias=False)


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*MODELS[kind]())


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return torch.randn(8, 4), torch.randn(8, 3)


def pipeline(net: nn.Sequential) -> sl.Pipeline:
    return sl.Pipeline(net, split=4, num_microbatches=4, loss_fn=F.mse_loss, timeout=20)


def _train(rank: int, kind: str, name: str) -> dict[str, Any]:
    """Train for three steps, and go on with another optimizer before the last one."""
    pipe = pipeline(model(kind))
    make = OPTIMIZERS[name]
    optimizer = make(pipe.parameters())
    norms = []
    for step in range(3):
        if step == 2:
            state, optimizer = optimizer.state_dict(), make(pipe.parameters())
            optimizer.load_state_dict(state)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        x, y = batch(step)
        pipe.step(x, target=y)
        norms.append(float(clip_grad_norm_(pipe.parameters(), LARGE)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    told = {
        "weights": {name: p.detach() for name, p in pipe.named_parameters()},
        "state": list(pipe.state_dict()),
        "norms": norms,
        "elements": sum(p.numel() for p in pipe.parameters()),
        "parameters": len(list(pipe.parameters())),
        "gradients": [p.grad for p in pipe.parameters() if p.grad is not None],
    }
    pipe.close()
    return told


def trained_alone(kind: str, name: str) -> dict[str, Tensor]:
    net = model(kind)
    make = OPTIMIZERS[name]
    optimizer = make(net.parameters())
    for step in range(3):
        if step == 2:
            state, optimizer = optimizer.state_dict(), make(net.parameters())
            optimizer.load_state_dict(state)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        x, y = batch(step)
        plain_step(net, x, target=y, num_microbatches=4, loss_fn=F.mse_loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in net.named_parameters()}


def assert_same_weights(ranks: Iterable[dict[str, Tensor]], wanted: dict[str, Tensor]) -> None:
    got = {name: weight for rank in ranks for name, weight in rank.items()}
    assert list(got) == list(wanted)
    for name, weight in wanted.items():
        assert torch.equal(got[name], weight), name


@pytest.mark.processes
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("in the middle", name) for name in OPTIMIZERS if name != "Muon"),
        ("first and last", "AdamW"),
        ("matrices only", "Muon"),
    ],
)
def test_ranks_without_parameters_train_as_the_plain_model(
    kind: str, name: str, four_ranks: RankPool
) -> None:
    ranks = four_ranks.run(_train, kind, name)
    wanted = trained_alone(kind, name)
    assert any(not torch.equal(p, wanted[n]) for n, p in model(kind).named_parameters())
    assert_same_weights((told["weights"] for told in ranks), wanted)
    assert sum(told["elements"] for told in ranks) == sum(p.numel() for p in wanted.values())
    assert [key for told in ranks for key in told["state"]] == list(wanted)
    empty = [told for told in ranks if not told["weights"]]
    assert len(empty) == 2
    for told in empty:
        assert told["norms"] == [0, 0, 0]
        assert told["parameters"] == 1
        assert told["gradients"] == []


def _train_by_lbfgs(rank: int) -> dict[str, Tensor]:
    pipe = pipeline(model("in the middle"))
    optimizer = torch.optim.LBFGS(pipe.parameters(), lr=0.1, max_iter=1)
    for step in range(3):
        x, y = batch(step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            return pipe.step(x, target=y).loss

        optimizer.step(closure)
    weights = {name: p.detach() for name, p in pipe.named_parameters()}
    pipe.close()
    return weights


@pytest.mark.processes
@pytest.mark.usefixtures("one_thread")
def test_lbfgs_runs_on_ranks_without_parameters(four_ranks: RankPool) -> None:
    """Each rank looks at its own parameters, as one LBFGS per stage of the plain model does."""
    net = model("in the middle")
    by_stage = [
        torch.optim.LBFGS(stage.parameters(), lr=0.1, max_iter=1) for stage in (net[0], net[3])
    ]
    for step in range(3):
        x, y = batch(step)
        net.zero_grad()
        result = plain_step(net, x, target=y, num_microbatches=4, loss_fn=F.mse_loss)
        for optimizer in by_stage:
            optimizer.step(partial(float, result.loss))
    wanted = {name: p.detach() for name, p in net.named_parameters()}
    assert_same_weights(four_ranks.run(_train_by_lbfgs), wanted)


def _train_what_is_not_frozen(rank: int, in_the_pipeline: bool) -> tuple[dict[str, Tensor], int]:
    """Freeze all but the last layer, in the model or later, and train what requires gradients."""
    net = model("first and last")
    for parameter in [] if in_the_pipeline else net[1].parameters():
        parameter.requires_grad_(False)
    pipe = pipeline(net)
    if in_the_pipeline:
        for parameter in pipe.parameters():
            parameter.requires_grad_(False)
        for name, parameter in pipe.named_parameters():
            parameter.requires_grad_(name.startswith("2."))
    optimizer = torch.optim.SGD([p for p in pipe.parameters() if p.requires_grad], lr=0.1)
    x, y = batch(0)
    pipe.step(x, target=y)
    optimizer.step()
    told = {name: p.detach() for name, p in pipe.named_parameters()}
    pipe.close()
    return told, len(optimizer.param_groups[0]["params"])


@pytest.mark.processes
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("in_the_pipeline", [False, True])
def test_a_rank_whose_parameters_are_frozen_has_something_for_its_optimizer(
    in_the_pipeline: bool, four_ranks: RankPool
) -> None:
    """A script that leaves out frozen parameters would fail where all of them are."""
    net = model("first and last")
    optimizer = torch.optim.SGD(net[2].parameters(), lr=0.1)
    x, y = batch(0)
    plain_step(net, x, target=y, num_microbatches=4, loss_fn=F.mse_loss)
    optimizer.step()
    ranks = four_ranks.run(_train_what_is_not_frozen, in_the_pipeline)
    wanted = {name: p.detach() for name, p in net.named_parameters()}
    assert_same_weights((weights for weights, _ in ranks), wanted)
    assert [count for _, count in ranks] == [1, 1, 2, 1]


def test_in_one_process_an_optimizer_says_what_it_says_of_the_plain_model() -> None:
    pipe = sl.Pipeline(nn.Sequential(nn.ReLU(), nn.Tanh()), split=2)
    assert list(pipe.parameters()) == []
    with pytest.raises(ValueError, match="empty parameter list"):
        torch.optim.AdamW(pipe.parameters())


def optimizers_with_options() -> Iterable[Any]:
    """Yield every optimizer of torch, and each with one of the options that change its code."""
    for name, kind in vars(torch.optim).items():
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer:
            known = inspect.signature(kind).parameters
            for options in ({}, {"foreach": True}, {"fused": True}, {"capturable": True}):
                if all(option in known for option in options):
                    yield pytest.param(kind, options, id=" ".join([name, *options]))


@pytest.mark.parametrize(("kind", "options"), list(optimizers_with_options()))
def test_every_optimizer_accepts_a_placeholder_and_does_not_change_it(
    kind: Callable[..., Optimizer], options: dict[str, bool]
) -> None:
    placeholder = Placeholder.on(torch.device("cpu"))
    optimizer = kind(iter([placeholder]), **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    for _ in range(3):
        optimizer.zero_grad()
        assert clip_grad_norm_(iter([placeholder]), 1.0) == 0
        optimizer.step(lambda: 1.0)
        scheduler.step()
    again = kind(iter([placeholder]), **options)
    again.load_state_dict(optimizer.state_dict())
    again.step(lambda: 1.0)
    assert placeholder.shape == (0, 1)
    assert placeholder.grad is None
