"""What a hunt for silent wrongness found: each is right now, or refused."""

from __future__ import annotations

import builtins
import copy
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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

LATER = {"b": "begin"}
Code = Callable[..., Any]


def right_or_refused(
    model: nn.Module, example: list[Any], *others: Any, train: bool = True, around: Any = None
) -> None:
    """Run beside a plain twin: equal to it, or an error that says why not."""
    around = around or nullcontext
    twin = copy.deepcopy(model.train(train))
    try:
        plan = planned(model, {"a": "end"}, tuple(example))
    except sl.CaptureError:
        return
    for other in (example, *others):
        run = other if isinstance(other, Run) else Run(tuple(other), {}, train)
        model.train(run.train)
        twin.train(run.train)
        with around():
            want = twin(*run.args)
            try:
                got = plan.run(*run.args)
            except sl.CaptureError:
                continue
        assert torch.equal(got, want)
        assert got.requires_grad == want.requires_grad


def test_two_recordings_with_constants_of_their_own() -> None:
    """Both called theirs constant_0, and the second got that of the first."""
    notes = [torch.zeros(4), torch.ones(4)]
    chosen = Three(lambda s, x, flag=True: s.b(s.a(x) + s.note[0 if flag else 1]), note=notes)
    right_or_refused(chosen, [rows(), True], [rows(), False], [rows(), True], [rows(), False])
    by_size = Three(lambda s, x: s.b(s.a(x) + s.note[int(x.shape[1] > 5)]), note=notes)
    right_or_refused(by_size, [rows()], [rows(3, 7)], [rows()])


PARTS: dict[str, Code] = {
    "unbind": lambda h: torch.stack([p * i for i, p in enumerate(h.unbind(1))], 1),
    "split": lambda h: torch.cat([p * 2 for p in h.split(2, 1)], 1),
    "chunk": lambda h: torch.cat([p * 2 for p in h.chunk(3, 1)], 1),
    "iterate": lambda h: torch.stack([p * i for i, p in enumerate(h)]),
}


@pytest.mark.parametrize("name", PARTS)
def test_how_many_parts_there_are_depends_on_sizes(name: str) -> None:
    model = Three(lambda s, x: s.b(PARTS[name](s.a(x))))
    assert_as_plain(model, [rows()], [rows(3, 7)], [rows(2, 2)])


RESULTS: dict[str, tuple[Code, Code]] = {
    "rank": (lambda x: x if x.sum() > 0 else x[0], lambda r, h: h * r.dim()),
    "len of shape": (lambda x: x if x.sum() > 0 else x[0], lambda r, h: h * len(r.shape)),
    "None": (lambda x: x if x.sum() > 0 else None, lambda r, h: h * (2 if r is None else 3)),
    "text": (lambda x: (x, "p" if x.sum() > 0 else "neg"), lambda r, h: h * len(r[1])),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_module_that_returns_another_kind_of_thing(name: str) -> None:
    leaf, code = RESULTS[name]
    model = Three(lambda s, x: s.b(code(s.leaf(x), s.a(x))), Returns(leaf))
    right_or_refused(model, [rows().abs()], [-rows().abs()])


def test_a_dimension_of_size_one_that_is_dropped() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        h = s.a(x).squeeze(1)
        return s.b(h * h.dim())

    assert_as_plain(Three(forward), [rows()], [rows(3, 1)])


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("ask", [lambda h: torch.is_grad_enabled(), lambda h: h.grad_fn is None])
def test_code_that_asks_for_gradients(around: Any, ask: Code) -> None:
    model = Three(lambda s, x: s.b(s.a(x) * (2 if ask(s.c(x)) else 3)))
    right_or_refused(model, [rows()], [rows()], around=around)


@pytest.mark.parametrize("train", [True, False])
def test_training_flags_of_children_and_by_identity(train: bool) -> None:
    other = Run((rows(),), {}, not train)
    for code in (
        lambda s, x: s.b(s.a(x)) * (2 if s.a.training else 3),
        lambda s, x: s.b(s.a(x)) * (2 if s.training is True else 3),
    ):
        right_or_refused(Three(code), [rows()], other, train=train)


def test_train_and_eval_in_forward_are_refused() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        s.eval()
        return s.b(s.a(x))

    with pytest.raises(sl.CaptureError, match=r"\.py:\d+ .*train\(\) or eval\(\) in forward"):
        planned(Three(forward), LATER, (rows(),))


def _list(s: Any, x: Tensor) -> Any:
    s.note.append(1)
    return s.b(s.a(x))


def _object(s: Any, x: Tensor) -> Any:
    object.__setattr__(s, "note", 5)
    return s.b(s.a(x))


def _first_call(s: Any, x: Tensor) -> Any:
    if not hasattr(s, "seen"):
        s.seen = True
        return s.b(s.a(x)) * 2
    return s.b(s.a(x))


@pytest.mark.parametrize(("code", "note"), [(_list, []), (_object, 0), (_first_call, 0)])
def test_a_state_that_forward_changes_is_refused(code: Code, note: Any) -> None:
    with pytest.raises(sl.CaptureError, match=r"in forward|stores a"):
        planned(Three(code, note=note), LATER, (rows(),))


def test_an_error_that_the_code_catches_is_refused() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        h = s.a(x)
        try:
            h = h.view(h.shape[0], 2, -1, WIDTH).sum(1)
        except RuntimeError:
            h = h * 2
        return s.b(h)

    with pytest.raises(sl.CaptureError, match=r"\.py:\d+ .*catches its error"):
        planned(Three(forward), LATER, (rows(),))


def test_captures_in_several_threads_leave_nothing_behind() -> None:
    x, faults = rows(), []
    found: set[str] = set()
    before = (builtins.len, nn.Module.__setattr__, "training" in vars(nn.Module))
    torch.manual_seed(0)
    models = [Three(lambda s, x: s.c(torch.relu(s.b(s.a(x))) * len(x))) for _ in range(3)]

    def work(model: nn.Module) -> None:
        try:
            found.update(sl.capture(model, (x,)).fingerprint for _ in range(3))
        except Exception as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (builtins.len, nn.Module.__setattr__, "training" in vars(nn.Module)) == before
    assert not faults
    assert len(found) == 1


@pytest.mark.parametrize("reach", [lambda w: w.detach(), lambda w: w.data])
def test_parameters_that_forward_writes_to_are_left_as_they_were(reach: Code) -> None:
    def forward(s: Any, x: Tensor) -> Any:
        reach(s.c.weight).mul_(0.5)
        return s.c(s.b(s.a(x)))

    model = Three(forward)
    before = model.c.weight.detach().clone()
    with pytest.raises(sl.CaptureError):
        planned(model, LATER, (rows(),))
    assert torch.equal(model.c.weight, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_batch_norm_inside_a_checkpoint_is_refused(reentrant: bool) -> None:
    """The plain model runs it twice, and its statistics count the batch twice."""

    def forward(s: Any, x: Tensor) -> Any:
        def inner(z: Tensor) -> Any:
            return s.leaf(s.b(z).transpose(1, 2)).transpose(1, 2)

        return s.c(checkpoint(inner, s.a(x), use_reentrant=reentrant))

    with pytest.raises(sl.CaptureError, match="inside a checkpoint"):
        planned(Three(forward, nn.BatchNorm1d(WIDTH)), LATER, (rows(),))


def test_a_number_that_the_user_changes_is_followed() -> None:
    model = Three(lambda s, x: s.b(s.a(x) * s.note), note=2.0)
    x = rows()
    plan = planned(model, LATER, (x,))
    for number in (3.0, 2.0, 4.0):
        model.note = number
        assert torch.equal(plan.run(x), model(x))


def test_what_the_user_replaces_is_refused() -> None:
    x = rows()
    for change in (
        lambda model: setattr(model, "note", torch.ones(1) * 3),
        lambda model: setattr(model, "count", torch.ones(1)),
        lambda model: model.register_forward_hook(lambda module, args, result: result * 2),
        lambda model: setattr(model, "b", nn.Linear(WIDTH, WIDTH)),
    ):
        model = Three(lambda s, x: s.b(s.a(x) * s.note + s.count), note=torch.ones(1))
        plan = planned(model, LATER, (x,))
        change(model)
        with pytest.raises(sl.CaptureError, match="was replaced since the model was captured"):
            plan.run(x)


def test_arguments_that_are_one_tensor_or_another_object() -> None:
    x = rows()
    model = Three(lambda s, x, y: s.b(s.a(x)) * (2 if x is y else 3))
    right_or_refused(model, [x, x], [rows(), rows()])
    right_or_refused(model, [rows(), rows()], [x, x])
    signs = Three(lambda s, x, n: s.b(s.a(x) * math.copysign(1, n)))
    right_or_refused(signs, [rows(), 0.0], [rows(), -0.0])
    settings = SimpleNamespace(v=2)
    scaled = Three(lambda s, x, c: s.b(s.a(x) * c.v))
    plan = planned(scaled, LATER, (x, settings))
    settings.v = 3
    assert torch.equal(plan.run(x, settings), scaled(x, settings))


def test_a_size_that_only_a_renewed_value_uses_is_sent() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        h = s.a(x)[0]
        eye = torch.eye(h.shape[0])
        return s.c(eye @ s.b(h))

    assert_as_plain(Three(forward), [rows()], [rows(3, 7)], split=LATER)


class Shelf(nn.Module):
    def __init__(self, shelf: Any, how: Code) -> None:
        super().__init__()
        self.shelf = shelf
        self.how = how

    def forward(self, x: Tensor) -> Any:
        return self.how(self.shelf, x)


def _put(shelf: Any, x: Tensor) -> Tensor:
    shelf.v = float(x.detach().sum())
    return x


def test_a_number_that_layers_hand_on_behind_the_graph_is_refused() -> None:
    """In a pipeline the second layer would read what another microbatch has left."""
    shelf = SimpleNamespace(v=0.0)
    layers = nn.ModuleList([Shelf(shelf, _put), Shelf(shelf, lambda q, x: x + q.v)])
    model = Three(lambda s, x: s.c(s.leaf[1](s.b(s.leaf[0](s.a(x))))), layers)
    with pytest.raises(sl.CaptureError, match=r"leaf\.0\.shelf\.v"):
        planned(model, LATER, (rows(),))
