"""Every schedule that can be run, by its name: equal to the plain model, dropout on."""

from __future__ import annotations

import pytest
import torch

import stageline as sl
from stageline.scheduling import schedules
from stageline.testing import RankPool
from tests.exactness.cases import (
    Case,
    differences,
    differences_in_process,
    run_plain,
    thread_transport,
)

pytestmark = pytest.mark.usefixtures("one_thread")

RUNNABLE = [
    name
    for name in schedules.NAMES
    if schedules.family(name).refusal is None and name != "forward-only"
]
DESCENDING = {"looped-bfs"}  # its backwards come last microbatch first: sums in another order
ASCENDING = [name for name in RUNNABLE if name not in DESCENDING]
TWO_COPIES = ["dualpipe", "chimera", "bitpipe"]
MODELS = ["random mlp", "transformer, dropout", "resnet"]


def _case(name: str, model: str, batch: str, ranks: int) -> Case:
    per_rank = 2 if schedules.family(name).num_stages(ranks) > ranks else 1
    return Case(model, per_rank * ranks, name, batch, "fp32", ranks=ranks)


@pytest.mark.parametrize("transport", ["memory", "ordered"])
@pytest.mark.parametrize("name", ASCENDING)
def test_threads_equal_the_plain_model(name: str, transport: str) -> None:
    """A batch with fewer rows than microbatches, too: the schedule is fitted to it."""
    for ranks, model, batch in zip(
        (2, 2, 3), MODELS, ("uneven", "even", "fewer rows than microbatches"), strict=True
    ):
        assert differences(_case(name, model, batch, ranks), thread_transport(transport)) == []


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
@pytest.mark.parametrize("name", ASCENDING)
def test_processes_equal_the_plain_model(name: str, transport: str, two_ranks: RankPool) -> None:
    case = _case(name, "random mlp", "uneven", 2)
    assert two_ranks.run(differences_in_process, case, transport) == [[], []]


@pytest.mark.parametrize("name", sorted(DESCENDING))
def test_descending_backwards_agree_to_a_millionth(name: str) -> None:
    """Only gradients are summed in another order; loss and outputs are equal."""
    case = _case(name, "mlp", "uneven", 2)
    found = differences(case, "memory")
    assert found
    assert all(fault.startswith("gradient of") for fault in found)
    plain, _ = run_plain(case, steps=1)
    gradients = _one_step(case)
    for parameter_name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        apart = (gradients[parameter_name] - parameter.grad).abs().max()
        assert apart <= 1e-6 * parameter.grad.abs().max(), parameter_name


def _one_step(case: Case) -> dict[str, torch.Tensor]:
    model, x, y = case.build()
    pipe = sl.Pipeline(
        model,
        split=case.stages,
        ranks=case.ranks,
        schedule=case.schedule,
        num_microbatches=case.num_microbatches,
        loss_fn=torch.nn.functional.cross_entropy,
    )
    pipe.step(x, target=y)
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", TWO_COPIES)
def test_schedules_of_two_copies_say_that_they_cannot_be_run(name: str) -> None:
    with pytest.raises(sl.ConfigError, match=f"{name} needs 2 copies of the weights"):
        sl.Pipeline(torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(4))), schedule=name)
