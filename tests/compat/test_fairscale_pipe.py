"""What a Pipe is: its attributes, its layers, its names in a state_dict, and what it refuses."""

from __future__ import annotations

import copy
import inspect
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stageline.compat.fairscale as fairscale
import stageline.compat.torchgpipe as torchgpipe
from stageline.compat.fairscale.nn import Pipe
from stageline.compat.torchgpipe import GPipe
from tests.compat.loops import differences, plain, twins

CPU = torch.device("cpu")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def pipe(model: nn.Sequential | None = None, **settings: Any) -> Pipe:
    return Pipe(net() if model is None else model, [2, 1], chunks=3, **settings)


class Text:
    """Something that is no string and can be made one."""

    def __str__(self) -> str:
        return "always"


def test_names_can_be_imported_by_changing_the_first_word() -> None:
    from stageline.compat.fairscale.nn.pipe import is_checkpointing, is_recomputing
    from stageline.compat.fairscale.nn.pipe.balance import balance_by_size, balance_by_time
    from stageline.compat.fairscale.nn.pipe.batchnorm import DeferredBatchNorm
    from stageline.compat.fairscale.nn.pipe.checkpoint import is_checkpointing as same
    from stageline.compat.fairscale.nn.pipe.skip import Namespace, skippable

    assert fairscale.nn.Pipe is fairscale.nn.pipe.Pipe is fairscale.Pipe is Pipe
    assert same is is_checkpointing is torchgpipe.is_checkpointing
    assert torchgpipe.is_recomputing is is_recomputing
    assert torchgpipe.balance.balance_by_time is balance_by_time
    assert torchgpipe.balance.balance_by_size is balance_by_size
    assert torchgpipe.batchnorm.DeferredBatchNorm is DeferredBatchNorm
    assert torchgpipe.skip.skippable is skippable
    assert torchgpipe.skip.Namespace is Namespace
    assert torchgpipe.gpipe.GPipe is GPipe


@pytest.mark.parametrize("door", [fairscale, torchgpipe])
def test_names_can_be_imported_from_the_root_of_a_door(door: ModuleType) -> None:
    names = {
        *("DeferredBatchNorm", "Namespace", "balance_by_size", "balance_by_time"),
        *("is_checkpointing", "is_recomputing", "pop", "skippable", "stash", "verify_skippables"),
    }
    assert names < set(door.__all__)
    assert all(getattr(door, name) is getattr(fairscale, name) for name in names)
    assert re.fullmatch(r"\d+\.\d+\.\d+", door.__version__)


@pytest.mark.parametrize("kind", [Pipe, GPipe])
def test_arguments_are_those_of_the_original(kind: type[Pipe]) -> None:
    found = inspect.signature(kind).parameters.values()
    assert [(each.name, each.default) for each in found] == [
        ("module", inspect.Parameter.empty),
        ("balance", None),
        ("devices", None),
        ("chunks", 1),
        ("checkpoint", "except_last"),
        ("deferred_batch_norm", False),
    ]
    assert [each.name for each in found if each.kind is each.KEYWORD_ONLY] == [
        *("devices", "chunks", "checkpoint", "deferred_batch_norm"),
    ]


def test_attributes_are_converted_as_in_the_original() -> None:
    made = Pipe(net(), (2.0, 1.0), devices=("cpu",) * 5, chunks=42.0, checkpoint=Text())  # type: ignore[arg-type]
    assert (made.balance, made.chunks, made.checkpoint) == ([2, 1], 42, "always")
    assert [type(each) for each in (*made.balance, made.chunks)] == [int, int, int]
    assert made.devices == [CPU, CPU]  # the others are dropped


def test_devices_may_be_an_iterator() -> None:
    assert Pipe(net(), iter([2, 1]), devices=iter(["cpu", "cpu"])).devices == [CPU, CPU]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there are accelerators to use")
def test_without_an_accelerator_partitions_are_on_the_cpu() -> None:
    assert pipe().devices == [CPU, CPU]


def test_partitions_hold_the_layers_themselves_under_their_names() -> None:
    model = nn.Sequential(OrderedDict(a=nn.Linear(1, 1), b=nn.ReLU(), c=nn.Linear(1, 1)))
    made = pipe(model)
    assert isinstance(made.partitions, nn.ModuleList)
    assert [type(partition) for partition in made.partitions] == [nn.Sequential, nn.Sequential]
    assert {"partitions.0.a", "partitions.1.c"} <= {name for name, _ in made.named_modules()}
    assert list(made) == list(model)
    assert not hasattr(made, "a")


def test_a_pipe_is_indexed_like_the_sequential() -> None:
    model = net()
    made = pipe(model)
    assert len(made) == 3
    assert [made[i] for i in range(3)] == list(made) == list(model)
    assert [made[i] for i in (-3, -2, -1)] == list(model)
    for index in (3, -4):
        with pytest.raises(IndexError):
            made[index]
    with pytest.raises(TypeError):
        made[0:2]  # type: ignore[index]


def test_an_empty_model_returns_its_input() -> None:
    made = Pipe(nn.Sequential(), [])
    x = torch.tensor(42)
    assert made(x) is x
    assert made((x,)) == (x,)
    assert len(made) == 0
    with pytest.raises(TypeError, match="expected Tensor, but got int"):
        made(42)


TWO = nn.Linear(2, 2)
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no balance": (lambda: Pipe(net()), ValueError, "balance is required"),
    "another sum": (
        lambda: Pipe(net(), [1, 1]),
        ValueError,
        r"have different length \(module: 3, sum of balance: 2\)",
    ),
    "zero": (
        lambda: Pipe(net(), [0, 3]),
        ValueError,
        r"all balance numbers must be positive integer \(balance: \[0, 3\]\)",
    ),
    "halves": (lambda: Pipe(net(), [1.5, 1.5]), ValueError, "must be positive integer"),
    "few devices": (
        lambda: Pipe(net(), [1, 1, 1], devices=["cpu", "cpu"]),
        IndexError,
        r"too few devices to hold given partitions \(devices: 2, partitions: 3\)",
    ),
    "no list": (
        lambda: Pipe(net(), 3),  # type: ignore[arg-type]
        TypeError,
        "balance=3: wanted the number of layers",
    ),
    "text": (
        lambda: Pipe(net(), "21"),  # type: ignore[arg-type]
        TypeError,
        "balance='21': wanted the number of layers",
    ),
    "one device": (lambda: pipe(devices="cpu"), TypeError, "devices='cpu': wanted one for each"),
    "no device": (
        lambda: pipe(devices=["cpu", "foo"]),
        RuntimeError,
        "there is no device 'foo' to use .* leave devices= out",
    ),
    "no chunks": (
        lambda: Pipe(net(), [3], chunks=0),
        ValueError,
        "number of chunks must be positive integer",
    ),
    "checkpoint": (
        lambda: pipe(checkpoint="sometimes"),
        ValueError,
        "checkpoint is not one of 'always', 'except_last', or 'never'",
    ),
    "no sequential": (
        lambda: Pipe(nn.Linear(1, 1), [1]),  # type: ignore[arg-type]
        TypeError,
        "module must be nn.Sequential to be partitioned",
    ),
    "the same layer": (
        lambda: Pipe(nn.Sequential(TWO, TWO), [1, 1]),
        ValueError,
        "module with duplicate children is not supported",
    ),
}


@pytest.mark.parametrize(("make", "kind", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_built_is_refused(
    make: Callable[[], object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        make()


@pytest.mark.parametrize(
    ("kind", "module"),
    [(Pipe, "stageline.compat.fairscale.nn.pipe"), (GPipe, "stageline.compat.torchgpipe")],
)
def test_a_wrong_balance_is_answered_with_how_to_find_one(kind: type[Pipe], module: str) -> None:
    with pytest.raises(ValueError, match="balance is required") as caught:
        kind(net())
    assert f"from {module}.balance import balance_by_time" in str(caught.value)


@pytest.mark.parametrize(
    ("balance", "devices"), [([3], None), ([1, 1], ["cpu"]), ([1, 1], ["meta", "foo"])]
)
def test_a_refused_model_stays_as_it_was(balance: list[int], devices: list[str] | None) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        Pipe(model, balance, devices=devices, deferred_batch_norm=True)
    assert type(model[0]) is nn.BatchNorm1d
    assert {tensor.device for tensor in model.state_dict().values()} == {CPU}


class Gives(nn.Module):
    """Returns something else than a tensor."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return x.sum() if self.what == "sum" else self.what


X = torch.randn(7, 4)
WRONG_INPUTS: dict[str, tuple[Any, type[Exception], str]] = {
    "list": ([X], TypeError, "expected Tensor, but got list"),
    "dict": ({"x": X}, TypeError, "expected Tensor, but got dict"),
    "None": (None, TypeError, "expected Tensor, but got NoneType"),
    "text inside": ((X, "x"), TypeError, "expected Tensor, but got str"),
    "no dimension": (X.sum(), RuntimeError, "chunk expects at least a 1-dimensional tensor"),
    "nothing": ((), IndexError, "empty tuple"),
    "rows": ((X, X[:2]), ValueError, "the tensors of the input have 7, 2 rows"),
}


@pytest.mark.parametrize(("value", "kind", "text"), WRONG_INPUTS.values(), ids=WRONG_INPUTS)
def test_a_wrong_input_is_refused(value: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        pipe()(value)


def test_a_pipe_takes_one_argument() -> None:
    with pytest.raises(TypeError):
        pipe()(X, X)
    with pytest.raises(TypeError):
        pipe()(X, mask=X)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("text", TypeError, "expected Tensor, but got str from partition 0"),
        ([X], TypeError, "expected Tensor, but got list from partition 0"),
        ((X, None), TypeError, "expected Tensor, but got NoneType from partition 0"),
        ("sum", RuntimeError, "zero-dimensional tensor .* cannot be concatenated"),
    ],
)
@pytest.mark.parametrize("layers", [1, 2])
def test_a_wrong_output_is_refused(
    what: Any, kind: type[Exception], text: str, layers: int
) -> None:
    model = nn.Sequential(*[Gives(what), nn.Identity()][:layers])
    with pytest.raises(kind, match=text):
        Pipe(model, [1] * layers, chunks=2)(X)


@pytest.mark.parametrize("kind", [Pipe, GPipe])
def test_moving_is_refused_and_casting_is_not(kind: type[Pipe]) -> None:
    made = kind(net(), [2, 1], chunks=2)
    moves: list[Callable[[], object]] = [
        lambda: made.cuda(),
        lambda: made.cuda(0),
        lambda: made.cpu(),
        lambda: made.to(CPU),
        lambda: made.to(0),
        lambda: made.to("cpu", torch.float64),
        lambda: made.to(device="cpu"),
        lambda: made.to(X),
        lambda: made.to(tensor=X),
    ]
    for move in moves:
        with pytest.raises(TypeError, match=f"because {kind.__name__} should manage device"):
            move()
    made(X)
    for cast in (made.double, lambda: made.to(torch.float64), lambda: made.to(dtype=torch.float64)):
        made.float()
        made(X)
        assert cast() is made
        made(X.double()).sum().backward()
        weight = made[0].weight
        assert isinstance(weight, nn.Parameter)
        assert weight.grad is not None
        assert weight.grad.dtype is torch.float64
        made.zero_grad()


def test_layers_that_share_a_weight() -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
        model[2].weight = model[0].weight
        return model

    with pytest.raises(
        ValueError, match="module with duplicate parameters in distinct children is not supported"
    ):
        GPipe(tied(), [1, 3])
    with pytest.raises(
        ValueError, match="module with duplicate parameters on distinct devices is not supported"
    ):
        Pipe(tied(), [1, 3], devices=["cpu", "meta"])

    model = tied()
    twin = copy.deepcopy(model)
    made = Pipe(model, [1, 1, 1, 1], chunks=3)
    calls: list[int] = []
    made(X).square().sum().backward()
    made[2].register_forward_hook(lambda *_: calls.append(1))
    made.zero_grad()
    made(X).square().sum().backward()
    plain(twin, X, 3).square().sum().backward()
    assert len(calls) == 5  # 3 forwards, 2 of them recomputed
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("rows", [4, 2])
def test_parameters_over_one_memory_get_a_gradient_each(rows: int) -> None:
    """The first got the sum and the second none; views that differ could not be built."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, rows))
    made, twin = twins(model, [2, 1], chunks=3)
    for first, last in ((made[0], made[2]), (twin[0], twin[2])):
        last.get_parameter("weight").data = first.get_parameter("weight").data[:rows]
    made(X).square().sum().backward()
    plain(twin, X, 3).square().sum().backward()
    assert list(differences(made, twin)) == []


LIVE = """
import torch
from torch import nn
from stageline.compat.fairscale.nn import Pipe

pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), [1, 1], chunks=2)
pipe(torch.randn(4, 4)).sum().backward()
print("the end")
"""


@pytest.mark.processes
def test_a_script_with_a_live_pipe_ends() -> None:
    """In fairscale 0.4.13 such a script never exits: its worker is waited for after it is gone."""
    command = [sys.executable, "-W", "error", "-c", LIVE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "the end\n", "")
