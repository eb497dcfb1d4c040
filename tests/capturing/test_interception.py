"""Every call of a module goes through the handler once, in one thread, and leaves no trace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from stageline.capturing.interception import intercepted


class Note:
    """A handler that notes the classes of the modules called, indented by depth."""

    def __init__(self, prefix: str = "") -> None:
        self.seen: list[str] = []
        self._prefix, self._depth = prefix, 0

    def __call__(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self.seen.append(self._prefix + ". " * self._depth + type(module).__name__)
        self._depth += 1
        try:
            return call(*args, **kwargs)
        finally:
            self._depth -= 1


def calls(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    note = Note()
    with intercepted(model, note):
        model(*args, **kwargs)
    return note.seen


def methods_of(*kinds: type) -> list[list[tuple[str, Any]]]:
    return [list(vars(kind).items()) for kind in kinds]


class Base(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Derived(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Checkpointing(nn.Module):
    """Overrides __call__ as transformers' GradientCheckpointingLayer does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class Layer(Checkpointing):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Tanh()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Around(nn.Module):
    """Calls its inner module in the way that it is told."""

    def __init__(self, inner: nn.Module, how: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x: Tensor) -> Any:
        return self.how(self.inner, x)


class Countdown(nn.Module):
    """Calls itself, by __call__ or by forward."""

    def forward(self, x: Tensor, times: int, direct: bool) -> Any:
        if not times:
            return x
        again = self.forward if direct else self
        return again(x + 1, times - 1, direct)


X = torch.zeros(2)


def test_a_forward_that_calls_its_parent_class_is_one_call() -> None:
    assert calls(Derived(), X) == ["Derived"]


def test_a_class_with_its_own_call_is_one_call() -> None:
    assert calls(nn.Sequential(Layer()), X) == ["Sequential", ". Layer", ". . Tanh"]


def test_a_forward_called_directly_is_seen() -> None:
    model = Around(Derived(), lambda inner, x: inner.forward(x))
    assert calls(model, X) == ["Around", ". Derived"]


def test_a_direct_forward_after_a_call_is_another_call() -> None:
    model = Around(nn.Tanh(), lambda inner, x: inner.forward(inner(x)))
    assert calls(model, X) == ["Around", ". Tanh", ". Tanh"]


@pytest.mark.parametrize("direct", [False, True])
def test_a_module_that_calls_itself_begins_a_call_each_time(direct: bool) -> None:
    assert calls(Countdown(), X, 2, direct) == ["Countdown", ". Countdown", ". . Countdown"]


def test_a_child_may_call_its_parent() -> None:
    def back(parent: nn.Module, x: Tensor) -> Any:
        return parent.forward(x, 0, True)

    class Parent(Countdown):
        def __init__(self) -> None:
            super().__init__()
            self.up = [self]
            self.child = Around(nn.Identity(), lambda _, x: back(self.up[0], x))

        def forward(self, x: Tensor, times: int, direct: bool) -> Any:
            return self.child(x) if times else x

    assert calls(Parent(), X, 1, True) == ["Parent", ". Around", ". . Parent"]


def test_modules_in_a_plain_list_are_seen_also_when_their_forward_is_called() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [Derived(), nn.Tanh()]

        def forward(self, x: Tensor) -> Any:
            return self.layers[1](self.layers[0].forward(x))

    assert calls(Hidden(), X) == ["Hidden", ". Derived", ". Tanh"]


def test_modules_made_on_the_way_are_seen() -> None:
    assert calls(Around(nn.Identity(), lambda _, x: nn.ReLU()(x)), X) == ["Around", ". ReLU"]


def test_an_argument_may_be_called_module() -> None:
    class Odd(nn.Module):
        def forward(self, module: Tensor, handler: Tensor, call: Tensor) -> Tensor:
            return module + handler + call

    assert calls(Odd(), module=X, handler=X, call=X) == ["Odd"]


def test_a_static_forward_is_seen_through_its_call() -> None:
    class Static(nn.Module):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x + 1

    class OfClass(nn.Module):
        @classmethod
        def forward(cls, x: Tensor) -> Tensor:
            return x + 1

    model = nn.Sequential(Static(), OfClass())
    assert calls(model, X) == ["Sequential", ". Static", ". OfClass"]
    assert isinstance(vars(Static)["forward"], staticmethod)


def test_a_forward_under_another_name_is_still_a_forward() -> None:
    class Alias(nn.Module):
        def run(self, x: Tensor) -> Tensor:
            return x + 1

        forward = run

    assert calls(Alias(), X) == ["Alias"]


def test_a_forward_that_stands_on_the_object_is_seen_through_the_call() -> None:
    model = nn.Tanh()
    model.forward = lambda x: x  # type: ignore[method-assign, assignment]  # as some libraries do
    assert calls(nn.Sequential(model), X) == ["Sequential", ". Tanh"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_script_modules_are_left_alone() -> None:
    script = torch.jit.script(nn.Sequential(nn.Tanh()))
    before = methods_of(*type(script).__mro__)
    note = Note()
    model = nn.Sequential(script, nn.ReLU())
    with intercepted(model, note):
        result = model(X)
    assert note.seen == ["Sequential", ". RecursiveScriptModule", ". ReLU"]
    assert torch.equal(result, X)
    assert methods_of(*type(script).__mro__) == before


def test_hooks_run_inside_the_call() -> None:
    order: list[str] = []
    layer = nn.Tanh()
    layer.register_forward_pre_hook(lambda *_: order.append("hook"))

    def handler(module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        order.append("handler")
        return call(*args, **kwargs)

    with intercepted(layer, handler):
        layer(X)
    assert order == ["handler", "hook"]


def test_the_handler_may_answer_by_itself_and_change_arguments() -> None:
    def handler(module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        return "no" if isinstance(module, nn.Tanh) else call("yes")

    model = Around(nn.Tanh(), lambda inner, x: (x, inner(x)))
    with intercepted(model, handler):
        assert model(X) == ("yes", "no")


def test_a_call_may_be_carried_out_twice() -> None:
    def handler(module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        call(*args)
        return call(*args)

    note = Note()
    model = nn.Sequential(nn.Tanh())
    with intercepted(model, note), intercepted(model, handler):
        model(X)
    assert note.seen == ["Sequential", ". Tanh", ". Tanh", "Sequential", ". Tanh", ". Tanh"]


def test_an_interception_inside_another_comes_first() -> None:
    outer, inner = Note("outer "), Note("inner ")
    model = nn.Sequential(Layer())
    seen = outer.seen = inner.seen = []
    with intercepted(model, outer):
        with intercepted(nn.ReLU(), inner):
            model(X)
        assert seen == [
            "inner Sequential",
            "outer Sequential",
            "inner . Layer",
            "outer . Layer",
            "inner . . Tanh",
            "outer . . Tanh",
        ]
        seen.clear()
        model(X)
    assert seen == ["outer Sequential", "outer . Layer", "outer . . Tanh"]


KINDS = (Layer, Checkpointing, Derived, Base, nn.Sequential, nn.Tanh, nn.Module)


@pytest.mark.parametrize("fails", [False, True])
def test_classes_are_afterwards_what_they_were(fails: bool) -> None:
    before = methods_of(*KINDS)
    model = nn.Sequential(Layer(), Derived())
    with intercepted(model, Note()):
        assert methods_of(*KINDS) != before
        if fails:
            with pytest.raises(TypeError):
                model(1, 2, 3)
        else:
            model(X)
    assert methods_of(*KINDS) == before


def test_an_error_in_the_context_restores_the_classes() -> None:
    before = methods_of(*KINDS)
    with pytest.raises(KeyError), intercepted(nn.Sequential(Layer()), Note()):
        raise KeyError
    assert methods_of(*KINDS) == before


def test_after_an_error_in_a_call_the_next_call_is_seen() -> None:
    def fail(inner: nn.Module, x: Tensor) -> Any:
        inner(x)
        raise KeyError

    note = Note()
    model = Around(Layer(), fail)
    with intercepted(model, note):
        for _ in range(2):
            with pytest.raises(KeyError):
                model(X)
        model.inner.forward(X)
    assert note.seen == ["Around", ". Layer", ". . Tanh"] * 2 + ["Layer", ". Tanh"]


def test_a_caught_error_leaves_the_calls_around_it_alone() -> None:
    def attempt(inner: nn.Module, x: Tensor) -> Any:
        with pytest.raises(TypeError):
            inner()
        return inner(x)

    assert calls(Around(nn.Tanh(), attempt), X) == ["Around", ". Tanh", ". Tanh"]


def in_thread(run: Callable[[], Any]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_other_threads_are_not_seen() -> None:
    note = Note()
    model = nn.Sequential(Layer())
    results: list[Tensor] = []
    with intercepted(model, note):
        in_thread(lambda: results.append(model(X)))
    assert note.seen == []
    assert torch.equal(results[0], X)


def test_two_threads_may_overlap_in_any_order() -> None:
    """The first to begin ends first: the second is still served, and no patch is left behind."""
    before = methods_of(*KINDS)
    model = nn.Sequential(Layer())
    notes = Note("main "), Note("other ")
    begun, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with intercepted(model, notes[1]):
            begun.set()
            assert go_on.wait(20)
            model(X)

    thread = threading.Thread(target=other)
    with intercepted(model, notes[0]):
        thread.start()
        assert begun.wait(20)
        model(X)
    go_on.set()
    thread.join()
    assert notes[0].seen == ["main Sequential", "main . Layer", "main . . Tanh"]
    assert notes[1].seen == ["other Sequential", "other . Layer", "other . . Tanh"]
    assert methods_of(*KINDS) == before


class Backend:
    """A compiler that changes nothing."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph


@pytest.mark.slow
def test_a_compiled_module_runs_uncompiled_and_is_compiled_afterwards() -> None:
    backend = Backend()
    layer = Layer()
    layer.compile(backend=backend)
    model = nn.Sequential(layer)
    assert calls(model, X) == ["Sequential", ". Layer", ". . Tanh"]
    compiled = cast(nn.Module, torch.compile(Derived(), backend=backend))
    seen = calls(nn.Sequential(compiled), X)
    assert seen == ["Sequential", ". OptimizedModule", ". . Derived"]
    assert backend.graphs == []
    model(X)
    assert len(backend.graphs) == 1


@pytest.mark.slow
def test_interceptions_that_overlap_leave_the_compiler_on() -> None:
    """The last to end put back what it had found: the stance that the first had set.

    The stance belongs to the process; from then on torch.compile did nothing in it.
    """
    backend = Backend()
    layer = Layer()
    layer.compile(backend=backend)
    first, second = intercepted(layer, Note()), intercepted(layer, Note())
    with first:
        second.__enter__()
    layer(X)
    assert backend.graphs == []
    second.__exit__(None, None, None)
    layer(X)
    assert len(backend.graphs) == 1
