"""The public door: every way to build a pipeline, and every way to call it."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import OrderedTransport, plain_step

pytestmark = pytest.mark.usefixtures("one_thread")


def net() -> nn.Sequential:
    """Five blocks with 112, 32, 136, 1 and 27 parameters, and with statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(6, 16, 1), nn.BatchNorm1d(16), nn.Conv1d(16, 8, 1), nn.PReLU(), nn.Conv1d(8, 3, 1)
    )


def batch(n: int = 10) -> tuple[Tensor, Tensor]:
    torch.manual_seed(n)
    return torch.randn(n, 6, 4), torch.randint(3, (n, 4))


def assert_same(pipe: sl.Pipeline, plain: nn.Module) -> None:
    """Compare parameters, buffers and each named gradient, bit by bit."""
    for name, want in plain.state_dict().items():
        assert torch.equal(pipe.state_dict()[name], want), name
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    assert [name for name, _ in pipe.named_parameters()] == list(gradients)
    for name, parameter in pipe.named_parameters():
        want_gradient = gradients[name]
        assert parameter.grad is not None, name
        assert want_gradient is not None, name
        assert torch.equal(parameter.grad, want_gradient), f"gradient of {name}"


def assert_trains_exactly(pipe: sl.Pipeline, sizes: Sequence[int] = (10, 3)) -> None:
    """Compare two optimizer steps, the second one on a smaller batch, with the plain model's."""
    plain = net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (pipe, plain)]
    for n in sizes:
        x, y = batch(n)
        for optimizer in optimizers:
            optimizer.zero_grad()
        result = pipe.step(x, target=y)
        want = plain_step(
            plain,
            x,
            target=y,
            num_microbatches=pipe.schedule.num_microbatches,
            loss_fn=F.cross_entropy,
        )
        assert result.num_microbatches == min(n, pipe.schedule.num_microbatches)
        assert torch.equal(result.loss, want.loss)
        if result.outputs is not None:
            assert torch.equal(result.outputs, want.outputs)
        assert_same(pipe, plain)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(pipe, plain)


# Ways to build


@pytest.mark.parametrize(
    ("how", "sizes"),
    [
        ({"split": 1}, [5]),
        ({"split": 2}, [2, 3]),
        ({"split": 4}, [1, 1, 1, 2]),
        ({"split": [2, 1, 2]}, [2, 1, 2]),
        ({"split": (4, 1)}, [4, 1]),
        ({"ranks": 3}, [2, 1, 2]),  # one stage per rank where split is left out
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential"])
def test_every_split_trains_exactly(how: dict[str, Any], sizes: list[int], schedule: str) -> None:
    pipe = sl.Pipeline(
        net(),
        num_microbatches=4,
        schedule=schedule,
        loss_fn=F.cross_entropy,
        keep_outputs=True,
        **how,
    )
    assert [len(stage.calls) for stage in pipe.plan.stages] == sizes
    assert_trains_exactly(pipe)


@pytest.mark.parametrize(("ranks", "placement"), [(1, (0, 0, 0, 0)), (3, (0, 0, 1, 2))])
def test_several_stages_per_rank(ranks: int, placement: tuple[int, ...]) -> None:
    pipe = sl.Pipeline(net(), split=4, ranks=ranks, num_microbatches=4, loss_fn=F.cross_entropy)
    assert pipe.plan.placement == pipe.schedule.placement == placement
    assert len(pipe.devices) == ranks
    assert_trains_exactly(pipe)


def test_four_microbatches_per_rank_unless_told() -> None:
    assert sl.Pipeline(net(), split=3).schedule.num_microbatches == 12
    assert sl.Pipeline(net(), split=3, ranks=2).schedule.num_microbatches == 8


def test_a_schedule_is_a_name_an_object_or_its_text() -> None:
    schedule = sl.schedules.gpipe(2, 3)
    given: list[tuple[Any, int | None]] = [("gpipe", 3), (schedule, None), (schedule.text(), None)]
    for form, count in given:
        pipe = sl.Pipeline(net(), split=2, schedule=form, num_microbatches=count)
        assert pipe.schedule == schedule


# Rank 0 holds the first and the last stage, rank 1 the two between them.
V = """
    0F0 0F1 3F0 3B0 0F2 3F1 3B1 0B0 3F2 3B2 0B1 0B2
    1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 2B2 1B2
"""
LOOPED = """
    0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
    1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2
"""
BACKWARDS = """
    3F0 3B0 3F1 3B1 3F2 3B2
    2F0 2F1 2B0 2F2 2B1 2B2
    1F0 1F1 1F2 1B0 1B1 1B2
    0F0 0F1 0F2 0B0 0B1 0B2
"""


@pytest.mark.parametrize("text", [V, LOOPED, BACKWARDS], ids=["V", "looped", "backwards"])
@pytest.mark.parametrize("transport", [None, OrderedTransport()], ids=["memory", "ordered"])
def test_a_schedule_of_ones_own_trains_exactly(text: str, transport: Any) -> None:
    """Whatever the placement; with as many rows as microbatches, and with fewer."""
    pipe = sl.Pipeline(net(), split=4, schedule=text, loss_fn=F.cross_entropy, transport=transport)
    assert pipe.plan.placement == sl.parse(text).placement
    assert_trains_exactly(pipe, sizes=(10, 3, 2))


@pytest.mark.parametrize("ahead", [1, 5])
def test_1f1b_that_is_ahead_trains_exactly(ahead: int) -> None:
    schedule = sl.schedules.one_f_one_b(3, 4, ahead=ahead)
    pipe = sl.Pipeline(net(), split=3, schedule=schedule, loss_fn=F.cross_entropy)
    assert f"schedule 1f1b, {ahead} ahead, 4 microbatches" in str(pipe)
    assert_trains_exactly(pipe, sizes=(10, 3, 2))


def test_descending_backwards_add_in_another_order() -> None:
    """Allowed, and equal but for rounding: sums of three numbers in the opposite order."""
    text = "0F0 0F1 0F2 0B2 0B1 0B0 \n 1F0 1F1 1F2 1B2 1B1 1B0"
    pipe = sl.Pipeline(net(), split=2, schedule=text, loss_fn=F.cross_entropy)
    plain = net()
    x, y = batch()
    pipe.step(x, target=y)
    plain_step(plain, x, target=y, num_microbatches=3, loss_fn=F.cross_entropy)
    for got, want in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-6, atol=1e-6)


def gpipe_in_a_v(num_microbatches: int) -> str:
    """All forwards of stage 0, then all of stage 3, on rank 0; stages 1 and 2 on rank 1."""
    every = range(num_microbatches)
    rows = [
        [f"{stage}F{m}" for stage in (0, 3) for m in every]
        + [f"{stage}B{m}" for stage in (3, 0) for m in every],
        [f"{stage}F{m}" for m in every for stage in (1, 2)]
        + [f"{stage}B{m}" for m in every for stage in (2, 1)],
    ]
    return "\n".join(" ".join(row) for row in rows)


LAST_FIRST = """
    0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 0B0 0B1 0B2 0B3 0B4 0B5 0B6 0B7
    1F7 1F6 1F5 1F4 1F3 1F2 1F1 1F0 1B0 1B1 1B2 1B3 1B4 1B5 1B6 1B7
"""


@pytest.mark.timeout(10)
@pytest.mark.parametrize("how", ["train", "differentiate", "evaluate", "infer"])
@pytest.mark.parametrize("text", [gpipe_in_a_v(8), LAST_FIRST], ids=["V", "last first"])
def test_a_rank_that_sends_much_before_it_is_taken_does_not_hang(text: str, how: str) -> None:
    """Forward-only runs bound the packets under way; two ranks once waited for each other's.

    So did a rank whose neighbour wants the last microbatch first.
    """
    schedule = sl.parse(text)
    pipe = sl.Pipeline(net(), split=schedule.num_stages, schedule=schedule, loss_fn=F.cross_entropy)
    x, y = batch(16)
    pipe.train(how in ("train", "differentiate"))
    if how in ("train", "evaluate"):
        assert pipe.step(x, target=y).num_microbatches == 8
    else:
        assert pipe(x).shape == (16, 3, 4)


def test_training_by_a_schedule_without_backwards_is_refused() -> None:
    """Else step returns a loss, no parameter gets a gradient, and nobody is told."""
    pipe = sl.Pipeline(
        net(), split=2, schedule="forward-only", num_microbatches=2, loss_fn=F.cross_entropy
    )
    x, y = batch()
    assert pipe.eval().step(x, target=y).num_microbatches == 2
    pipe.train()
    with pytest.raises(sl.StagelineError, match=r"forward-only.*(no|without) backward"):
        pipe.step(x, target=y)
    assert not pipe(x).requires_grad


@pytest.mark.parametrize("split", [[1, 2], [2, 1]])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "sequential"])
def test_a_model_may_begin_in_place(schedule: str, split: list[int]) -> None:
    """Slices of one batch share its version counter, so a change of one looked like one of all."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.ReLU(inplace=True), nn.Conv1d(6, 6, 1), nn.Conv1d(6, 3, 1))

    pipe = sl.Pipeline(
        model(), split=split, num_microbatches=4, schedule=schedule, loss_fn=F.cross_entropy
    )
    plain = model()
    x, y = batch()
    pipe.step(x.clone(), target=y)
    plain_step(plain, x.clone(), target=y, num_microbatches=4, loss_fn=F.cross_entropy)
    assert_same(pipe, plain)


# Stages of one's own


def test_stages_may_be_modules_and_functions() -> None:
    model = net()
    pipe = sl.Pipeline.from_stages(
        [model[:2], model[2], lambda h: torch.tanh(h), model[4]], num_microbatches=4
    )
    x, _ = batch()
    plain = net()
    plain[3] = nn.Tanh()
    want = torch.cat([plain(part) for part in x.tensor_split(4)])
    assert torch.equal(pipe(x), want)


def test_stages_may_be_a_mapping() -> None:
    model = net()
    pipe = sl.Pipeline.from_stages(
        {1: model[2:], 0: model[:2]}, num_stages=2, num_microbatches=4, loss_fn=F.cross_entropy
    )
    x, y = batch()
    plain = net()
    pipe.step(x, target=y)
    plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.cross_entropy)
    for got, want in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert got.grad is not None
        assert want.grad is not None
        assert torch.equal(got.grad, want.grad)


@pytest.mark.parametrize("unpack", [True, False])
def test_tuples_become_arguments_where_asked(unpack: bool) -> None:
    def second(*received: Any) -> Any:
        assert len(received) == (2 if unpack else 1)
        a, b = received if unpack else received[0]
        return a * 3 + b

    pipe = sl.Pipeline.from_stages(
        [lambda x, *, shift: (x * 2, shift), second], unpack_tuples=unpack, num_microbatches=3
    ).eval()
    x, shift = torch.randn(10, 2), torch.randn(10, 1)
    assert torch.equal(pipe(x, shift=shift), x * 2 * 3 + shift)


def test_wrap_stage_is_called_once_per_stage_and_what_it_returns_is_run() -> None:
    calls: list[tuple[int, list[str]]] = []

    class Negated(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Any:
            return -self.module(x)

    def wrap(module: nn.Module, index: int) -> nn.Module:
        calls.append((index, [name for name, _ in module.named_parameters()]))
        return Negated(module)

    pipe = sl.Pipeline(net(), split=[2, 3], num_microbatches=2, wrap_stage=wrap).eval()
    assert calls == [
        (0, ["0.weight", "0.bias", "1.weight", "1.bias"]),
        (1, ["2.weight", "2.bias", "3.weight", "4.weight", "4.bias"]),
    ]
    x, _ = batch()
    plain = net().eval()
    want = torch.cat([-plain[2:](-plain[:2](part)) for part in x.tensor_split(2)])
    assert torch.equal(pipe(x), want)
    assert len(calls) == 2
    assert all(isinstance(stage.module, Negated) for stage in pipe.plan.stages)


def test_hooks_of_layers_are_called() -> None:
    model = net()
    seen: list[int] = []
    model[2].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    pipe = sl.Pipeline(model, split=2, num_microbatches=3, loss_fn=F.cross_entropy)
    x, y = batch(8)
    pipe.step(x, target=y)
    assert seen == [3, 3, 2]


# What it says of itself


def test_repr_shows_the_plan() -> None:
    pipe = sl.Pipeline(net(), split=[2, 3], num_microbatches=8)
    first, *rest = repr(pipe).splitlines()
    assert first.startswith(
        "Pipeline: 2 stages on 2 ranks (threads of one process), schedule 1f1b, 8 microbatches"
    )
    assert "\n".join(rest) == pipe.plan.table()
    assert "0 Conv1d .. 1 BatchNorm1d (2)" in repr(pipe)


def test_a_result_without_outputs() -> None:
    pipe = sl.Pipeline(net(), split=2, num_microbatches=2, loss_fn=F.cross_entropy)
    x, y = batch()
    result = pipe.step(x, target=y)
    assert result.outputs is None
    assert repr(result) == f"StepResult(loss={result.loss.item():.6g}, num_microbatches=2)"
    assert torch.equal(pickle.loads(pickle.dumps(result)).loss, result.loss)


def test_the_loss_stays_where_it_was_computed_whatever_the_default_device() -> None:
    """It is weighed from numbers, and a tensor of these was made on the user's default device."""
    pipe = sl.Pipeline(net(), split=2, num_microbatches=2, loss_fn=F.cross_entropy)
    x, y = batch()
    wanted = pipe.step(x, target=y).loss
    with torch.device("meta"):
        loss = pipe.step(x, target=y).loss
    assert torch.equal(loss, wanted)


def test_a_closed_pipeline_opens_itself_again() -> None:
    pipe = sl.Pipeline(net(), split=2, num_microbatches=2, loss_fn=F.cross_entropy)
    pipe.close()
    assert_trains_exactly(pipe)
    pipe.close()
    assert_trains_exactly(sl.Pipeline(net(), split=2, num_microbatches=2, loss_fn=F.cross_entropy))


# Calls


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_a_call_returns_the_outputs_of_the_batch_without_a_graph(how: str) -> None:
    pipe, plain = sl.Pipeline(net(), split=3, num_microbatches=4), net()
    pipe.train(how != "eval")
    plain.train(how != "eval")
    x, _ = batch(7)
    modes: dict[str, Callable[[], Any]] = {
        "eval": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
    }
    with modes[how]():
        out = pipe(x)
        want = torch.cat([plain(part) for part in x.tensor_split(4)])
    assert torch.equal(out, want)
    assert not out.requires_grad
    assert all(p.grad is None for p in pipe.parameters())


def plain_call(model: nn.Module, x: Tensor, m: int) -> Tensor:
    """Return the joined outputs of m microbatches: one graph, and so one backward."""
    return torch.cat([model(part) for part in x.tensor_split(min(m, len(x)))])


@pytest.mark.parametrize(("n", "m"), [(10, 4), (3, 8)])
@pytest.mark.parametrize("kind", ["data", "leaf", "history"])
def test_a_call_can_be_differentiated(kind: str, n: int, m: int) -> None:
    """Parameters, a leaf x, and what lies before x get the plain model's gradients."""
    pipe, plain = sl.Pipeline(net(), split=3, num_microbatches=m), net()
    x, y = batch(n)
    mine, theirs = (x.clone().requires_grad_(kind != "data") for _ in range(2))

    value = F.cross_entropy(pipe(mine * 3 if kind == "history" else mine), y) * 2
    value.backward()

    cut_off = (theirs * 3 if kind == "history" else theirs).detach().requires_grad_(kind != "data")
    want = F.cross_entropy(plain_call(plain, cut_off, m), y) * 2
    want.backward()

    assert torch.equal(value, want)
    assert_same(pipe, plain)
    if kind == "data":
        assert mine.grad is None
    else:
        assert mine.grad is not None
        assert cut_off.grad is not None
        assert torch.equal(mine.grad, cut_off.grad * 3 if kind == "history" else cut_off.grad)


def test_a_call_may_begin_in_place() -> None:
    """As in the plain model, if x is not a leaf itself: torch protects leaves only."""
    pipe = sl.Pipeline(nn.Sequential(nn.ReLU(inplace=True), nn.Tanh()), split=2, num_microbatches=2)
    plain = nn.Sequential(nn.ReLU(inplace=True), nn.Tanh())
    mine, theirs = (torch.randn(4, 3, generator=torch.manual_seed(1)) for _ in range(2))
    pipe(mine.requires_grad_() * 2).sum().backward()
    plain(theirs.requires_grad_() * 2).sum().backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    assert torch.equal(mine.grad, theirs.grad)


def test_a_batch_that_changes_before_the_backward_is_noticed() -> None:
    """Its old numbers are needed for the gradient of the first layer; torch would raise, too."""
    pipe = sl.Pipeline(net(), split=2, num_microbatches=2)
    x, _ = batch()
    out = pipe(x)
    x.zero_()
    with pytest.raises(sl.PipeError, match=r"(modified|changed) .*in-?\s?place"):
        out.sum().backward()


def test_calls_may_overlap_and_accumulate() -> None:
    """Two calls, a step, then the backward of the second call and that of the first."""
    pipe = sl.Pipeline(net(), split=2, num_microbatches=2, loss_fn=F.cross_entropy)
    plain = net()
    (x, y), (x2, y2) = batch(8), batch(6)

    out, out2 = pipe(x), pipe(x2)
    pipe.step(x, target=y)
    F.cross_entropy(out2, y2).backward()
    F.cross_entropy(out, y).backward()

    want, want2 = plain_call(plain, x, 2), plain_call(plain, x2, 2)
    plain_step(plain, x, target=y, num_microbatches=2, loss_fn=F.cross_entropy)
    F.cross_entropy(want2, y2).backward()
    F.cross_entropy(want, y).backward()
    assert_same(pipe, plain)


class Forked(nn.Module):
    """Returns leaves of all sorts, in all sorts of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Conv1d(6, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"y": y, "best": y.argmax(1), "both": (y * 2, None), "mean": y.mean(), "n": 7}


def test_structured_outputs_can_be_differentiated() -> None:
    torch.manual_seed(0)
    forked, twin = Forked(), Forked()
    twin.load_state_dict(forked.state_dict())
    pipe = sl.Pipeline.from_stages([nn.Identity(), forked], num_microbatches=2)
    x, _ = batch()
    out = pipe(x)
    assert out["y"].requires_grad
    assert not out["best"].requires_grad
    assert torch.equal(out["best"], out["y"].argmax(1))
    assert out["both"][1] is None
    assert out["n"] == 7
    assert isinstance(out["mean"], sl.PerMicrobatch)
    (out["both"][0].sum() + sum(out["mean"])).backward()  # out["y"] itself is not used
    for part in x.tensor_split(2):
        want = twin(part)
        (want["both"][0].sum() + want["mean"]).backward()
    for got, other in zip(forked.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got.grad, other.grad)


def test_a_call_is_differentiated_once() -> None:
    pipe = sl.Pipeline(net(), split=2, num_microbatches=2)
    out = pipe(batch()[0])
    out.sum().backward(retain_graph=True)
    with pytest.raises(sl.PipeError, match=r"graphs of this call are gone.* Call the pipeline ag"):
        out.sum().backward()


def test_a_frozen_pipeline_returns_outputs_without_a_graph() -> None:
    pipe = sl.Pipeline(net().requires_grad_(False), split=2, num_microbatches=2)
    assert not pipe(batch()[0]).requires_grad


@pytest.mark.parametrize("backward", [True, False])
def test_an_output_that_is_dropped_takes_its_graph_with_it(backward: bool) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def watch(x: Tensor) -> Tensor:
        x = x * 2
        alive.add(x)
        return x.sin()  # whose backward needs x

    pipe = sl.Pipeline.from_stages([nn.Conv1d(6, 6, 1), watch], num_microbatches=3)
    out = pipe(batch()[0])
    gc.collect()
    assert len(alive) == 3
    if backward:
        out.sum().backward()
    del out
    gc.collect()
    assert len(alive) == 0


def test_what_is_replicated_gets_its_gradient_too() -> None:
    """Marked leaf by leaf or as a whole tree, at the end of a graph or in the middle of one."""
    x, _ = batch()
    gradients = []
    for mark in (lambda w: {"w": sl.replicate(w)}, lambda w: sl.replicate({"w": w})):
        weight = torch.full((4,), 2.0, requires_grad=True)
        pipe = sl.Pipeline.from_stages(
            [lambda x, tree: x * tree["w"], nn.Identity()], num_microbatches=2
        )
        pipe(x, mark(weight.exp())).sum().backward()
        assert weight.grad is not None
        gradients.append(weight.grad)
    assert torch.equal(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], x.sum((0, 1)) * torch.tensor(2.0).exp())


# Two callers


class Gate(nn.Module):
    """Tells when it is entered, and waits to be let through."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.open = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        assert self.open.wait(timeout=60)
        return x


def test_a_second_caller_waits() -> None:
    gate = Gate()
    model = net()
    pipe = sl.Pipeline.from_stages(
        [model[:2], gate, model[2:]], num_microbatches=2, loss_fn=F.cross_entropy
    )
    x, y = batch()
    results: list[sl.StepResult] = []

    def step() -> None:
        results.append(pipe.step(x, target=y))

    callers = [threading.Thread(target=step) for _ in range(2)]
    callers[0].start()
    assert gate.entered.wait(timeout=60)
    callers[1].start()
    gate.open.set()
    for caller in callers:
        caller.join(timeout=60)
    plain = net()
    for result in results:
        want = plain_step(plain, x, target=y, num_microbatches=2, loss_fn=F.cross_entropy)
        assert torch.equal(result.loss, want.loss)
    assert len(results) == 2
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    assert pipe.eval()(x).shape == (10, 3, 4)


def test_two_threads_may_call_and_differentiate() -> None:
    """As fairscale's Pipe could not: of its outputs 380 of 400 were another call's."""
    pipe, plain = sl.Pipeline(net(), split=2, num_microbatches=2), net()
    x, _ = batch()
    want = plain_call(plain, x, 2)
    outputs: list[Tensor] = []

    def train() -> None:
        for _ in range(20):
            out = pipe(x)
            outputs.append(out.detach())
            out.sum().backward()

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(outputs) == 40
    assert all(torch.equal(out, want) for out in outputs)
    (40 * want.sum()).backward()
    for name, parameter in pipe.named_parameters():
        want_gradient = plain.get_parameter(name).grad  # 40 times one sum, not 40 sums
        torch.testing.assert_close(parameter.grad, want_gradient, rtol=1e-5, atol=1e-4)


class CallsItself(nn.Module):
    pipe: sl.Pipeline | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x if self.pipe is None else self.pipe(x)
        return out


def test_a_stage_that_calls_its_own_pipeline_is_refused() -> None:
    """It would wait for itself for ever."""
    inner = CallsItself()
    pipe = sl.Pipeline.from_stages([nn.Linear(3, 3), inner], num_microbatches=2)
    object.__setattr__(inner, "pipe", pipe)
    with pytest.raises(sl.StepError, match="called the pipeline that it is a part of"):
        pipe(torch.randn(4, 3))
