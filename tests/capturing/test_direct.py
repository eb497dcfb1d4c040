"""Direct calls do what calls of modules do: same bits, same hooks, same errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.overrides import TorchFunctionMode

from stageline.capturing.direct.calls import VARIABLE, DirectCall
from stageline.torch_private import CALL
from tests.capturing.direct_models import Residual, calls_of_modules


def directly(module: nn.Module, *args: Any) -> Any:
    return DirectCall(module).now()(*args)


def vectors() -> Tensor:
    return torch.randn(6, 4)


def pictures() -> Tensor:
    return torch.randn(3, 4, 8, 8)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(4, 3), vectors),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), vectors),
    "relu": (nn.ReLU, vectors),
    "relu in place": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), vectors),
    "layer norm": (lambda: nn.LayerNorm(4), vectors),
    "bare layer norm": (lambda: nn.LayerNorm(4, elementwise_affine=False), vectors),
    "conv 1": (lambda: nn.Conv1d(4, 2, 3, stride=2), lambda: torch.randn(2, 4, 9)),
    "conv 2": (lambda: nn.Conv2d(4, 2, 3, padding=1, bias=False), pictures),
    "conv 3": (lambda: nn.Conv3d(4, 2, 2, dilation=2), lambda: torch.randn(1, 4, 5, 5, 5)),
    "conv in groups": (lambda: nn.Conv2d(4, 4, 3, groups=2, padding="same"), pictures),
    "conv that reflects": (lambda: nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect"), pictures),
    "batch norm 1": (lambda: nn.BatchNorm1d(4), vectors),
    "batch norm 1 of lines": (lambda: nn.BatchNorm1d(4), lambda: torch.randn(2, 4, 9)),
    "batch norm 2": (lambda: nn.BatchNorm2d(4), pictures),
    "batch norm 3": (lambda: nn.BatchNorm3d(4), lambda: torch.randn(1, 4, 2, 2, 2)),
    "batch norm that averages": (lambda: nn.BatchNorm2d(4, momentum=None), pictures),
    "batch norm that keeps nothing": (
        lambda: nn.BatchNorm2d(4, track_running_stats=False),
        pictures,
    ),
    "bare batch norm": (lambda: nn.BatchNorm2d(4, affine=False), pictures),
    "group norm": (lambda: nn.GroupNorm(2, 4), pictures),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), vectors),
    "pools": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)), pictures),
    "of the user": (lambda: Residual(4, 8), pictures),
    "several": (
        lambda: nn.Sequential(Residual(4, 8), nn.Flatten(), nn.Linear(8 * 64, 3), nn.GELU()),
        pictures,
    ),
}


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_to_the_last_bit(name: str, is_training: bool) -> None:
    make, draw = LAYERS[name]
    torch.manual_seed(0)
    plain = make().train(is_training)
    twin = copy.deepcopy(plain)
    direct = DirectCall(twin)
    for _ in range(3):  # statistics of the first call show in the third
        x = draw().requires_grad_()
        y = x.detach().clone().requires_grad_()
        wanted, made = plain(x), direct.now()(y)
        assert torch.equal(made, wanted)
        assert str(made.grad_fn).split()[0] == str(wanted.grad_fn).split()[0]
        wanted.square().sum().backward()
        made.square().sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        assert torch.equal(x.grad, y.grad)
    for name, parameter in plain.named_parameters():
        mine = twin.get_parameter(name)
        assert parameter.grad is not None
        assert mine.grad is not None
        assert torch.equal(parameter.grad, mine.grad), name
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, twin.get_buffer(name)), name


@pytest.mark.parametrize(
    "name", ["linear", "relu", "conv 2", "batch norm 2", "layer norm", "group norm"]
)
def test_no_module_is_called(name: str) -> None:
    make, draw = LAYERS[name]
    module, x = nn.Sequential(make()), draw()
    with calls_of_modules() as calls:
        module(x)
    assert len(calls) == 2
    with calls_of_modules() as calls:
        directly(module, x)
    assert not calls


class Counted(nn.Identity):
    """Has a call of its own."""

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


def test_of_a_block_of_the_users_own_only_unknown_layers_are_called() -> None:
    block = nn.Sequential(Residual(4, 8), nn.Identity(), Counted())
    with calls_of_modules() as calls:
        directly(block, pictures())
    assert [type(module) for module in calls] == [Counted]


def other_memory(norm: Any) -> None:
    norm.num_batches_tracked.data = torch.tensor(40)


def shared_memory(norm: Any) -> None:
    norm.num_batches_tracked.share_memory_()


def other_tensor(norm: Any) -> None:
    norm.num_batches_tracked = torch.tensor(50)


def shorter_number(norm: Any) -> None:
    norm.num_batches_tracked = torch.tensor(60, dtype=torch.int32)


def other_value(norm: Any) -> None:
    norm.load_state_dict({**norm.state_dict(), "num_batches_tracked": torch.tensor(70)})


@pytest.mark.parametrize(
    "change",
    [nn.Module.train, other_memory, shared_memory, other_tensor, shorter_number, other_value],
)
def test_batches_are_counted_wherever_their_number_lies(change: Callable[[Any], object]) -> None:
    """1 is added in its memory, without an operation of torch."""
    plain = nn.BatchNorm2d(4)
    twin = copy.deepcopy(plain)
    direct = DirectCall(twin).now()
    for _ in range(2):
        for norm, call in ((plain, plain), (twin, direct)):
            for _ in range(3):
                call(pictures())
            change(norm)
            call(pictures())
    assert plain.num_batches_tracked is not None
    assert twin.num_batches_tracked is not None
    assert torch.equal(plain.num_batches_tracked, twin.num_batches_tracked)
    assert plain.num_batches_tracked.dtype is twin.num_batches_tracked.dtype


def test_a_graph_that_needs_the_number_of_batches_knows_that_it_has_changed() -> None:
    norm = nn.BatchNorm2d(4)
    call = DirectCall(norm).now()
    call(pictures())
    assert norm.num_batches_tracked is not None
    scaled = pictures().requires_grad_() * norm.num_batches_tracked
    call(pictures())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scaled.sum().backward()


BAD: dict[str, tuple[nn.Module, Tensor]] = {
    "too wide": (nn.Linear(4, 3), torch.ones(2, 5)),
    "not 4 dimensions": (nn.BatchNorm2d(4), torch.ones(2, 4)),
    "a single value": (nn.BatchNorm1d(4), torch.ones(1, 4)),
    "other channels": (nn.BatchNorm2d(4), torch.ones(2, 3, 4, 4)),
    "no epsilon": (nn.BatchNorm2d(4, eps=0.0), torch.ones(2, 4, 4, 4)),
    "other shape": (nn.LayerNorm(4), torch.ones(2, 3)),
    "whole numbers": (nn.Conv2d(4, 2, 3), torch.ones(2, 4, 8, 8, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_torchs_words(name: str) -> None:
    module, x = BAD[name]
    twin = copy.deepcopy(module)
    with pytest.raises((RuntimeError, ValueError), match=r"\w") as wanted:
        module(x)
    with pytest.raises(type(wanted.value)) as came:
        directly(twin, x)
    assert str(came.value) == str(wanted.value)
    for one, other in zip(module.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other)


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "forward": nn.Module.register_forward_hook,
    "pre": nn.Module.register_forward_pre_hook,
    "backward": nn.Module.register_full_backward_hook,
    "backward pre": nn.Module.register_full_backward_pre_hook,
}


@pytest.mark.parametrize("place", ["", "0", "0.first", "0.first_norm", "1", "1.0"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_seen_whenever_they_come(kind: str, place: str) -> None:
    model = nn.Sequential(Residual(4, 8), nn.Sequential(nn.Flatten()))
    call = DirectCall(model).now()
    heard: list[object] = []
    handle = HOOKS[kind](model.get_submodule(place), lambda *given: heard.append(kind))
    call(pictures().requires_grad_()).sum().backward()
    assert len(heard) == 1
    handle.remove()
    call(pictures().requires_grad_()).sum().backward()
    assert len(heard) == 1


def test_hooks_on_all_modules_are_seen_in_the_next_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    direct = DirectCall(model)
    direct.now()(vectors())
    heard: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *given: heard.append(module)
    )
    try:
        direct.now()(vectors())
    finally:
        handle.remove()
    assert len(heard) == 3
    direct.now()(vectors())
    assert len(heard) == 3


def other_layer(model: Any) -> None:
    model[0] = nn.Linear(4, 4)


def other_weight(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.ones(4, 4))


def weight_that_is_no_parameter(model: Any) -> None:
    del model[0].weight
    model[0].weight = torch.ones(4, 4)


def forward_of_its_own(model: Any) -> None:
    model[0].forward = lambda x: x + 1


def another_class(model: Any) -> None:
    parametrizations.orthogonal(model[0])


def pruned(model: Any) -> None:
    prune.l1_unstructured(model[0], "weight", 0.5)


def pruned_for_good(model: Any) -> None:
    pruned(model)
    prune.remove(model[0], "weight")


def compiled(model: Any) -> None:
    model[0]._compiled_call_impl = lambda x: x * 3


def one_more(model: Any) -> None:
    model.append(nn.Tanh())


def one_less(model: Any) -> None:
    del model[1]


@pytest.mark.parametrize(
    "change",
    [
        other_layer,
        other_weight,
        weight_that_is_no_parameter,
        forward_of_its_own,
        another_class,
        pruned,
        pruned_for_good,
        compiled,
        one_more,
        one_less,
        nn.Module.eval,
        nn.Module.double,
    ],
)
def test_a_change_between_batches_is_seen(change: Callable[[Any], object]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    direct, x = DirectCall(model), vectors()
    before = direct.now()(x)
    change(model)
    x = x.to(next(model.parameters()).dtype)
    plain = copy.deepcopy(model) if change is nn.Module.eval else model
    wanted = plain(x)
    assert torch.equal(direct.now()(x), wanted)
    assert not torch.equal(wanted.to(before.dtype), before)


def test_a_replaced_function_of_torch_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = DirectCall(nn.Sequential(nn.ReLU()))
    direct.now()(vectors())
    monkeypatch.setattr(F, "relu", lambda input, inplace=False: input * 0 + 7)
    assert torch.equal(direct.now()(vectors()), torch.full((6, 4), 7.0))


def test_a_method_replaced_in_its_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = DirectCall(Residual(4, 8))
    direct.now()(pictures())
    monkeypatch.setattr(Residual, "forward", lambda self, x: x * 0)
    assert not direct.now()(pictures()).any()


class Noting(TorchFunctionMode):
    """Notes which functions of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_same_functions() -> None:
    model, x = nn.Sequential(Residual(4, 8), nn.ReLU(), nn.LayerNorm(8)), pictures()
    with Noting() as wanted:
        model(x)
    with Noting() as seen:
        directly(model, x)
    calls = [func for func in seen.called if func is not Tensor.dim]
    assert set(wanted.called) <= set(seen.called)
    assert calls.count(F.relu) == wanted.called.count(F.relu) == 3


def test_a_class_of_tensors_is_asked_the_same() -> None:
    class Own(Tensor):
        pass

    x = vectors().as_subclass(Own)
    assert type(directly(nn.Sequential(nn.ReLU(), nn.LayerNorm(4)), x)) is Own


class Takes(nn.Module):
    """Takes more than one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: float = 0.0) -> Tensor:
        hidden: Tensor = self.layer(input=x)
        return hidden * scale + shift


class Calls(nn.Module):
    """Gives some of them, one by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Takes()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(self.inner(x), shift=2.0)
        return output


def test_hooks_see_the_arguments_that_were_given() -> None:
    """A twin that called its module once more, for the hooks, had filled in all defaults."""
    model = Calls()
    seen: list[Any] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append((type(module), len(args), sorted(kwargs)))

    for module in (model.inner, model.inner.layer):
        module.register_forward_pre_hook(note, with_kwargs=True)
    model(vectors())
    wanted = seen.copy()
    seen.clear()
    directly(model, vectors())
    assert seen == wanted
    assert (Takes, 1, ["shift"]) in seen


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (nn.Linear, "forward"),
        (nn.Linear, "__call__"),
        (nn.Sequential, "forward"),
        (nn.Module, CALL),
        (Takes, "__call__"),
    ],
)
def test_methods_replaced_in_classes_are_called(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Takes())
    direct, before = DirectCall(model), getattr(owner, name)
    direct.now()(vectors())
    called: list[object] = []

    def instead(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(self)
        return before(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, instead)
    direct.now()(vectors())
    assert called


def test_a_method_of_a_layer_replaced_in_an_instance_is_called() -> None:
    """So pictures are made to tile."""
    layer = nn.Conv2d(1, 1, 3, padding=1)

    def tiled(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), weight, bias)

    layer._conv_forward = tiled  # type: ignore[assignment,method-assign]
    x = torch.randn(1, 1, 4, 4)
    assert torch.equal(directly(nn.Sequential(layer), x), layer(x))


def test_graphs_of_the_users_own_are_called_as_modules() -> None:
    model = nn.Sequential(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    direct = DirectCall(model)
    direct.now()(vectors())
    model[0].forward = lambda x: x * 0 + 5
    assert torch.equal(direct.now()(vectors()), torch.full((6, 4), 5.0))


def test_layers_that_change_names_are_called_by_their_new_ones() -> None:
    model = Residual(4, 4)
    direct, x = DirectCall(model), pictures()
    direct.now()(x)
    first, second = model.first, model.second
    del model.first, model.second
    model.second, model.first = first, second
    assert torch.equal(direct.now()(x), model(x))


@pytest.mark.parametrize("args", [(), (1, 2), ("text",)])
def test_wrong_arguments_are_refused_in_the_same_words(args: Any) -> None:
    for model in (nn.Linear(4, 4), nn.Sequential(nn.ReLU()), Takes()):
        with pytest.raises((TypeError, AttributeError)) as wanted:
            model(*args)
        with pytest.raises(type(wanted.value)) as came:
            directly(model, *args)
        assert str(came.value) == str(wanted.value)


class Holds(nn.Module):
    """Has a hole that it does not use, and is its own child."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.unused = nn.Sequential(nn.ReLU(), nn.ReLU())
        self.unused._modules["1"] = None  # type: ignore[assignment]  # as setattr() would do
        self._modules["itself"] = self

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        if again:
            return self.itself(x, False)  # type: ignore[operator,no-any-return]
        if x.isnan().any():
            return self.unused(x)  # type: ignore[no-any-return]
        return self.layer(x)  # type: ignore[no-any-return]


def test_holes_and_circles() -> None:
    model, x = Holds(), vectors()
    assert torch.equal(directly(model, x), model.layer(x))
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        directly(model, torch.full((6, 4), torch.nan))


def test_a_copy_calls_its_own_layers() -> None:
    direct = DirectCall(nn.Sequential(nn.Linear(4, 4)))
    direct.now()(vectors())
    twin = copy.deepcopy(direct)
    for parameter in twin._module.parameters():
        nn.init.zeros_(parameter)
    assert not twin.now()(vectors()).any()
    assert direct.now()(vectors()).any()


def test_modules_are_called_if_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    monkeypatch.setenv(VARIABLE, "0")
    assert DirectCall(model).now() is model
    monkeypatch.setenv(VARIABLE, "1")
    assert DirectCall(model).now() is not model


@pytest.mark.parametrize(
    ("name", "model", "x"),
    [
        ("layer_norm", nn.LayerNorm(4), torch.randn(6, 4)),
        ("batch_norm", nn.BatchNorm1d(4), torch.randn(6, 4)),
    ],
)
def test_functions_of_torch_that_are_replaced_are_called(
    name: str, model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had been taken out of torch once and for all."""
    direct, before = DirectCall(model), getattr(torch, name)
    direct.now()(x)
    monkeypatch.setattr(torch, name, lambda *args, **options: before(*args, **options) * 3)
    assert torch.equal(direct.now()(x), model(x))


def test_a_layer_that_another_one_replaces_in_the_same_call() -> None:
    """The Sequential was only looked at when its call began."""
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.Tanh())

    def replace(*_: Any) -> None:
        model[1] = nn.ReLU()

    first.register_forward_hook(replace)
    x = vectors()
    wanted = torch.relu(F.linear(x, first.weight, first.bias))
    assert torch.equal(directly(model, x), wanted)
