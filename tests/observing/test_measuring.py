"""Costs of blocks as measured: of any model, which is left as it was."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from stageline.observing import StageMemory, measure_memory
from stageline.observing.bench import _boundary, _surely
from stageline.observing.progress import Progress
from stageline.observing.shares import Samples
from stageline.partitioning.costs import BoundaryCosts


class Odd(nn.Module):
    """An embedding, layers of different kinds that pass numbers along, and a tied head.

    The first layer is frozen; one has no parameters; a mask and a number cross every cut.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([Layer(nn.Linear(8, 8)), Layer(nn.Dropout(0.5)), Layer(Norm())])
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.layers[0].requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        value, mask, count = self.embed(ids), ids > 3, ids.shape[1]
        for layer in self.layers:
            value = layer(value, mask, count)
        made: Tensor = self.head(value)
        return made


class Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, mask: Tensor, count: int) -> Tensor:
        made: Tensor = self.inner(x) * mask[..., None] / count
        return made


class Norm(nn.Module):
    """A BatchNorm over the last dimension, whose statistics change with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(x.flatten(0, 1)).view_as(x)
        return made


def ids(rows: int = 4) -> Tensor:
    return torch.arange(rows * 5).view(rows, 5) % 20


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def state_of(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    return [
        [tensor.clone() for tensor in tensors],
        [None if tensor.grad is None else tensor.grad.clone() for tensor in model.parameters()],
        [module.training for module in model.modules()],
        torch.get_rng_state(),
        torch.get_num_threads(),
        sorted(vars(model)),
    ]


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("busy", [1, 2, 9])
@pytest.mark.parametrize("beside", ["threads", "processes"])
def test_any_block_is_measured_and_the_model_left_alone(busy: int, beside: Any) -> None:
    model = Odd()
    cross_entropy(model(ids()), ids()).backward()
    graph = sl.capture(model, (ids(),))
    before = state_of(model)
    costs = sl.measure_costs(graph, repeats=1, busy=busy, beside=beside)
    assert_same(state_of(model), before)
    assert len(costs.blocks) == len(graph.cuts) + 1 == 5
    embed, frozen, bare, _, head = costs.blocks
    assert all(block.forward > 0 and block.backward > 0 for block in costs.blocks)
    assert frozen.parameters == 72
    assert bare.parameters == 0
    assert embed.parameters == head.parameters == 160
    assert embed.output_bytes == 4 * 5 * 8 * 4  # float32 [4, 5, 8]; the mask is made again
    assert head.output_bytes == 0
    assert costs.rows == 4
    told = "one rank busy" if busy == 1 else f"{busy} ranks busy as {beside}"
    assert costs.origin == f"measured here, {told}"


def test_other_sizes_of_microbatches() -> None:
    costs = sl.measure_costs(sl.capture(Odd(), (ids(),)), rows=[2, 6], repeats=1)
    (larger,) = costs.others
    assert (costs.rows, larger.rows) == (2, 6)
    small, large = (each.blocks[0].output_bytes for each in (costs, larger))
    assert (small, large) == (2 * 5 * 32, 6 * 5 * 32)
    assert costs.at(4).blocks[0].output_bytes == 4 * 5 * 32


def test_memory_is_that_of_the_stages() -> None:
    """Of blocks one by one, and of blocks joined: what measure_memory sees of a whole stage."""
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 8)]
    model = nn.Sequential(*layers)
    x = torch.randn(16, 64)
    costs = sl.measure_costs(sl.capture(model, (x,)), repeats=1)
    for sizes in ([1, 1, 1, 1, 1], [2, 3], [1, 4], [1, 2, 2]):
        parts, begin = [], 0
        for size in sizes:
            parts.append(nn.Sequential(*layers[begin : begin + size]))
            begin += size
        seen = measure_memory(parts, x)
        first, *others = zip(costs.stages(sizes), seen, strict=True)
        for stage, memory in others:
            kept = stage.input_bytes + stage.activation_bytes
            assert kept == memory.after_forward
            # Never more than is really released: a plan must not count on it.
            frees = memory.after_forward - memory.after_input_gradient
            assert frees - x.nbytes * (len(sizes) < 5) <= stage.input_gradient_frees <= frees
        stage, memory = first
        assert stage.activation_bytes == memory.after_forward - x.nbytes  # that is the caller's
        frees = memory.after_forward - memory.after_input_gradient
        assert stage.input_gradient_frees == frees < 0  # the gradient that came, and nothing else


def test_a_boundary_is_what_blocks_together_save() -> None:
    """Blocks 1, 2 and 3 take 10 each, together 24: two boundaries between them took 3 each."""
    memories = [StageMemory(0, 0, 0, 0, is_split=False)] * 4
    together = 4
    samples: Samples = {
        (what, block): [10, 500, 11] if block < together else [24, 100, 27]
        for what in ("F", "F split", "I", "W", "B")
        for block in range(5)
    }
    found = _boundary({together: range(1, 4)}, samples, memories, scale=2.0)
    assert found == BoundaryCosts(6, 6, 6, 6)
    assert _boundary({}, samples, memories, scale=1.0) == BoundaryCosts()


def test_what_is_not_sure_of_a_boundary_is_not_taken_off() -> None:
    """A boundary that was measured too large made stages of many blocks seem too fast."""
    steady, scattered = [100] * 9, [0, 200, 100, 20, 180, 60, 140, 100, 100]
    assert _surely(steady) == 100
    assert 60 < _surely(scattered) < 80  # their median deviation is 40


def test_the_loss_counts_to_the_last_block() -> None:
    graph = sl.capture(Odd(), (ids(),))
    plain = sl.measure_costs(graph, repeats=1).blocks[-1]
    lossy = sl.measure_costs(graph, repeats=1, loss_fn=cross_entropy, target=ids()).blocks[-1]
    assert lossy.activation_bytes > plain.activation_bytes  # the softmax is kept


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x)
        return {"loss": y.square().mean(), "y": y}


def test_a_model_with_a_loss_of_its_own() -> None:
    costs = sl.measure_costs(sl.capture(OwnLoss(), (torch.randn(3, 4),)), repeats=1)
    assert all(block.backward > 0 for block in costs.blocks)


class Fails(nn.Module):
    """Fails at its fourth call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(self.calls) > 3:
            raise ArithmeticError("no more")
        self.calls.append(1)
        made: Tensor = self.inner(x)
        return made


def test_an_error_leaves_the_model_alone_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Fails())
    graph = sl.capture(model, (torch.randn(2, 4),))
    before = state_of(model)
    with pytest.raises(ArithmeticError, match="no more"):
        sl.measure_costs(graph, busy=2)
    assert_same(state_of(model), before)


def test_under_no_grad_and_autocast_as_a_step_would_run() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = sl.capture(model, (torch.randn(2, 8),))
        with torch.no_grad():
            costs = sl.measure_costs(graph, repeats=1)
        assert torch.is_grad_enabled()
    assert costs.blocks[0].output_bytes == 2 * 8 * 2
    assert costs.blocks[1].weight_gradient > 0


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(sl.ConfigError) as caught:
        sl.measure_costs(nn.Linear(2, 2), rows=0, repeats=0, busy=-1, beside="gpus")  # type: ignore[arg-type]
    assert caught.value.findings == (
        "graph: wanted what sl.capture(model, args) returns, got Linear",
        "repeats=0: wanted a whole number of at least 1",
        "busy=-1: wanted a whole number of at least 1",
        "beside='gpus': wanted 'threads' or 'processes'",
    )
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(sl.ConfigError) as caught:
        sl.measure_costs(sl.capture(model, (torch.randn(2, 2),)), rows=[2, 2])
    assert caught.value.findings == (
        "graph: the model is on meta, so nothing can be run: use sl.estimate_costs",
        "rows=[2, 2]: wanted a size of microbatches, or different ones: [1, 4]",
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_appears_on_a_terminal_once_it_takes_long() -> None:
    terminal, times = Terminal(), iter([0.0, 0.5, 2.0, 2.0, 3.0, 3.0])
    with Progress(3, "working", stream=terminal, clock=times.__next__) as bar:
        bar.advance()
        assert terminal.getvalue() == ""
        bar.advance()
        assert "67 %" in terminal.getvalue() or "66 %" in terminal.getvalue()
        bar.advance()
    assert terminal.getvalue().endswith("\r")
    elsewhere = io.StringIO()
    with Progress(1, "working", stream=elsewhere, clock=iter([0.0, 9.0, 9.0]).__next__) as bar:
        bar.advance()
    assert elsewhere.getvalue() == ""


def test_copies_are_measured_not_the_model() -> None:
    """A model that counts its calls does not see those of the measurement."""
    model = nn.Sequential(nn.Linear(4, 4), Fails())
    graph = sl.capture(model, (torch.randn(2, 4),))
    twin = copy.deepcopy(model[1])
    with pytest.raises(ArithmeticError):
        sl.measure_costs(graph, repeats=1)
    assert model[1].calls == twin.calls == []


class Numbered(nn.Module):
    """Notes which microbatch it is told that it runs."""

    def __init__(self, seen: list[int | None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.note = seen.append  # of the list itself, also in a copy

    def forward(self, x: Tensor) -> Tensor:
        self.note(sl.current_microbatch())
        made: Tensor = self.linear(x)
        return made


def test_the_number_of_a_microbatch_is_known_while_it_is_measured_and_not_after_it() -> None:
    """The number of the last microbatch stayed behind in the caller's thread."""
    seen: list[int | None] = []
    model = nn.Sequential(Numbered(seen), nn.Linear(4, 4))
    graph = sl.capture(model, (torch.ones(4, 4),))
    seen.clear()
    sl.measure_costs(graph)
    assert {0, 1} <= set(seen)
    assert sl.current_microbatch() is None
