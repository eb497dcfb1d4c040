"""Decisions of opened code: another outcome is another recording or an error, never the old way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stageline as sl
from tests.capturing.test_recording_checked import (
    WIDTH,
    Returns,
    Run,
    Three,
    assert_as_plain,
    planned,
    rows,
)


def positive(batch: int = 3) -> Tensor:
    return rows(batch).abs()


def negative(batch: int = 3) -> Tensor:
    return -rows(batch).abs()


def early_return(self: Three, x: Tensor) -> Any:
    hidden = self.a(x)
    return self.c(hidden) if x.sum() < 0 else self.b(hidden)


def caught(self: Three, x: Tensor) -> Any:
    hidden = self.a(x)
    try:
        if x.sum() < 0:
            raise ValueError
        hidden = hidden * 2
    except ValueError:
        hidden = hidden * 3
    return self.b(hidden)


def loop(self: Three, x: Tensor) -> Any:
    hidden = self.a(x)
    for _ in range(int((x[0, :2, 0] > 0).sum())):
        hidden = hidden + 1
    return self.b(hidden)


ABOUT_INPUTS: dict[str, Callable[[Three, Tensor], Any]] = {
    "bool": lambda self, x: self.b(self.a(x) * (2 if x.sum() > 0 else 3)),
    "all and any": lambda self, x: self.b(self.a(x) * (2 if (x > 0).all() else 3)),
    "item": lambda self, x: self.b(self.a(x) * x.sum().item()),
    "int": lambda self, x: self.b(self.a(x) * int(x.sum())),
    "float": lambda self, x: self.b(self.a(x) * float(x.sum())),
    "tolist": lambda self, x: self.b(self.a(x) * sum(x[0, 0].tolist())),
    "in": lambda self, x: self.b(self.a(x) * (2 if 1 in (x > 0) else 3)),
    "equal": lambda self, x: self.b(self.a(x) * (2 if torch.equal(x, x.abs()) else 3)),
    "allclose": lambda self, x: self.b(self.a(x) * (2 if torch.allclose(x, x.abs()) else 3)),
    "text of an item": lambda self, x: self.b(self.a(x) * float(f"{x.sum().item():.3f}")),
    "slice by int": lambda self, x: self.b(self.a(x)[:, : int((x[0, :, 0] > 0).sum()) + 1]),
    "slice by tensor": lambda self, x: self.b(self.a(x)[:, : (x[0, :, 0] > 0).sum() + 1]),
    "list[tensor]": lambda self, x: self.b(self.a(x) * [1, 2, 3][(x[0, :2, 0] > 0).sum()]),
    "a count as a length": lambda self, x: self.b(self.a(x) * len(x[0][x[0].sum(-1) > 0])),
    "contiguous": lambda self, x: self.b(self.a(x) * (2 if x.is_contiguous() else 3)),
    "early return": early_return,
    "an exception of its own": caught,
    "loop": loop,
}


@pytest.mark.parametrize("name", ABOUT_INPUTS)
def test_a_decision_about_the_input_follows_the_input(name: str) -> None:
    others = [[negative()], [positive(2)], [negative(4)], [rows(4).transpose(0, 1)]]
    assert_as_plain(Three(ABOUT_INPUTS[name]), [positive()], *others)


@contextmanager
def either_right_or_refused() -> Iterator[None]:
    try:
        yield
    except sl.CaptureError as error:
        if "test_recording_guards.py:" not in str(error):
            raise


@pytest.mark.parametrize(
    ("leaf", "code"),
    [
        (lambda x: x, lambda r, h: h * (2 if r.sum() > 0 else 3)),
        (lambda x: (x, None if x.sum() > 0 else x), lambda r, h: h * (2 if r[1] is None else 3)),
        (lambda x: (x,) * (2 if x.sum() > 0 else 3), lambda r, h: h * len(r)),
        (lambda x: {"p": x} if x.sum() > 0 else {"n": x}, lambda r, h: h * (2 if "p" in r else 3)),
        (lambda x: (x, bool(x.sum() > 0)), lambda r, h: h * (2 if r[1] else 3)),
        (lambda x: x if x.sum() > 0 else x.double(), lambda r, h: h * r.dtype.itemsize),
    ],
)
def test_a_decision_about_a_result_never_takes_the_old_way(
    leaf: Callable[[Tensor], Any], code: Callable[[Any, Tensor], Tensor]
) -> None:
    model = Three(lambda self, x: self.b(code(self.leaf(x), self.a(x))), Returns(leaf))
    plan = planned(model, {"a": "end"}, (positive(),))
    for x in (positive(), negative(), positive(2)):
        with either_right_or_refused():
            assert torch.equal(plan.run(x), model(x))


def test_a_loop_on_a_hidden_state_raises_when_it_ends_elsewhere() -> None:
    def forward(self: Three, x: Tensor) -> Any:
        hidden = self.a(x)
        while hidden.norm() > 1:
            hidden = hidden / 2
        return self.b(hidden)

    model = Three(forward)
    x = positive()
    plan = planned(model, {"a": "end"}, (x,))
    assert torch.equal(plan.run(x), model(x))
    with pytest.raises(sl.CaptureError, match=r"test_recording_guards\.py:\d+ in forward"):
        plan.run(x * 1000)


def test_autocast_around_a_run_is_another_recording() -> None:
    def forward(self: Three, x: Tensor) -> Any:
        hidden = self.a(x)
        kind = 2 if hidden.dtype == torch.float32 else 3
        return self.b(hidden * kind) * (2 if torch.is_autocast_enabled("cpu") else 3)

    model = Three(forward)
    x = rows()
    plan = planned(model, {"a": "end"}, (x,))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plan.run(x), model(x))
        inside = planned(model, {"a": "end"}, (x,))
        assert torch.equal(inside.run(x), model(x))
    assert torch.equal(plan.run(x), model(x))
    assert torch.equal(inside.run(x), model(x))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_run_without_gradients(around: Callable[[], Any]) -> None:
    model = Three(lambda self, x: self.b(torch.relu(self.a(x)) * len(x)))
    x = rows()
    plan = planned(model, {"a": "end"}, (x,))
    with around():
        found, wanted = plan.run(x), model(x)
    assert torch.equal(found, wanted)
    assert not found.requires_grad
    assert found.is_inference() == wanted.is_inference()
    assert plan.run(x).requires_grad


def branch(self: Three, x: Tensor) -> Any:
    training = self.training
    hidden = self.a(x)
    if not training:
        hidden = hidden * 2
    return self.b(hidden)


def in_place(self: Three, x: Tensor) -> Any:
    hidden = self.a(x)
    F.dropout(hidden, 0.5, self.training, inplace=True)
    return self.b(hidden)


def attention(self: Three, x: Tensor) -> Any:
    hidden = self.a(x)
    rate = 0.3 if self.training else 0.0
    return self.b(F.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=rate))


def batch_norm(self: Three, x: Tensor) -> Any:
    hidden, norm = self.a(x).transpose(1, 2), self.leaf
    hidden = F.batch_norm(hidden, norm.running_mean, norm.running_var, training=self.training)
    return self.b(hidden.transpose(1, 2))


MODES: dict[str, Callable[[Three, Tensor], Any]] = {
    "passed": lambda self, x: self.b(F.dropout(self.a(x), 0.5, self.training)),
    "passed by name": lambda self, x: self.b(F.dropout(self.a(x), 0.5, training=self.training)),
    "torch.dropout": lambda self, x: self.b(torch.dropout(self.a(x), 0.5, self.training)),
    "not": lambda self, x: self.b(F.dropout(self.a(x), 0.5, not (not self.training))),  # noqa: SIM208
    "as a rate": lambda self, x: self.b(F.dropout(self.a(x), 0.5 * self.training)),
    "as a number": lambda self, x: self.b(self.a(x) * self.training + int(self.training)),
    "as an index": lambda self, x: self.b(self.a(x) * [1, 2][self.training]),
    "as a key": lambda self, x: self.b(self.a(x) * {True: 1, False: 3}[self.training]),
    "as a result": lambda self, x: (self.b(self.a(x)), self.training),
    "alpha dropout": lambda self, x: self.b(F.alpha_dropout(self.a(x), 0.2, self.training)),
    "rrelu": lambda self, x: self.b(F.rrelu(self.a(x), training=self.training)),
    "branch": branch,
    "in place": in_place,
    "attention": attention,
    "batch norm in opened code": batch_norm,
    "batch norm": lambda self, x: self.b(self.leaf(self.a(x).transpose(1, 2)).transpose(1, 2)),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MODES)
def test_train_and_eval_recorded_in_one_run_in_the_other(name: str, train: bool) -> None:
    model = Three(MODES[name], nn.BatchNorm1d(WIDTH))
    others = [Run((rows(),), {}, mode) for mode in (True, False, not train, train)]
    assert_as_plain(model, [rows()], *others, train=train)


@pytest.mark.parametrize("train", [True, False])
def test_a_dropout_that_hands_its_input_through_is_still_a_value_of_its_own(train: bool) -> None:
    def forward(self: Three, x: Tensor) -> Any:
        hidden = self.a(x)
        dropped = self.leaf(hidden)
        return self.b(hidden + dropped)

    others = [Run((rows(),), {}, mode) for mode in (True, False)]
    assert_as_plain(Three(forward, nn.Dropout(0.3)), [rows()], *others, train=train)
