"""A model whose late stages need arguments, and who of the ranks is given them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import plain_step

WIDTH = 6


class Asking(nn.Module):
    """Late stages use a mask, a shape, a value and a number; the way goes by what is in x."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c, self.d = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.dropout = dropout
        self.factor = 1

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        h: Tensor = self.b(self.a(x).relu())
        if x[0, 0] > 0:
            h = h * (2 * self.factor)
        h = F.dropout(self.c(h), self.dropout, self.training).view(x.shape[0], -1)
        if mask is not None:
            h = h * mask
        made: Tensor = self.d(h)
        return made if mask is None else made * scale + mask[:, :3]


def built(model: nn.Module, **settings: Any) -> sl.Pipeline:
    """Build a pipeline with a stage for each process; ``num_microbatches`` is 3."""
    cuts = ("a", "b", "c")[: dist.get_world_size() - 1]
    return sl.Pipeline(
        model,
        example_args=(torch.ones(2, 4), torch.ones(2, WIDTH)),
        split=dict.fromkeys(cuts, "end"),
        **{"num_microbatches": 3, "loss_fn": F.cross_entropy, "timeout": 30, **settings},
    )


def batch(rows: int = 7, sign: int = 1, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of the model and a target."""
    torch.manual_seed(seed)
    x = torch.randn(rows, 4)
    x[:, 0] = x[:, 0].abs() * sign
    return x, torch.rand(rows, WIDTH), torch.randint(3, (rows,))


Data = tuple[tuple[Any, ...], dict[str, Any]]


def handed(where: str, rank: int, args: tuple[Any, ...], **kwargs: Any) -> Data:
    """Return what a rank is given: all, nothing, or what only the ends of the pipeline have."""
    last = dist.get_world_size() - 1
    if where == "all" or (where == "first" and rank == 0) or (where == "middle" and rank == 0):
        if where == "middle":
            kwargs.pop("target", None)
        return args, kwargs
    if where == "ends" and rank == 0:
        return args, {name: value for name, value in kwargs.items() if name != "target"}
    has_target = (where == "ends" and rank == last) or (where == "middle" and rank == 1)
    return (), {"target": kwargs["target"]} if has_target and "target" in kwargs else {}


def differing(pipe: sl.Pipeline, plain: nn.Module) -> list[str]:
    """Return the names of gradients that are not those of the plain model."""
    wanted = dict(plain.named_parameters())
    return [
        name
        for name, parameter in pipe.named_parameters()
        if parameter.grad is None or not torch.equal(parameter.grad, grad_of(wanted[name]))
    ]


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def on_meta(plain: Asking) -> tuple[Asking, dict[str, Any]]:
    """Return a twin without numbers, and the setting that gives it those of a model."""
    weights = plain.state_dict()

    def read(stage: nn.Module, index: int) -> None:
        for name, tensor in stage.state_dict().items():
            tensor.copy_(weights[name])

    with torch.device("meta"):
        return Asking(plain.dropout), {"init_stage": read}


def trained(
    rank: int, where: str, settings: dict[str, Any], begins_on_meta: bool = False
) -> list[str]:
    """Train on batches of several sizes, signs and kinds; return what is not as in the model."""
    torch.manual_seed(0)
    model, plain = Asking(dropout=0.25), Asking(dropout=0.25)
    plain.load_state_dict(model.state_dict())
    if begins_on_meta:
        model, reading = on_meta(plain)
        settings = {**settings, **reading}
    pipe = built(model, **settings)
    wrong = []
    kinds: list[tuple[str, int, int, dict[str, Any], Callable[[], AbstractContextManager[Any]]]] = [
        ("as recorded", 7, 1, {}, nullcontext),
        ("another way", 7, -1, {}, nullcontext),
        ("another size", 4, 1, {}, nullcontext),
        ("one row", 1, -1, {}, nullcontext),
        ("a number", 7, 1, {"scale": 2.5}, nullcontext),
        ("autocast", 6, 1, {}, lambda: torch.autocast("cpu", torch.bfloat16)),
        ("without a mask", 7, 1, {"mask": None}, nullcontext),
        ("as recorded again", 7, 1, {}, nullcontext),
    ]
    for step, (name, rows, sign, more, mode) in enumerate(kinds):
        x, mask, y = batch(rows, sign, seed=3)
        args = (x,) if "mask" in more else (x, mask)
        pipe.zero_grad()
        plain.zero_grad()
        given, named = handed(where, rank, args, target=y, **more)
        with mode():
            loss = pipe.step(*given, **named).loss
            wanted = plain_step(
                plain,
                *args,
                kwargs=more,
                target=y,
                num_microbatches=3,
                loss_fn=F.cross_entropy,
                step=step,
                num_threads=1,
            )
        if not torch.equal(loss, wanted.loss):
            wrong.append(f"{name}: loss")
        wrong += [f"{name}: {parameter}" for parameter in differing(pipe, plain)]
    pipe.eval()
    plain.eval()
    x, mask, _ = batch(11)
    with torch.no_grad():
        parts = zip(x.tensor_split(3), mask.tensor_split(3), strict=True)
        outputs = torch.cat([plain(*part) for part in parts])
    for _ in range(2):
        given, _ = handed(where, rank, (x, mask))
        if not torch.equal(pipe(*given), outputs):
            wrong.append("inference")
    pipe.close()
    return wrong
