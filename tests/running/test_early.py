"""The gradient of a stage's input leaves before those of its first weights are made."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.capturing.direct.entrances import Entrance
from stageline.running import early, forwards
from stageline.running.early import EarlySlot
from stageline.running.linear import Layout
from stageline.running.program import StageProgram
from stageline.running.transports import memory
from stageline.running.transports.base import Edge
from stageline.scheduling import Schedule
from stageline.testing import OrderedTransport, RankPool, plain_step

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 4  # microbatches


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What has left early; layers of any size let it."""
    seen: list[Tensor] = []
    take = EarlySlot.take

    def noted(slot: EarlySlot, gradient: Tensor, weight: Tensor) -> None:
        take(slot, gradient, weight)
        if slot.has_left:
            seen.append(gradient)

    monkeypatch.setattr(EarlySlot, "take", noted)
    monkeypatch.setattr(early, "LEAST_WORK", 1)
    return seen


def in_threads(pipe: sl.Pipeline) -> sl.Pipeline:
    vars(pipe._engine.runner)["_takes_turns"] = False
    return pipe


def of_stages(*stages: nn.Module, **settings: Any) -> sl.Pipeline:
    return in_threads(
        sl.Pipeline.from_stages(
            copy.deepcopy(list(stages)), num_microbatches=COUNT, loss_fn=F.mse_loss, **settings
        )
    )


def check_bits(*stages: nn.Module, x: Tensor | None = None) -> None:
    """Compare two steps, whose gradients add up, with the plain model's."""
    x = torch.randn(8, 6) if x is None else x
    plain = nn.Sequential(*stages)
    with torch.no_grad():
        y = torch.randn_like(plain(x))
    pipe = of_stages(*stages)
    for _ in range(2):
        wanted = plain_step(plain, x, target=y, num_microbatches=COUNT, loss_fn=F.mse_loss)
        assert torch.equal(pipe.step(x, target=y).loss, wanted.loss)
    check_gradients(plain, pipe)


def check_gradients(plain: nn.Module, pipe: sl.Pipeline) -> None:
    found = dict(pipe.named_parameters())
    for name, parameter in plain.named_parameters():
        mine, wanted = found[name].grad, parameter.grad
        assert (mine is None) == (wanted is None), name
        assert mine is None or wanted is None or torch.equal(mine, wanted), name


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x)) * 2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 6), (8, 3, 6), (12, 1, 6), (8, 2, 3, 6), (10, 2)])
def test_to_the_last_bit(
    shape: tuple[int, ...], dtype: torch.dtype, bias: bool, left: list[Tensor]
) -> None:
    torch.manual_seed(0)
    width = shape[-1]
    stages = [
        nn.Sequential(nn.Linear(width, width, bias=bias), nn.Tanh(), nn.Linear(width, width))
        for _ in range(3)
    ]
    check_bits(*(stage.to(dtype) for stage in stages), x=torch.randn(shape, dtype=dtype))
    assert len(left) == 2 * 2 * COUNT  # steps, stages, microbatches


@pytest.mark.parametrize(
    "after",
    [
        nn.ReLU(inplace=True),
        nn.Sequential(),
        nn.Unflatten(1, (2, 3)),
        nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Softmax(1), nn.Flatten()),
        Doubled(),
    ],
    ids=["in place", "nothing", "a view", "strides", "a module"],
)
def test_whatever_comes_next(after: nn.Module, left: list[Tensor]) -> None:
    check_bits(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), after))
    assert len(left) == 2 * COUNT


def test_the_gradient_leaves_before_that_of_the_weight_is_made(
    left: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    send = memory._MemoryEndpoint.send

    def noted(endpoint: Any, edge: Edge, packet: Any) -> None:
        if edge.letter == "B":
            happened.append(f"sent {edge.microbatch}")
        send(endpoint, edge, packet)

    monkeypatch.setattr(memory._MemoryEndpoint, "send", noted)
    pipe = of_stages(nn.Linear(6, 6), Doubled())
    for name, parameter in pipe.named_parameters():
        if name == "1.first.weight":
            parameter.register_post_accumulate_grad_hook(lambda _: happened.append("made"))
    pipe.step(torch.randn(8, 6), target=torch.randn(8, 6))
    assert happened == [each for i in range(COUNT) for each in (f"sent {i}", "made")]


class Again(nn.Module):
    """Uses one weight three times, once by its name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Doubled()
        self.first = self.block.first

    def forward(self, x: Tensor) -> Tensor:
        once: Tensor = self.block(x)
        return F.linear(self.block(once), self.first.weight)


def test_a_weight_that_is_used_again_gets_its_parts_in_the_order_of_the_plain_model(
    left: list[Tensor],
) -> None:
    check_bits(nn.Linear(6, 6), Again())
    assert len(left) == 2 * COUNT


def test_hooks_on_its_weight_see_one_whole_gradient(left: list[Tensor]) -> None:
    stages = [nn.Linear(6, 6), Again()]
    plain = nn.Sequential(*copy.deepcopy(stages))
    pipe = of_stages(*stages)
    seen: dict[str, list[Tensor]] = {"plain": [], "pipe": []}
    for kind, owner in (("plain", plain), ("pipe", pipe)):
        weight = dict(owner.named_parameters())["1.block.first.weight"]
        weight.register_hook(seen[kind].append)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    plain_step(plain, x, target=y, num_microbatches=COUNT, loss_fn=F.mse_loss)
    pipe.step(x, target=y)
    assert len(seen["pipe"]) == len(seen["plain"]) == len(left) == COUNT
    assert all(map(torch.equal, seen["pipe"], seen["plain"]))


class Residual(Doubled):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + x  # type: ignore[no-any-return]  # torch has no types here


class Looped(Doubled):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.first(x) for _ in range(2)]).sum(0)


class Changed(Doubled):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.first(x)  # type: ignore[no-any-return]  # likewise


class Halved(Doubled):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            held = self.first(x)
        return held * self.first.weight.sum()  # type: ignore[no-any-return]  # likewise


class Casting(Doubled):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            cast = self.first(x)
        return cast.float()  # type: ignore[no-any-return]  # likewise


class Freezing(Doubled):
    def forward(self, x: Tensor) -> Tensor:
        self.first.requires_grad_(False)
        made = self.first(x)
        self.first.requires_grad_(True)
        return made  # type: ignore[no-any-return]  # likewise


def hooked(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    return layer


@pytest.mark.parametrize(
    "second",
    [
        Residual(),
        Looped(),
        Changed(),
        Halved(),
        Casting(),
        Freezing(),
        nn.Sequential(nn.Tanh(), nn.Linear(6, 6)),
        nn.Linear(6, 6).requires_grad_(False),
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
        hooked(nn.Linear(6, 6)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_where_more_happens_to_the_input_its_gradient_waits(
    second: nn.Module, left: list[Tensor]
) -> None:
    check_bits(nn.Linear(6, 6), nn.Sequential(second, nn.Linear(6, 6)))
    assert not left


@pytest.mark.parametrize("shape", [(4, 6), (8, 1), (4, 1)], ids=["row", "column", "number"])
def test_single_rows_and_columns(shape: tuple[int, int], left: list[Tensor]) -> None:
    width = shape[-1]
    check_bits(nn.Linear(width, width), nn.Linear(width, 3), x=torch.randn(shape))
    assert len(left) == 2 * COUNT


@pytest.mark.parametrize("shape", [(4, 1, 6), (8, 3, 1)], ids=["row", "column"])
def test_where_torch_may_lay_it_out_in_another_way_the_gradient_waits(
    shape: tuple[int, ...], left: list[Tensor]
) -> None:
    width = shape[-1]
    check_bits(nn.Linear(width, width), nn.Linear(width, 3), x=torch.randn(shape))
    assert not left


def test_small_layers_let_it_wait() -> None:
    layer = nn.Linear(1024, 1024)
    entrance = Entrance(layer)
    assert early.pays(entrance, torch.empty(8, 1024))
    assert not early.pays(entrance, torch.empty(7, 1024))


def test_a_listener_that_comes_in_the_middle_of_a_step(left: list[Tensor]) -> None:
    """The layer is called as ever from then on: it is met no more, and the bits are the same."""
    stages = [nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())]
    plain, pipe = nn.Sequential(*copy.deepcopy(stages)), of_stages(*stages)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    layer = pipe._engine.programs[1].module.get_submodule("0")
    assert isinstance(layer, nn.Linear)
    heard: list[Tensor] = []

    def listen(_: Tensor) -> None:
        layer.register_forward_hook(lambda _, given, __: heard.append(given[0]))

    layer.weight.register_post_accumulate_grad_hook(listen)
    plain_step(plain, x, target=y, num_microbatches=COUNT, loss_fn=F.mse_loss)
    pipe.step(x, target=y)
    assert len(left) < COUNT
    assert heard
    check_gradients(plain, pipe)


class Network(nn.Module):
    """Recorded whole; ``skip`` carries what enters the second stage past it."""

    def __init__(self, *, skip: bool) -> None:
        super().__init__()
        self.skip = skip
        self.layers = nn.ModuleList(Doubled() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        second = self.layers[1](first)
        third: Tensor = self.layers[2](second)
        return third + first if self.skip else third


@pytest.mark.parametrize("skip", [False, True])
def test_a_recorded_model(skip: bool, left: list[Tensor]) -> None:
    """What a stage only hands on is used again by a later one."""
    torch.manual_seed(0)
    plain = Network(skip=skip)
    pipe = in_threads(
        sl.Pipeline(
            copy.deepcopy(plain),
            example_args=(torch.randn(2, 6),),
            split=["layers.1", "layers.2"],
            num_microbatches=COUNT,
            loss_fn=F.mse_loss,
        )
    )
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    wanted = plain_step(plain, x, target=y, num_microbatches=COUNT, loss_fn=F.mse_loss)
    assert torch.equal(pipe.step(x, target=y).loss, wanted.loss)
    check_gradients(plain, pipe)
    assert len(left) == (0 if skip else 2 * COUNT)


KEPT: list[Tensor] = []


class Sly(Doubled):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + KEPT[0]  # type: ignore[no-any-return]  # likewise


def test_a_second_use_that_the_code_does_not_show_is_an_error(
    left: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known that could do it; but a gradient that is lost would be silent."""
    enter = early.enter_early

    def kept(tensor: Tensor, *where: Any) -> Tensor | None:
        KEPT[:] = [tensor]
        return enter(tensor, *where)

    monkeypatch.setattr(forwards, "enter_early", kept)
    pipe = of_stages(nn.Linear(6, 6), Sly())
    with pytest.raises(sl.StepError, match="used in a second place"):
        pipe.step(torch.randn(8, 6), target=torch.randn(8, 6))
    KEPT.clear()


class Impatient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.sum().backward(retain_graph=True)
        return x


def test_a_backward_inside_the_stage_is_refused(left: list[Tensor]) -> None:
    pipe = of_stages(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), Impatient()))
    with pytest.raises(sl.StepError, match=r"backward\(\) was called inside a stage's forward"):
        pipe.step(torch.randn(8, 6), target=torch.randn(8, 6))


@pytest.mark.parametrize("error", [ValueError("lost"), KeyboardInterrupt()], ids=type)
def test_a_send_that_fails_in_the_middle_of_b(
    error: BaseException, left: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes out of autograd's engine as it went in, and the next step works."""
    pipe = of_stages(nn.Linear(6, 6), nn.Linear(6, 6))
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    send = memory._MemoryEndpoint.send

    def fails(endpoint: Any, edge: Edge, packet: Any) -> None:
        if edge.letter == "B" and edge.microbatch == 1:
            raise error
        send(endpoint, edge, packet)

    with monkeypatch.context() as patch:
        patch.setattr(memory._MemoryEndpoint, "send", fails)
        with pytest.raises((sl.StepError, KeyboardInterrupt)) as caught:
            pipe.step(x, target=y)
    if isinstance(error, ValueError):
        assert "action 1B1 failed: ValueError: lost" in str(caught.value)
    assert len(left) == 1
    pipe.step(x, target=y)
    assert len(left) == 1 + COUNT


def test_a_channel_with_one_order_for_both_directions_gets_it_in_its_turn(
    left: list[Tensor],
) -> None:
    stages = [nn.Linear(6, 6), Doubled(), Doubled()]
    plain = nn.Sequential(*copy.deepcopy(stages))
    pipe = of_stages(*stages, transport=OrderedTransport())
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    plain_step(plain, x, target=y, num_microbatches=COUNT, loss_fn=F.mse_loss)
    pipe.step(x, target=y)
    check_gradients(plain, pipe)
    assert not left


class Swapped(Doubled):
    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.first(x))
        self.first.weight.data = self.first.weight.data * 0.9
        return made


def test_what_the_data_of_its_weight_is_set_to_later_does_not_matter(left: list[Tensor]) -> None:
    """A Parameter that is saved as it is shows its new data in B: gradients were silently wrong."""
    check_bits(nn.Linear(6, 6), Swapped())
    assert len(left) == 2 * COUNT


@pytest.mark.parametrize(
    "listen",
    [
        lambda block: block.register_forward_pre_hook(lambda _, given: given[0].clamp_(-1, 1)),
        lambda block: block.register_full_backward_hook(
            lambda _, gradients, __: (gradients[0].t().contiguous().t(),)
        ),
    ],
    ids=["works in place", "another layout"],
)
def test_a_listener_between_the_stage_and_its_first_layer(
    listen: Callable[[nn.Module], object], left: list[Tensor]
) -> None:
    """The input was a leaf, which may not be changed and brings gradients into its own layout."""
    stages = [nn.Linear(6, 6), nn.Sequential(Doubled(), nn.Tanh())]
    plain, pipe = nn.Sequential(*copy.deepcopy(stages)), of_stages(*stages)
    listen(plain.get_submodule("1.0"))
    listen(pipe._engine.programs[1].module.get_submodule("0"))
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    plain_step(plain, x, target=y, num_microbatches=COUNT, loss_fn=F.mse_loss)
    pipe.step(x, target=y)
    check_gradients(plain, pipe)
    assert not left


@pytest.mark.parametrize("create_graph", [True, False])
def test_a_loss_that_asks_for_the_gradient_of_the_weight(
    create_graph: bool, left: list[Tensor]
) -> None:
    """It was told that a gradient had reached the input, which nobody had asked for."""
    stages = [nn.Linear(6, 6), Doubled()]
    plain, pipe = nn.Sequential(*copy.deepcopy(stages)), of_stages(*stages)

    def penalised(weight: nn.Parameter) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            (found,) = torch.autograd.grad(
                output.square().mean(), weight, retain_graph=True, create_graph=create_graph
            )
            return F.mse_loss(output, target) + found.square().sum()

        return loss

    weights = [dict(each.named_parameters())["1.first.weight"] for each in (plain, pipe)]
    ours = sl.Pipeline.from_stages(
        [pipe._engine.programs[index].module for index in range(2)],
        num_microbatches=COUNT,
        loss_fn=penalised(weights[1]),
    )
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    plain_step(plain, x, target=y, num_microbatches=COUNT, loss_fn=penalised(weights[0]))
    in_threads(ours).step(x, target=y)
    check_gradients(plain, ours)
    assert not left


def ask(made: Tensor, layer: nn.Linear, _: Tensor) -> None:
    """Take another gradient, on the way of the one that comes here."""
    with torch.enable_grad():
        torch.autograd.grad(made.sum(), layer.weight, retain_graph=True)


class Asking(Doubled):
    draws_nothing = True  # what else it does, nobody reads

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.first(x).sin()
        output = made.cos()
        if output.requires_grad:
            output.register_hook(partial(ask, made, self.first))
        return output


def test_a_stage_that_only_promises_is_left_alone(left: list[Tensor]) -> None:
    """A backward inside of B came to the first layer before B did, and its gradient was sent."""
    check_bits(nn.Linear(6, 6), Asking())
    assert not left


def test_a_gradient_that_is_asked_for_in_b_is_not_the_one_that_leaves(
    left: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StageProgram, "_promises", False)
    check_bits(nn.Linear(6, 6), Asking())
    assert len(left) == 2 * COUNT


class Keeping(Doubled):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.first(x)
        KEPT.append(made.sin())
        return made


def test_a_graph_that_somebody_keeps_holds_no_channel(
    left: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[weakref.ref[Any]] = []
    make = memory._MemoryEndpoint.__init__

    def noted(endpoint: Any, *given: Any) -> None:
        make(endpoint, *given)
        opened.append(weakref.ref(endpoint))

    monkeypatch.setattr(memory._MemoryEndpoint, "__init__", noted)
    pipe = of_stages(nn.Linear(6, 6), Keeping())
    pipe.step(torch.randn(8, 6), target=torch.randn(8, 6))
    gc.collect()
    assert len(KEPT) == len(left) == COUNT
    assert opened
    assert not any(endpoint() for endpoint in opened)
    KEPT.clear()


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no")


def test_a_failed_step_keeps_nothing_that_was_on_its_way(
    left: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[EarlySlot]] = []
    enter = early.EarlySlot.__init__

    def noted(slot: EarlySlot, *given: Any) -> None:
        enter(slot, *given)
        made.append(weakref.ref(slot))

    monkeypatch.setattr(early.EarlySlot, "__init__", noted)
    pipe = of_stages(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), Failing()))
    with pytest.raises(sl.StepError, match="no"):
        pipe.step(torch.randn(8, 6), target=torch.randn(8, 6))
    gc.collect()
    assert made
    assert not any(slot() for slot in made)


@pytest.mark.parametrize(
    ("build", "early_ones"),
    [
        (sl.schedules.gpipe, COUNT),
        (sl.schedules.one_f_one_b, COUNT),
        (sl.schedules.zb_h1, 0),  # I and W have a time of their own
    ],
    ids=["gpipe", "1f1b", "zb-h1"],
)
def test_schedules(
    build: Callable[[int, int], Schedule], early_ones: int, left: list[Tensor]
) -> None:
    stages = [nn.Linear(6, 6), Doubled()]
    plain, pipe = (
        nn.Sequential(*copy.deepcopy(stages)),
        of_stages(*stages, schedule=build(2, COUNT)),
    )
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    plain_step(plain, x, target=y, num_microbatches=COUNT, loss_fn=F.mse_loss)
    pipe.step(x, target=y)
    assert len(left) == early_ones
    check_gradients(plain, pipe)


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)))


def _two_steps(rank: int, transport: str) -> dict[str, Tensor | None]:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x, y = torch.randn(256, 256), torch.randn(256, 256)
    pipe = sl.Pipeline(
        wide(), split=2, num_microbatches=2, loss_fn=F.mse_loss, transport=transport, timeout=20
    )
    counted = 0
    take = EarlySlot.take

    def noted(slot: EarlySlot, gradient: Tensor, weight: Tensor) -> None:
        nonlocal counted
        take(slot, gradient, weight)
        counted += slot.has_left

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlySlot, "take", noted)
        for _ in range(2):
            pipe.step(x, target=y)
    pipe.close()
    assert counted == (4 if rank else 0)
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
def test_between_processes(transport: str, two_ranks: RankPool) -> None:
    """With a layer that is large enough by itself."""
    found = two_ranks.run(_two_steps, transport)
    plain = wide()
    torch.manual_seed(1)
    x, y = torch.randn(256, 256), torch.randn(256, 256)
    for _ in range(2):
        plain_step(plain, x, target=y, num_microbatches=2, loss_fn=F.mse_loss)
    gradients = found[0] | found[1]
    for name, parameter in plain.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name  # type: ignore[arg-type]  # likewise


def test_a_gradient_that_comes_twice_is_an_error() -> None:
    """The first has left by then, and the rank before has used it."""
    slot = EarlySlot(torch.ones(2, 3), Layout.ROWS)
    slot.is_open = True
    slot.take(torch.ones(2, 4), torch.ones(4, 3))
    assert torch.equal(slot.gradients[0], torch.full((2, 3), 4.0))  # type: ignore[arg-type]  # a tensor
    with pytest.raises(RuntimeError, match="used in a second place"):
        slot.take(torch.ones(2, 4), torch.ones(4, 3))


def test_a_gradient_that_was_there_before_b_is_an_error() -> None:
    slot = EarlySlot(torch.ones(2, 3), Layout.ROWS)
    slot.tensor.sum().backward()
    with pytest.raises(RuntimeError, match="called inside a stage's forward"):
        slot.is_open = True
