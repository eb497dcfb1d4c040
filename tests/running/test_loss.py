"""The loss of a batch is that of the plain model; steps accumulate; evaluation leaves no trace."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.running import backwards
from stageline.running.loss import Losses, LossRule, own_loss
from stageline.running.microbatches import Microbatches
from stageline.testing import plain_step
from stageline.torch_private import run_backward

IGNORED = -100


pytestmark = pytest.mark.usefixtures("one_thread")


def mlp(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(n: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(n)
    return torch.randn(n, 6), torch.randint(3, (n,))


def assert_same_gradients(pipe: sl.Pipeline, plain: nn.Module) -> None:
    """Compare each named gradient, bit by bit."""
    wanted = dict(plain.named_parameters())
    assert [name for name, _ in pipe.named_parameters()] == list(wanted)
    for name, parameter in pipe.named_parameters():
        want, got = wanted[name].grad, parameter.grad
        assert want is not None
        assert got is not None, f"{name} has no gradient"
        assert torch.equal(got, want), f"gradient of {name}"


# The loss of the whole batch

UNEVEN = [(10, 4), (7, 3), (3, 8), (8, 4)]


@pytest.mark.parametrize(("n", "m"), UNEVEN)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_is_that_of_the_whole_batch(reduction: str, n: int, m: int) -> None:
    """Bit-equal to the plain loop, and close to one plain step over the whole batch."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction=reduction)

    x, y = batch(n)
    pipe = sl.Pipeline(
        mlp(), split=3, num_microbatches=m, loss_fn=loss_fn, loss_reduction=reduction
    )
    loop, whole = mlp(), mlp()
    result = pipe.step(x, target=y)
    want = plain_step(
        loop, x, target=y, num_microbatches=m, loss_fn=loss_fn, loss_reduction=reduction
    )
    assert torch.equal(result.loss, want.loss)
    assert_same_gradients(pipe, loop)

    loss = loss_fn(whole(x), y)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    for parameter, other in zip(pipe.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_sum_does_not_weigh_a_mean() -> None:
    """``loss_reduction="sum"`` adds what loss_fn returns, whatever the sizes."""
    x, y = batch(5)
    pipe = sl.Pipeline(
        mlp(), split=2, num_microbatches=2, loss_fn=F.cross_entropy, loss_reduction="sum"
    )
    first, second = (F.cross_entropy(mlp()(x[a:b]), y[a:b]) for a, b in ((0, 3), (3, 5)))
    assert torch.equal(pipe.step(x, target=y).loss, (first + second).detach())


def token_share(microbatch: sl.Batch, whole: sl.Batch) -> float:
    """Return which part of the labels that count lies in this microbatch."""
    return float((microbatch.target != IGNORED).sum() / (whole.target != IGNORED).sum())


@pytest.mark.parametrize(("n", "m"), [(10, 4), (7, 3), (8, 4)])
def test_token_means_with_ignored_labels(n: int, m: int) -> None:
    """Microbatches hold different numbers of labels, so n_i / n would be the wrong weight."""
    x, y = batch(n)
    y[1::3] = IGNORED
    pipe = sl.Pipeline(
        mlp(), split=3, num_microbatches=m, loss_fn=F.cross_entropy, loss_reduction=token_share
    )
    loop, whole = mlp(), mlp()
    result = pipe.step(x, target=y)
    plain_step(
        loop,
        x,
        target=y,
        num_microbatches=m,
        loss_fn=F.cross_entropy,
        loss_reduction=token_share,
    )
    assert_same_gradients(pipe, loop)
    loss = F.cross_entropy(whole(x), y)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    for parameter, other in zip(pipe.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_a_microbatch_that_weighs_nothing_adds_nothing() -> None:
    """The mean over no labels is nan, and 0 * nan is nan: one padded microbatch spoilt the loss."""
    x, y = batch(8)
    y[4:] = IGNORED
    pipe = sl.Pipeline(
        mlp(), split=2, num_microbatches=2, loss_fn=F.cross_entropy, loss_reduction=token_share
    )
    torch.testing.assert_close(pipe.step(x, target=y).loss, F.cross_entropy(mlp()(x), y).detach())


def test_a_weight_sees_arguments_and_rows() -> None:
    seen: list[tuple[int, int, int, int]] = []

    def weight(microbatch: sl.Batch, whole: sl.Batch) -> float:
        seen.append((microbatch.rows, whole.rows, len(microbatch.args[0]), len(whole.args[0])))
        return 0.25

    pipe = sl.Pipeline(
        mlp(), split=2, num_microbatches=2, loss_fn=F.cross_entropy, loss_reduction=weight
    )
    x, y = batch(3)
    loss = pipe.step(x, target=y).loss
    assert seen == [(2, 3, 2, 3), (1, 3, 1, 3)]
    parts = [F.cross_entropy(mlp()(x[a:b]), y[a:b]).detach() for a, b in ((0, 2), (2, 3))]
    assert torch.equal(loss, parts[0] * 0.25 + parts[1] * 0.25)


def test_the_weights_of_a_rule() -> None:
    parts = Microbatches((torch.zeros(5),), {}, None, num_microbatches=2)
    assert [LossRule(None, "mean").weight(parts, i) for i in range(2)] == [3 / 5, 2 / 5]
    assert [LossRule(None, "sum").weight(parts, i) for i in range(2)] == [1.0, 1.0]
    double = LossRule(None, lambda microbatch, whole: torch.tensor(microbatch.rows * 2))
    assert [double.weight(parts, i) for i in range(2)] == [6.0, 4.0]


# Models that compute their own loss


@dataclass
class Output:
    """What a model of transformers returns, in short."""

    loss: Tensor


@pytest.mark.parametrize(
    "wrap", [lambda loss: loss, lambda loss: {"loss": loss}, lambda loss: (loss, 1), Output]
)
def test_a_models_own_loss_is_found(wrap: Callable[[Tensor], Any]) -> None:
    loss = torch.tensor(1.5)
    assert own_loss(wrap(loss)) is loss


def test_a_model_that_returns_its_own_loss_trains() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            logits = self.body(pair[0])
            return {"logits": logits, "loss": F.cross_entropy(logits, pair[1])}

    class Whole(nn.Sequential):
        def forward(self, input: Tensor, labels: Tensor | None = None) -> Any:
            return self[1](self[0](input, labels))

    class Pass(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            return x, labels

    stages, plain = [Pass(), Head()], Whole(Pass(), Head())
    pipe = sl.Pipeline.from_stages(stages, num_microbatches=4, keep_outputs=True)
    x, y = batch(10)
    result = pipe.step(x, labels=y)
    want = plain_step(plain, x, kwargs={"labels": y}, num_microbatches=4)
    assert torch.equal(result.loss, want.loss)
    assert torch.equal(result.outputs["logits"], want.outputs["logits"])
    assert isinstance(result.outputs["loss"], sl.PerMicrobatch)
    assert_same_gradients(pipe, plain)


# Losses that are none


def step_with(loss_fn: Callable[..., Any] | None) -> None:
    pipe = sl.Pipeline(mlp(), split=2, num_microbatches=2, loss_fn=loss_fn)
    x, y = batch(6)
    pipe.step(x, **({} if loss_fn is None else {"target": y}))


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (
            lambda out, y: F.cross_entropy(out, y, reduction="none"),
            r"loss_fn must be a tensor with one element, got shape \(3,\): reduce it .*\.mean\(\)",
        ),
        (lambda out, y: 1.5, "loss_fn must be a tensor with one element, got float"),
        (lambda out, y: None, "loss_fn must be a tensor with one element, got NoneType"),
        (None, r"the model's own loss must be a tensor with one element, got shape \(3, 3\)"),
        (lambda out, y: out.detach().mean(), "depends on no parameter .* unfreeze one, or call"),
    ],
)
def test_a_loss_that_cannot_be_trained(loss_fn: Callable[..., Any] | None, message: str) -> None:
    with pytest.raises(sl.StepError, match=rf"rank 1, stage 1, microbatch 0: .*{message}"):
        step_with(loss_fn)


def test_who_forgot_loss_fn_is_told_of_it() -> None:
    with pytest.raises(sl.StepError, match="loss_fn="):
        step_with(None)


def test_a_missing_target() -> None:
    pipe = sl.Pipeline(mlp(), split=2, num_microbatches=2, loss_fn=F.cross_entropy)
    with pytest.raises(
        sl.BatchError, match=r"rank 1 holds the last stage .* target .* step\(x, target=y\)"
    ):
        pipe.step(batch(6)[0])


def test_a_target_that_nobody_would_use() -> None:
    pipe = sl.Pipeline(mlp(), split=2, num_microbatches=2)
    x, y = batch(6)
    with pytest.raises(sl.BatchError, match=r"a target was given, .* no loss_fn .* pass loss_fn"):
        pipe.step(x, target=y)


# Accumulation


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "sequential"])
def test_two_steps_accumulate_as_two_plain_steps(schedule: str) -> None:
    """Fault 5 of torch.distributed.pipelining: it rescales what the step before had left."""
    plain = mlp()
    pipe = sl.Pipeline(
        mlp(), split=3, num_microbatches=4, loss_fn=F.cross_entropy, schedule=schedule
    )
    for n in (10, 3):
        x, y = batch(n)
        result = pipe.step(x, target=y)
        want = plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.cross_entropy)
        assert torch.equal(result.loss, want.loss)
    assert_same_gradients(pipe, plain)


# Evaluation


def train_step(pipe: sl.Pipeline, plain: nn.Module) -> None:
    x, y = batch(10)
    pipe.step(x, target=y)
    plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.cross_entropy)


def state_of(pipe: sl.Pipeline) -> dict[str, Tensor]:
    """Return copies of all that a step could touch."""
    gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in pipe.named_buffers()}
    return {**{f"grad {k}": v for k, v in gradients.items()}, **buffers}


def assert_same_state(now: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    assert now.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(now[name], value), name


@pytest.mark.parametrize("trained_before", [False, True])
def test_an_evaluation_between_two_steps_changes_nothing(trained_before: bool) -> None:
    """Fault 4 of torch.distributed.pipelining: its eval() divides the gradients that lie there."""
    pipe = sl.Pipeline(mlp(norm=True), split=3, num_microbatches=4, loss_fn=F.cross_entropy)
    plain = mlp(norm=True)
    if trained_before:
        train_step(pipe, plain)
    before = state_of(pipe)
    x, y = batch(7)
    pipe.eval()
    loss = pipe.step(x, target=y).loss
    assert_same_state(state_of(pipe), before)
    plain.eval()
    parts = [
        F.cross_entropy(plain(a), b).detach() * (len(a) / 7)
        for a, b in zip(x.tensor_split(4), y.tensor_split(4), strict=True)
    ]
    assert torch.equal(loss, sum(parts[1:], parts[0]))
    pipe.train()
    plain.train()
    train_step(pipe, plain)
    assert_same_gradients(pipe, plain)
    assert_same_state(dict(pipe.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_grad_mode_touches_no_gradient(mode: Callable[[], Any]) -> None:
    """Buffers follow train() and eval(), as in the plain model; gradients stay what they were."""
    pipe = sl.Pipeline(mlp(norm=True), split=2, num_microbatches=4, loss_fn=F.cross_entropy)
    plain = mlp(norm=True)
    train_step(pipe, plain)
    x, y = batch(9)
    with mode():
        result = pipe.step(x, target=y)
        for part in x.tensor_split(4):
            plain(part)
    assert not result.loss.requires_grad
    assert_same_gradients(pipe, plain)
    assert_same_state(dict(pipe.named_buffers()), dict(plain.named_buffers()))
    before = state_of(pipe)
    with mode():
        pipe.eval().step(x, target=y)
    assert_same_state(state_of(pipe), before)


class Traced(nn.Module):
    """Leaves a token in every graph that runs through it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: weakref.WeakSet[Token] = weakref.WeakSet()
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Any:
        self.modes.append(torch.is_grad_enabled())
        token = Token()
        self.tokens.add(token)
        apply: Any = _Trace.apply  # untyped in torch
        return apply(x, token)


class Token:
    """Lives as long as the node that holds it."""


class _Trace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def traced() -> tuple[list[nn.Module], tuple[Traced, Traced]]:
    first, last = Traced(), Traced()
    return [nn.Sequential(nn.Linear(6, 6), first), nn.Sequential(nn.Linear(6, 3), last)], (
        first,
        last,
    )


@pytest.mark.parametrize("how", ["train", "eval", "no_grad"])
def test_no_graph_outlives_its_step(how: str) -> None:
    stages, traces = traced()
    pipe = sl.Pipeline.from_stages(
        stages, num_microbatches=3, loss_fn=F.cross_entropy, keep_outputs=True
    )
    x, y = batch(6)
    pipe.train(how != "eval")
    with torch.set_grad_enabled(how != "no_grad"):
        result = pipe.step(x, target=y)
    gc.collect()
    for trace in traces:
        assert trace.modes == [how == "train"] * 3
        assert len(trace.tokens) == 0
    assert not result.loss.requires_grad
    assert not result.outputs.requires_grad


def test_the_memory_behind_a_loss_goes_with_its_microbatch() -> None:
    """F.mse_loss returns a number in a storage as large as its input: m of them were held."""
    behind: list[weakref.ref[Any]] = []
    held = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        held.append(sum(each() is not None for each in behind))
        memory = np.zeros(1000, dtype=np.float32)
        behind.append(weakref.ref(memory))
        buffer = torch.from_numpy(memory)
        buffer[:1] = F.cross_entropy(output, target)
        return buffer[0]

    pipe = sl.Pipeline(mlp(), split=2, num_microbatches=6, loss_fn=loss_fn, schedule="1f1b")
    x, y = batch(6)
    pipe.step(x, target=y)
    assert held == [0] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("even", [True, False])
def test_losses_are_added_as_a_plain_loop_adds_them(
    dtype: torch.dtype, shape: tuple[int, ...], even: bool
) -> None:
    torch.manual_seed(0)
    given = torch.randn(33, *shape).to(dtype)
    weights = [1 / 33] * 33 if even else [(i % 5 + 1) / 99 for i in range(33)]
    wanted, kept = torch.zeros(shape, dtype=dtype), Losses()
    for index, (loss, weight) in enumerate(zip(given, weights, strict=True)):
        wanted += loss * weight
        kept.note(index, loss, weight)
    assert torch.equal(kept.total(), wanted)
    assert kept.total().shape == shape


def test_a_loss_that_weighs_nothing_has_no_say() -> None:
    losses = Losses()
    for index, (value, weight) in enumerate([(float("nan"), 0.0), (2.0, 0.5), (4.0, 0.5)]):
        losses.note(index, torch.tensor(value), weight)
    assert losses.total() == 3


def test_a_loss_is_what_it_was_when_it_was_noted() -> None:
    """A loss function may hand out one buffer again and again."""
    buffer, losses = torch.zeros(()), Losses()
    for index in range(3):
        losses.note(index, buffer.fill_(index), 1.0)
    assert losses.total() == 3


def test_whole_numbers_are_weighed_too() -> None:
    losses = Losses()
    for index in range(2):
        losses.note(index, torch.tensor(index), 0.5)
    assert torch.equal(losses.total(), torch.tensor(0.5))


def test_nothing_of_a_loss_is_kept_for_backward_but_its_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """mse_loss reduces in memory as large as its input, which the loss as a tensor kept alive."""
    rooted: list[object] = []

    def noted(roots: Any, gradients: Any, *leaves: Any) -> None:
        rooted.extend(roots)
        run_backward(roots, gradients, *leaves)

    monkeypatch.setattr(backwards, "run_backward", noted)
    pipe = sl.Pipeline(mlp(), split=[2, 3], num_microbatches=2, loss_fn=F.mse_loss)
    vars(pipe._engine.runner)["_takes_turns"] = False
    pipe.step(torch.randn(4, 6), target=torch.randn(4, 3))
    assert len(rooted) == 4
    assert not any(isinstance(root, Tensor) for root in rooted)


class _Heard(nn.MSELoss):
    """A class of the user's."""


def _hooked() -> nn.Module:
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda *given: given[2] * 2)
    return loss


def _learned() -> nn.Module:
    return nn.CrossEntropyLoss(weight=nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize(
    "function", [None, F.mse_loss, F.cross_entropy, nn.MSELoss(), nn.CrossEntropyLoss()]
)
def test_losses_that_are_known(function: Any) -> None:
    assert LossRule(function, "mean").is_known()


@pytest.mark.parametrize("make", [_Heard, _hooked, _learned, lambda: lambda x, y: F.mse_loss(x, y)])
def test_losses_that_are_not_known(make: Any) -> None:
    assert not LossRule(make(), "mean").is_known()


def test_a_loss_of_the_users_that_stands_among_torchs_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its name and place alone it was taken for one of torch's."""

    def own_loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).sum()

    monkeypatch.setattr(F, "own_loss", own_loss, raising=False)
    assert not LossRule(own_loss, "mean").is_known()


@pytest.mark.parametrize("function", [F.mse_loss, nn.MSELoss()])
def test_a_loss_of_torchs_that_somebody_has_replaced_is_not_known(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = F.mse_loss

    @functools.wraps(before)
    def instead(*args: Any, **options: Any) -> Tensor:
        return before(*args, **options) * 2

    monkeypatch.setattr(F, "mse_loss", instead)
    assert not LossRule(function, "mean").is_known()
    assert not LossRule(instead, "mean").is_known()


def test_a_loss_of_torchs_whose_method_somebody_has_replaced_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nn.MSELoss, "forward", lambda self, output, target: output.sum())
    assert not LossRule(nn.MSELoss(), "mean").is_known()
