"""Arguments and results of every shape, through a cut; and the check that all these tests share.

``assert_as_plain`` runs a recorded model and its plain twin side by side and compares everything
that a user could see: results, their types, gradients, buffers, arguments and random numbers.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import stageline as sl

WIDTH = 4
Forward = Callable[..., Any]


class Three(nn.Module):
    """Three layers, and a forward that the test writes."""

    leaf: Any
    note: Any

    def __init__(self, forward: Forward, leaf: nn.Module | None = None, note: Any = None) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(1))
        self.leaf = leaf
        self.note = note
        self.code = forward

    count: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.code(self, *args, **kwargs)


def rows(batch: int = 3, length: int = 5) -> Tensor:
    return torch.randn(batch, length, WIDTH)


class Run(NamedTuple):
    """One call: its arguments, and whether the model is in train() for it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = {}  # never changed
    train: bool = True


def planned(
    model: nn.Module, split: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> sl.Plan:
    return sl.partition(sl.capture(model, args, kwargs or {}), split=split)


def assert_as_plain(
    model: nn.Module,
    example: Sequence[Any],
    *others: Run | Sequence[Any],
    split: Any = None,
    train: bool = True,
) -> sl.Plan:
    """Capture on an example, run on it and on others; nothing may differ from the plain model."""
    model.train(train)
    twin = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    first = example if isinstance(example, Run) else Run(tuple(example), {}, train)
    state = torch.get_rng_state()
    plan = planned(model, split or {"a": "end"}, first.args, first.kwargs)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(dict(model.state_dict()), dict(before))
    for run in (first, *others):
        call = run if isinstance(run, Run) else Run(tuple(run), {}, train)
        _compare(plan, model, twin, call)
    return plan


def _compare(plan: sl.Plan, model: nn.Module, twin: nn.Module, call: Run) -> None:
    outcomes = []
    for module, run in ((twin, twin), (model, plan.run)):
        module.train(call.train)
        module.zero_grad()
        args, kwargs = tree_map(_copied, (call.args, dict(call.kwargs)))
        torch.manual_seed(1)
        result = run(*args, **kwargs)
        random = torch.get_rng_state()
        roots = [t for t in _tensors(result) if t.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        gradients = {name: p.grad for name, p in module.named_parameters()}
        reached = [t.grad for t in _tensors((args, kwargs))]
        kept = tree_map(_detached, (args, kwargs))
        outcomes.append((result, gradients, reached, kept, dict(module.state_dict()), random))
    assert_same(outcomes[1], outcomes[0])


def assert_same(found: Any, wanted: Any) -> None:
    """Equal to the last bit, and of the same types; None where the other is None."""
    assert type(found) is type(wanted)
    if isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype
        assert found.requires_grad == wanted.requires_grad
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        assert_same(list(found.values()), list(wanted.values()))
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif hasattr(wanted, "__dataclass_fields__"):
        assert_same(vars(found), vars(wanted))
    else:
        assert found == wanted


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    left: Any
    right: Any = None
    number: int = 3


class Returns(nn.Module):
    """Makes of its input what the test wants to send across a cut."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize("split", [{"b": "begin"}, {"b": "end"}, {"c": "begin"}, ["b", "c"]])
def test_a_named_tuple_a_dataclass_and_none_cross_a_cut(split: Any) -> None:
    def forward(self: Three, x: Tensor) -> Any:
        hidden = self.a(x)
        pair, record, nothing = self.leaf(hidden)
        out = self.c(self.b(hidden) + pair.right + record.left)
        return out, pair, record, nothing

    leaf = Returns(lambda x: (Pair(x, x * 2), Record(x + 1, None), None))
    assert_as_plain(Three(forward, leaf), [rows()], [rows(2, 7)], split=split)


@pytest.mark.parametrize("split", [{"b": "begin"}, {"b": "end"}])
def test_numbers_of_a_module_cross_a_cut(split: Any) -> None:
    def forward(self: Three, x: Tensor) -> Any:
        hidden, whole, part = self.leaf(self.a(x))
        return self.c(self.b(hidden)) * whole + part

    leaf = Returns(lambda x: (x, int((x > 0).sum()), float(x.detach().sum())))
    assert_as_plain(Three(forward, leaf), [rows()], [rows()], [rows(2)], split=split)


def test_results_of_every_type() -> None:
    def forward(self: Three, x: Tensor) -> Any:
        h = self.a(x)
        k = self.b(h)
        mixed = [h, None, 1, "text", 2.5, True, ...]
        return Record(h), self.c(k), Pair(h, k), OrderedDict(z=h, a=k), mixed, x.shape[0]

    assert_as_plain(Three(forward), [rows()], [rows(2)], split=["b", "c"])


def test_hidden_states_the_input_and_one_tensor_twice_as_results() -> None:
    def forward(self: Three, x: Tensor) -> Any:
        states = [x]
        for layer in (self.a, self.b, self.c):
            states.append(layer(states[-1]))
        return tuple(states), states[1], states[1].transpose(0, 1)

    assert_as_plain(Three(forward), [rows()], [rows(2, 7)], split=["b", "c"])


def test_a_result_made_by_an_early_stage_only() -> None:
    def forward(self: Three, x: Tensor) -> Tensor:
        hidden: Tensor = self.a(x)
        self.c(self.b(hidden))
        return hidden

    assert_as_plain(Three(forward), [rows()], [rows(2)], split=["b", "c"])


def test_the_input_itself_as_the_result() -> None:
    def forward(self: Three, x: Tensor) -> Tensor:
        self.b(self.a(x))
        return x

    assert_as_plain(Three(forward), [rows()], [rows(2)])


def test_arguments_by_place_by_name_and_left_out() -> None:
    def forward(self: Three, x: Tensor, y: Any = None, *, scale: Any = None) -> Tensor:
        out: Tensor = self.b(self.a(x))
        out = out if y is None else out + y
        return out if scale is None else out * scale

    assert_as_plain(
        Three(forward),
        [rows()],
        [rows(), rows()],
        [rows(), None],
        Run((rows(),), {"scale": rows()}),
        Run((rows(),), {"y": rows(), "scale": 2.0}),
    )


def test_lists_dicts_and_their_order_as_arguments() -> None:
    def forward(self: Three, x: Tensor, more: dict[str, Any], several: Sequence[Any]) -> Tensor:
        out: Tensor = self.a(x)
        for key, value in more.items():
            out = out * 2 + value * len(key)
        for value in several:
            out = out * 3 + value
        return self.b(out)  # type: ignore[no-any-return]  # what a module returns is Any

    assert_as_plain(
        Three(forward),
        [rows(), {"a": rows(), "bc": rows()}, [1, 2]],
        [rows(), {"bc": rows(), "a": rows()}, [1, 2]],
        [rows(), {}, [rows()]],
        [rows(), {"a": 2}, (1, 2, 3)],
    )


def test_a_plain_argument_is_told_by_value_and_type() -> None:
    def forward(self: Three, x: Tensor, flag: Any) -> Tensor:
        kinds = [isinstance(flag, kind) for kind in (bool, int, float, str)]
        return self.b(self.a(x) * (kinds.index(True) + 2)) * (1 if flag else 2)  # type: ignore[no-any-return]  # what a module returns is Any

    flags = [True, False, 1, 0, 1.0, 0.0, "x", ""]
    assert_as_plain(Three(forward), [rows(), 1], *([rows(), flag] for flag in flags))


def test_one_tensor_as_two_arguments() -> None:
    def forward(self: Three, x: Tensor, y: Tensor, *, z: Tensor) -> Tensor:
        return self.b(self.a(x) + y) * z  # type: ignore[no-any-return]  # what a module returns is Any

    shared = rows().requires_grad_()
    same = Run((shared, shared), {"z": shared})
    other = Run((rows(), rows()), {"z": rows()})
    assert_as_plain(Three(forward), same, other, same)
    assert_as_plain(Three(forward), other, same)


@pytest.mark.parametrize("train", [True, False])
def test_the_gradient_of_an_input_of_a_frozen_model(train: bool) -> None:
    model = Three(lambda self, x: self.b(self.a(x))).requires_grad_(False)
    wanted = rows().requires_grad_()
    assert_as_plain(model, [wanted], [rows()], [rows(2).requires_grad_()], train=train)


def test_second_derivatives() -> None:
    model = Three(lambda self, x: self.b(torch.tanh(self.a(x))) ** 2)
    x = rows().requires_grad_()
    plan = planned(model, {"a": "end"}, (x,))

    def second(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), [model.a.weight, x]))

    assert_same(second(plan.run), second(model))


def test_no_arguments_and_no_rows() -> None:
    alone = Three(lambda self: self.b(self.a(torch.ones(2, WIDTH))))
    assert_as_plain(alone, [])
    plain = Three(lambda self, x: self.b(self.a(x)))
    assert_as_plain(plain, [rows()], [rows(0)], [rows(3, 0)])
    assert_as_plain(plain, [rows(0)], [rows()])


def test_whole_numbers_and_masks_as_inputs() -> None:
    def forward(self: Three, x: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.a(x + self.leaf(tokens))
        return self.b(hidden).masked_fill(mask[..., None], 0.0) * (~mask).sum()  # type: ignore[no-any-return]  # what a module returns is Any

    def call(batch: int) -> list[Tensor]:
        tokens = torch.randint(0, 10, (batch, 5))
        return [rows(batch), tokens, torch.rand(batch, 5) > 0.5]

    model = Three(forward, nn.Embedding(10, WIDTH))
    assert_as_plain(model, call(3), call(2), call(1))
