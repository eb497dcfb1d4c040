"""Skip connections: from the layer that stashes to the layer that pops, past all in between."""

from __future__ import annotations

import copy
import threading
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.compat.fairscale.nn import Pipe
from stageline.compat.fairscale.nn.pipe.skip import (
    Namespace,
    pop,
    skippable,
    stash,
    verify_skippables,
)
from stageline.compat.fairscale.nn.pipe.skip.layout import crossing
from stageline.compat.fairscale.nn.pipe.skip.skippable import Skippable
from tests.compat.loops import differences, plain, twins

pytestmark = pytest.mark.usefixtures("one_thread")

Commands = Generator[Any, Any, Any]


@skippable(stash=["a", "b"])
class StashTwo(nn.Module):
    """Stashes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Commands:
        yield stash("a", x * 2)
        yield stash("b", self.linear(x))
        return x + 1


@skippable(pop=["a"], stash=["c"])
class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Commands:
        a = yield pop("a")
        yield stash("c", None)
        return self.linear(x) + a


@skippable(pop=["b", "c"])
class PopTwo(nn.Module):
    def forward(self, x: Tensor) -> Commands:
        c = yield pop("c")
        b = yield pop("b")
        assert c is None
        return x * b


def skipping() -> nn.Sequential:
    return nn.Sequential(StashTwo(), nn.Tanh(), Between(), nn.Linear(4, 4), PopTwo())


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("balance", [[5], [1, 4], [2, 3], [4, 1], [1, 1, 1, 1, 1]])
def test_skips_compute_what_the_plain_model_does(balance: list[int], checkpoint: str) -> None:
    pipe, twin = twins(skipping(), balance, chunks=3, checkpoint=checkpoint)
    x = torch.randn(7, 4)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    output, wanted = pipe(mine), plain(twin, theirs, 3)
    assert torch.equal(output, wanted)
    output.square().sum().backward()
    wanted.square().sum().backward()
    assert list(differences(pipe, twin)) == []
    assert mine.grad is not None
    assert theirs.grad is not None
    assert torch.equal(mine.grad, theirs.grad)


def test_skips_in_eval_mode_and_without_grad() -> None:
    pipe, twin = twins(skipping(), [2, 3], chunks=2)
    x = torch.randn(4, 4)
    with torch.no_grad():
        assert torch.equal(pipe(x), plain(twin, x, 2))
    assert torch.equal(pipe.eval()(x), plain(twin.eval(), x, 2))
    assert pipe(torch.empty(0, 4)).shape == (0, 4)


@skippable(stash=["maybe"])
class StashOrNone(nn.Module):
    """Stashes where the microbatch is positive."""

    def forward(self, x: Tensor) -> Commands:
        yield stash("maybe", x if x.sum().item() > 0 else None)
        return x.tanh()


@skippable(pop=["maybe"])
class AddIfAny(nn.Module):
    def forward(self, x: Tensor) -> Commands:
        maybe = yield pop("maybe")
        return x if maybe is None else x + maybe


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_a_skip_may_be_none_for_some_microbatches(checkpoint: str) -> None:
    model = nn.Sequential(StashOrNone(), nn.Linear(2, 2), AddIfAny())
    pipe, twin = twins(model, [1, 1, 1], chunks=4, checkpoint=checkpoint)
    x = torch.rand(4, 2) * torch.tensor([[1.0], [-1.0], [-1.0], [1.0]])
    for batch in (x, -x):
        output, wanted = pipe(batch), plain(twin, batch, 4)
        assert torch.equal(output, wanted)
        output.square().sum().backward()
        wanted.square().sum().backward()
    assert list(differences(pipe, twin)) == []


def test_which_skips_cross_each_boundary() -> None:
    layers = list(skipping())
    assert crossing([layers[:2], layers[2:3], layers[3:4], layers[4:]]) == [
        [(None, "a"), (None, "b")],
        [(None, "b"), (None, "c")],
        [(None, "b"), (None, "c")],
        [],
    ]
    assert crossing([layers]) == [[]]


def test_a_skippable_layer() -> None:
    layer = StashTwo()
    assert repr(layer).startswith("@skippable(StashTwo(")
    assert list(layer.state_dict()) == ["module.linear.weight", "module.linear.bias"]
    assert StashTwo.__doc__ == "Stashes two tensors."
    twin: nn.Module = copy.deepcopy(layer)
    assert isinstance(twin, StashTwo)
    assert isinstance(twin, Skippable)
    assert twin.stashable_names == {"a", "b"}
    assert twin.poppable_names == frozenset()
    assert twin.stashable() == [(None, "a"), (None, "b")]


@skippable(stash=["x"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Commands:
        yield stash("x", x)
        return x * 2


@skippable(pop=["x"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Commands:
        skip = yield pop("x")
        return x + skip


@skippable(stash=["x"], pop=["x"])
class Both(nn.Module):
    pass


def test_the_same_name_twice_in_namespaces() -> None:
    one, two = Namespace(), Namespace()
    assert one != two
    assert (one < two) != (two < one)
    assert one == copy.copy(one)
    assert hash(one) == hash(copy.copy(one))
    assert repr(one) == f"<Namespace '{one.id}'>"
    layers = [Stash(), Stash(), Pop(), Pop()]
    for layer, namespace in zip(layers, (one, two, one, two), strict=True):
        assert isinstance(layer, Skippable)
        assert layer.isolate(namespace, only=["x"]) is layer
    model = nn.Sequential(*layers)
    x = torch.randn(6, 3)
    pipe, twin = twins(model, [1, 1, 1, 1], chunks=3)
    assert torch.equal(pipe(x), x * 4 + x + 2 * x)
    assert torch.equal(plain(twin, x, 3), pipe(x))


MISMATCHED = {
    "never popped": ([Stash()], ["no module declared 'x' as poppable but stashed"]),
    "never stashed": ([Pop()], ["'0' declared 'x' as poppable but it was not stashed"]),
    "too early": (
        [Pop(), Stash()],
        [
            "'0' declared 'x' as poppable but it was not stashed",
            "no module declared 'x' as poppable but stashed",
        ],
    ),
    "stashed twice": (
        [Stash(), Stash(), Pop()],
        ["'1' redeclared 'x' as stashable but not isolated by namespace"],
    ),
    "popped twice": (
        [Stash(), Pop(), Pop()],
        ["'2' redeclared 'x' as poppable but not isolated by namespace"],
    ),
    "both": ([Both()], ["'0' declared 'x' both as stashable and as poppable"]),
}


@pytest.mark.parametrize(("layers", "findings"), MISMATCHED.values(), ids=MISMATCHED)
def test_pairs_that_do_not_match_are_refused(layers: list[nn.Module], findings: list[str]) -> None:
    model = nn.Sequential(*layers)
    with pytest.raises(TypeError) as caught:
        verify_skippables(model)
    first, empty, *bullets = str(caught.value).splitlines()
    assert first == "one or more pairs of stash and pop do not match:"
    assert empty == ""
    assert bullets == [f"* {finding}" for finding in findings]
    with pytest.raises(TypeError, match="pairs of stash and pop do not match"):
        Pipe(model, [len(layers)])


class Yields(nn.Module):
    """Yields what it was made with."""

    def __init__(self, *commands: Any) -> None:
        super().__init__()
        self.commands = commands

    def forward(self, x: Tensor) -> Commands:
        for number in range(len(self.commands)):
            yield self.commands[number]
        return x


FORGETS = skippable(stash=["a", "b"])(Yields)
RUN_TIME = {
    "not stashed": (Pop(), RuntimeError, "'x' has not been stashed"),
    "stashable": (
        skippable(stash=["x"])(Yields)(stash("y", None)),
        RuntimeError,
        "'y' has not been declared as stashable",
    ),
    "poppable": (
        skippable()(Yields)(pop("y")),
        RuntimeError,
        "'y' has not been declared as poppable",
    ),
    "forgets to stash": (
        FORGETS(stash("a", None)),
        RuntimeError,
        "'b' must be stashed but have not",
    ),
    "forgets both": (FORGETS(), RuntimeError, "'a', 'b' must be stashed but have not"),
    "no command": (skippable()(Yields)("x"), TypeError, "'x' is not a command from @skippable"),
}


@pytest.mark.parametrize(("layer", "kind", "text"), RUN_TIME.values(), ids=RUN_TIME)
def test_wrong_commands_are_refused(layer: nn.Module, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"^{text}$"):
        layer(torch.ones(1))


def test_what_is_popped_twice_or_never_is_refused() -> None:
    for commands, text in (
        ((), "'x' must be popped but have not"),
        ((pop("x"), pop("x")), "'x' has been popped before"),
    ):
        layer = skippable(pop=["x"])(Yields)(*commands)
        Stash()(torch.ones(1))
        with pytest.raises(RuntimeError, match=f"^{text}$"):
            layer(torch.ones(1))


def test_commands_may_be_handled_by_the_caller() -> None:
    """So torchgpipe's own benchmark turns skip connections into tuples."""
    layer: Any = skippable(stash=["x"], pop=["y"])(Yields)(stash("x", None), pop("y"))
    done: list[tuple[str, ...]] = []
    x = torch.ones(1)
    output = layer.dispatch(
        x,
        lambda name, tensor: done.append(("stash", name)),
        lambda name: done.append(("pop", name)),
    )
    assert output is x
    assert done == [("stash", "x"), ("pop", "y")]


def test_a_layer_that_yields_nothing_returns_its_output() -> None:
    @skippable()
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    assert torch.equal(Plain()(torch.ones(1)), torch.full((1,), 2.0))


def test_skips_inside_of_layers_stay_in_their_partition() -> None:
    layers = nn.Linear(3, 3), nn.Sequential(Stash(), nn.Tanh()), nn.Sequential(Pop())
    x = torch.randn(4, 3)
    pipe, twin = twins(nn.Sequential(*layers), [1, 2], chunks=2)
    assert torch.equal(pipe(x), plain(twin, x, 2))
    pipe, _ = twins(nn.Sequential(*layers), [2, 1], chunks=2)
    with pytest.raises(RuntimeError, match="'x' has not been stashed"):
        pipe(x)


def test_without_a_pipe_each_thread_has_its_own_skips() -> None:
    model = nn.Sequential(Stash(), Pop())
    results: list[Tensor] = []
    stashed, go_on = threading.Event(), threading.Event()

    def other() -> None:
        middle = model[0](torch.full((1,), 5.0))
        stashed.set()
        go_on.wait(30)
        results.append(model[1](middle))

    thread = threading.Thread(target=other)
    thread.start()
    assert stashed.wait(30)
    assert torch.equal(model(torch.ones(1)), torch.full((1,), 3.0))
    go_on.set()
    thread.join()
    assert torch.equal(results[0], torch.full((1,), 15.0))
