"""How a Pipe computes: as the plain model over the chunks, in every checkpoint mode."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.compat.fairscale.nn import Pipe
from stageline.compat.fairscale.nn.pipe import is_checkpointing, is_recomputing
from tests.compat.loops import differences, plain, twins

MODES = ("always", "except_last", "never")

pytestmark = pytest.mark.usefixtures("one_thread")


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 3)
    )


def compare(model: nn.Sequential, balance: list[int], x: Any, chunks: int, **settings: Any) -> None:
    """Compare output and every gradient, of the input too, to the last bit."""
    pipe, twin = twins(model, balance, chunks=chunks, **settings)
    mine, theirs = _leaves(x), _leaves(x)
    output, wanted = pipe(mine), plain(twin, theirs, chunks)
    for got, want in zip(_tuple(output), _tuple(wanted), strict=True):
        assert torch.equal(got, want)
    sum(each.square().sum() for each in _tuple(output)).backward()
    sum(each.square().sum() for each in _tuple(wanted)).backward()
    assert list(differences(pipe, twin)) == []
    for got, want in zip(_tuple(mine), _tuple(theirs), strict=True):
        assert got.grad is not None
        assert torch.equal(got.grad, want.grad)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _leaves(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_leaves(each) for each in value)
    return value.clone().requires_grad_()


@pytest.mark.parametrize("rows", [24, 22, 7, 5, 2, 1])
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_pipe_computes_what_the_plain_model_does(checkpoint: str, rows: int) -> None:
    compare(deep(), [2, 1, 2], torch.randn(rows, 6), chunks=4, checkpoint=checkpoint)


@pytest.mark.parametrize("balance", [[5], [1, 4], [1, 1, 1, 1, 1]])
def test_any_balance_gives_the_same_numbers(balance: list[int]) -> None:
    compare(deep(), balance, torch.randn(9, 6), chunks=3)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = pair
        return self.a(a) + b, self.b(b) * a


@pytest.mark.parametrize("checkpoint", MODES)
def test_values_may_be_tuples(checkpoint: str) -> None:
    model = nn.Sequential(Pair(), Pair())
    x = (torch.randn(7, 4), torch.randn(7, 4))
    compare(model, [1, 1], x, chunks=3, checkpoint=checkpoint)


class Labelled(nn.Module):
    """Passes integers beside the values: torchgpipe 0.0.7 fails on them in its backward."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.argmax(1)


class Chosen(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, labels = pair
        return x.gather(1, labels[:, None])


@pytest.mark.parametrize("checkpoint", MODES)
def test_integers_cross_between_partitions(checkpoint: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Labelled(), Chosen())
    compare(model, [2, 1], torch.randn(6, 4), chunks=2, checkpoint=checkpoint)


@pytest.mark.parametrize("checkpoint", MODES)
def test_batchnorm_counts_each_microbatch_once(checkpoint: str) -> None:
    """The original counts a recomputed microbatch twice."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    compare(model, [1, 2], torch.randn(12, 6), chunks=4, checkpoint=checkpoint)


@pytest.mark.parametrize("rows", [4, 5, 2])
@pytest.mark.parametrize(("checkpoint", "stop"), [("always", 4), ("except_last", 3), ("never", 0)])
def test_which_microbatches_are_checkpointed(checkpoint: str, stop: int, rows: int) -> None:
    calls: list[str] = []

    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append("R" if is_recomputing() else "C" if is_checkpointing() else "n")
            return x

    pipe = Pipe(nn.Sequential(nn.Linear(1, 1), Log()), [1, 1], chunks=4, checkpoint=checkpoint)
    count = len(torch.empty(rows).chunk(4))
    dropped = min(stop, count)
    pipe(torch.randn(rows, 1)).sum().backward()
    assert "".join(calls) == "C" * dropped + "n" * (count - dropped) + "R" * dropped
    calls.clear()
    pipe.eval()
    pipe(torch.randn(rows, 1)).sum().backward()
    assert "".join(calls) == "n" * count


def test_a_layer_alone_is_in_no_checkpoint() -> None:
    assert not is_checkpointing()
    assert not is_recomputing()


@pytest.mark.parametrize("checkpoint", MODES)
def test_dropout_is_drawn_again_alike(checkpoint: str) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    pipe = Pipe(model, [1, 1], chunks=4, checkpoint=checkpoint)
    x = torch.ones(8, 50, requires_grad=True)
    torch.manual_seed(3)
    first = pipe(x)
    first.sum().backward()
    assert x.grad is not None
    assert torch.equal(first, x.grad)  # both are 4 where nothing was dropped
    assert 0 < int(first.count_nonzero()) < first.numel()
    torch.manual_seed(3)
    assert torch.equal(pipe(x), first)
    assert not torch.equal(pipe(x), first)


def test_recompute_runs_under_the_modes_of_the_forward() -> None:
    model = deep()
    pipe, twin = twins(model, [2, 3], chunks=2, checkpoint="always")
    x = torch.randn(8, 6)
    # With its cache, autocast rounds the sum of the gradients instead of each.
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        output, wanted = pipe(x), plain(twin, x, 2)
    assert output.dtype is wanted.dtype is torch.bfloat16  # the original computes in float32
    assert torch.equal(output, wanted)
    output.float().square().sum().backward()
    wanted.float().square().sum().backward()
    assert list(differences(pipe, twin)) == []


def test_without_grad_no_graph_is_built() -> None:
    pipe, twin = twins(deep(), [2, 3], chunks=2)
    seen: list[tuple[bool, bool]] = []
    pipe.partitions[0].register_forward_hook(
        lambda _m, _i, output: seen.append((output.requires_grad, is_checkpointing()))
    )
    x = torch.randn(4, 6)
    with torch.no_grad():
        output = pipe(x)
        assert torch.equal(output, plain(twin, x, 2))
    assert not output.requires_grad
    assert seen == [(False, False)] * 2
    with torch.inference_mode():
        assert pipe(x).is_inference()


def test_statistics_follow_a_call_without_grad_as_in_the_plain_model() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    pipe, twin = twins(model, [1, 1], chunks=2)
    x = torch.randn(8, 6)
    with torch.no_grad():
        assert torch.equal(pipe(x), plain(twin, x, 2))
    assert list(differences(pipe, twin)) == []


def test_gradients_come_in_eval_mode_too() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    pipe, twin = twins(model, [2, 2], chunks=3)
    x = torch.randn(9, 6)
    for mode in (False, True, False):
        pipe.train(mode)
        pipe(x).sum().backward()
        pipe.zero_grad()
    twin.load_state_dict({name.split(".", 2)[2]: v for name, v in pipe.state_dict().items()})
    twin.eval()
    pipe(x).sum().backward()
    plain(twin, x, 3).sum().backward()
    assert list(differences(pipe, twin)) == []


@pytest.mark.parametrize("checkpoint", MODES)
def test_two_calls_accumulate(checkpoint: str) -> None:
    pipe, twin = twins(deep(), [3, 2], chunks=2, checkpoint=checkpoint)
    for x in (torch.randn(4, 6), torch.randn(3, 6)):
        pipe(x).sum().backward()
        plain(twin, x, 2).sum().backward()
    assert list(differences(pipe, twin)) == []


def test_two_calls_before_their_backwards() -> None:
    pipe, twin = twins(deep(), [3, 2], chunks=2)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    (pipe(x).sum() + pipe(y).square().sum()).backward()
    (plain(twin, x, 2).sum() + plain(twin, y, 2).square().sum()).backward()
    for mine, theirs in zip(pipe.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_calls_are_differentiated_in_any_order(order: tuple[int, int], checkpoint: str) -> None:
    pipe, twin = twins(deep(), [1, 2, 2], chunks=3, checkpoint=checkpoint)
    batches = torch.randn(8, 6), torch.randn(5, 6)
    outputs = [pipe(x) for x in batches]
    wanted = [plain(twin, x, 3) for x in batches]
    for number in order:
        outputs[number].square().sum().backward()
        wanted[number].square().sum().backward()
        assert list(differences(pipe, twin)) == []


class Last(nn.Module):
    """The output of a recurrent layer without its state."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_weight_that_a_layer_uses_several_times(checkpoint: str) -> None:
    """Autograd adds its uses in all microbatches one by one; a Pipe adds each microbatch's sum."""
    model = nn.Sequential(nn.GRU(4, 5, batch_first=True), Last(), nn.Linear(5, 2))
    pipe, twin = twins(model, [1, 2], chunks=3, checkpoint=checkpoint)
    x = torch.randn(7, 3, 4)
    output, wanted = pipe(x), plain(twin, x, 3)
    assert torch.equal(output, wanted)
    output.square().sum().backward()
    wanted.square().sum().backward()
    assert set(differences(pipe, twin)) <= {"0.weight_hh_l0", "0.bias_hh_l0"}
    for mine, theirs in zip(pipe.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_a_batch_without_rows_keeps_its_shape() -> None:
    pipe = Pipe(deep(), [2, 3], chunks=4)
    output = pipe(torch.empty(0, 6))
    assert output.shape == (0, 3)
    output.sum().backward()


def test_frozen_layers_get_no_gradient() -> None:
    pipe, twin = twins(deep(), [2, 3], chunks=2)
    pipe(torch.randn(4, 6)).sum().backward()
    pipe.zero_grad()
    for layers in (pipe, twin):
        for parameter in layers[0].parameters():
            parameter.requires_grad_(False)
    x = torch.randn(4, 6)
    pipe(x).sum().backward()
    plain(twin, x, 2).sum().backward()
    assert list(differences(pipe, twin)) == []
    pipe.requires_grad_(False)
    assert not pipe(x).requires_grad


def test_a_layer_or_parameter_may_be_replaced() -> None:
    model = deep()
    pipe = Pipe(model, [2, 3], chunks=2)
    x = torch.randn(4, 6)
    pipe(x).sum().backward()
    weight = nn.Parameter(torch.zeros(16, 6))
    pipe[0].weight = weight
    last = nn.Linear(16, 3)
    second = pipe.partitions[1]
    assert isinstance(second, nn.Sequential)
    second[2] = last
    pipe(x).sum().backward()
    assert weight.grad is not None
    assert last.weight.grad is not None
    assert torch.equal(pipe(x), plain(nn.Sequential(*pipe), x, 2))


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_layer_may_be_added_after_a_call(checkpoint: str) -> None:
    """A module that held none was not looked at again: its gradients had other last bits."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Sequential())
    pipe, twin = twins(model, [1, 1], chunks=3, checkpoint=checkpoint)
    pipe(torch.randn(6, 6)).sum().backward()
    pipe.zero_grad()
    late = nn.Linear(4, 2)
    for layers in (pipe[1], twin[1]):
        assert isinstance(layers, nn.Sequential)
        layers.append(copy.deepcopy(late))
    for x in torch.randn(2, 6, 6):
        pipe(x).square().sum().backward()
        plain(twin, x, 3).square().sum().backward()
    assert list(differences(pipe, twin)) == []
    loss = pipe(x).sum()
    assert all(each.any() for each in torch.autograd.grad(loss, list(pipe[1].parameters())))


def test_chunks_and_checkpoint_may_be_set_after_a_call() -> None:
    """Both originals read them in each call."""
    calls: list[str] = []

    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append("R" if is_recomputing() else "F")
            return x

    pipe = Pipe(nn.Sequential(nn.Linear(1, 1), Log()), [1, 1], chunks=2)
    for chunks, checkpoint, wanted in ((2, "except_last", "FFR"), (3, "always", "FFFRRR")):
        pipe.chunks, pipe.checkpoint = chunks, checkpoint
        calls.clear()
        pipe(torch.randn(6, 1)).sum().backward()
        assert "".join(calls) == wanted


def test_hooks_of_layers_and_partitions_fire() -> None:
    pipe = Pipe(deep(), [2, 3], chunks=2, checkpoint="except_last")
    x = torch.randn(4, 6)
    pipe(x).sum().backward()  # the hooks come later
    forwards: list[str] = []
    backwards: list[str] = []
    for name, module in (("partition", pipe.partitions[1]), ("layer", pipe[4])):
        module.register_forward_hook(lambda *_, name=name: forwards.append(name))
        module.register_full_backward_hook(lambda *_, name=name: backwards.append(name))
    pipe(x).sum().backward()
    assert sorted(forwards) == ["layer"] * 3 + ["partition"] * 3  # one of them recomputed
    assert sorted(backwards) == ["layer"] * 2 + ["partition"] * 2


def test_cpu_partitions_run_at_the_same_time() -> None:
    """In both originals one thread runs all partitions that are on the CPU."""
    meeting = threading.Barrier(2, timeout=30)
    numbers = [0, 0]

    class Meets(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def forward(self, x: Tensor) -> Tensor:
            numbers[self.index] += 1
            if numbers[self.index] == 2 - self.index:  # microbatch 1 here, microbatch 0 there
                meeting.wait()
            return x

    pipe = Pipe(nn.Sequential(Meets(0), Meets(1)), [1, 1], devices=["cpu", "cpu"], chunks=2)
    pipe(torch.randn(2, 1))
    assert numbers == [2, 2]


@pytest.mark.parametrize("deferred", [False, True])
def test_two_threads_may_call_one_pipe(deferred: bool) -> None:
    """In fairscale 0.4.13, 380 of 400 such calls returned wrong outputs."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    pipe, twin = twins(model, [2, 2], chunks=2, deferred_batch_norm=deferred)
    batches = torch.randn(2, 15, 8, 6)
    wanted = [[plain(twin, x, 2) for x in each] for each in batches]
    torch.stack([output for each in wanted for output in each]).sum().backward()
    wrong: list[str] = []
    start = threading.Barrier(2)

    def calls(number: int) -> None:
        start.wait()
        for x, want in zip(batches[number], wanted[number], strict=True):
            output = pipe(x)
            output.sum().backward()
            if not torch.equal(output, want):
                wrong.append("output")

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert int(pipe[1].num_batches_tracked) == (30 if deferred else 60)  # type: ignore[arg-type]
    for mine, theirs in zip(pipe.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
