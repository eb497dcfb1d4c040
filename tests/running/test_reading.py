"""Code of the user's own is read: only what may draw random numbers is followed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stageline.running.streams.candidates import Candidates, function_may_draw
from stageline.running.streams.reading import forward_draws_nothing, function_draws_nothing

SCALE = 0.5
_hidden = nn.Dropout()
_noise = torch.randn
_relu = torch.relu


class Parts(nn.Module):
    """What the forwards below use."""

    size: int = 4

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(()))
        self.shift: Tensor
        self.register_buffer("shift", torch.zeros(()))
        self.depth = 2
        self.shape = [2, 2]
        self.activation = F.gelu
        self.unlisted = [nn.Dropout()]


def scaled(x: Tensor) -> Tensor:
    return x * math.sqrt(2.0) + SCALE


def noisy(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


class Residual(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + x)


class Loop(Parts):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        for _ in range(self.depth):
            x = nn.functional.gelu(self.linear(x))
        return x.view(-1, *self.shape).flatten(1)


class Methods(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.twice(x) + self.once(x)

    def twice(self, x: Tensor) -> Tensor:
        return self.once(self.once(x))

    @staticmethod
    def once(x: Tensor) -> Tensor:
        return scaled(x)


class Attributes(Parts):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and self.training:
            x = x.masked_fill(mask, float("-inf"))
        return self.activation(x * self.scale + self.shift)[:, : self.size]


class Comprehension(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum(0)


class Captured(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.linear(x) for _ in range(2)]).sum(0)


class Remembers(Parts):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        return _relu(x)


class Recursive(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.dim() > 4 else self.forward(x[None])


class Refuses(Parts):
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            raise ValueError(f"wanted rows, got {x.shape}")
        return x.T.contiguous().to(torch.float64)


@pytest.mark.parametrize(
    "kind", [Residual, Loop, Methods, Attributes, Comprehension, Captured, Remembers, Refuses]
)
def test_code_that_draws_nothing_is_found(kind: type[nn.Module]) -> None:
    assert forward_draws_nothing(kind())
    assert not Candidates.among(kind().modules()).may_draw()


class Draws(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(4)


class DrawsByMethod(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).bernoulli_(0.5)


class DrawsByName(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return x + _noise(4)


class DrawsInHelper(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return noisy(x)


class DrawsInMethod(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.twice(x)

    def twice(self, x: Tensor) -> Tensor:
        return F.dropout(x, training=self.training)


class DrawsUnderAName(Parts):
    """A name that tensors have too, called on the module in ways that hide whose it is."""

    def sum(self, x: Tensor) -> Tensor:
        return noisy(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.sum(x)


class Alias(DrawsUnderAName):
    def forward(self, x: Tensor) -> Tensor:
        this = self
        return this.sum(x)


class AliasInside(DrawsUnderAName):
    def forward(self, x: Tensor) -> Tensor:
        return next(self.sum(x) for _ in range(1))


class HandsItselfOn(DrawsUnderAName):
    def forward(self, x: Tensor) -> Tensor:
        return summed(self, x)


def summed(module: Any, x: Tensor) -> Tensor:
    total: Tensor = module.sum(x)
    return total


class Inherits(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class UsesPython(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class UsesUnlisted(Parts):
    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.unlisted[0](x)
        return dropped


class Awkward:
    """Cannot be compared with anything."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("not comparable")

    def __hash__(self) -> int:
        raise TypeError("not hashable")

    def __call__(self, x: Tensor) -> Tensor:
        return noisy(x)


class UsesAwkward(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.awkward = Awkward()

    def forward(self, x: Tensor) -> Tensor:
        return self.awkward(x)


class UsesHidden(Parts):
    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = _hidden(x)
        return dropped


class Makes(Parts):
    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = nn.Dropout()(x)
        return dropped


class Imports(Parts):
    def forward(self, x: Tensor) -> Tensor:
        from torch import randn

        return x + randn(4)


class Checkpoints(Parts):
    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(self.linear, x, use_reentrant=False)
        return again


class Asks(Parts):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = getattr(torch, "rand")(4)  # noqa: B009
        return x + found


class Property(Parts):
    @property
    def noise(self) -> Tensor:
        return torch.rand(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.noise


class Answers(Parts):
    def __getattr__(self, name: str) -> Any:
        return torch.rand(4) if name == "noise" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        noise: Tensor = self.noise
        return x + noise


class Called(Parts):
    def __call__(self, x: Tensor) -> Tensor:
        return noisy(x)

    def forward(self, x: Tensor) -> Tensor:
        return x


def decorated(function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    @wraps(function)
    def call(self: Any, x: Tensor) -> Tensor:
        return function(self, noisy(x))

    return call


class Decorated(Parts):
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        return x


class Hooks(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(noisy)
        return x


NOT_SURE = [
    Draws,
    DrawsByMethod,
    DrawsByName,
    DrawsInHelper,
    DrawsInMethod,
    DrawsUnderAName,
    Alias,
    AliasInside,
    HandsItselfOn,
    Inherits,
    UsesPython,
    UsesUnlisted,
    UsesAwkward,
    UsesHidden,
    Makes,
    Imports,
    Checkpoints,
    Asks,
    Property,
    Answers,
    Called,
    Decorated,
    Hooks,
    Recursive,
]


@pytest.mark.parametrize("kind", NOT_SURE)
def test_code_of_which_that_is_not_sure_may_draw(kind: type[nn.Module]) -> None:
    assert not forward_draws_nothing(kind())
    assert Candidates.among([kind()]).may_draw()


def test_a_forward_of_one_module_only_may_draw() -> None:
    module = Residual()
    module.forward = lambda x: noisy(x)  # type: ignore[method-assign]
    assert Candidates.among([module]).may_draw()


def test_a_hook_may_draw() -> None:
    module = Residual()
    module.register_forward_hook(lambda module, args, output: noisy(output))
    assert Candidates.among([module]).may_draw()


def test_losses_are_read_too() -> None:
    weight = torch.ones(4)

    def weighed(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), weight=weight)

    def perturbed(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output + torch.randn_like(output), target)

    assert not function_may_draw(weighed)
    assert not function_may_draw(lambda output, target: (output - target).square().mean())
    assert function_may_draw(perturbed)
    assert not function_may_draw(partial(F.mse_loss, reduction="sum"))
    assert function_may_draw(partial(perturbed))
    assert function_may_draw(partial(lambda loss, output, target: loss(output, target), perturbed))
    assert not function_draws_nothing(torch.rand)


def test_a_cell_that_is_not_bound_yet_is_not_sure() -> None:
    def make() -> Callable[[Tensor], Tensor]:
        def use(x: Tensor) -> Tensor:
            return later(x)

        if SCALE > 1:
            later = noisy
        return use

    assert not function_draws_nothing(make())
