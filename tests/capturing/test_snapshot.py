"""A model that was run on trial is the model that it was before."""

from __future__ import annotations

import queue
import random
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stageline.capturing.naming import named_everywhere
from stageline.capturing.snapshot import Snapshot, preserved


@dataclass(frozen=True)
class Frozen:
    value: Any


class Slotted:
    __slots__ = ("gone", "value")

    def __init__(self) -> None:
        self.value = 1


class Model(nn.Module):
    """Has one of everything that a run may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("wide", torch.tensor([[1.0], [float("nan")]]).expand(2, 3))
        self.register_buffer("nothing", None)
        self.plain = torch.zeros(3)
        self.config = SimpleNamespace(problem_type=None, inner=SimpleNamespace(sizes=[1, 2]))
        self.cache: dict[str, Any] = {"a": [1]}
        self.counts: defaultdict[str, int] = defaultdict(int, a=1)
        self.order = OrderedDict(a=1, b=2)
        self.history = deque([1, 2], maxlen=2)
        self.names = {"a"}
        self.pair = ([1], {"b": 2})
        self.frozen, self.slotted = Frozen(1), Slotted()
        self.array = np.zeros(3)
        self.hidden: list[nn.Module] = [nn.Linear(1, 1)]
        self.generator = torch.Generator()
        self.python_random, self.numpy_random = random.Random(1), np.random.default_rng(1)


def summary(value: Any, seen: set[int] | None = None) -> Any:
    """Return identity and contents of all that hangs on a value."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, str | int | float | bool | type | type(None)):
        return id(value)
    seen.add(id(value))
    if isinstance(value, Tensor):
        gradient = value.grad if value.is_leaf else None
        flags = (value.requires_grad, value.grad_fn, id(gradient), value.data_ptr())
        return id(value), type(value), flags, str(value.tolist())
    if isinstance(value, np.ndarray):
        return id(value), value.tolist()
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().tolist()
    if isinstance(value, random.Random):
        return id(value), value.getstate()
    if isinstance(value, np.random.Generator):
        return id(value), str(value.bit_generator.state)
    return id(value), type(value), [(key, summary(part, seen)) for key, part in parts(value)]


def parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple | set | deque):
        return list(enumerate(value))
    if isinstance(value, Slotted):
        return [(name, getattr(value, name, None)) for name in Slotted.__slots__]
    return list(getattr(value, "__dict__", {}).items())


def set_grad(model: Model) -> None:
    model.linear.weight.grad = torch.ones(2, 2)


def reorder(model: Model) -> None:
    model._modules["linear"] = model._modules.pop("linear")


CHANGES: list[Callable[[Model], Any]] = [
    lambda model: setattr(model, "new", 1),
    lambda model: delattr(model, "plain"),
    lambda model: setattr(model, "plain", torch.ones(1)),
    lambda model: model.plain.add_(1),
    lambda model: model.get_buffer("table").add_(1),
    lambda model: model.get_buffer("table").data.add_(1),
    lambda model: model.get_buffer("table").mul_(torch.ones(4, requires_grad=True)),
    lambda model: model.get_buffer("table").resize_(2),
    lambda model: setattr(model.get_buffer("table"), "data", torch.ones(7)),
    lambda model: model.get_buffer("wide")[0, :1].zero_(),
    lambda model: setattr(model, "table", torch.ones(4)),
    lambda model: setattr(model, "nothing", torch.ones(4)),
    lambda model: model.register_buffer("more", torch.ones(1)),
    lambda model: delattr(model, "norm"),
    lambda model: model.add_module("extra", nn.ReLU()),
    lambda model: setattr(model, "linear", nn.Linear(2, 2)),
    reorder,
    lambda model: model.register_parameter("weight", nn.Parameter(torch.ones(1))),
    lambda model: setattr(model.linear.weight, "data", torch.zeros(2, 2)),
    lambda model: model.linear.requires_grad_(False),
    set_grad,
    lambda model: model.linear(torch.ones(1, 2)).sum().backward(),
    lambda model: model.norm(torch.randn(4, 2)),
    lambda model: model.eval(),
    lambda model: model.double(),
    lambda model: model.register_forward_hook(lambda *_: None),
    lambda model: setattr(model.config, "problem_type", "regression"),
    lambda model: model.config.inner.sizes.append(3),
    lambda model: setattr(model.config, "inner", None),
    lambda model: model.cache["a"].append(2),
    lambda model: model.cache.update(b=2),
    lambda model: model.cache.clear(),
    lambda model: model.counts["b"],
    lambda model: model.order.move_to_end("a"),
    lambda model: model.history.append(3),
    lambda model: model.names.add("b"),
    lambda model: model.pair[1].pop("b"),
    lambda model: object.__setattr__(model.frozen, "value", 2),
    lambda model: setattr(model.slotted, "gone", 2),
    lambda model: delattr(model.slotted, "value"),
    lambda model: model.array.fill(1),
    lambda model: setattr(model.hidden[0], "new", 1),
    lambda model: model.hidden.append(nn.ReLU()),
    lambda model: torch.rand(1, generator=model.generator),
    lambda model: model.python_random.random(),
    lambda model: model.numpy_random.random(),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fails", [False, True])
def test_every_change_is_undone(change: Callable[[Model], Any], fails: bool) -> None:
    model = Model()
    model.linear.bias.grad = torch.ones(2)
    before = summary(model)
    with suppress(KeyError), preserved(model):
        change(model)
        assert summary(model) != before
        if fails:
            raise KeyError
    assert summary(model) == before


def test_gradients_are_put_aside_and_come_back_as_they_were() -> None:
    model = nn.Linear(1, 1)
    model(torch.ones(1, 1)).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    with preserved(model):
        assert model.weight.grad is None
        (model(torch.ones(1, 1)) * 5).sum().backward()
    assert model.weight.grad is gradient
    assert gradient.item() == 1


def test_random_numbers_come_back() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        with preserved(nn.ReLU()):
            first = draw()
        assert draw() == first
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def test_an_initialized_accelerator_is_asked_and_another_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = ["state"]
    module = SimpleNamespace(
        is_initialized=lambda: True,
        get_rng_state_all=lambda: states[-1],
        set_rng_state_all=states.append,
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    with preserved(nn.ReLU()):
        states.append("drawn")
    assert states == ["state", "drawn", "state"]
    module.is_initialized = lambda: False
    module.get_rng_state_all = None
    with preserved(nn.ReLU()):
        pass
    del module.get_rng_state_all
    module.is_initialized = lambda: True
    module.get_rng_state, module.set_rng_state = lambda: "one", states.append
    with preserved(nn.ReLU()):
        pass
    assert states[-1] == "one"


def test_arguments_come_back_too() -> None:
    x = torch.zeros(2)
    options: dict[str, Any] = {"mask": torch.ones(2), "sizes": [1]}
    with preserved(nn.ReLU(), (x,), options) as snapshot:
        x.add_(1)
        options["mask"].mul_(0)
        options.pop("sizes")
        assert snapshot.differences() == []
    assert x.tolist() == [0, 0]
    assert list(options) == ["mask", "sizes"]
    assert options["mask"].tolist() == [1, 1]


def test_a_graph_of_the_user_stays_valid() -> None:
    model: Any = nn.BatchNorm1d(2, affine=False).eval()
    x = torch.randn(3, 2, requires_grad=True)
    loss = (x * model.running_mean).sum()
    with preserved(model):
        model.running_mean.data.add_(1)
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0, 0]] * 3


def test_a_lazy_module_is_lazy_again() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    weight = model[0].weight
    with preserved(model):
        model(torch.zeros(1, 3))
        assert type(model[0]) is nn.Linear
    assert type(model[0]) is nn.LazyLinear
    assert model[0].weight is weight
    assert nn.parameter.is_lazy(weight)
    assert model(torch.zeros(1, 5)).shape == (1, 2)


def test_inference_tensors_can_be_kept() -> None:
    with torch.inference_mode():
        model = nn.BatchNorm1d(2)
        with preserved(model):
            model(torch.randn(3, 2))
    with preserved(model), torch.inference_mode():
        model(torch.randn(3, 2))
    assert model.num_batches_tracked is not None
    assert model.num_batches_tracked.item() == 0


def test_meta_and_sparse_tensors_are_let_be() -> None:
    with torch.device("meta"):
        model = nn.BatchNorm1d(2)
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    before = id(model.running_mean)
    with preserved(model):
        model.running_mean = torch.zeros(2)
    assert id(model.running_mean) == before


def test_a_parameter_that_is_written_to_is_put_back_by_whatever_alias() -> None:
    """Parameters are not copied beforehand; the operation that writes is seen."""
    model: Any = nn.Linear(2, 2)
    flat = model.weight.data.view(4)
    model.flat = [flat, model.weight]
    before = model.weight.detach().clone()
    with preserved(model):
        flat.zero_()
        assert model.weight.count_nonzero() == 0
    assert torch.equal(model.weight, before)


def test_a_loop_of_references_ends() -> None:
    model = Model()
    model.config.owner = [model]
    model.cache["self"] = model.cache
    before = summary(model)
    with preserved(model):
        model.cache.pop("self")
    assert summary(model) == before


def test_what_belongs_to_other_threads_is_left_alone() -> None:
    model: Any = nn.ReLU()
    model.waiting = queue.Queue()
    with preserved(model):
        model.waiting.put(1)
    assert model.waiting.qsize() == 1


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda m: setattr(m, "plain", torch.ones(1)), ["plain: attribute set to a tensor"]),
        (lambda m: setattr(m, "state", torch.ones(1)), ["state: attribute set to a tensor"]),
        (
            lambda m: setattr(m.linear, "state", (1, [torch.ones(1)])),
            ["linear.state: attribute set to a tuple with a tensor"],
        ),
        (lambda m: setattr(m, "table", torch.ones(1)), ["table: attribute set to a tensor"]),
        (lambda m: m.cache.update(k=torch.ones(1)), ["cache.k: attribute set to a tensor"]),
        (lambda m: m.cache["a"].append(torch.ones(1)), ["cache.a.1: attribute set to a tensor"]),
        (
            lambda m: setattr(m.config.inner, "last", torch.ones(1)),
            ["config.inner.last: attribute set to a tensor"],
        ),
        (lambda m: setattr(m, "linear", nn.ReLU()), ["linear: attribute set to a module"]),
        (
            lambda m: setattr(m.hidden[0], "state", torch.ones(1)),
            ["hidden.0.state: attribute set to a tensor"],
        ),
        (lambda m: m.norm(torch.randn(4, 2)), []),
        (lambda m: setattr(m, "plain", m.plain), []),
        (lambda m: setattr(m, "plain", m.plain.view_as(m.plain)), []),
        (lambda m: setattr(m, "plain", m.plain[:1]), ["plain: attribute set to a tensor"]),
        (lambda m: setattr(m, "cache", {"a": [2]}), []),
        (lambda m: setattr(m, "steps", 3), []),
        (lambda m: delattr(m, "plain"), []),
    ],
)
def test_tensors_stored_on_a_module_are_named(change: Callable[[Any], Any], found: Any) -> None:
    model = Model()
    with preserved(model) as snapshot:
        assert snapshot.differences() == []
        change(model)
        assert snapshot.differences() == found


def test_a_list_that_was_empty_and_one_that_was_shifted() -> None:
    model: Any = nn.ReLU()
    first, second = torch.zeros(1), torch.zeros(1)
    model.shifted, model.empty = [first, second], {}
    with preserved(model) as snapshot:
        model.shifted.pop(0)
        assert snapshot.differences() == []
        model.empty["x"] = first
        assert snapshot.differences() == ["empty.x: attribute set to a tensor"]


def test_only_the_modules_asked_for_are_looked_at() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    with preserved(model) as snapshot:
        model[0].state = model[1].state = torch.ones(1)
        assert snapshot.differences([model]) == []
        assert snapshot.differences([model[1]]) == ["1.state: attribute set to a tensor"]
        assert len(snapshot.differences()) == 2


def test_a_deep_model_is_kept_quickly() -> None:
    model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8) for _ in range(100)))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        Snapshot(model).restore()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.2  # 0.04 s on a quiet machine


def test_modules_are_named_wherever_they_hang() -> None:
    inner: Any = nn.Sequential(nn.ReLU())
    model: Any = nn.Sequential(nn.Tanh())
    model.lists = [[inner], {"key": nn.ELU()}]
    model.holder = SimpleNamespace(one=nn.GELU(), again=model[0])
    model.far = [[[[nn.ReLU()]]]]
    inner[0].up = [model, nn.Sigmoid()]
    assert list(named_everywhere(model)) == [
        *("", "0", "lists.0.0", "lists.0.0.0", "lists.1.key", "holder.one", "lists.0.0.0.up.1"),
    ]
