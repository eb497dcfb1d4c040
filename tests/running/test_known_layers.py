"""Stages of known layers: their backward is split without a mode that looks on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.capturing.direct.calls import VARIABLE
from stageline.running.events import ActionDone
from stageline.running.split.layers import KnownLayers
from stageline.running.split.mode import Splitting
from stageline.testing import plain_step
from tests.exactness.cases import same
from tests.running.placements import looped, zb_h1
from tests.running.split_cases import WIDTH

pytestmark = pytest.mark.usefixtures("one_thread")

MICROBATCHES = 3


class Own(nn.Module):
    """Code of the user's, with a weight that is not a layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.linear.weight.sum(0)  # type: ignore[no-any-return]


def tied() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Sequential(nn.GELU(), layer))


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 2, 1, groups=2, bias=False),
        nn.Flatten(),
        nn.LayerNorm(WIDTH),
    )


def half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    module[0].weight.requires_grad_(False)
    module[2].bias.requires_grad_(False)
    return module


KNOWN: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()),
    "one weight three times": tied,
    "convolutions": pictures,
    "ReLU in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "frozen in part": half_frozen,
    "no layer": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential()),
}
UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "own code": Own,
    "own code between layers": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Own(), nn.Tanh()),
    "PReLU": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU()),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
}


def stages_of(middle: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Linear(WIDTH, WIDTH), middle(), nn.Linear(WIDTH, WIDTH)]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    return torch.randn(7, WIDTH), torch.randn(7, WIDTH)


def pipe_of(stages: list[nn.Module], **settings: Any) -> sl.Pipeline:
    settings = {
        "loss_fn": F.mse_loss,
        "schedule": zb_h1(3, MICROBATCHES),
        "timeout": 30,
        **settings,
    }
    return sl.Pipeline.from_stages(stages, num_microbatches=MICROBATCHES, **settings)


def check(stages: list[nn.Module], plain: nn.Module, pipe: sl.Pipeline, steps: int = 2) -> None:
    """Compare some steps, whose gradients add up, with the plain model's."""
    x, y = batch()
    for step in range(steps):
        wanted = plain_step(
            plain, x, target=y, num_microbatches=MICROBATCHES, loss_fn=F.mse_loss, step=step
        )
        assert torch.equal(pipe.step(x, target=y).loss, wanted.loss)
    check_gradients(stages, plain)


def check_gradients(stages: list[nn.Module], plain: nn.Module) -> None:
    found = dict(nn.Sequential(*stages).named_parameters())
    wrong = [n for n, p in plain.named_parameters() if not same(found[n].grad, p.grad)]
    assert wrong == []


@contextmanager
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yield the functions about which a mode is asked meanwhile."""
    seen: list[Any] = []
    follow = Splitting.__torch_function__

    def noted(mode: Splitting, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func)
        return follow(mode, func, types, args, kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Splitting, "__torch_function__", noted)
        yield seen


@pytest.mark.parametrize("name", KNOWN)
def test_to_the_last_bit_and_nobody_looks_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = stages_of(KNOWN[name])
    plain = copy.deepcopy(nn.Sequential(*stages))
    with asked(monkeypatch) as functions:
        check(stages, plain, pipe_of(stages))
    assert functions == []


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = stages_of(UNKNOWN[name])
    plain = copy.deepcopy(nn.Sequential(*stages))
    with asked(monkeypatch) as functions:
        check(stages, plain, pipe_of(stages))
    assert functions != []


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_i_leaves_all_gradients_to_w(name: str) -> None:
    stages = stages_of({**KNOWN, **UNKNOWN}[name])
    seen: dict[str, int] = {}

    def observe(event: ActionDone) -> None:
        parameters = nn.Sequential(*stages).parameters()
        seen[event.action] = sum(p.grad is not None for p in parameters)

    schedule = looped(lambda _: range(3), 1, MICROBATCHES, letters="IW")
    x, y = batch()
    pipe_of(stages, schedule=schedule, observer=observe).step(x, target=y)
    assert seen[f"0I{MICROBATCHES - 1}"] == 0
    assert seen[f"2W{MICROBATCHES - 1}"] == sum(
        p.requires_grad for p in nn.Sequential(*stages).parameters()
    )


def test_under_autocast() -> None:
    stages = stages_of(KNOWN["convolutions"])
    plain = copy.deepcopy(nn.Sequential(*stages))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(stages, plain, pipe_of(stages))


@pytest.mark.parametrize("where", ["layer", "stage", "ReLU"])
def test_a_hook_that_comes_in_the_middle_of_a_step(where: str) -> None:
    """It hears the rest of the step, and its weights still wait for W."""
    stages = stages_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    plain = copy.deepcopy(nn.Sequential(*stages))
    stage: Any = stages[1]
    listened = {"layer": stage[0], "stage": stage, "ReLU": stage[1]}[where]
    heard: list[Tensor] = []

    def listen(event: ActionDone) -> None:
        if event.action == "1F0":
            listened.register_forward_hook(lambda *given: heard.append(given[2]))

    schedule = looped(lambda _: range(3), 1, MICROBATCHES, letters="IW")
    check(stages, plain, pipe_of(stages, schedule=schedule, observer=listen), steps=1)
    assert len(heard) == MICROBATCHES - 1


def test_a_hook_may_use_weights_too() -> None:
    stages = stages_of(KNOWN["no bias"])
    layer: Any = stages[1].get_submodule("0")
    layer.register_forward_hook(lambda module, _, made: made @ module.weight)
    plain = copy.deepcopy(nn.Sequential(*stages))
    check(stages, plain, pipe_of(stages))


def test_a_function_that_is_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = stages_of(KNOWN["Linear"])
    pipe = pipe_of(stages)
    x, y = batch()
    pipe.step(x, target=y)
    before, called = F.linear, []

    def instead(*args: Any) -> Tensor:
        called.append(args)
        return before(*args)

    monkeypatch.setattr(F, "linear", instead)
    pipe.step(x, target=y)
    assert len(called) == 3 * MICROBATCHES


def test_a_weight_changed_in_place_between_forward_and_i_is_noticed() -> None:
    stages = stages_of(KNOWN["Linear"])
    weight = stages[1].get_parameter("weight")

    def change(event: ActionDone) -> None:
        if event.action == "1F0":
            with torch.no_grad():
                weight.mul_(2)

    x, y = batch()
    with pytest.raises(sl.StepError) as failure:
        pipe_of(stages, observer=change).step(x, target=y)
    assert "modified by an inplace operation" in str(failure.value.__cause__)


def test_a_weight_whose_data_is_replaced_is_the_old_one_in_i() -> None:
    """As in the plain model: backward knows what forward has used."""
    schedule = looped(lambda _: range(3), 1, MICROBATCHES, letters="IW")
    wanted = stages_of(KNOWN["Linear"])
    x, y = batch()
    pipe_of(wanted, schedule=schedule).step(x, target=y)
    stages = stages_of(KNOWN["Linear"])
    weight = stages[1].get_parameter("weight")

    def replace(event: ActionDone) -> None:
        if event.action == f"1F{MICROBATCHES - 1}":
            weight.data = torch.zeros_like(weight)

    pipe_of(stages, schedule=schedule, observer=replace).step(x, target=y)
    found, known = stages[0].get_parameter("weight").grad, wanted[0].get_parameter("weight").grad
    assert same(found, known)


def test_a_layer_that_is_replaced_between_steps_is_called() -> None:
    stages = stages_of(KNOWN["no bias"])
    plain = copy.deepcopy(nn.Sequential(*stages))
    pipe = pipe_of(stages)
    check(stages, plain, pipe, steps=1)
    for each in (stages[1], plain[1]):
        torch.manual_seed(7)
        each.add_module("1", nn.Tanh())
    check(stages, plain, pipe, steps=1)


class Penalty(nn.Module):
    """A loss that uses a weight of the last stage."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layers = [layer]  # not a child

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + self.layers[0].weight.square().sum()


def test_weights_in_a_loss_of_the_users_own_wait_with_the_others() -> None:
    stages = stages_of(KNOWN["Linear"])
    plain = copy.deepcopy(nn.Sequential(*stages))
    x, y = batch()
    last: Any = stages[2]
    pipe = pipe_of(stages, loss_fn=Penalty(last))
    for step in range(2):
        penalty = Penalty(plain[2])  # type: ignore[arg-type]
        plain_step(plain, x, target=y, num_microbatches=MICROBATCHES, loss_fn=penalty, step=step)
        pipe.step(x, target=y)
    check_gradients(stages, plain)


def test_the_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    assert KnownLayers(module).look() is not None
    monkeypatch.setenv(VARIABLE, "0")
    assert KnownLayers(module).look() is None


def compiled() -> nn.Module:
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(2, 2), Own()),
        nn.Sequential(nn.Embedding(2, 2)),
        torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())),
        nn.GRU(2, 2),
        compiled(),
    ],
    ids=["own code", "Embedding", "graph", "GRU", "compiled"],
)
def test_what_is_not_known(module: nn.Module) -> None:
    assert KnownLayers(module).look() is None


def test_nothing_is_held_after_a_forward() -> None:
    stages = stages_of(KNOWN["Linear"])
    pipe = pipe_of(stages)
    x, y = batch()
    pipe.step(x, target=y)
    splitting = pipe._engine.programs[1].known_layers.splitting
    assert splitting._leaves == {}
    assert splitting._deferred.places == 0


def _penalised(module: nn.Module, given: Any, made: Any) -> Any:
    (slope,) = torch.autograd.grad(made.sum(), given[0], create_graph=True)
    return made + slope.square().mean()


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_hook_that_comes_later_may_differentiate(position: int) -> None:
    """It used to end the step: only stages with code of the user's began again without bridges."""
    stages = stages_of(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    )
    plain = copy.deepcopy(nn.Sequential(*stages))
    pipe = pipe_of(stages)
    check(stages, plain, pipe, steps=1)
    for each in (stages[1], plain[1]):
        each.get_submodule(str(position)).register_forward_hook(_penalised)
    check(stages, plain, pipe, steps=2)


class _Twice(nn.Parameter):
    """A bias by which a linear layer sees twice its input."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            x, weight, bias = args
            return F.linear(x * 2, weight, bias.as_subclass(Tensor))
        ask: Any = super().__torch_function__
        return ask(func, types, args, kwargs or {})


def test_a_bias_of_a_class_of_its_own_is_asked() -> None:
    """Only the weight was looked at: the input got the gradient of another operation."""

    def middle() -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        layer.bias = _Twice(layer.bias.detach())
        return layer

    stages, plain = stages_of(middle), nn.Sequential(*stages_of(middle))
    check(stages, plain, pipe_of(stages))


def test_a_method_that_is_replaced_in_a_class_of_torchs_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may use weights of the stage, which wait for W elsewhere."""
    stages = stages_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    plain = copy.deepcopy(nn.Sequential(*stages))
    of = {
        id(each.get_submodule("1")): each.get_parameter("0.weight")
        for each in (stages[1], plain[1])
    }
    pipe = pipe_of(stages)
    check(stages, plain, pipe, steps=1)

    def instead(self: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(x) * of[id(self)].sum(0)

    monkeypatch.setattr(nn.Tanh, "forward", instead)
    check(stages, plain, pipe, steps=2)


class _Named(nn.Module):
    """Calls a product by the names of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(input=F.linear(input=x, weight=self.weight), other=self.weight)


def test_products_may_be_called_by_names() -> None:
    """The first argument was looked for among those without a name, where there was none."""
    stages = stages_of(_Named)
    plain = copy.deepcopy(nn.Sequential(*stages))
    check(stages, plain, pipe_of(stages))


def test_a_layer_that_is_frozen_in_the_middle_of_a_step_ends_no_step() -> None:
    stages = stages_of(KNOWN["no bias"])
    layer = stages[1].get_submodule("0")

    def freeze(event: ActionDone) -> None:
        if event.action == "1F0":
            layer.requires_grad_(False)

    x, y = batch()
    pipe_of(stages, observer=freeze).step(x, target=y)
    assert all(p.grad is None for p in layer.parameters())  # as B, too, would leave them
