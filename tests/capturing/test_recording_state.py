"""What a model keeps between calls: followed, or refused; and the model is left as it was."""

from __future__ import annotations

import builtins
import copy
import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stageline as sl
from tests.capturing.test_recording_checked import WIDTH, Three, assert_as_plain, planned, rows

SPLITS: list[Any] = [{"a": "end"}, {"b": "begin"}]


def counted(self: Three, x: Tensor) -> Any:
    hidden = self.a(x)
    self.count += 1
    return self.b(hidden * self.count)


def averaged(self: Three, x: Tensor) -> Any:
    hidden = self.a(x)
    before = hidden * self.count.clone()
    self.count.lerp_(hidden.detach().mean(), 0.1)
    return self.b(hidden) + before


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("code", [counted, averaged])
def test_a_buffer_changed_in_place_counts_as_in_the_plain_model(code: Any, split: Any) -> None:
    assert_as_plain(Three(code), [rows()], [rows(2)], [rows()], split=split)


@pytest.mark.parametrize("split", [{"b": "begin"}, {"b": "end"}], ids=str)
def test_a_buffer_that_one_stage_changes_and_a_later_one_reads(split: Any) -> None:
    def forward(self: Three, x: Tensor) -> Any:
        hidden = self.a(x)
        self.count.copy_(hidden.detach().mean())
        return self.c(self.b(hidden)) * self.count

    assert_as_plain(Three(forward), [rows()], [rows(2)], [rows()], split=split)


class Counts(nn.Module):
    """Keeps state of its own, as a leaf may."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().mean()
        self.calls += 1
        return x * self.total.clone() + self.calls


def test_a_module_with_state_of_its_own_may_be_called_twice_in_a_stage() -> None:
    def forward(self: Three, x: Tensor) -> Any:
        return self.c(self.b(self.leaf(self.leaf(self.a(x)))))

    model = Three(forward, Counts())
    assert_as_plain(model, [rows()], [rows(2)], [rows()], split={"b": "begin"})


def reassigned(self: Three, x: Tensor) -> Any:
    self.count = self.count + 1
    return self.b(self.a(x) * self.count)


def data_set(self: Three, x: Tensor) -> Any:
    self.count.data = self.count.data + 1
    return self.b(self.a(x) * self.count)


def number_kept(self: Three, x: Tensor) -> Any:
    self.note += 1
    return self.b(self.a(x))


def state_kept(self: Three, x: Tensor) -> Any:
    self.note = self.a(x)
    return self.b(self.note)


@pytest.mark.parametrize("code", [reassigned, data_set, number_kept, state_kept])
def test_a_value_stored_on_a_module_is_refused_with_its_line(code: Any) -> None:
    model = Three(code, note=0)
    with pytest.raises(sl.CaptureError, match=rf"state\.py:\d+ in {code.__name__}: the code s"):
        planned(model, {"a": "end"}, (rows(),))
    assert model.note == 0
    assert torch.equal(model.count, torch.zeros(1))


class Writes(nn.Module):
    def __init__(self, shelf: Any) -> None:
        super().__init__()
        self.shelf = shelf

    def forward(self, x: Tensor) -> Tensor:
        self.shelf.value = x * 2
        return x


class Reads(Writes):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.shelf.value  # type: ignore[no-any-return]  # a shelf holds anything


def test_a_tensor_that_two_modules_share_behind_the_graph_is_refused() -> None:
    shelf = SimpleNamespace(value=None)
    leaf = nn.ModuleList([Writes(shelf), Reads(shelf)])

    def forward(self: Three, x: Tensor) -> Any:
        hidden = self.leaf[0](self.a(x))
        return self.c(self.leaf[1](self.b(hidden)))

    with pytest.raises(sl.CaptureError, match=r"recording_state\.py:\d+ in "):
        planned(Three(forward, leaf), {"b": "begin"}, (rows(),))
    assert shelf.value is None


class Keeps(nn.Module):
    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(x)
        return x


def test_a_list_that_a_module_fills_is_refused() -> None:
    def forward(self: Three, x: Tensor) -> Any:
        kept: list[Tensor] = []
        hidden = self.leaf(self.a(x), kept)
        return self.c(self.b(hidden) + kept[0])

    with pytest.raises(sl.CaptureError, match=r"recording_state\.py:\d+ in "):
        planned(Three(forward, Keeps()), {"b": "begin"}, (rows(),))


def parameters_used(self: Three, x: Tensor) -> Any:
    hidden = F.linear(self.a(x), self.b.weight, self.a.bias)
    return self.c(self.b(hidden)) @ self.a.weight * self.leaf[0] * self.leaf[1]


def called_three_times(self: Three, x: Tensor) -> Any:
    hidden = self.a(x)
    for _ in range(3):
        hidden = torch.relu(self.b(hidden))
    return self.c(hidden)


def called_by_itself(self: Three, x: Tensor) -> Any:
    def again(hidden: Any, times: int) -> Any:
        return hidden if not times else again(self.b(hidden), times - 1)

    return self.c(again(self.a(x), 3))


def forward_called(self: Three, x: Tensor) -> Any:
    return self.c.forward(self.b.forward(self.a(x)))


@pytest.mark.parametrize("split", [{"b": "begin"}, {"b": "end"}, {"c": "begin"}], ids=str)
@pytest.mark.parametrize(
    "code", [parameters_used, called_three_times, called_by_itself, forward_called]
)
def test_parameters_and_modules_used_in_unusual_ways(code: Any, split: Any) -> None:
    leaf = nn.ParameterList([torch.ones(1) * 3, torch.ones(WIDTH)])
    model = Three(code, leaf)
    model.c.weight = model.a.weight
    assert_as_plain(model, [rows()], [rows(2, 7)], split=split)


def test_modules_in_a_list_a_dict_and_an_object() -> None:
    def forward(self: Three, x: Tensor) -> Any:
        listed, named, held = self.note
        return self.c(self.b(held.module(named["one"](listed[0](self.a(x))))))

    def layer() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    note = [[layer()], {"one": layer()}, SimpleNamespace(module=layer())]
    assert_as_plain(Three(forward, note=note), [rows()], [rows(2)], split={"b": "begin"})


def test_hooks_and_parametrizations_of_a_module_that_is_not_opened() -> None:
    model = Three(lambda self, x: self.c(self.b(self.a(x))))
    model.b.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.b.register_forward_hook(lambda module, args, result: result + 1)
    torch.nn.utils.parametrizations.weight_norm(model.c)
    assert_as_plain(model, [rows()], [rows(2)], split={"b": "begin"})


class Boom(Exception):
    pass


def test_an_error_of_the_model_leaves_everything_as_it_was() -> None:
    def forward(self: Three, x: Tensor) -> Any:
        self.count += 1
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            self.b(self.a(x)) + torch.rand(1)
            raise Boom

    model = Three(forward, nn.BatchNorm1d(WIDTH))
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    patched = _patched()
    with pytest.raises(Boom):
        sl.capture(model, (rows(),))
    assert _patched() == patched
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(random, torch.get_rng_state())  # rows() has drawn, and nobody else
    torch.set_rng_state(random)
    rows()
    drawn = torch.get_rng_state()
    torch.set_rng_state(random)
    with pytest.raises(Boom):
        sl.capture(model, (rows(),))
    assert torch.equal(torch.get_rng_state(), drawn)


def _patched() -> list[Any]:
    kinds = [nn.Module, nn.Linear, Three, torch.autograd.Function, torch.autocast]
    names = ("__call__", "__setattr__", "forward", "training", "apply", "__enter__", "__exit__")
    return [builtins.len, *(vars(kind).get(name) for kind in kinds for name in names)]


def test_another_thread_that_runs_the_model_meanwhile_is_not_recorded() -> None:
    model = Three(called_three_times)
    x = rows()
    wanted, faults, stop = model(x), list[str](), threading.Event()

    def run() -> None:
        while not stop.is_set():
            if not torch.equal(model(x), wanted):
                faults.append("another value")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        prints = {sl.capture(model, (x,)).fingerprint for _ in range(3)}
    finally:
        stop.set()
        thread.join()
    assert not faults
    assert prints == {sl.capture(model, (x,)).fingerprint}


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_same_graph_every_time(around: Callable[[], Any]) -> None:
    def forward(self: Three, x: Tensor) -> Any:
        return self.b(torch.relu(self.a(x)) * self.note + x.shape[1])

    model = Three(forward, note=torch.ones(WIDTH))
    wanted = sl.capture(model, (rows(),)).fingerprint
    with around():
        assert sl.capture(model, (rows(2),)).fingerprint == wanted
    assert sl.capture(copy.deepcopy(model), (rows(),)).fingerprint == wanted


def test_a_captured_model_can_still_be_copied_and_pickled() -> None:
    model = Three(called_three_times)
    plan = planned(model, {"b": "end"}, (rows(),))
    x = rows()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))
    assert torch.equal(plan.run(x), model(x))


def test_a_sequential_is_the_same_wherever_it_is_captured() -> None:
    """The lines of its guards are those of the caller: a saved plan was refused on another line."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    one = sl.capture(model, (torch.zeros(2, 3),))
    other = sl.capture(model, (torch.zeros(2, 3),))
    assert one.fingerprint == other.fingerprint
