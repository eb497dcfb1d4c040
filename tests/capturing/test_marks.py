"""Marks: nothing when the model runs plainly, positions when somebody listens."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.capturing.marks import (
    Block,
    CutPoint,
    MarkLog,
    begin_block,
    begun_block,
    is_own_hook,
    listening,
    remove_blocks,
)
from stageline.errors import ConfigError


class Counting:
    """A position that grows by one with each tick: what a recording's nodes would do."""

    def __init__(self) -> None:
        self.position = 0

    def tick(self, x: Any) -> Any:
        self.position += 1
        return x


@Block("decorated")
def doubled(x: Tensor, *, times: int = 2) -> Tensor:
    """Double."""
    return x * times


class Marked(nn.Module):
    """Runs what a test gives it, with a model's self."""

    def __init__(self, body: Callable[[Marked, Tensor], Any], counting: Counting) -> None:
        super().__init__()
        self.body = body
        self.tick = counting.tick
        self.cut = CutPoint()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def logged(body: Callable[[Marked, Any], Any], **attributes: Any) -> MarkLog:
    """Run a body and return what was written down."""
    counting = Counting()
    model = Marked(body, counting)
    for name, value in attributes.items():
        setattr(model, name, value)
    log = MarkLog(model, position=lambda: counting.position)
    with listening(log):
        model(torch.zeros(1, 2))
    log.finish(counting.position)
    return log


def spans(log: MarkLog) -> list[tuple[str, str, int, int]]:
    return [(mark.kind, mark.name, mark.begin, mark.end) for mark in log.marks]


def test_a_cut_point_returns_the_very_value_it_is_given() -> None:
    for value in (torch.zeros(1), (torch.zeros(1), None), {"a": 1}):
        assert CutPoint()(value) is value


def test_a_decorated_function_looks_as_before() -> None:
    assert doubled.__name__ == "doubled"
    assert doubled.__doc__ == "Double."
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    assert torch.equal(doubled(torch.ones(2), times=3), torch.full((2,), 3.0))
    assert pickle.loads(pickle.dumps(Block("B1"))).name == "B1"


def test_marks_do_not_break_a_compiled_graph() -> None:
    def body(self: Marked, x: Tensor) -> Tensor:
        with Block("B1"):
            x = self.cut(self.first(x))
        result: Tensor = self.second(doubled(x))
        return result

    model = Marked(body, Counting())
    begin_block(model.second, "B2")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(3, 2)
    assert torch.equal(compiled(x), model(x))


def test_a_begun_block_changes_neither_names_nor_copies() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    keys, x = list(model.state_dict()), torch.randn(3, 2)
    want = model(x)
    assert begin_block(model[1], "B2") is model[1]
    assert list(model.state_dict()) == keys
    assert torch.equal(model(x), want)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(model), copy.copy(model), saved):
        assert begun_block(other[1]) == "B2"
        assert torch.equal(other(x), want)
    assert remove_blocks(model) == 1
    assert remove_blocks(model) == 0
    assert begun_block(model[1]) is None


def test_only_its_own_hooks_are_its_own() -> None:
    module = begin_block(nn.Linear(2, 2), "B1")
    module.register_forward_pre_hook(lambda module, args: None)
    assert [is_own_hook(hook) for hook in module._forward_pre_hooks.values()] == [True, False]
    remove_blocks(module)
    assert len(module._forward_pre_hooks) == 1


def test_two_blocks_cannot_begin_at_one_module() -> None:
    module = begin_block(nn.Linear(2, 2), "B1")
    with pytest.raises(ConfigError, match=r"block 'B1' begins at this Linear already"):
        begin_block(module, "B2")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda block, _: block(""), "wanted the name of a block, got ''"),
        (lambda block, _: block(3), "wanted the name of a block, got 3"),
        (lambda _, begin: begin(torch.relu, "B1"), "wanted a module, got builtin"),
        (lambda _, begin: begin(nn.ReLU(), None), "wanted the name of a block, got None"),
        (lambda block, _: block("B1")(nn.ReLU()), r"got ReLU: sl.begin_block\(module, 'B1'\)"),
        (lambda block, _: block("B1")(nn.ReLU), "got the class ReLU: decorate its forward"),
        (lambda block, _: block("B1")(3), "got int: decorate a function"),
        (lambda block, _: block("B1")(spans_of_nothing), "got a generator or coroutine"),
    ],
)
def test_what_cannot_be_marked(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(Block, begin_block)


def spans_of_nothing() -> Any:
    yield 1


def test_positions_are_those_where_marks_were_reached() -> None:
    def body(self: Marked, x: Any) -> Any:
        with Block("B1"):
            self.tick(self.tick(x))
        self.cut(self.tick(x))
        with Block("B2"):
            self.tick(x)
        with Block("B1"):
            self.tick(x)

    log = logged(body)
    assert log.findings == []
    assert spans(log) == [
        ("block", "B1", 0, 2),
        ("cut", "cut", 3, 3),
        ("block", "B2", 3, 4),
        ("block", "B1", 4, 5),
    ]
    assert {mark.where.split(":")[0] for mark in log.marks} == {"test_marks.py"}
    lines = [int(mark.where.split(":")[1].split()[0]) for mark in log.marks]
    first = body.__code__.co_firstlineno
    assert [line - first for line in lines] == [1, 3, 4, 6]


def test_a_begun_block_ends_where_the_next_begins_or_the_model_ends() -> None:
    def body(self: Marked, x: Any) -> Any:
        self.tick(self.cut(x))
        self.tick(self.first(x))
        self.tick(x)
        self.tick(self.second(x))

    first, second = begin_block(nn.Linear(2, 2), "B1"), begin_block(nn.Linear(2, 2), "B2")
    log = logged(body, first=first, second=second)
    assert log.findings == []
    assert spans(log) == [("cut", "cut", 0, 0), ("block", "B1", 1, 3), ("block", "B2", 3, 4)]


def test_a_scope_ends_a_begun_block() -> None:
    def body(self: Marked, x: Any) -> Any:
        self.tick(self.first(self.cut(x)))
        with Block("scope"):
            self.tick(x)
        self.tick(x)

    log = logged(body, first=begin_block(nn.Linear(2, 2), "B1"))
    assert log.findings == []
    assert spans(log)[1:] == [("block", "B1", 0, 1), ("block", "scope", 1, 2)]


def test_nested_blocks_are_named_both_and_the_rest_goes_on() -> None:
    def body(self: Marked, x: Any) -> Any:
        with Block("outer"):
            with Block("inner"):
                self.tick(self.cut(x))
            self.tick(self.first(x))
        with Block("after"):
            self.tick(x)

    log = logged(body, first=begin_block(nn.Linear(2, 2), "begun"))
    first = body.__code__.co_firstlineno
    outer = f"begins inside block 'outer' (test_marks.py:{first + 1} in body): "
    way_out = "blocks cannot be nested, end one before the next begins"
    assert log.findings == [
        f"block 'inner' (test_marks.py:{first + 2} in body) {outer}{way_out}",
        f"block 'begun' (test_marks.py:{first + 4} in body) {outer}{way_out}",
    ]
    assert [(name, begin, end) for kind, name, begin, end in spans(log) if kind == "block"] == [
        ("outer", 0, 2),
        ("after", 2, 3),
    ]


def test_a_cut_point_used_twice_is_named() -> None:
    def body(self: Marked, x: Any) -> Any:
        self.tick(self.cut(x))
        self.cut(x)

    log = logged(body)
    first = body.__code__.co_firstlineno
    assert log.findings == [
        f"CutPoint cut is used twice, at test_marks.py:{first + 1} in body and "
        f"test_marks.py:{first + 2} in body: make one for each place"
    ]
    assert spans(log) == [("cut", "cut", 0, 0)]


def test_a_mark_that_was_never_reached_is_named() -> None:
    log = logged(
        lambda self, x: x,
        first=begin_block(nn.Linear(2, 2), "B1"),
        others=[CutPoint(), CutPoint()],
    )
    assert log.findings == [
        "CutPoint cut was never reached: call it in forward, or remove it",
        "CutPoint others.0 was never reached: call it in forward, or remove it",
        "CutPoint others.1 was never reached: call it in forward, or remove it",
        "block 'B1' was never reached: it begins at first, which was not called",
    ]


def test_cut_points_that_nobody_holds_are_told_apart() -> None:
    """A CutPoint made on the spot dies at once; the next one may get its id."""

    def body(self: Marked, x: Any) -> Any:
        self.cut(x)
        CutPoint()(self.tick(x))
        CutPoint()(self.tick(x))

    log = logged(body)
    assert log.findings == []
    assert [mark.name.split(" ")[0] for mark in log.marks] == ["cut", "at", "at"]


def test_only_the_listening_thread_is_heard() -> None:
    def body(self: Marked, x: Any) -> Any:
        def elsewhere() -> None:
            with Block("elsewhere"):
                self.cut(x)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        self.cut(x)

    assert spans(logged(body)) == [("cut", "cut", 0, 0)]


def test_listening_ends_with_an_error() -> None:
    def body(self: Marked, x: Any) -> Any:
        with Block("B1"):
            raise ZeroDivisionError

    model = Marked(body, Counting())
    log = MarkLog(model, position=lambda: 0)
    with pytest.raises(ZeroDivisionError), listening(log):
        model(torch.zeros(1))
    model.cut(torch.zeros(1))
    log.finish(0)
    assert spans(log) == [("block", "B1", 0, 0)]
