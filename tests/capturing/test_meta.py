"""Models on meta: recorded without a number of theirs, made real stage by stage."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from stageline.testing import RankPool, plain_step
from tests.exactness.recorded_cases import CASES, loss_of

transformers = pytest.importorskip("transformers")

_CAPTURE_TEN_BILLION = """
import resource, torch, transformers
import stageline as sl
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=48))
assert sum(p.numel() for p in model.parameters()) > 9.9e9
ids = torch.randint(100, (2, 16))
plan = sl.partition(sl.capture(model, (), {"input_ids": ids, "labels": ids}), split=8)
assert plan.num_stages == 8
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_ten_billion_parameters_are_captured_in_less_than_a_gibibyte() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CAPTURE_TEN_BILLION],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    peak = int(done.stdout.split()[-1]) * (1 if sys.platform == "darwin" else 1024)
    assert peak < 1 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # the figure is a real one here too


def _inputs(name: str) -> dict[str, Any]:
    return CASES[name].batch(4, seed=0)[0]


@pytest.mark.parametrize("name", CASES)
def test_meta_and_real_models_give_the_same_graph(name: str) -> None:
    case = CASES[name]
    real = sl.capture(case.model(), (), _inputs(name))
    with torch.device("meta"):
        abstract = case.model()
    assert sl.capture(abstract, (), _inputs(name)).fingerprint == real.fingerprint
    assert all(parameter.is_meta for parameter in abstract.parameters())


@pytest.mark.parametrize("name", ["skips", "tied", "late inputs"])
def test_a_pipeline_makes_a_meta_model_real(name: str, one_thread: None) -> None:
    case = CASES[name]
    with torch.device("meta"):
        abstract = case.model()
    if name == "tied":  # a copy of a meta weight in another layout is a weight of its own
        abstract.head.weight = nn.Parameter(torch.empty(6, 8, device="meta"))  # type: ignore[union-attr]  # a Linear
    pipe = sl.Pipeline(
        abstract, example_kwargs=_inputs(name), split=3, num_microbatches=3, loss_fn=loss_of
    )
    plain = case.model()
    plain.load_state_dict(pipe.state_dict())
    inputs, target = case.batch(7)
    result = pipe.step(**inputs, target=target)
    wanted = plain_step(
        plain, kwargs=inputs, target=target, num_microbatches=3, loss_fn=loss_of, num_threads=1
    )
    assert torch.equal(result.loss, wanted.loss)
    found = {key: parameter.grad for key, parameter in pipe.named_parameters()}
    for key, parameter in plain.named_parameters():
        assert parameter.grad is not None
        got = found[key]
        assert got is not None
        assert (got - parameter.grad).abs().max() <= 1e-6 * parameter.grad.abs().max(), key
    pipe.close()


def test_a_sequential_on_meta_begins_the_same_however_it_is_cut() -> None:
    states = []
    for split in (1, 2, 3):
        torch.manual_seed(5)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        states.append(sl.Pipeline(model, split=split).state_dict())
    for name, value in states[0].items():
        assert all(torch.equal(state[name], value) for state in states)
        assert value.isfinite().all()


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_weight_that_nobody_initialises_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Custom())
    with pytest.raises(sl.ConfigError, match=r"1\.scale was made real .* init_stage"):
        sl.Pipeline(model, split=2)


def test_init_stage_sets_the_weights_of_a_stage() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Custom())
    seen = []

    def fill(stage: nn.Module, index: int) -> None:
        seen.append(index)
        for parameter in stage.parameters():
            parameter.fill_(index + 1)

    pipe = sl.Pipeline(model, split=2, init_stage=fill)
    assert seen == [0, 1]
    assert pipe(torch.ones(1, 3)).tolist() == [[8.0, 8.0, 8.0]]


def _on_rank(rank: int) -> tuple[list[str], list[str], float, dict[str, Tensor]]:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    case = CASES["skips"]
    with torch.device("meta"):
        model = case.make()
    pipe = sl.Pipeline(
        model, example_kwargs=_inputs("skips"), split=2, num_microbatches=2, loss_fn=loss_of
    )
    inputs, target = case.batch(6)
    loss = pipe.step(**inputs, target=target).loss.item()
    real = [name for name, p in model.named_parameters() if not p.is_meta]
    mine = [name for name, _ in pipe.named_parameters()]
    state = {name: value.clone() for name, value in pipe.state_dict().items()}
    pipe.close()
    return real, mine, loss, state


@pytest.mark.processes
def test_each_process_makes_only_its_own_stage_real(two_ranks: RankPool) -> None:
    reports = two_ranks.run(_on_rank)
    for real, mine, _, _ in reports:
        assert sorted(real) == sorted(mine)
    (first, *_), (second, *_) = reports
    assert not set(first) & set(second)
    case = CASES["skips"]
    plain = case.model()
    plain.load_state_dict({**reports[0][3], **reports[1][3]})
    inputs, target = case.batch(6)
    wanted = plain_step(plain, kwargs=inputs, target=target, num_microbatches=2, loss_fn=loss_of)
    assert [loss for _, _, loss, _ in reports] == pytest.approx([wanted.loss.item()] * 2)
