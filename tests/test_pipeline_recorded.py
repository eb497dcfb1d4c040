"""A pipeline of any model: what a user sees from construction to state."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import RankPool, plain_step
from tests.exactness.recorded_cases import CASES, loss_of


class IterationBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin(x)
        return torch.relu(x)


class IterativeNetwork(nn.Module):
    """One block in a loop, then a projection."""

    def __init__(self, width: int = 8, num_iters: int = 3) -> None:
        super().__init__()
        self.num_iters = num_iters
        self.iter_block = IterationBlock(width)
        self.output_proj = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_iters):
            x = self.iter_block(x)
        result: Tensor = self.output_proj(x)
        return result


def iterative(**settings: Any) -> tuple[IterativeNetwork, sl.Pipeline]:
    torch.manual_seed(2)
    model = IterativeNetwork()
    pipe = sl.Pipeline(
        model,
        example_args=(torch.randn(2, 8),),
        split={"iter_block": "end"},
        loss_fn=F.cross_entropy,
        num_microbatches=4,
        **settings,
    )
    return model, pipe


def test_a_loop_unrolls_into_a_stage_per_iteration() -> None:
    model, pipe = iterative()
    assert pipe.plan.num_stages == 4
    assert [name for name, _ in pipe.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    assert list(pipe.state_dict()) == list(model.state_dict())
    pipe.close()


def test_the_shared_block_gets_its_true_gradient(one_thread: None) -> None:
    torch.manual_seed(2)
    plain = IterativeNetwork()
    _, pipe = iterative()
    x, y = torch.randn(9, 8), torch.randint(10, (9,))
    result = pipe.step(x, target=y)
    wanted = plain_step(
        plain, x, target=y, num_microbatches=4, loss_fn=F.cross_entropy, num_threads=1
    )
    assert torch.equal(result.loss, wanted.loss)
    found = dict(pipe.named_parameters())
    for name, parameter in plain.named_parameters():
        got, want = found[name].grad, parameter.grad
        assert got is not None
        assert want is not None
        assert (got - want).abs().max() <= 1e-6 * want.abs().max(), name
    pipe.close()


def test_a_graph_lists_its_blocks() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    graph = sl.capture(model, (torch.zeros(4, 2),))
    assert repr(graph) == "Graph of Sequential: 6 nodes, 3 blocks"
    title, head, *rows = str(graph).splitlines()
    assert title == repr(graph)
    assert head == "block  parameters  time  calls"
    figures = [(row.split()[:2], row.split()[-2:]) for row in rows]
    assert figures == [
        (["0", "9"], ["0", "Linear"]),
        (["1", "0"], ["1", "Tanh"]),
        (["2", "4"], ["2", "Linear"]),
    ]


def test_pipe_and_stages_print_readably() -> None:
    graph = sl.capture(IterativeNetwork(), (torch.randn(2, 8),))
    plan = sl.partition(graph, split={"iter_block": "end"})
    lines = str(plan).splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["stage", "0", "1", "2", "3"]
    assert "iter_block IterationBlock" in lines[1]
    assert lines[-2:] == [
        "tied: iter_block.lin.weight in stages 0, 1 and 2, 64 parameters counted in each",
        "tied: iter_block.lin.bias in stages 0, 1 and 2, 8 parameters counted in each",
    ]
    text = str(plan.stages[0].module)
    assert "(lin): Linear(in_features=8, out_features=8, bias=True)" in text
    assert re.search(r"def forward\(self, x.*\):\n    iter_block = self.iter_block\(x\)", text)
    assert "return iter_block" in text


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no example": ({}, "IterativeNetwork is no nn.Sequential: give the arguments of one call"),
    "a tensor": ({"example_args": torch.zeros(2, 8)}, r"example_args: wanted a tuple .* \(x,\)"),
    "no dict": ({"example_kwargs": [1]}, "example_kwargs: wanted a dict of keyword arguments"),
    "unknown name": (
        {"example_args": (torch.zeros(2, 8),), "split": ["iter_blok"]},
        "iter_blok.*iter_block",
    ),
    "too many stages": (
        {"example_args": (torch.zeros(2, 8),), "split": 50},
        "split=50: the model has .* blocks",
    ),
    "a limit": (
        {"example_args": (torch.zeros(2, 8),), "split": 2, "memory_limit": "1KiB"},
        "memory",
    ),
    "a balance": (
        {"example_args": (torch.zeros(2, 8),), "balance": "luck"},
        "balance='luck'",
    ),
    "no plan": ({"plan": "plan.json"}, "plan: wanted what sl.partition returns, got str"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_at_construction(name: str) -> None:
    settings, message = WRONG[name]
    with pytest.raises(sl.ConfigError, match=message):
        sl.Pipeline(IterativeNetwork(), **{"split": 2, **settings})


class Wide(nn.Module):
    """Keeps much more than it weighs."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(4))
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, "867.4 KiB"),
        ({"schedule": "gpipe"}, "4.3 MiB"),
        ({"schedule": "gpipe", "recompute": "always"}, "578.2 KiB"),
        ({"recompute": "always"}, "578.2 KiB"),
        ({"recompute": [0]}, "578.2 KiB"),
        ({"schedule": "varuna"}, "578.2 KiB"),
    ],
)
def test_a_memory_limit_is_that_of_the_schedule_with_what_it_recomputes(
    settings: dict[str, Any], needed: str
) -> None:
    """It was always that of 1F1B: refused what recompute= makes fit, and let GPipe overflow."""
    with pytest.raises(sl.ConfigError, match=f"the fullest of 2 stages needs {needed}"):
        sl.Pipeline(
            Wide(),
            example_args=(torch.zeros(512, 8),),
            split=2,
            num_microbatches=8,
            memory_limit="100KiB",
            **settings,
        )


def test_a_plan_can_be_saved_loaded_and_run(one_thread: None) -> None:
    case = CASES["skips"]
    model = case.model()
    inputs, target = case.batch(6)
    graph = sl.capture(model, (), inputs)
    text = sl.partition(graph, split=3).to_json()
    plan = sl.Plan.from_json(text, sl.capture(model, (), inputs))
    pipe = sl.Pipeline(plan=plan, num_microbatches=3, loss_fn=loss_of)
    wanted = plain_step(
        case.model(), kwargs=inputs, target=target, num_microbatches=3, loss_fn=loss_of
    )
    assert torch.equal(pipe.step(**inputs, target=target).loss, wanted.loss)
    pipe.close()


def test_a_stage_can_be_wrapped(one_thread: None) -> None:
    case = CASES["late inputs"]
    inputs, target = case.batch(6)
    wrapped: list[int] = []

    def wrap(stage: nn.Module, index: int) -> nn.Module:
        wrapped.append(index)
        return Wrapper(stage)

    pipe = sl.Pipeline(
        case.model(),
        example_kwargs=inputs,
        split=3,
        num_microbatches=3,
        loss_fn=loss_of,
        wrap_stage=wrap,
    )
    wanted = plain_step(
        case.model(), kwargs=inputs, target=target, num_microbatches=3, loss_fn=loss_of
    )
    assert torch.equal(pipe.step(**inputs, target=target).loss, wanted.loss)
    assert wrapped == [0, 1, 2]
    assert set(pipe.state_dict()) == set(case.model().state_dict())
    pipe.close()


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


class Switching(nn.Module):
    """Does something else in train mode, and for batches of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(IterationBlock(8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.training else layer(x) * 2
            if x.shape[0] == 1:
                x = x + 1
        return x


def test_train_and_eval_and_one_row_are_recordings_of_their_own(one_thread: None) -> None:
    model = Switching()
    pipe = sl.Pipeline(model, example_args=(torch.randn(3, 8),), split=3, num_microbatches=2)
    x = torch.randn(4, 8)
    for mode in (True, False, True):
        pipe.train(mode)
        assert model.training is mode
        with torch.no_grad():
            assert torch.equal(pipe(x), torch.cat([model(part) for part in x.tensor_split(2)]))
            assert torch.equal(pipe(x[:1]), model(x[:1]))
    pipe.close()


def _on_two_ranks(rank: int, name: str, left_out: list[str]) -> str:
    case = CASES[name]
    inputs, target = case.batch(4)
    pipe = sl.Pipeline(
        case.model(),
        example_kwargs=inputs,
        split=2,
        num_microbatches=2,
        loss_fn=loss_of,
        timeout=5,
    )
    given: dict[str, Any] = dict(inputs)
    if rank == 1:
        given |= dict.fromkeys(left_out)
    try:
        return f"{pipe.step(**given, target=target).loss.item():.6f}"
    except sl.StagelineError as error:
        return str(error)
    finally:
        pipe.close()


@pytest.mark.processes
def test_a_rank_may_leave_out_what_its_stages_do_not_use(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_on_two_ranks, "skips", [])
    assert first == second
    assert two_ranks.run(_on_two_ranks, "skips", ["x"]) == [first, first]


@pytest.mark.processes
def test_a_rank_may_leave_out_what_its_stages_use(two_ranks: RankPool) -> None:
    """It is sent what it lacks; this was an error before arguments travelled."""
    first, second = two_ranks.run(_on_two_ranks, "late inputs", [])
    assert first == second
    assert two_ranks.run(_on_two_ranks, "late inputs", ["x", "scale"]) == [first, first]


class Numpy(nn.Module):
    """Draws from numpy's global generator, as BigBird's attention does."""

    def forward(self, x: Tensor) -> Tensor:
        np.random.seed(1)
        return x * float(np.random.rand())


def test_ranks_that_would_share_a_generator_of_numpy_are_refused() -> None:
    """Two threads that seed and draw from it get each other's numbers."""
    model = nn.Sequential(nn.Linear(8, 8), Numpy(), nn.Linear(8, 8))
    inner = IterationBlock(8)
    inner.lin = model  # type: ignore[assignment]  # any module will do
    example = {"example_args": (torch.randn(2, 8),), "split": ["lin.2"], "num_microbatches": 2}
    with pytest.raises(sl.ConfigError, match=r"lin\.1 draws random numbers .*torchrun"):
        sl.Pipeline(inner, **example)  # type: ignore[arg-type]  # a dict of settings
    sl.Pipeline(inner, ranks=1, **example).close()  # type: ignore[arg-type]  # a dict of settings
