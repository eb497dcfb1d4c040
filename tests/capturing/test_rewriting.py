"""Code of the user's own with direct calls in it: the rest runs as it stands."""

from __future__ import annotations

import gc
import importlib.util
import traceback
import weakref
from collections.abc import Callable
from inspect import getattr_static
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.capturing.direct.calls import DirectCall
from stageline.capturing.direct.rewriting import read
from tests.capturing.direct_models import calls_of_modules

COUNT = 0


class Two(nn.Module):
    """Has two layers to call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)


class Decides(Two):
    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        one = self.one(x)
        while again and one.sum() < 10:
            one = one + self.two(x).abs()
        return one if self.training else -one  # type: ignore[no-any-return]


class Writes(Two):
    """Counts in a global, keeps what it has seen, and catches what its layer raises."""

    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        self.seen = x.shape
        try:
            return self.one(x[:, :2])  # type: ignore[no-any-return]  # torch has no types here
        except RuntimeError:
            return self.two(x)  # type: ignore[no-any-return]


class Nests(Two):
    def forward(self, x: Tensor, /) -> Tensor:
        def twice(y: Tensor) -> Tensor:
            return self.two(self.one(y))  # type: ignore[no-any-return]

        return sum((twice(row) for row in x), start=torch.zeros(3))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Two()
        self.both = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for each in self.both:
            x = each(x)
        return self.inner.two(self.inner.one(self.both[0](x)))  # type: ignore[no-any-return]


class Picks(Two):
    """Lets a method choose which layer it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = self.one

    def choose(self, x: Tensor) -> None:
        self.chosen = self.two if len(x) == 4 else self.one

    def forward(self, x: Tensor) -> Tensor:
        self.choose(x)
        return self.chosen(x)  # type: ignore[no-any-return]


def forward(x: Tensor) -> Tensor:
    return 3 * x


class Homonym(Two):
    """Calls a function that bears the name of its method."""

    def forward(self, x: Tensor) -> Tensor:
        return forward(self.one(x))


REWRITTEN: dict[type[nn.Module], int] = {
    Decides: 0,
    Writes: 0,
    Nests: 0,
    Deep: 3,
    Homonym: 0,
}
"""With how many calls of modules are left."""


@pytest.mark.parametrize("kind", REWRITTEN)
def test_code_does_what_it_did(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(4, 3)
    assert torch.equal(DirectCall(model).now()(x), model(x))
    with calls_of_modules() as calls:
        DirectCall(model).now()(x)
    assert len(calls) == REWRITTEN[kind]


def test_what_code_writes_is_written() -> None:
    global COUNT
    COUNT = 0
    model = Writes()
    DirectCall(model).now()(torch.randn(4, 3))
    assert COUNT == 1
    assert model.seen == (4, 3)


def test_defaults_and_names_of_arguments() -> None:
    model, x = Decides(), torch.randn(4, 3)
    call = DirectCall(model).now()
    assert torch.equal(call(x, again=False), model(x, again=False))
    assert torch.equal(call(x), model(x))
    model.eval()
    assert torch.equal(call(x), model(x))


@pytest.mark.parametrize("rows", [4, 5])
def test_a_layer_that_a_method_chooses_is_called(rows: int) -> None:
    """The first layer that was seen under a name went on being called, in the same batch."""
    model, x = Picks(), torch.randn(rows, 3)
    call = DirectCall(model).now()
    assert torch.equal(call(x), model.two(x) if rows == 4 else model.one(x))


def test_a_method_that_is_reloaded_is_called() -> None:
    """Notebooks reload a method by giving it other code, and leave the function as it is."""

    class Reloaded(Two):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.one(x) * scale  # type: ignore[no-any-return]

    def other(self: Two, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.two(x) * scale  # type: ignore[no-any-return]

    model, x = Reloaded(), torch.randn(4, 3)
    direct = DirectCall(model)
    direct.now()(x)
    Reloaded.forward.__defaults__ = (2.0,)
    assert torch.equal(direct.now()(x), model.one(x) * 2)
    Reloaded.forward.__code__ = other.__code__
    assert torch.equal(direct.now()(x), model.two(x) * 2)


class Fails(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        return hidden @ torch.ones(5)  # type: ignore[no-any-return]


def test_a_traceback_points_at_the_users_line() -> None:
    try:
        DirectCall(Fails()).now()(torch.randn(4, 3))
    except RuntimeError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
    assert last.filename == __file__
    assert str(last.line).startswith("return hidden @ torch.ones(5)")


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args) + 1


class Decorated(Two):
    @wrapped
    def forward(self, x: Tensor) -> Tensor:
        return self.one(x)  # type: ignore[no-any-return]


class Takes(Two):
    def forward(self, x: Tensor, *others: Tensor, **named: Any) -> Tensor:
        return self.one(x)  # type: ignore[no-any-return]


class Above(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.one(x)  # type: ignore[no-any-return]


class Below(Above):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.two(x))


class Replaces(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.one = nn.Linear(3, 3)
        return self.one(x)  # type: ignore[no-any-return]


class Rebinds(Two):
    def forward(self, x: Tensor) -> Tensor:
        module, self = self, nn.Module()  # type: ignore[assignment]
        self.one = module.two
        return self.one(x)  # type: ignore[no-any-return]


class Looks(Two):
    def forward(self, x: Tensor) -> Tensor:
        assert sorted(locals()) == ["self", "x"]
        return self.one(x)  # type: ignore[no-any-return]


class Mangled(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.__scaled(x)

    def __scaled(self, x: Tensor) -> Tensor:
        return 2 * x


class Answers(Two):
    """Has attributes of its own making."""

    def __getattr__(self, name: str) -> Any:
        return (lambda x: x + 5) if name == "one" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x)  # type: ignore[no-any-return]


class Hides(Two):
    """Has a property with the name of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self._modules["three"] = nn.Linear(3, 3)

    @property
    def three(self) -> nn.Module:
        return self.two

    def forward(self, x: Tensor) -> Tensor:
        return self.three(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "kind", [Decorated, Takes, Below, Replaces, Rebinds, Looks, Mangled, Answers, Hides]
)
def test_code_that_is_not_plain_does_what_it_did(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(4, 3)
    torch.manual_seed(1)
    wanted = model(x)
    torch.manual_seed(1)
    assert torch.equal(DirectCall(model).now()(x), wanted)


@pytest.mark.parametrize("kind", [Below, Replaces, Rebinds, Looks])
def test_code_that_is_not_plain_is_left_alone(kind: type[nn.Module]) -> None:
    assert read(getattr_static(kind, "forward")) is None


def imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CODE = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.one(x) + 1
"""


def test_a_file_that_has_changed_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "a_file_that_changes.py"
    path.write_text(CODE)
    block = imported(path).Block()
    path.write_text(CODE.replace("+ 1", "+ 2"))
    assert read(type(block).forward) is None
    x = torch.randn(4, 3)
    assert torch.equal(DirectCall(block).now()(x), block.one(x) + 1)


@pytest.mark.parametrize(
    "edited",
    [
        CODE.replace("+ 1", "+ 1.0"),  # which Python finds equal
        CODE.replace("(self, x)", "(self, x, /)"),
        CODE.replace("self.one(x) + 1", "self.one(x"),
        CODE.replace("return self.one(x) + 1", '"""'),
        "# nothing\n" * 20,
    ],
)
def test_a_file_that_is_being_edited_is_left_alone(tmp_path: Path, edited: str) -> None:
    path = tmp_path / "a_file_that_is_edited.py"
    path.write_text(CODE)
    block = imported(path).Block()
    path.write_text(edited)
    x = torch.randn(4, 3)
    assert torch.equal(DirectCall(block).now()(x=x), block.one(x) + 1)
    assert read(type(block).forward) is None


def test_an_expression_too_deep_to_go_down_in_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a_long_sum.py"
    path.write_text(CODE.replace("+ 1", "+ 1" * 800))
    block, x = imported(path).Block(), torch.randn(4, 3)
    assert torch.equal(DirectCall(block).now()(x), block(x))


def test_names_around_code_are_freed_with_it(tmp_path: Path) -> None:
    """A twin kept for the next module held the file's names, and so its own method, for ever."""
    path = tmp_path / "a_file_that_goes.py"
    path.write_text(CODE)
    module = imported(path)
    DirectCall(module.Block()).now()(torch.randn(4, 3))
    there = weakref.ref(module.Block)
    del module
    gc.collect()
    assert there() is None


def test_code_without_a_file_is_left_alone() -> None:
    names: dict[str, Any] = {}
    exec(CODE, names)
    assert read(names["Block"].forward) is None


def test_a_module_of_which_nobody_knows_is_freed() -> None:
    model = Decides()
    direct = DirectCall(model)
    direct.now()(torch.randn(4, 3))
    there = weakref.ref(model)
    del model, direct
    gc.collect()
    assert there() is None


class Enters(Two):
    """Each of its methods does something else with what it is given."""

    inner: Any

    def once(self, x: Tensor, y: int = 0) -> Any:
        return torch.relu(self.one(x)) + y

    def forgets(self, x: Tensor) -> Any:
        made, x = self.one(x), None  # type: ignore[assignment]  # as recorded code does
        return made

    def deeper(self, x: Tensor) -> Any:
        return self.one.weight.sum() + self.inner.one(x)

    def either(self, x: Tensor) -> Any:
        return self.one(x) if self.training else self.two(x)

    def twice(self, x: Tensor) -> Any:
        return self.one(x) + x

    def asks(self, x: Tensor) -> Any:
        return self.one(x) if x.shape[0] else None

    def again(self, x: Tensor) -> Any:
        return [self.one(x) for _ in range(2)]

    def loops(self, x: Tensor) -> Any:
        while self.training:
            self.one(x)

    def later(self, x: Tensor) -> Any:
        return lambda: self.one(x)

    def changes(self, x: Tensor) -> Any:
        x += 1
        return self.one(x)

    def names(self, x: Tensor) -> Any:
        return self.one(input=x)

    def more(self, x: Tensor) -> Any:
        return self.one(x, 1)

    def spreads(self, *x: Tensor) -> Any:
        return self.one(x)

    def others(self, y: Tensor, x: Tensor) -> Any:
        return self.one(x)

    def elsewhere(self, x: Tensor) -> Any:
        return torch.relu(x)


@pytest.mark.parametrize(
    ("name", "path"),
    [("once", ("one",)), ("forgets", ("one",)), ("deeper", ("inner", "one"))]
    + [(name, ()) for name in ("either", "twice", "asks", "again", "loops", "later", "changes")]
    + [(name, ()) for name in ("names", "more", "spreads", "others", "elsewhere")],
)
def test_where_all_of_the_first_argument_goes(name: str, path: tuple[str, ...]) -> None:
    method = read(getattr_static(Enters, name))
    assert method is not None
    assert method.entrance == path
