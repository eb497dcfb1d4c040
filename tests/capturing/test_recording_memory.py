"""Changes in place, views, regions, custom functions and random numbers keep their meaning."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stageline as sl
from tests.capturing.test_recording_checked import WIDTH, Three, assert_as_plain, planned, rows

Code = Callable[[Three, Tensor], Any]
# The cut through the middle, and two cuts; the others only in `make test-full`.
SPLITS: list[Any] = [
    {"b": "begin"},
    ["b", "c"],
    pytest.param({"a": "end"}, marks=pytest.mark.slow),
    pytest.param({"b": "end"}, marks=pytest.mark.slow),
]


def relu_(self: Three, x: Tensor) -> Any:
    return self.c(self.b(self.a(x).relu_()))


def both_names(self: Three, x: Tensor) -> Any:
    hidden = self.a(x)
    other = hidden
    hidden += 1
    return self.c(self.b(other.detach()) + hidden)


def assigned(self: Three, x: Tensor) -> Any:
    hidden = self.a(x)
    hidden[:, 1:] = 0
    hidden[..., 0] += hidden[..., 1]
    hidden.masked_fill_(x > 1, 0.5)
    return self.c(self.b(hidden))


def view_changed(self: Three, x: Tensor) -> Any:
    hidden = self.a(x) * 1
    hidden[:, 0].mul_(2)
    return self.c(self.b(hidden))


def view_changed_later(self: Three, x: Tensor) -> Any:
    hidden = self.a(x) * 1
    view = hidden[:, 0]
    out = self.b(x)
    view.mul_(2)
    return self.c(out + hidden)


def base_changed_later(self: Three, x: Tensor) -> Any:
    hidden = self.a(x) * 1
    view = hidden[:, 0]
    out = self.b(x)
    hidden.mul_(2)
    return self.c(out) + view[:, None]


def received_changed(self: Three, x: Tensor) -> Any:
    hidden = self.a(x) * 1
    out = self.b(x)
    hidden.mul_(2)
    hidden[:, 0] = out[:, 0]
    return self.c(out) + hidden


def through_data(self: Three, x: Tensor) -> Any:
    hidden = self.a(x) * 1
    out = self.b(x)
    hidden.data.mul_(2)
    hidden.detach().add_(1)
    return self.c(out) + hidden


def input_changed(self: Three, x: Tensor) -> Any:
    x.mul_(2)
    return self.c(self.b(self.a(x))) + x


def input_changed_late(self: Three, x: Tensor) -> Any:
    view = x[:, 0]
    out = self.b(self.a(x.detach().clone()))
    view.mul_(2)
    return self.c(out) + x


def table_changed(self: Three, x: Tensor) -> Any:
    table = torch.zeros(x.shape[1], WIDTH)
    hidden = self.a(x + table)
    table[0] = 1
    out = self.b(hidden + table)
    table[1:] += 2
    return self.c(out + table)


def filled_by_a_layer(self: Three, x: Tensor) -> Any:
    table = torch.zeros(x.shape[0], x.shape[1], WIDTH)
    alias = table[:]
    table.copy_(self.a(x).detach())
    return self.c(self.b(x) + alias)


def changed_by_a_module(self: Three, x: Tensor) -> Any:
    hidden = torch.relu(self.a(x)) - 0.1
    before = hidden
    out = self.b(x)
    after = self.leaf(hidden)
    return self.c(out + after) + before


IN_PLACE: list[Code] = [
    *(relu_, both_names, assigned, view_changed, view_changed_later, base_changed_later),
    *(received_changed, through_data, input_changed, input_changed_late, table_changed),
    *(filled_by_a_layer, changed_by_a_module),
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("code", IN_PLACE, ids=lambda code: code.__name__)
def test_a_change_in_place_is_seen_by_all_who_look(code: Code, split: Any) -> None:
    model = Three(code, nn.ReLU(inplace=True))
    assert_as_plain(model, [rows()], [rows(2)], [rows(4, 7)], split=split)


def without_gradients(self: Three, x: Tensor) -> Any:
    hidden = self.a(x)
    with torch.no_grad():
        out = self.b(hidden * 2) * 3
        scale = self.a.weight * 2
    return self.c(out + hidden) + scale.sum()


def with_again(self: Three, x: Tensor) -> Any:
    with torch.no_grad():
        hidden = self.a(x)
        with torch.enable_grad():
            out = self.b(hidden)
    return self.c(out + hidden)


def switched(self: Three, x: Tensor) -> Any:
    torch.set_grad_enabled(False)
    hidden = self.a(x)
    torch.set_grad_enabled(True)
    return self.c(self.b(hidden))


def half(self: Three, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = self.a(x)
        with torch.autocast("cpu", enabled=False):
            out = self.b(hidden.float())
        out = out @ out.transpose(1, 2)
    return self.c(out.float() @ hidden.float())


def decorated(self: Three, x: Tensor) -> Any:
    def attend(hidden: Tensor) -> Any:
        return self.b(hidden) @ hidden.transpose(1, 2)

    hidden = self.a(x)
    in_half: Any = torch.autocast("cpu", torch.bfloat16)(attend)
    return self.c(in_half(hidden).float() @ hidden)


def detached(self: Three, x: Tensor) -> Any:
    hidden = self.a(x)
    return self.c(self.b(hidden.detach()) + hidden.detach() + x)


class Steep(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 7, None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 7


def call_of(function: Any) -> Callable[..., Any]:
    return function.apply  # type: ignore[no-any-return]  # torch has no type for it


def custom(self: Three, x: Tensor) -> Any:
    hidden, steep = self.a(x), call_of(Steep)
    return self.c(self.b(steep(hidden, 2.0) + steep(hidden, x.shape[1])))


def custom_in_place(self: Three, x: Tensor) -> Any:
    hidden = self.a(x) * 1
    return self.c(self.b(x) + call_of(InPlace)(hidden)) + hidden


def recomputed(self: Three, x: Tensor) -> Any:
    def inner(hidden: Tensor) -> Tensor:
        return F.dropout(self.b(hidden), 0.5) * 2

    hidden = checkpoint(inner, self.a(x), use_reentrant=False)
    return self.c(checkpoint(inner, hidden, use_reentrant=True))


def mapped(self: Three, x: Tensor) -> Any:
    return self.c(self.b(torch.vmap(lambda row: row * 2 + row.sum())(self.a(x))))


def differentiated(self: Three, x: Tensor) -> Any:
    hidden = self.a(x)
    (slope,) = torch.autograd.grad((hidden**3).sum(), hidden, create_graph=True)
    return self.c(self.b(slope))


OUTSIDE = torch.arange(float(WIDTH))


def constants(self: Three, x: Tensor, table: Tensor = OUTSIDE * 2) -> Any:
    hidden = self.b(self.a(x) * self.note + OUTSIDE + table)
    return self.c(hidden + torch.tensor([1.0, 2, 3, 4]))


def complex_numbers(self: Three, x: Tensor) -> Any:
    spectrum = torch.fft.fft(self.a(x))
    out = self.c(self.b(spectrum.real) + spectrum.imag)
    return torch.complex(out, out)


def randomness(self: Three, x: Tensor) -> Any:
    early = torch.rand(x.shape[1], WIDTH)
    hidden = self.a(x) + torch.randn_like(x) + torch.randperm(WIDTH)
    hidden = self.b(F.dropout(hidden, 0.5) + early + torch.empty(WIDTH).bernoulli_(0.5))
    return self.c(hidden * torch.randint(0, 5, (x.shape[1], 1)) + early)


KEPT: list[Code] = [
    *(without_gradients, with_again, switched, half, decorated, detached, custom, recomputed),
    *(custom_in_place, mapped, differentiated, constants, complex_numbers, randomness),
]


@pytest.mark.filterwarnings("ignore:.*checkpoint")  # that the stages do not recompute
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("code", KEPT, ids=lambda code: code.__name__)
def test_what_opened_code_does_keeps_its_meaning(code: Code, split: Any) -> None:
    model = Three(code, note=torch.full((WIDTH,), 2.0))
    assert_as_plain(model, [rows()], [rows(2)], [rows(4, 7)], split=split)


REFUSED: dict[str, Code] = {
    "torch.Tensor": lambda self, x: self.b(self.a(x) + torch.Tensor([1, 2, 3, 4])),
    "LongTensor": lambda self, x: self.b(self.a(x) + torch.LongTensor([len(x)])),
    "from_numpy": lambda self, x: self.b(self.a(x) + torch.from_numpy(np.ones(4, "float32"))),
    "numpy": lambda self, x: self.b(self.a(x) * float(x[0, 0].numpy().sum())),
    "random": lambda self, x: self.b(self.a(x) * random.random()),
    "numpy.random": lambda self, x: self.b(self.a(x) * float(np.random.rand())),
    "torch.func.grad": lambda self, x: self.b(torch.func.grad(lambda z: (z**3).sum())(self.a(x))),
    "register_hook": lambda self, x: (lambda h: (h.register_hook(print), self.b(h)))(self.a(x)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(sl.CaptureError, match=r"test_recording_memory\.py:\d+ in "):
        planned(Three(REFUSED[name]), {"a": "end"}, (rows(),))


def test_a_vmap_that_hides_a_value_is_refused_with_its_line() -> None:
    def forward(self: Three, x: Tensor) -> Any:
        hidden = self.a(x)
        doubled = hidden * 2
        return self.b(torch.vmap(lambda row: row + doubled.sum())(hidden))

    with pytest.raises(sl.CaptureError, match=r"memory\.py:\d+ in forward.* pass it as an"):
        planned(Three(forward), {"a": "end"}, (rows(),))
