"""A pipeline on a part of the world: several of them in one job, independent of each other."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import stageline as sl
from stageline.testing import RankPool, plain_step
from tests.running.mortals import Mortals, Teller, join_world

pytestmark = pytest.mark.processes

_groups: dict[tuple[int, ...], Any] = {}  # they live as long as the processes of the pool


def groups() -> tuple[Any, Any]:
    """Return the group of the first two processes, and that of the others; all make both."""
    for ranks in ((0, 1), (2, 3)):
        if ranks not in _groups:
            _groups[ranks] = dist.new_group(list(ranks))
    return _groups[0, 1], _groups[2, 3]


def model(seed: int, dropout: float = 0.3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.ReLU(), nn.Linear(8, 3))


def batch(seed: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, 4), torch.randint(3, (rows,))


def is_exact(pipe: sl.Pipeline, seed: int, step: int) -> bool:
    """Train a step; return whether loss and gradients are those of the plain model."""
    plain = model(seed)
    x, y = batch(seed + step)
    pipe.zero_grad()
    loss = pipe.step(x, target=y).loss
    wanted = plain_step(
        plain, x, target=y, num_microbatches=4, loss_fn=F.cross_entropy, step=step, num_threads=1
    )
    grads = dict(plain.named_parameters())
    here = list(pipe.named_parameters())
    return (
        len(here) > 0
        and torch.equal(loss, wanted.loss)
        and all(
            p.grad is not None and torch.equal(p.grad, grads[name].grad)  # type: ignore[arg-type]
            for name, p in here
        )
    )


def built(seed: int, **settings: Any) -> sl.Pipeline:
    return sl.Pipeline(
        model(seed), split=2, num_microbatches=4, loss_fn=F.cross_entropy, timeout=30, **settings
    )


def _two_pipelines(rank: int, transport: str | None) -> list[bool]:
    """Ranks 0 and 1 build one pipeline more, and each pair makes calls of its own."""
    first, second = groups()
    mine, seed = (first, 10) if rank < 2 else (second, 20)
    before = built(seed, group=mine, transport=transport) if rank < 2 else None
    pipe = built(seed, group=mine, transport=transport)
    found = [is_exact(pipe, seed, step) for step in range(3 if rank < 2 else 2)]
    whole = dist.group.WORLD if rank % 2 else None  # two names for the same processes
    everywhere = sl.Pipeline(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))),
        split=4,
        num_microbatches=2,
        loss_fn=F.mse_loss,
        timeout=30,
        group=whole,
    )
    torch.manual_seed(0)
    everywhere.step(torch.randn(4, 4), target=torch.randn(4, 4))
    if before is not None:
        found.append(is_exact(before, seed, 0))
    found.append(is_exact(pipe, seed, 3 if rank < 2 else 2))
    for each in (pipe, everywhere, before):
        if each is not None:
            each.close()
    return found


@pytest.mark.parametrize("transport", [None, "process-group"])
def test_two_pipelines_of_two_ranks_in_a_job_of_four(
    transport: str | None, four_ranks: RankPool
) -> None:
    found = four_ranks.run(_two_pipelines, transport)
    assert found == [[True] * 5] * 2 + [[True] * 3] * 2


def _stages_of_a_group(rank: int) -> tuple[list[bool], str]:
    """Data on the first rank of the group alone; the group's own ranks count."""
    _, group = groups()
    if rank < 2:
        return [], ""
    here = dist.get_rank(group)
    layers = model(5, dropout=0.0)
    stages = [layers[:2], layers[2:]]
    pipe = sl.Pipeline.from_stages(
        {here: stages[here]},
        num_stages=2,
        num_microbatches=4,
        loss_fn=F.cross_entropy,
        group=group,
        timeout=30,
    )
    x, y = batch(6)
    loss = pipe.step(*([x] if here == 0 else []), target=y if here == 0 else None).loss
    plain = model(5, dropout=0.0)
    wanted = plain_step(plain, x, target=y, num_microbatches=4, loss_fn=F.cross_entropy)
    with pytest.raises(sl.StagelineError) as caught:
        pipe.step(x, target=y)
    pipe.close()
    return [torch.equal(loss, wanted.loss)], str(caught.value)


def test_stages_of_a_group_and_the_names_of_its_ranks(four_ranks: RankPool) -> None:
    *_, third, fourth = four_ranks.run(_stages_of_a_group)
    assert third[0] == fourth[0] == [True]
    assert "rank 1 was given arguments and a target, but nothing in the first call" in third[1]
    assert "rank 1 was given arguments and a target, but nothing in the first call" in fourth[1]


def group_of(rank: int, *lists: tuple[int, ...]) -> tuple[Any, bool]:
    """Return a process's group among some, and whether it is the first in it; all make them all."""
    for ranks in lists:
        if ranks not in _groups:
            _groups[ranks] = dist.new_group(list(ranks))
    group = next(_groups[ranks] for ranks in lists if rank in ranks)
    return group, dist.get_rank(group) == 0


def _one_fails(rank: int) -> list[str]:
    """Every other step of ranks 0 and 2 fails; ranks 1 and 3 stand between them and go on."""
    group, is_first = group_of(rank, (0, 2), (1, 3))
    pipe = built(30 + rank % 2, group=group)
    found = []
    for _ in range(3):
        if rank in (0, 2):
            bad = torch.ones(8, 5)
            with pytest.raises(sl.StepError):
                pipe.step(bad, target=torch.zeros(8, dtype=torch.long))
        found.append(is_exact(pipe, 30 + rank % 2, pipe.step_number))
    if rank in (0, 2):
        pipe.close()  # and is over, while the other one trains
    else:
        found.append(is_exact(pipe, 31, pipe.step_number))
    assert is_first is (rank < 2)
    pipe.close()
    return [f"step {step}" for step, is_right in enumerate(found) if not is_right]


def test_a_pipeline_goes_on_where_another_one_fails(four_ranks: RankPool) -> None:
    assert four_ranks.run(_one_fails) == [[]] * 4


def train_beside_a_death(rank: int, size: int, store: str, tell: Teller) -> None:
    """The second process of one pipeline is killed; the other pipeline trains until after that."""
    join_world(rank, size, store)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pipe = built(50 + rank % 2, group=groups[rank % 2])
    try:
        for step in range(4):
            if rank == 2 and step == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            tell("right", step, is_exact(pipe, 50 + rank % 2, step))
            time.sleep(0.1)
    except sl.PeerError as error:
        tell("raised", str(error))


def test_a_pipeline_goes_on_where_a_process_of_another_one_is_killed() -> None:
    lives = Mortals(train_beside_a_death, 4).bury()
    for rank in (1, 3):
        assert lives[rank].said == [("right", step, True) for step in range(4)]
        assert lives[rank].exit_code == 0
    assert lives[2].exit_code == -signal.SIGKILL
    raised = lives[0].first("raised")
    assert raised is not None
    assert raised[0].startswith("rank 1 is gone")  # the second one in its group


def _of_three_and_of_one(rank: int, transport: str | None) -> bool:
    """One script for groups of several sizes: three processes, and one by itself."""
    group, _ = group_of(rank, (0, 1, 3), (2,))
    pipe = sl.Pipeline(
        model(40),
        split=dist.get_world_size(group),
        num_microbatches=4,
        loss_fn=F.cross_entropy,
        timeout=30,
        group=group,
        transport=transport,
    )
    # A stage of activations has no parameter, and so nothing to compare.
    found = is_exact(pipe, 40, 0) or not list(pipe.named_parameters())
    pipe.close()
    return found


@pytest.mark.parametrize("transport", [None, "process-group", "shared-memory"])
def test_a_group_of_one_process_runs_the_same_script(
    transport: str | None, four_ranks: RankPool
) -> None:
    """Alone in its group, a process was told to start the script with torchrun."""
    assert four_ranks.run(_of_three_and_of_one, transport) == [True] * 4


def _outside(rank: int) -> str:
    group, _ = groups()
    if rank == 0:
        return ""
    settings: dict[str, Any] = {"group": group} if rank != 1 else {"group": "0-1"}
    if rank == 3:
        settings = {"group": group, "transport": "memory"}
    with pytest.raises(sl.ConfigError) as caught:
        built(1, **settings)
    return str(caught.value)


def test_a_process_outside_of_the_group_is_told(four_ranks: RankPool) -> None:
    _, no_group, outside, threads = four_ranks.run(_outside)
    assert "group='0-1': wanted a torch.distributed.ProcessGroup" in no_group
    assert "group: this process is not in it: call this only on its processes" in outside
    assert "group: ranks are threads of this process with this transport" in threads


def _wrong_number(rank: int) -> str:
    mine = groups()[rank // 2]
    with pytest.raises(sl.ConfigError) as caught:
        built(1, group=mine, ranks=4)
    return str(caught.value)


def test_the_number_of_ranks_is_that_of_the_group(four_ranks: RankPool) -> None:
    for message in four_ranks.run(_wrong_number):
        assert "ranks=4, but group has 2 processes: leave ranks out" in message
