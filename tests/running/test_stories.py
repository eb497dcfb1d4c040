"""Faults that were found by trying to break the engine, each with its story."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import stageline as sl
from stageline.testing import RankPool, plain_step

pytestmark = pytest.mark.usefixtures("one_thread")


class Call(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


def linear() -> nn.Linear:
    return nn.Linear(6, 6)


def batch() -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(5)
    return torch.randn(8, 6, generator=own), torch.randn(8, 6, generator=own)


def compare(stages: Callable[[], list[nn.Module]], schedule: str = "1f1b") -> None:
    """Train one step both ways; loss and gradients must be equal to the bit."""
    torch.manual_seed(0)
    plain = nn.Sequential(*stages())
    torch.manual_seed(0)
    mine = stages()
    x, y = batch()
    wanted = plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.mse_loss)
    pipe = sl.Pipeline.from_stages(mine, num_microbatches=4, schedule=schedule, loss_fn=F.mse_loss)
    assert torch.equal(pipe.step(x, target=y).loss, wanted.loss)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradients[name]), name  # type: ignore[arg-type]


def test_a_tensor_returned_twice_and_changed_in_place_once() -> None:
    """Two aliases had two graphs: the gradient through the changed one missed the other."""
    compare(
        lambda: [
            nn.Sequential(linear(), Call(lambda t: (t, t))),
            nn.Sequential(Call(lambda t: t[0].mul_(3.0) * 1 + t[1]), linear()),
        ]
    )


def test_a_tensor_returned_twice_and_used_in_turn() -> None:
    """Gradients of two aliases were summed apart, and differed in the last bit."""

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = linear(), linear(), linear()

        def forward(self, t: tuple[Tensor, Tensor]) -> Tensor:
            out: Tensor = self.a(t[0]) + self.b(t[1]) + self.c(t[0])
            return out

    compare(lambda: [nn.Sequential(linear(), Call(lambda t: (t, t))), Uses()])


def test_two_views_of_one_memory_are_refused_when_one_is_changed_in_place() -> None:
    """The plain model tracks views; across a cut the second view's graph knows nothing of it."""
    stages = [
        nn.Sequential(linear(), Call(lambda t: (t, t.view(-1, 2, 3)))),
        Call(lambda t: t[0].mul_(3.0) * 1 + t[1].flatten(1)),
    ]
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=2, loss_fn=F.mse_loss)
    x, y = batch()
    with pytest.raises(sl.StepError, match="another input lies in the same memory: return a copy"):
        pipe.step(x, target=y)


def test_two_views_of_one_memory_may_cross_when_nobody_changes_them() -> None:
    compare(
        lambda: [
            nn.Sequential(linear(), Call(lambda t: (t, t.view(-1, 2, 3)))),
            nn.Sequential(Call(lambda t: t[0] * 3.0 + t[1].flatten(1)), linear()),
        ]
    )


class Counts(nn.Module):
    """Returns its own buffer, and changes it in place at its next call."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self.linear(x), self.calls


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_that_returns_its_buffer_sends_what_it_was_then(schedule: str) -> None:
    """In memory the next stage saw the value of a later call: a race, and a wrong loss."""
    compare(lambda: [Counts(), nn.Sequential(Call(lambda t: t[0] + t[1]), linear())], schedule)


def test_a_backward_inside_a_forward_is_refused() -> None:
    """An auxiliary loss of a stage reached its input, and was overwritten there by the real one."""

    def auxiliary(t: Tensor) -> Tensor:
        (t**2).sum().backward(retain_graph=True)
        return t

    pipe = sl.Pipeline.from_stages(
        [linear(), Call(auxiliary)], num_microbatches=2, loss_fn=F.mse_loss
    )
    x, y = batch()
    with pytest.raises(sl.StepError, match=r"backward\(\) was called inside a stage's forward"):
        pipe.step(x, target=y)


def test_a_second_derivative_is_refused() -> None:
    """create_graph=True was ignored, and a gradient penalty became a constant without a word."""
    pipe = sl.Pipeline.from_stages([linear(), nn.Tanh()], num_microbatches=2)
    x = batch()[0].requires_grad_()
    with pytest.raises(sl.PipeError, match="cannot be differentiated twice"):
        torch.autograd.grad(pipe(x).sum(), x, create_graph=True)
    with pytest.raises(sl.PipeError, match="cannot be differentiated twice"):
        pipe(x).sum().backward(create_graph=True)


def test_gradients_of_the_input_alone_leave_parameters_alone() -> None:
    """autograd.grad(out, x) also filled .grad of every parameter, for the next step to use."""
    stage = linear()
    pipe = sl.Pipeline.from_stages([stage, nn.Tanh()], num_microbatches=2)
    x = batch()[0].requires_grad_()
    (found,) = torch.autograd.grad(pipe(x).sum(), x)
    (wanted,) = torch.autograd.grad(
        torch.cat([stage(part).tanh() for part in x.tensor_split(2)]).sum(), x
    )
    assert torch.equal(found, wanted)
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_some_gradients_are_refused_where_a_hook_keeps_others_inside() -> None:
    """A parameter with a hook gets its gradient in the pipeline, whatever the caller asks for."""
    stage = linear()
    handle = stage.weight.register_hook(lambda gradient: None)
    pipe = sl.Pipeline.from_stages([stage, nn.Tanh()], num_microbatches=2)
    x = batch()[0].requires_grad_()
    with pytest.raises(
        sl.PipeError, match=r"gradient hooks .* call \.backward\(\) without inputs="
    ):
        torch.autograd.grad(pipe(x).sum(), x)
    with pytest.raises(
        sl.PipeError, match=r"gradient hooks .* call \.backward\(\) without inputs="
    ):
        pipe(x).sum().backward(inputs=[x])
    assert all(parameter.grad is None for parameter in pipe.parameters())
    handle.remove()
    out = pipe(x)
    stage.weight.register_hook(lambda gradient: None)
    with pytest.raises(sl.PipeError, match="register it before the call"):
        out.sum().backward()


def test_gradients_of_parameters_can_be_asked_for() -> None:
    """They were none: torch.autograd.grad said so, and backward(inputs=...) said nothing."""
    stage = linear()
    pipe = sl.Pipeline.from_stages([stage, nn.Tanh()], num_microbatches=2)
    x = batch()[0]
    loss = torch.cat([stage(part).tanh() for part in x.tensor_split(2)]).sum()
    wanted = torch.autograd.grad(loss, list(stage.parameters()))
    found = torch.autograd.grad(pipe(x).sum(), list(pipe.parameters()))
    assert all(map(torch.equal, found, wanted))
    assert all(parameter.grad is None for parameter in pipe.parameters())
    pipe(x).sum().backward(inputs=[stage.bias])
    assert stage.weight.grad is None
    assert stage.bias.grad is not None
    assert torch.equal(stage.bias.grad, wanted[1])


def test_gradients_of_inputs_and_parameters_together() -> None:
    pipe = sl.Pipeline.from_stages([linear(), nn.Tanh()], num_microbatches=2)
    x = batch()[0].requires_grad_()
    pipe(x).sum().backward()
    assert x.grad is not None


def test_a_function_that_closes_over_a_module_is_refused() -> None:
    """Its parameters were in no optimizer, and eval() did not reach it."""
    encoder = nn.Sequential(linear(), nn.BatchNorm1d(6))
    with pytest.raises(sl.ConfigError, match=r"stages\[0\]: a function that uses encoder"):
        sl.Pipeline.from_stages([lambda v: encoder(v), linear()], num_microbatches=2)
    frozen = linear().requires_grad_(False)
    sl.Pipeline.from_stages([lambda v: frozen(v), linear()], num_microbatches=2)


def test_a_loss_that_uses_another_stages_parameter_is_refused() -> None:
    """Between processes the gradient of a penalty on all weights was lost without a word."""
    model = nn.Sequential(linear(), nn.Tanh(), linear())

    def penalised(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + sum(p.pow(2).sum() for p in model.parameters())

    pipe = sl.Pipeline(model, split=2, num_microbatches=2, loss_fn=penalised)
    x, y = batch()
    for _ in range(2):  # the second time too: looking once must not mean complaining once
        with pytest.raises(sl.StepError, match=r"uses 0\..*, a parameter of stage 0: .*weight_dec"):
            pipe.step(x, target=y)
    one_stage = sl.Pipeline(model, split=1, num_microbatches=2, loss_fn=penalised)
    one_stage.step(x, target=y)


def test_a_stage_that_reaches_into_another_is_refused() -> None:
    first = linear()

    class Thief(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ first.weight

    pipe = sl.Pipeline.from_stages([first, Thief()], num_microbatches=2, loss_fn=F.mse_loss)
    x, y = batch()
    with pytest.raises(sl.StepError, match=r"uses 0\.weight, a parameter of stage 0"):
        pipe.step(x, target=y)


@dataclass
class Labels:
    y: Tensor


@pytest.mark.parametrize("wrap", [Labels, lambda y: UserDict(y=y), lambda y: [Labels(y)]])
def test_a_batch_hidden_in_an_object_is_refused(wrap: Callable[[Tensor], Any]) -> None:
    """It went whole to every microbatch; with broadcasting the loss was wrong without an error."""
    pipe = sl.Pipeline.from_stages(
        [linear()], num_microbatches=8, loss_fn=lambda out, target: F.l1_loss(out, target)
    )
    x, y = batch()
    with pytest.raises(
        sl.BatchError, match=r"target.* with a tensor in .*: pass a dict or a tuple"
    ):
        pipe.step(x, target=wrap(y))


def test_modes_that_cannot_follow_into_other_threads_are_named() -> None:
    """FlopCounterMode counted nothing, and saved-tensor mutation gave wrong gradients."""
    pipe = sl.Pipeline.from_stages([linear(), linear()], num_microbatches=2, loss_fn=F.mse_loss)
    x, y = batch()
    with FlopCounterMode(display=False), pytest.raises(sl.PipeError, match="FlopCounterMode is ac"):
        pipe.step(x, target=y)
    with (
        torch.autograd.graph.allow_mutation_on_saved_tensors(),
        pytest.raises(sl.PipeError, match="cannot follow into the threads"),
    ):
        pipe.step(x, target=y)
    pipe.step(x, target=y)


class Migrates(nn.Linear):
    """A module that multiplies the weights of an older format by ten."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] * 10
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("own", [True, False])
def test_format_versions_survive_in_the_state(own: bool) -> None:
    """Without them a module took its own fresh checkpoint for an old one and migrated it."""
    layers = [Migrates(2, 2), nn.Sequential(Migrates(2, 2))]
    model = nn.Sequential(*layers)
    pipe = sl.Pipeline.from_stages(layers) if own else sl.Pipeline(model, split=2)
    before = copy.deepcopy(dict(model.state_dict()))
    pipe.load_state_dict(pipe.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if not own:
        model.load_state_dict(pipe.state_dict())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_failed_step_lets_go_of_its_tensors_at_once() -> None:
    """The frame that raised held the exception, which held the frame: only gc could break that."""

    def fail(x: Tensor) -> Tensor:
        alive.add(x)
        raise ZeroDivisionError

    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    pipe = sl.Pipeline.from_stages([nn.Identity(), fail], num_microbatches=2)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(sl.StepError) as caught:
            pipe(batch()[0])
        del caught
        assert len(alive) == 0
    finally:
        gc.enable()


def test_a_loss_with_more_than_one_dimension_is_refused() -> None:
    """Without loss_fn an output of shape [1, 1] was taken for a loss."""
    pipe = sl.Pipeline.from_stages([nn.Linear(6, 1)], num_microbatches=8)
    with pytest.raises(sl.StepError, match=r"got shape \(1, 1\): pass loss_fn"):
        pipe.step(batch()[0])


def test_copying_a_pipeline_says_what_to_copy() -> None:
    pipe = sl.Pipeline.from_stages([linear()])
    with pytest.raises(TypeError, match="copy the model"):
        copy.deepcopy(pipe)


def _different_pipelines(rank: int, what: str) -> str:
    settings: dict[str, Any] = {"split": [2, 1], "num_microbatches": 4, "schedule": "1f1b"}
    torch.manual_seed(0)
    model = nn.Sequential(linear(), nn.ReLU(), linear())
    if rank == 1:
        changes: dict[str, dict[str, Any]] = {
            "split": {"split": [1, 2]},
            "schedule": {"schedule": "gpipe"},
            "microbatches": {"num_microbatches": 2},
            "outputs": {"keep_outputs": True},
            "sizes": {"microbatch_sizes": lambda rows, count: [rows]},
            "recompute": {"recompute": lambda stage, microbatch: microbatch == 0},
        }
        settings |= changes.get(what, {})
        if what == "model":
            model[2] = nn.Linear(6, 3)
        elif what == "code":
            model[1] = nn.Tanh()
        elif what == "seed":
            torch.manual_seed(1)
    if what == "seed":
        model[1] = nn.Dropout()
    with pytest.raises(sl.PeerError) as caught:
        sl.Pipeline(model, loss_fn=F.mse_loss, timeout=20, **settings)
    torch.manual_seed(0)
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("schedule", "the schedule: the row of rank 0 is 0F0 0F1 0B0 0F2"),
        ("microbatches", "the number of microbatches: it is 4 on rank 0 and 2 on rank 1"),
        ("outputs", "the settings: keep_outputs is False on rank 0 and True on rank 1"),
        ("sizes", "the settings: microbatch_sizes is None on rank 0 and a function on rank 1"),
        ("recompute", "the schedule: the row of rank 0 is 0F0 0F1 0B0 0F2"),
        ("model", "the parameters: 2.weight is float32 (6, 6) on rank 0 and float32 (3, 6) on"),
        ("code", "the stages: stage 0 is 0 Linear, 1 ReLU on rank 0 and 0 Linear, 1 Tanh on rank"),
    ],
)
def test_ranks_that_built_different_pipelines_are_told(
    what: str, told: str, two_ranks: RankPool
) -> None:
    first, second = two_ranks.run(_different_pipelines, what)
    assert first == second
    assert f"ranks 0 and 1 have built different pipelines: they differ in {told}" in first


@pytest.mark.processes
def test_ranks_with_different_seeds_are_told(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_different_pipelines, "seed"):
        assert message.startswith("rank 1 has another seed than rank 0")
        assert "with 1 on rank 1 and with 0 on rank 0" in message


@pytest.mark.processes
def test_ranks_that_ask_for_other_cuts_are_told(two_ranks: RankPool) -> None:
    """With cuts of its own, rank 1 ran block 1 again, and both agreed on a wrong loss."""
    for message in two_ranks.run(_different_pipelines, "split"):
        assert "they differ in the arguments: split is [2, 1] on rank 0 and [1, 2] on" in message


def _only_own_stages_stay(rank: int) -> list[bool]:
    model = nn.Sequential(linear(), linear())
    alive = [weakref.ref(layer.weight) for layer in model]
    pipe = sl.Pipeline(model, split=2, loss_fn=F.mse_loss, timeout=20)
    del model
    gc.collect()
    x, y = batch()
    pipe.step(x, target=y)
    pipe.close()
    return [reference() is not None for reference in alive]


@pytest.mark.processes
def test_a_process_keeps_only_its_own_stages_alive(two_ranks: RankPool) -> None:
    """The list of who owns which parameter held the whole model on every rank."""
    assert two_ranks.run(_only_own_stages_stay) == [[True, False], [False, True]]


def _closed_and_used_again(rank: int) -> str:
    pipe = sl.Pipeline(nn.Sequential(linear(), linear()), split=2, loss_fn=F.mse_loss, timeout=20)
    x, y = batch()
    pipe.step(x, target=y)
    pipe.close()
    pipe.close()
    with pytest.raises(sl.PipeError) as caught:
        pipe.step(x, target=y)
    return str(caught.value)


@pytest.mark.processes
def test_a_pipeline_of_processes_that_was_closed_says_so(two_ranks: RankPool) -> None:
    """Once, the thread that gives credits back had ended, and the third packet waited for ever."""
    for message in two_ranks.run(_closed_and_used_again):
        assert message == "this pipeline was closed on this rank: build another one"
