"""``sl.find_plans``, and proposals that run: as the plain model does, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from stageline.observing import Recorder
from stageline.planning import Prediction
from stageline.testing import plain_step

pytestmark = pytest.mark.usefixtures("one_thread")

LINK = sl.Link(latency=1e-6, bandwidth=1e9)
SMALL = sl.Device("a small device", {"float32": 1e9}, 1e9, memory=2**20, link=LINK)


class Net(nn.Module):
    """A stem, six residual layers with dropout, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16))
            for _ in range(6)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        result: Tensor = self.head(x)
        return result


def case() -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(3)
    return Net(), torch.randn(12, 8), torch.randint(3, (12,))


def found(**options: Any) -> sl.Proposals:
    model, x, _ = case()
    usual = {"ranks": 2, "batch_size": 12, "device": SMALL, "microbatches": [4]}
    options = {**usual, "schedules": ["1f1b", "zb-v"], **options}
    return sl.find_plans(model, (x,), **options)


def gradients_differ(proposal: sl.Proposal) -> list[str]:
    model, x, y = case()
    loss = nn.functional.cross_entropy
    count = proposal.num_microbatches
    plain = plain_step(model, x, target=y, num_microbatches=count, loss_fn=loss, num_threads=1)
    again = sl.Proposal.from_json(proposal.to_json(), case()[0], (x,))
    pipe = sl.Pipeline(plan=again, loss_fn=loss)
    result = pipe.step(x, target=y)
    pipe.close()
    assert torch.equal(result.loss, plain.loss)
    want = dict(model.named_parameters())
    return [
        name
        for name, parameter in pipe.named_parameters()
        if parameter.grad is None or not torch.equal(parameter.grad, want[name].grad)  # type: ignore[arg-type]  # the plain model has all
    ]


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved", "dualpipe-v"])
def test_a_proposal_runs_as_the_plain_model_does(schedule: str) -> None:
    """Saved and loaded again; in a V, round several stages, and in pairs."""
    assert gradients_differ(found(schedules=[schedule], microbatches=None).best) == []


def test_a_proposal_that_recomputes_runs_as_the_plain_model_does() -> None:
    plenty = found(schedules=["gpipe"], microbatches=[6]).best.predicted
    room = max(plenty.parameter_bytes) + max(plenty.activation_bytes) // 2
    best = found(schedules=["gpipe"], microbatches=[6], memory_limit=room).best
    assert best.recompute
    assert gradients_differ(best) == []


def test_a_proposal_that_was_searched_for_runs_as_the_plain_model_does() -> None:
    """Its rows are saved one by one."""
    best = found(schedules=["1f1b", "auto"], microbatches=[3]).best
    assert best.method.schedule == "auto"
    assert gradients_differ(best) == []


def test_the_pipeline_is_that_of_the_proposal() -> None:
    best = found().best
    pipe = sl.Pipeline(plan=best, loss_fn=nn.functional.cross_entropy)
    assert pipe.schedule == best.schedule
    assert pipe.plan.placement == best.placement
    assert [s.calls for s in pipe.plan.stages] == [s.calls for s in best.plan.stages]
    pipe.close()


def test_what_contradicts_a_proposal_is_refused() -> None:
    best = found(schedules=["zb-h1"], microbatches=[4]).best
    with pytest.raises(sl.ConfigError) as caught:
        sl.Pipeline(plan=best, schedule="gpipe", num_microbatches=3, split=2)
    assert list(caught.value.findings) == [
        "schedule='gpipe', the proposal has zb-h1: leave schedule out, or give plan=proposal.plan",
        "num_microbatches=3, the proposal has 4: leave num_microbatches out, or give "
        "plan=proposal.plan",
        "split: the plan has said that already: leave it out",
    ]
    sl.Pipeline(plan=best, schedule="zb-h1", num_microbatches=4).close()


def test_copies_are_proposed_but_not_run() -> None:
    best = found(ranks=4, data_parallel=2, schedules=["1f1b"]).best
    assert (best.num_ranks, best.data_parallel, best.num_microbatches, best.rows) == (2, 2, 4, 2)
    with pytest.raises(sl.ConfigError, match="it is for 2 copies of the pipeline side by side"):
        sl.Pipeline(plan=best)


def test_the_memory_of_the_device_is_the_limit() -> None:
    assert found().memory_limit == 2**20
    assert found(memory_limit="30KiB").memory_limit == 30 * 1024
    assert all(max(one.predicted.memory) <= 30 * 1024 for one in found(memory_limit="30KiB"))


def test_blocks_are_timed_here_unless_a_device_is_described() -> None:
    model, x, _ = case()
    best = sl.find_plans(model, (x,), ranks=2, batch_size=4, microbatches=[2], top=1).best
    assert best.origin.startswith("measured here")
    with torch.device("meta"):
        abstract = Net()
    best = sl.find_plans(abstract, (x,), ranks=2, batch_size=4, microbatches=[2]).best
    assert best.origin.startswith("estimated for a nominal CPU core")


def test_costs_of_your_own() -> None:
    model, x, _ = case()
    graph = sl.capture(model, (x,))
    costs = sl.estimate_costs(graph, SMALL, rows=3)
    best = sl.find_plans(graph, ranks=2, batch_size=12, costs=costs, microbatches=[4]).best
    told = costs.placed(best.sizes, best.placement, sl.Device.named("cpu"))
    assert best.predicted.T == sl.simulate(best.schedule, told).T
    few = sl.ModelCosts(costs.blocks[:-1], costs.rows, costs.origin)
    with pytest.raises(sl.ConfigError, match="they are of 7 blocks, the model has 8"):
        sl.find_plans(graph, ranks=2, batch_size=12, costs=few)


def test_wrong_questions_are_answered_before_the_model_is_run() -> None:
    with pytest.raises(sl.ConfigError) as caught:
        sl.find_plans(
            nn.Linear(2, 2),
            (torch.zeros(1, 3),),  # would not even run
            ranks=2,
            batch_size=0,
            memory_limit="much",
            costs=3,  # type: ignore[arg-type]  # wrong on purpose
        )
    assert [finding.split(":")[0] for finding in caught.value.findings] == [
        "batch_size=0",
        "memory_limit='much'",
        "costs",
    ]


def test_json_of_another_model_is_refused() -> None:
    text = found().best.to_json()
    with pytest.raises(sl.ConfigError, match="made for another model"):
        sl.Proposal.from_json(text, nn.Sequential(nn.Linear(8, 3)), (torch.zeros(2, 8),))
    alone = sl.Proposal.from_json(text)
    assert alone == found().best
    with pytest.raises(sl.ConfigError, match="it was made from costs alone"):
        _ = alone.plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is no JSON"),
        ("{}", "this JSON holds no proposal"),
        ('{"format": "stageline proposal", "version": 7}', "has version 7, wanted 1"),
        ('{"format": "stageline proposal", "version": 1}', "an entry is missing or wrong"),
        (3, "returned, got int"),
    ],
)
def test_what_is_no_proposal_is_refused(text: Any, message: str) -> None:
    with pytest.raises(sl.ConfigError, match=message):
        sl.Proposal.from_json(text)


def test_prediction_beside_measurement() -> None:
    best = found(schedules=["1f1b"], microbatches=[4]).best
    recorder = Recorder()
    _, x, y = case()
    pipe = sl.Pipeline(plan=best, loss_fn=nn.functional.cross_entropy, observer=recorder)
    for _ in range(3):
        pipe.step(x, target=y)
    pipe.close()
    compared = best.compare(recorder)
    assert len(compared.measured) == 3
    assert max(compared.measured) <= recorder.times()[0].total
    assert sum(compared.measured) > 0
    assert compared.error == best.predicted.seconds / compared.seconds - 1
    assert str(best.compare(2 * best.predicted.seconds)).endswith("50.0 % too short")
    with pytest.raises(sl.ConfigError, match="wanted seconds of a step above 0"):
        best.compare([])


def test_where_the_time_goes_adds_up() -> None:
    best = found().best
    predicted = best.predicted
    assert isinstance(predicted, Prediction)
    lines = best.explain().splitlines()
    parts = [float(line.split(" ms ")[0]) for line in lines[1:4]]
    assert sum(parts) == pytest.approx(1e3 * predicted.seconds, rel=1e-2)
    assert len(best.table().splitlines()) == 2 + best.num_ranks
