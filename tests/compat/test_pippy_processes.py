"""PiPPy's door on several processes: each gives its own stages and its own data."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stageline as sl
from stageline.compat.pippy import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
    any_schedule,
    build_stage,
    get_schedule_class,
    pipeline,
)
from stageline.testing import RankPool, plain_step
from tests.compat.pippy_models import WIDTH, IterativeNetwork, Split, Untied

pytestmark = pytest.mark.processes

mean_loss = nn.MSELoss()
EIGHT = {f"layers.{i}": SplitPoint.BEGINNING for i in range(1, 8)}


def batch(rows: int = 16, seed: int = 1, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, WIDTH), torch.randn(rows, width)


def run(schedule: Any, x: Tensor, y: Tensor | None, losses: list[Tensor]) -> Any:
    """Take a step as the documents show it: each rank gives what its own stages need."""
    stages = schedule._stages
    args = (x,) if any(stage.is_first for stage in stages) else ()
    if any(stage.is_last for stage in stages) and y is not None:
        return schedule.step(*args, target=y, losses=losses)
    return schedule.step(*args)


def differing(stages: list[PipelineStage], plain: nn.Module, tolerance: float = 0.0) -> list[str]:
    """Return the names of a rank's gradients that are not those of the plain model."""
    names = []
    for stage in stages:
        for name, mine in stage.submod.named_parameters():
            theirs = plain.get_parameter(name)
            assert mine.grad is not None, name
            assert theirs.grad is not None, name
            error = float((mine.grad - theirs.grad).abs().max() / theirs.grad.abs().max())
            if not torch.equal(mine.grad, theirs.grad) and error > tolerance:
                names.append(name)
    return names


def held(schedule_class: Any, rank: int, size: int, num_stages: int) -> list[int]:
    """Return the stages of a rank as torch numbers them: in a loop or a V."""
    if schedule_class in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
        return [rank, num_stages - 1 - rank]
    return list(range(rank, num_stages, size))


# ---- stages of a Pipe ------------------------------------------------------------------------


def _traced(rank: int, schedule_class: Any, rows: int) -> list[str]:
    torch.manual_seed(0)
    model = Untied(8 if schedule_class not in (ScheduleGPipe, Schedule1F1B) else 4)
    plain = copy.deepcopy(model)
    x, y = batch(rows)
    spec = {name: point for name, point in EIGHT.items() if int(name[7:]) < len(model.layers)}
    pipe = pipeline(model, (x[:2],), split_spec=spec)
    stages = [pipe.build_stage(i, "cpu") for i in held(schedule_class, rank, 4, pipe.num_stages)]
    schedule = schedule_class(stages, 8, loss_fn=mean_loss)
    losses: list[Tensor] = []
    found = []
    for step in range(2):
        torch.manual_seed(100 + rank)  # torch does not ask for one seed, and nothing draws here
        output = run(schedule, x, y, losses)
        wanted = plain_step(
            plain, x, target=y, num_microbatches=8, loss_fn=mean_loss, num_threads=1
        )
        found += [f"{step} {name}" for name in differing(stages, plain)]
        is_last = any(stage.is_last for stage in stages)
        assert (output is not None) is is_last
        assert not is_last or torch.equal(output, wanted.outputs)
        assert len(losses) == (min(8, rows) if is_last else 0)
    with torch.no_grad():
        evaluated = run(_Evaluating(schedule), x, y, losses)
    assert not is_last or torch.equal(evaluated, wanted.outputs)
    return found


class _Evaluating:
    def __init__(self, schedule: Any) -> None:
        self._stages, self.step = schedule._stages, schedule.eval


@pytest.mark.parametrize(
    ("schedule_class", "rows"),
    [
        (ScheduleGPipe, 16),
        (Schedule1F1B, 3),
        (ScheduleInterleaved1F1B, 16),
        (ScheduleInterleavedZeroBubble, 13),
        (ScheduleZBVZeroBubble, 16),
        (ScheduleDualPipeV, 16),
    ],
)
def test_stages_of_a_pipe(four_ranks: RankPool, schedule_class: Any, rows: int) -> None:
    assert four_ranks.run(_traced, schedule_class, rows) == [[]] * 4


def _unrolled(rank: int) -> list[str]:
    """Train the unrolled network; every rank keeps its own copy of the block, and all agree."""
    torch.manual_seed(0)
    model = IterativeNetwork()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, 4, (batch()[0],), split_spec={"iter_block": SplitPoint.END})
    stage = PipelineStage(pipe, rank, "cpu")
    schedule = ScheduleGPipe(stage, 4, loss_fn=mean_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    found = []
    for seed in (1, 2, 3):
        x, y = batch(seed=seed, width=3)
        run(schedule, x, y, [])
        plain_step(plain, x, target=y, num_microbatches=4, loss_fn=mean_loss, num_threads=1)
        found += [f"{seed} {name}" for name in differing([stage], plain, 1e-6)]
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    kept = torch.stack([p.detach().double().sum() for p in stage.submod.parameters()])
    return [*found, *map(str, kept.tolist())]


def test_copies_of_a_shared_block_stay_equal(four_ranks: RankPool) -> None:
    """In torch each rank trains its copy with its own part of the gradient, and they drift."""
    first, second, third, last = four_ranks.run(_unrolled)
    assert len(first) == len(last) == 2
    assert first == second == third


def _called(rank: int, trains: bool) -> tuple[bool, bool]:
    torch.manual_seed(0)
    model = IterativeNetwork()
    pipe = pipeline(model, 4, (batch()[0],), split_spec={"iter_block": SplitPoint.END})
    stage = PipelineStage(pipe, rank, "cpu")
    if trains:
        x, y = batch(width=3)
        run(ScheduleGPipe(stage, 4, loss_fn=mean_loss, scale_grads=True), x, y, [])
    found = []
    for rows in (16, 10):
        x = batch(rows)[0]
        output = stage(x) if rank == 0 else stage()
        wanted = torch.cat([model(part) for part in x.tensor_split(4)])
        found.append((output is None) is (rank < 3) and (rank < 3 or torch.equal(output, wanted)))
    return found[0], found[1]


@pytest.mark.parametrize("trains", [False, True])
def test_a_stage_is_called_as_in_pippy(four_ranks: RankPool, trains: bool) -> None:
    """After a schedule with a loss, a call was a training step without a target."""
    assert four_ranks.run(_called, trains) == [(True, True)] * 4


def _masked(rank: int) -> list[str]:
    """Rank 0 alone has the arguments, among them a mask that rank 1 uses."""
    torch.manual_seed(0)
    model = Split()
    plain = copy.deepcopy(model)
    x, y = batch(width=3)
    mask = (x > 0).float()
    pipe = pipeline(model, (x, mask), {"scale": 1.0}, {"first": SplitPoint.END})
    stage = pipe.build_stage(rank, "cpu")
    schedule = Schedule1F1B(stage, 4, loss_fn=mean_loss)
    found = []
    for scale in (1.0, 2.0):  # another number is another recording, which rank 0 alone sees
        if rank == 0:
            schedule.step(x, mask, scale=scale)
        elif rank == 3:
            schedule.step(target=y)
        else:
            schedule.step()
        kwargs = {"mask": mask, "scale": scale}
        plain_step(
            plain,
            x,
            target=y,
            kwargs=kwargs,
            num_microbatches=4,
            loss_fn=mean_loss,
            num_threads=1,
        )
        found += differing([stage], plain, 1e-6)
    return found


def test_an_argument_of_a_later_stage(four_ranks: RankPool) -> None:
    """In torch it cannot be given at all: by keyword or not, on that rank or on the first."""
    assert four_ranks.run(_masked) == [[]] * 4


class Flagged(nn.Module):
    """Reads its own training flag in code that is cut open."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.layers[0](x), 0.5, self.training)
        output: Tensor = self.layers[1](x)
        return output


def _evaluated(rank: int) -> bool:
    torch.manual_seed(0)
    model = Flagged()
    x = batch()[0]
    pipe = pipeline(model, (x,), split_spec={"layers.1": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, "cpu")
    schedule = ScheduleGPipe(stage, 2)
    torch.manual_seed(0)
    trained = run(schedule, x, None, [])
    stage.submod.eval()
    output = run(schedule, x, None, [])
    if rank == 0:  # a pipe that is called runs all stages here, and needs no other rank
        assert torch.equal(pipe(x)[0], model(x))
    wanted = torch.cat([model.eval()(part) for part in x.tensor_split(2)])
    return rank == 0 or (torch.equal(output, wanted) and not torch.equal(trained, wanted))


def test_each_rank_sets_the_mode_of_its_own_stage(two_ranks: RankPool) -> None:
    """A traced stage of torch keeps the flags that were recorded, whatever eval() is called on."""
    assert two_ranks.run(_evaluated) == [True, True]


# ---- modules that the caller has cut ---------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.layer(x))
        return x if scale is None else x * scale


def _manual(rank: int, schedule_class: Any) -> list[str]:
    """Each rank makes its own modules only, and gives each of them a keyword argument."""
    size, num_stages = 2, 4 if schedule_class is not Schedule1F1B else 2
    torch.manual_seed(0)
    layers = nn.Sequential(*(Scaled(nn.Linear(WIDTH, WIDTH)) for _ in range(num_stages)))
    plain = copy.deepcopy(layers)
    stages = [
        PipelineStage(layers[i], i, num_stages, torch.device("cpu", rank))
        for i in held(schedule_class, rank, size, num_stages)
    ]
    schedule = schedule_class(stages, 4, loss_fn=mean_loss)
    x, y = batch()
    scale = torch.randn(16, 1)
    args = (x,) if any(stage.is_first for stage in stages) else ()
    target = {"target": y} if any(stage.is_last for stage in stages) else {}
    schedule.step(*args, scale=scale, **target)
    for part, factor, wanted in zip(
        x.tensor_split(4), scale.tensor_split(4), y.tensor_split(4), strict=True
    ):
        for layer in plain:
            part = layer(part, factor)
        (mean_loss(part, wanted) * 0.25).backward()
    return [
        f"{stage.stage_index} {name}"
        for stage in stages
        for name, mine in stage.submod.named_parameters()
        if not torch.equal(mine.grad, plain[stage.stage_index].get_parameter(name).grad)  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(
    "schedule_class", [Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble]
)
def test_modules_of_each_rank_alone(two_ranks: RankPool, schedule_class: Any) -> None:
    assert two_ranks.run(_manual, schedule_class) == [[], []]


_grid: list[Any] = []  # the groups of a grid of 2 x 2; they live as long as the processes


def _replicated(rank: int, name: str, is_traced: bool) -> list[str]:
    """Two replicas of a pipeline of two ranks, each with its own half of the batch."""
    if not _grid:
        _grid.extend(dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3]))
    place, replica = rank % 2, rank // 2
    pipeline_group, group = _grid[replica], _grid[2 + place]
    schedule_class = get_schedule_class(name)
    num_stages = 2 if name == "1F1B" else 4
    torch.manual_seed(0)
    model = Untied(num_stages)
    plain = copy.deepcopy(model)
    (x, y), whole = batch(seed=replica), [batch(seed=seed) for seed in (0, 1)]
    spec = {name: point for name, point in EIGHT.items() if int(name[7:]) < num_stages}
    pipe = pipeline(model, (x,), split_spec=spec)

    def stage_of(index: int) -> PipelineStage:
        part = nn.Sequential(model.layers[index], nn.Tanh())
        if is_traced:
            wrapped = DistributedDataParallel(pipe.get_stage_module(index), process_group=group)
            return build_stage(wrapped, index, pipe.info(), "cpu", pipeline_group)
        wrapped = DistributedDataParallel(part, process_group=group)
        return PipelineStage(wrapped, index, num_stages, "cpu", group=pipeline_group)

    stages = [stage_of(index) for index in held(schedule_class, place, 2, num_stages)]
    schedule = schedule_class(stages, 4, loss_fn=mean_loss)
    for _ in range(2):  # the second step adds to what the first one has left
        run(schedule, x, y, [])
        for each, wanted in whole:
            for a, b in zip(each.tensor_split(4), wanted.tensor_split(4), strict=True):
                (mean_loss(plain(a), b) / 8).backward()
    return [
        f"{stage.stage_index}: {name}"
        for stage in stages
        for name, theirs in plain.layers[stage.stage_index].named_parameters()
        if not close(model.layers[stage.stage_index].get_parameter(name).grad, theirs.grad)
    ]


def close(mine: Tensor | None, theirs: Tensor | None) -> bool:
    assert mine is not None
    assert theirs is not None
    return float((mine - theirs).abs().max() / theirs.abs().max()) <= 1e-6


@pytest.mark.parametrize(
    ("name", "is_traced"), [("1F1B", False), ("InterleavedZeroBubble", False), ("1F1B", True)]
)
def test_stages_in_ddp(four_ranks: RankPool, name: str, is_traced: bool) -> None:
    """In torch zero bubble makes weight gradients by hand, and DDP's hooks never see them."""
    assert four_ranks.run(_replicated, name, is_traced) == [[]] * 4


_alone: list[Any] = []  # a group for each rank, and one of both


def _late_weights(rank: int) -> bool:
    """Two replicas of a pipeline of one rank, whose module leaves its gradient to dw_builder."""
    if not _alone:
        _alone.extend(dist.new_group([each]) for each in (0, 1))
        _alone.append(dist.new_group([0, 1]))
    layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def make_gradient() -> None:
        layer.weight.grad = torch.full_like(layer.weight, 1.0 + rank)

    wrapped = DistributedDataParallel(layer, process_group=_alone[2])
    stage = PipelineStage(
        wrapped, 0, 1, "cpu", group=_alone[rank], dw_builder=lambda: make_gradient
    )
    x, y = batch()
    ScheduleGPipe(stage, 2, loss_fn=mean_loss).step(x, target=y)
    return torch.equal(layer.weight.grad, torch.full_like(layer.weight, 1.5))  # type: ignore[arg-type]


def test_gradients_of_a_dw_builder_are_averaged(two_ranks: RankPool) -> None:
    """They were made after the average over the replicas, which so got different gradients."""
    assert two_ranks.run(_late_weights) == [True, True]


# ---- groups, and what is wrong ---------------------------------------------------------------


_groups: list[Any] = []  # they live as long as the processes of the pool


def _in_groups(rank: int) -> list[str]:
    """Two pipelines of two ranks each, which take different numbers of steps."""
    if not _groups:
        _groups.extend(dist.new_group(ranks) for ranks in ([0, 1], [3, 2]))
    group = _groups[rank // 2]
    torch.manual_seed(10 * (rank // 2))
    model = Untied(2)
    plain = copy.deepcopy(model)
    place = dist.get_rank(group)
    stage = PipelineStage(
        nn.Sequential(model.layers[place], nn.Tanh()), place, 2, "cpu", group=group
    )
    schedule = ScheduleGPipe(stage, 4, loss_fn=mean_loss)
    assert (stage.group_rank, stage.group_size) == (place, 2)
    found = []
    for seed in range(3 if rank < 2 else 1):
        x, y = batch(seed=seed + rank // 2)
        run(schedule, x, y, [])
        plain_step(plain, x, target=y, num_microbatches=4, loss_fn=mean_loss, num_threads=1)
        pairs = zip(stage.submod.parameters(), plain.layers[place].parameters(), strict=True)
        found += [str(seed) for mine, theirs in pairs if not torch.equal(mine.grad, theirs.grad)]  # type: ignore[arg-type]
    return found


def test_two_pipelines_in_one_job(four_ranks: RankPool) -> None:
    assert four_ranks.run(_in_groups) == [[]] * 4


def _wrong_stage(rank: int) -> str:
    stage = PipelineStage(nn.Linear(2, 2), 1 - rank, 2, "cpu")
    try:
        ScheduleGPipe(stage, 2)
    except ValueError as error:
        return str(error)
    return "built"


def _too_many_ranks(rank: int) -> str:
    try:
        PipelineStage(nn.Linear(2, 2), 0, 1, "cpu")
    except RuntimeError as error:
        return str(error)
    return "built"


def _wrong_v(rank: int) -> str:
    stage = PipelineStage(nn.Linear(2, 2), rank, 2, "cpu")
    try:
        ScheduleZBVZeroBubble([stage], 2)
    except ValueError as error:
        return str(error)
    return "built"


def _sharded(rank: int) -> str:
    """Say what a schedule makes of sharded parameters; torch's error was about a python storage."""
    layer = nn.Linear(2, 2)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    try:
        ScheduleGPipe(PipelineStage(layer, rank, 2, "cpu"), 2)
    except ValueError as error:
        return str(error)
    return "built"


def test_wrong_stages(two_ranks: RankPool) -> None:
    assert two_ranks.run(_sharded) == [
        f"ScheduleGPipe: fully_shard has split the parameters of stage {rank}, which is not "
        "possible here: replicate stages with DistributedDataParallel"
        for rank in (0, 1)
    ]
    assert two_ranks.run(_wrong_stage) == [
        f"ScheduleGPipe holds stages [{rank}] on rank {rank}, got [{1 - rank}]" for rank in (0, 1)
    ]
    assert (
        two_ranks.run(_too_many_ranks)
        == ["Pipeline group size 2 cannot be larger than number of stages 1"] * 2
    )
    assert (
        two_ranks.run(_wrong_v)
        == ["ScheduleZBVZeroBubble requires exactly 2 stages per rank, but got 1."] * 2
    )


def _notes(rank: int) -> list[str]:
    """Make each of two schedules twice; return what was logged."""
    any_schedule._said.clear()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment]  # keep them
    logging.getLogger("stageline").addHandler(handler)
    pipe = pipeline(Untied(2), 4, (batch()[0],), split_spec={"layers.1": SplitPoint.BEGINNING})
    for _ in range(2):
        ScheduleGPipe(PipelineStage(nn.Linear(2, 2), rank, 2, "cpu"), 2, loss_fn=mean_loss)
        ScheduleGPipe(PipelineStage(pipe, rank, "cpu"), 4, loss_fn=mean_loss, scale_grads=True)
        ScheduleGPipe(PipelineStage(pipe, rank, "cpu"), 4)
        ScheduleGPipe(PipelineStage(pipe, rank, "cpu"), 4, loss_fn=mean_loss)
    logging.getLogger("stageline").removeHandler(handler)
    return [record.getMessage() for record in records]


def test_notes(two_ranks: RankPool) -> None:
    """PiPPy's own test of gradients takes a sum as its loss: it got a quarter of them, silently."""
    (shared, scaled), others = two_ranks.run(_notes)
    assert others == []
    assert "a parameter that ranks share gets a part of its gradient on each" in shared
    assert "pass scale_grads=False if loss_fn is a sum" in scaled


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise LookupError("no such word")
        output: Tensor = self.layer(x)
        return output


def _failing(rank: int) -> list[str]:
    """In torch the other ranks wait for half an hour, and the next step fails as well."""
    torch.manual_seed(0)
    module = Failing()
    schedule = ScheduleGPipe(PipelineStage(module, rank, 2, "cpu"), 4, loss_fn=mean_loss)
    x, y = batch()
    told = []
    for fails in (True, False):
        module.fails = fails and rank == 1
        try:
            run(schedule, x, y, [])
            told.append("done")
        except LookupError as error:
            told.append(f"LookupError {error}")
        except sl.PipeError as error:
            told.append(
                type(error).__name__ + (" no such word" if "no such word" in str(error) else "")
            )
    return told


def test_a_failure_reaches_every_rank(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_failing)
    assert first == ["StepError no such word", "done"]
    assert second == ["LookupError no such word", "done"]
