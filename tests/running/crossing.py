"""Stages between which unusual values cross; every case is compared with the plain Sequential."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import stageline as sl
from stageline.running.transports.base import ThreadTransport
from stageline.testing import plain_step


class Lambda(nn.Module):
    """A stage with one weight, so that every stage has a gradient to compare."""

    def __init__(self, function: Callable[[nn.Linear, Any], Any], width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(self.linear, value)


def two_tensors() -> list[nn.Module]:
    return [
        Lambda(lambda f, x: (f(x), x * 2)),
        Lambda(lambda f, v: (f(v[0]) + v[1], v[1])),
        Lambda(lambda f, v: f(v[0]) * v[1]),
    ]


def nested_tree() -> list[nn.Module]:
    return [
        Lambda(
            lambda f, x: {"a": [f(x), None, 3], "b": (x.argmax(1), {"c": f(x).sin()}), "t": True}
        ),
        Lambda(
            lambda f, v: {
                "s": f(v["a"][0]) * v["a"][2] if v["t"] else None,
                "i": v["b"][0],
                **v["b"][1],
            }
        ),
        Lambda(lambda f, v: f(v["s"] + v["c"]) * v["i"].unsqueeze(1)),
    ]


def integers_and_booleans() -> list[nn.Module]:
    return [
        Lambda(lambda f, x: (f(x), x > 0, x.long(), x.to(torch.int8))),
        Lambda(lambda f, v: (f(v[0]).masked_fill(v[1], 0.5), v[2], v[3])),
        Lambda(lambda f, v: f(v[0]) * v[1] + v[2]),
    ]


def non_contiguous() -> list[nn.Module]:
    return [
        Lambda(lambda f, x: f(x).t()),
        Lambda(lambda f, v: f(v.t()).unsqueeze(1).expand(-1, 3, -1)),
        Lambda(lambda f, v: f(v).transpose(1, 2)[:, ::2]),
        Lambda(lambda f, v: f(v.sum(2).repeat(1, 2))),
    ]


def expanded_gradient() -> list[nn.Module]:
    """The last stage passes through, so an expanded gradient travels back."""
    return [Lambda(lambda f, x: f(x)), Lambda(lambda f, x: f(x)), nn.Identity()]


def channels_last() -> list[nn.Module]:
    def images(f: nn.Linear, x: Tensor) -> Any:
        return (
            f(x).view(-1, 6, 1, 1).expand(-1, 6, 4, 4).contiguous(memory_format=torch.channels_last)
        )

    return [
        Lambda(images),
        nn.Conv2d(6, 6, 3, padding=1).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        Lambda(lambda f, v: f(v.mean((2, 3)))),
    ]


def no_gradient_needed() -> list[nn.Module]:
    """Some outputs of a stage need no gradient although they are floating point."""
    return [
        Lambda(lambda f, x: (f(x), f(x).detach(), torch.ones(6))),
        Lambda(lambda f, v: f(v[0]) * v[1] + v[2]),
    ]


def gradient_for_some() -> list[nn.Module]:
    """The second output is never used, so no gradient comes back for it."""
    return [
        Lambda(lambda f, x: (f(x), f(x) * 3)),
        Lambda(lambda f, v: (v[0] * 2, f(v[0]))),
        Lambda(lambda f, v: f(v[1])),
    ]


def frozen_first_stage() -> list[nn.Module]:
    first = Lambda(lambda f, x: f(x))
    first.requires_grad_(False)
    return [first, Lambda(lambda f, x: f(x).relu()), Lambda(lambda f, x: f(x))]


def frozen_middle_stage() -> list[nn.Module]:
    middle = Lambda(lambda f, x: f(x).relu())
    middle.requires_grad_(False)
    return [Lambda(lambda f, x: f(x)), middle, Lambda(lambda f, x: f(x))]


def in_place_first_layer() -> list[nn.Module]:
    return [
        Lambda(lambda f, x: f(x)),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)),
    ]


def passed_on_unchanged() -> list[nn.Module]:
    """A skip connection by hand: the second value goes through the middle stage untouched."""
    return [
        Lambda(lambda f, x: (f(x), f(x).exp())),
        Lambda(lambda f, v: (f(v[0]), v[1])),
        Lambda(lambda f, v: f(v[0] + v[1])),
    ]


def same_tensor_twice() -> list[nn.Module]:
    def twice(f: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
        y = f(x)
        return y, y

    return [Lambda(twice), Lambda(lambda f, v: f(v[0] * v[1]))]


def returns_a_parameter() -> list[nn.Module]:
    return [
        Lambda(lambda f, x: (f(x), f.weight)),
        Lambda(lambda f, v: f(v[0] @ v[1].t())),
    ]


CASES: dict[str, Callable[[], list[nn.Module]]] = {
    make.__name__: make
    for make in (
        two_tensors,
        nested_tree,
        integers_and_booleans,
        non_contiguous,
        expanded_gradient,
        channels_last,
        no_gradient_needed,
        gradient_for_some,
        frozen_first_stage,
        frozen_middle_stage,
        in_place_first_layer,
        passed_on_unchanged,
        same_tensor_twice,
        returns_a_parameter,
    )
}

ROWS, WIDTH, MICROBATCHES = 12, 6, 4


def sum_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum() if output.shape == target.shape else output.sum()


def differences(name: str, transport: ThreadTransport | str, schedule: str = "1f1b") -> list[str]:
    """Train two steps both ways; return everything that differs."""
    loss_fn = (
        (lambda output, target: output.sum()) if name == "expanded_gradient" else sum_of_squares
    )

    def build() -> tuple[list[nn.Module], Tensor, Tensor]:
        torch.manual_seed(3)
        stages = CASES[name]()
        return stages, torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)

    stages, x, y = build()
    plain = nn.Sequential(*stages)
    wanted = [
        plain_step(
            plain,
            x,
            target=y,
            num_microbatches=MICROBATCHES,
            loss_fn=loss_fn,
            loss_reduction="sum",
            num_threads=1,
        )
        for _ in range(2)
    ]
    stages, x, y = build()
    pipe = sl.Pipeline.from_stages(
        stages,
        num_microbatches=MICROBATCHES,
        schedule=schedule,
        loss_fn=loss_fn,
        loss_reduction="sum",
        transport=transport,
        timeout=30,
    )
    losses = [pipe.step(x, target=y).loss for _ in range(2)]
    wrong = [f"loss of step {i}" for i in range(2) if not torch.equal(losses[i], wanted[i].loss)]
    gradients = {key: value.grad for key, value in plain.named_parameters()}
    for key, parameter in pipe.named_parameters():
        mine, theirs = parameter.grad, gradients[key]
        if (mine is None) != (theirs is None):
            wrong.append(f"{key}: {mine} instead of {theirs}")
        elif mine is not None and theirs is not None and not torch.equal(mine, theirs):
            wrong.append(f"gradient of {key}")
    pipe.close()
    return wrong


def differences_in_process(rank: int, name: str) -> list[str]:
    torch.set_num_threads(1)
    return differences(name, "process-group")
