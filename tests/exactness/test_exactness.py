"""The promise: loss, outputs, buffers and each gradient equal the plain model's, to the bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from allpairspy import AllPairs

from stageline.testing import RankPool
from tests.exactness.cases import (
    BATCHES,
    MODELS,
    Case,
    differences,
    differences_in_process,
    thread_transport,
)

SCHEDULES = ["gpipe", "1f1b", "sequential"]
PRECISIONS = ["fp32", "bf16"]


pytestmark = pytest.mark.usefixtures("one_thread")


def _name(values: object) -> str:
    return "-".join(map(str, values)) if isinstance(values, (list, tuple)) else str(values)


THREAD_AXES: list[list[Any]] = [
    [*MODELS],
    [1, 2, 3, 4],
    SCHEDULES,
    [*BATCHES],
    PRECISIONS,
    ["memory", "ordered"],
]
PROCESS_TRANSPORTS = ["shared-memory", "process-group"]
PROCESS_AXES: list[list[Any]] = [
    [*MODELS],
    [2, 3, 4],
    SCHEDULES,
    [*BATCHES],
    PRECISIONS,
    PROCESS_TRANSPORTS,
]


@pytest.mark.parametrize("values", [list(v) for v in AllPairs(THREAD_AXES)], ids=_name)
def test_threads_equal_the_plain_model(values: list[str]) -> None:
    model, stages, schedule, batch, precision, transport = values
    case = Case(model, int(stages), schedule, batch, precision)
    assert differences(case, thread_transport(transport)) == []


@pytest.mark.slow
@pytest.mark.parametrize("values", list(product(*THREAD_AXES)), ids=_name)
def test_threads_equal_the_plain_model_in_every_combination(values: list[str]) -> None:
    test_threads_equal_the_plain_model(values)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_several_stages_per_rank_equal_the_plain_model(ranks: int, schedule: str) -> None:
    case = Case("resnet", 4, schedule, "uneven", "fp32", ranks=ranks)
    assert differences(case, "memory") == []


@pytest.mark.processes
@pytest.mark.parametrize("values", [list(v) for v in AllPairs(PROCESS_AXES)], ids=_name)
def test_two_processes_equal_the_plain_model(values: list[str], two_ranks: RankPool) -> None:
    model, stages, schedule, batch, precision, transport = values
    case = Case(model, int(stages), schedule, batch, precision)
    assert two_ranks.run(differences_in_process, case, transport) == [[], []]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("values", list(product(*PROCESS_AXES)), ids=_name)
def test_two_processes_equal_the_plain_model_in_every_combination(
    values: list[str], two_ranks: RankPool
) -> None:
    test_two_processes_equal_the_plain_model(values, two_ranks)


@pytest.mark.processes
@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_processes_equal_the_plain_model(
    schedule: str, transport: str, four_ranks: RankPool
) -> None:
    case = Case("resnet", 4, schedule, "uneven", "fp32")
    assert four_ranks.run(differences_in_process, case, transport) == [[], [], [], []]
