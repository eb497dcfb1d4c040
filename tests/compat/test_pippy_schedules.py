"""Schedules of PiPPy's door, in one process: every stage is given, and runs as a thread."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn import functional as F

from stageline.compat.pippy import (
    ArgsChunkSpec,
    KwargsChunkSpec,
    ManualPipelineStage,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    TensorChunkSpec,
    _ScheduleForwardOnly,
    build_stage,
    get_schedule_class,
    pipeline,
)
from stageline.compat.pippy.microbatch import _CustomReducer, _Replicate, sum_reducer
from stageline.running.microbatches import Batch
from stageline.testing import plain_step
from tests.compat.pippy_models import WIDTH, IterativeNetwork, Split, Untied

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = (
    ScheduleGPipe,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    ScheduleDualPipeV,
)
SPEC = {f"layers.{i}": SplitPoint.BEGINNING for i in (1, 2, 3)}
mean_loss = nn.MSELoss()
sum_loss = nn.MSELoss(reduction="sum")


def batch(rows: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def untied() -> Untied:
    torch.manual_seed(0)
    return Untied()


def traced(model: nn.Module, *example: Any, spec: Any = None) -> list[PipelineStage]:
    pipe = pipeline(model, example, split_spec=spec)
    return [pipe.build_stage(i, "cpu") for i in range(pipe.num_stages)]


class Tanh(nn.Module):
    """One layer of the model as a stage that the caller has cut."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def manual(model: Untied) -> list[PipelineStage]:
    count = len(model.layers)
    return [PipelineStage(Tanh(layer), i, count, "cpu") for i, layer in enumerate(model.layers)]


def stages_of(kind: str, model: Untied) -> list[PipelineStage]:
    return manual(model) if kind == "manual" else traced(model, batch()[0], spec=SPEC)


def differing(model: nn.Module, plain: nn.Module, tolerance: float = 0.0) -> list[str]:
    """Return the names of gradients that are not those of the plain model."""
    names = []
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) is (theirs.grad is None), name
        if mine.grad is None or theirs.grad is None:
            continue
        error = float((mine.grad - theirs.grad).abs().max() / theirs.grad.abs().max())
        if not torch.equal(mine.grad, theirs.grad) and error > tolerance:
            names.append(name)
    return names


# ---- gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["traced", "manual"])
@pytest.mark.parametrize("rows", [16, 11])
@pytest.mark.parametrize("scale_grads", [True, False])
@pytest.mark.parametrize("schedule_class", ALL)
def test_gradients_losses_and_outputs_are_the_plain_models(
    schedule_class: Any, scale_grads: bool, rows: int, kind: str
) -> None:
    model = untied()
    plain = copy.deepcopy(model)
    loss_fn = mean_loss if scale_grads else sum_loss
    schedule = schedule_class(stages_of(kind, model), 8, loss_fn=loss_fn, scale_grads=scale_grads)
    x, y = batch(rows)
    losses: list[Tensor] = [torch.tensor(7.0)]
    output = schedule.step(x, target=y, losses=losses)
    wanted = plain_step(
        plain,
        x,
        target=y,
        num_microbatches=8,
        loss_fn=loss_fn,
        loss_reduction="mean" if scale_grads else "sum",
    )
    assert torch.equal(output, wanted.outputs)
    # Looped BFS makes gradients from the last microbatch to the first: sums in another order.
    tolerance = 1e-6 if schedule_class is ScheduleLoopedBFS else 0.0
    assert differing(model, plain, tolerance) == []
    parts = zip(wanted.outputs.tensor_split(8), y.tensor_split(8), strict=True)
    assert len(losses) == 8
    assert all(torch.equal(loss, loss_fn(*p)) for loss, p in zip(losses, parts, strict=True))


@pytest.mark.parametrize("scale_grads", [True, False])
def test_two_steps_accumulate(scale_grads: bool) -> None:
    """torch divides the sum of both by the number of microbatches: 1.25 times one step, not 2."""
    model = untied()
    plain = copy.deepcopy(model)
    stages = traced(model, batch()[0], spec=SPEC)
    schedule = ScheduleGPipe(stages, 4, loss_fn=mean_loss, scale_grads=scale_grads)
    for seed in (1, 2):
        x, y = batch(seed=seed)
        schedule.step(x, target=y)
        plain_step(
            plain,
            x,
            target=y,
            num_microbatches=4,
            loss_fn=mean_loss,
            loss_reduction="mean" if scale_grads else "sum",
        )
    assert differing(model, plain) == []


def test_a_mean_over_tokens() -> None:
    """In torch it is the mean of the means, whatever the number of tokens in each microbatch."""
    model = untied()
    plain = copy.deepcopy(model)
    x, y = batch()[0], torch.randint(WIDTH, (16,))
    y[:7] = -100  # tokens that do not count: four microbatches have 0, 1, 4 and 4 others

    def share(part: Batch, whole: Batch) -> Tensor:
        counted, of_all = ((each.target != -100).sum() for each in (part, whole))
        return torch.div(counted, of_all)

    stages = traced(model, x, spec=SPEC)
    ScheduleGPipe(stages, 4, loss_fn=F.cross_entropy, scale_grads=share).step(x, target=y)
    F.cross_entropy(plain(x), y).backward()
    assert differing(model, plain, 1e-6) == []


@pytest.mark.parametrize("schedule_class", ALL)
def test_shared_parameters_have_the_whole_gradient(schedule_class: Any) -> None:
    """In torch every stage has a copy with a part of the gradient, and the copies drift apart."""
    torch.manual_seed(0)
    model = IterativeNetwork()
    plain = copy.deepcopy(model)
    x, y = batch()[0], torch.randn(16, 3)
    stages = traced(model, x, spec={"iter_block": SplitPoint.END})
    schedule = schedule_class(stages, 4, loss_fn=mean_loss)
    schedule.step(x, target=y)
    plain_step(plain, x, target=y, num_microbatches=4, loss_fn=mean_loss)
    assert differing(model, plain, 1e-6) == []
    assert stages[0].submod.get_parameter("iter_block.lin.weight") is model.iter_block.lin.weight


def test_modules_that_share_a_parameter_in_one_process() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    plain = copy.deepcopy(layer)
    stages = [PipelineStage(Tanh(layer), i, 2, "cpu") for i in range(2)]
    x, y = batch()
    ScheduleGPipe(stages, 4, loss_fn=mean_loss).step(x, target=y)
    twice = nn.Sequential(Tanh(plain), Tanh(plain))
    plain_step(twice, x, target=y, num_microbatches=4, loss_fn=mean_loss)
    assert differing(layer, plain, 1e-6) == []


@pytest.mark.parametrize("schedule_class", [ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble])
def test_a_frozen_first_stage(schedule_class: Any) -> None:
    """In torch the stages after it get no gradient at all under zero bubble."""
    model = untied()
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each.layers[0].requires_grad_(False)
    x, y = batch()
    schedule_class(traced(model, x, spec=SPEC), 4, loss_fn=mean_loss).step(x, target=y)
    plain_step(plain, x, target=y, num_microbatches=4, loss_fn=mean_loss)
    assert differing(model, plain) == []
    assert model.layers[1].weight.grad is not None


def test_skips_masks_and_keyword_arguments_reach_later_stages() -> None:
    """torch refuses a value that two later stages use, and an argument of a later stage."""
    torch.manual_seed(0)
    model = Split()
    plain = copy.deepcopy(model)
    x, y = batch()[0], torch.randn(16, 3)
    mask = (x > 0).float()
    stages = traced(model, x[:4], mask[:4])
    schedule = Schedule1F1B(stages, 4, loss_fn=mean_loss)
    output = schedule.step(x, target=y, mask=mask, scale=3.0)
    wanted = plain_step(
        plain,
        x,
        target=y,
        kwargs={"mask": mask, "scale": 3.0},
        num_microbatches=4,
        loss_fn=mean_loss,
    )
    assert torch.equal(output, wanted.outputs)
    assert differing(model, plain, 1e-6) == []


def test_autocast() -> None:
    """A traced stage of torch receives float32 where bfloat16 was sent: outputs are off by 2e5."""
    model = untied()
    plain = copy.deepcopy(model)
    x, y = batch()
    schedule = ScheduleGPipe(traced(model, x, spec=SPEC), 4, loss_fn=mean_loss)
    with torch.autocast("cpu", torch.bfloat16):
        output = schedule.step(x, target=y)
        wanted = plain_step(plain, x, target=y, num_microbatches=4, loss_fn=mean_loss)
    assert output.dtype is torch.bfloat16
    assert torch.equal(output, wanted.outputs)
    assert differing(model, plain) == []


def test_batches_of_any_size() -> None:
    """In torch a smaller second batch returns rows of the first one, without a word."""
    model = untied()
    plain = copy.deepcopy(model)
    schedule = ScheduleGPipe(traced(model, batch()[0], spec=SPEC), 4)
    for rows in (16, 10, 3, 32):
        x = batch(rows)[0]
        assert torch.equal(schedule.step(x), torch.cat([plain(p) for p in x.tensor_split(4)]))


def test_statistics_of_batch_norm_are_updated_once_per_microbatch() -> None:
    """torch runs the module once more, on uninitialised memory, to learn its shapes."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)]
    plain = copy.deepcopy(stages)
    schedule = ScheduleGPipe([PipelineStage(s, i, 2, "cpu") for i, s in enumerate(stages)], 4)
    schedule.step(batch()[0])
    for part in batch()[0].tensor_split(4):
        nn.Sequential(*plain)(part)
    for mine, theirs in zip(stages, plain, strict=True):
        for name, value in mine.named_buffers():
            assert torch.equal(value, theirs.get_buffer(name)), name


class Tied(nn.Module):
    """Two modules with one weight, as embedding and head of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.relu(self.first(x)))
        return output


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_model_on_meta_is_made_real(by_hand: bool) -> None:
    real = untied()
    with torch.device("meta"):
        model, example = Untied(), torch.empty(4, WIDTH)
    stages = traced(model, example, spec=SPEC)
    if by_hand:
        for stage in stages:
            stage.submod.to_empty(device="cpu")
    schedule = ScheduleGPipe(stages, 4, loss_fn=mean_loss)
    for stage in stages:
        names = stage.submod.state_dict()
        stage.submod.load_state_dict({k: v for k, v in real.state_dict().items() if k in names})
    x, y = batch()
    schedule.step(x, target=y)
    plain_step(real, x, target=y, num_microbatches=4, loss_fn=mean_loss)
    assert differing(model, real) == []


def test_a_tied_weight_that_came_apart_is_an_error() -> None:
    """to_empty() gives each module a weight of its own, with a part of the gradient each."""
    with torch.device("meta"):
        model, example = Tied(), torch.empty(4, WIDTH)
    stages = traced(model, example, spec={"last": SplitPoint.BEGINNING})
    for stage in stages:
        stage.submod.to_empty(device="cpu")
    with pytest.raises(
        ValueError, match=r"submod_0\.first\.weight and submod_1\.last\.weight are one"
    ):
        ScheduleGPipe(stages, 4, loss_fn=mean_loss)
    model.last.weight = model.first.weight
    ScheduleGPipe(stages, 4, loss_fn=mean_loss)


# ---- evaluation ------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule_class", ALL)
def test_evaluation_touches_no_gradient(schedule_class: Any) -> None:
    """In torch eval() divides the gradients of the step before; V schedules fail in it."""
    model = untied()
    x, y = batch()
    schedule = schedule_class(traced(model, x, spec=SPEC), 4, loss_fn=mean_loss)
    schedule.step(x, target=y)
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    losses: list[Tensor] = []
    output = schedule.eval(x, target=y, losses=losses)
    assert len(losses) == 4
    assert not output.requires_grad
    after = [p.grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))  # type: ignore[arg-type]
    schedule.step(x, target=y)


def test_the_mode_of_a_stage_is_followed() -> None:
    """A traced stage of torch keeps the dropout that was recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 2))
    x = batch()[0]
    stages = traced(model, x, spec={"2": SplitPoint.BEGINNING})
    schedule = ScheduleGPipe(stages, 4)
    dropped = schedule.step(x)
    for stage in stages:
        stage.submod.eval()
    assert not torch.equal(schedule.step(x), dropped)
    assert torch.equal(schedule.step(x), torch.cat([model(part) for part in x.tensor_split(4)]))


def test_without_a_loss_a_schedule_runs_forward() -> None:
    model = untied()
    x = batch()[0]
    for schedule_class in (*ALL, _ScheduleForwardOnly):
        schedule = schedule_class(traced(model, x, spec=SPEC), 4)
        assert torch.equal(schedule.step(x), schedule.eval(x))
        assert schedule.step(x, return_outputs=False) is None
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- arguments and outputs -------------------------------------------------------------------


class Gate(nn.Module):
    def forward(self, x: Tensor, gate: Tensor | None = None, times: int = 1) -> Tensor:
        return x * times if gate is None else x * gate * times


def test_modules_of_the_caller_get_their_keyword_arguments() -> None:
    stages = [PipelineStage(Gate(), i, 2, "cpu") for i in range(2)]
    schedule = ScheduleGPipe(stages, 4)
    x, gate = batch()[0], torch.randn(16, 1)
    assert torch.equal(schedule.step(x, gate=gate, times=2), x * gate * 2 * gate * 2)
    assert torch.equal(schedule.step(x), x)


def test_keyword_arguments_with_rows_of_their_own() -> None:
    """torch cuts every tensor by itself: 4 rows for 4 microbatches, beside 16 rows of data."""
    schedule = ScheduleGPipe([PipelineStage(Gate(), 0, 1, "cpu")], 4)
    x, gate = torch.ones(16, 1), torch.arange(4.0).view(4, 1)
    assert (
        schedule.step(x, gate=gate).flatten().tolist()
        == [0.0] * 4 + [1.0] * 4 + [2.0] * 4 + [3.0] * 4
    )


def test_a_first_stage_that_is_given_keyword_arguments_alone() -> None:
    schedule = ScheduleGPipe([PipelineStage(Gate(), 0, 1, "cpu")], 4)
    x = batch()[0]
    assert torch.equal(schedule.step(x=x, times=3), x * 3)


def test_several_values_between_stages() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, x * 2

    class One(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * b

    schedule = ScheduleGPipe(
        [PipelineStage(Two(), 0, 2, "cpu"), PipelineStage(One(), 1, 2, "cpu")], 4
    )
    x = batch()[0]
    assert torch.equal(schedule.step(x), (x + 1) * (x * 2))


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_list_between_stages_is_several_values(kind: Any) -> None:
    """torch makes it a tuple; the door passed the list on, as one argument."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return kind([x + 1, x * 2])

    class Both(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Any:
            return kind([a * b, a])

    schedule = ScheduleGPipe(
        [PipelineStage(Two(), 0, 2, "cpu"), PipelineStage(Both(), 1, 2, "cpu")], 4
    )
    x = batch()[0]
    output = schedule.step(x)
    assert type(output) is kind  # the last stage's own
    assert torch.equal(output[0], (x + 1) * (x * 2))


def test_arguments_that_are_cut_elsewhere_or_not_at_all() -> None:
    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return a @ b.T @ c

    a, b, c = torch.randn(8, 3), torch.randn(8, 3), torch.randn(8, 5)
    by_columns, whole = TensorChunkSpec(1), _Replicate
    specs = (TensorChunkSpec(0), whole, whole)
    schedule = ScheduleGPipe([PipelineStage(Product(), 0, 1, "cpu")], 4, args_chunk_spec=specs)
    assert torch.equal(schedule.step(a, b, c), torch.cat([p @ b.T @ c for p in a.tensor_split(4)]))

    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b.T

    schedule = ScheduleGPipe(
        [PipelineStage(Sum(), 0, 1, "cpu")], 4, args_chunk_spec=(TensorChunkSpec(0), by_columns)
    )
    assert torch.equal(schedule.step(a, a.T), a + a)


def test_specs_of_values_inside_of_an_argument() -> None:
    """What lies in a dict was cut although its spec says that it goes whole to every microbatch."""

    class Product(nn.Module):
        def forward(self, x: list[dict[str, Tensor]]) -> Tensor:
            return x[0]["a"] @ x[0]["b"]

    a, b = torch.randn(8, 3), torch.randn(3, 5)
    specs = ([{"a": TensorChunkSpec(0), "b": _Replicate}],)
    schedule = ScheduleGPipe([PipelineStage(Product(), 0, 1, "cpu")], 4, args_chunk_spec=specs)
    wanted = torch.cat([part @ b for part in a.tensor_split(4)])
    assert torch.equal(schedule.step([{"a": a, "b": b}]), wanted)


def test_specs_of_a_with_block() -> None:
    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return a + b.T + c

    x = torch.randn(8, 3)
    with ArgsChunkSpec((0, 1)), KwargsChunkSpec({"c": 0}):
        pipe = pipeline(Sum(), 4, (x, x.T), {"c": x})
    schedule = ScheduleGPipe([pipe.build_stage(0, "cpu")], 4)
    assert torch.equal(schedule.step(x, x.T, c=x), x + x + x)


def test_outputs_are_joined_as_the_spec_says() -> None:
    class Parts(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"columns": x.T, "loss": x.sum()}

    x = torch.randn(8, 3)
    spec = {"columns": TensorChunkSpec(1), "loss": sum_reducer}
    schedule = ScheduleGPipe([PipelineStage(Parts(), 0, 1, "cpu")], 4, output_merge_spec=spec)
    merged = schedule.step(x)
    assert torch.equal(merged["columns"], x.T)
    assert torch.equal(merged["loss"], sum((p.sum() for p in x.tensor_split(4)), torch.tensor(0.0)))
    largest = _CustomReducer(torch.tensor(-9.0), torch.maximum)
    spec["loss"] = largest
    schedule = ScheduleGPipe([PipelineStage(Parts(), 0, 1, "cpu")], 4, output_merge_spec=spec)
    assert float(schedule.step(x)["loss"]) == max(float(p.sum()) for p in x.tensor_split(4))


def test_keyword_arguments_of_the_loss() -> None:
    def loss_fn(output: Tensor, target: Tensor, factor: float = 1.0) -> Tensor:
        return F.mse_loss(output, target) * factor

    model = untied()
    x, y = batch()
    schedule = ScheduleGPipe(traced(model, x, spec=SPEC), 4, loss_fn=loss_fn)
    found = []
    for factor in (2.0, 3.0, None):
        losses: list[Tensor] = []
        keywords = None if factor is None else {"factor": factor}
        schedule.step(x, target=y, losses=losses, loss_kwargs=keywords)
        found.append(float(sum(losses)))
    assert found[0] == pytest.approx(2 * found[2])
    assert found[1] == pytest.approx(3 * found[2])


def test_a_module_that_makes_gradients_of_its_own() -> None:
    """dw_builder is called for every microbatch, and what it returns makes the gradients."""
    made: list[int] = []
    layer = nn.Linear(WIDTH, WIDTH)

    def dw_builder() -> Any:
        made.append(len(made))
        return partial(made.append, -1)

    stage = PipelineStage(layer, 0, 1, "cpu", dw_builder=dw_builder)
    x, y = batch()
    ScheduleInterleavedZeroBubble([stage], 4, loss_fn=mean_loss).step(x, target=y)
    assert made == [0, -1, 2, -1, 4, -1, 6, -1]


# ---- stages and names ------------------------------------------------------------------------


def test_attributes_of_a_stage() -> None:
    stages = traced(untied(), batch()[0], spec=SPEC)
    assert [stage.is_first for stage in stages] == [True, False, False, False]
    assert [stage.is_last for stage in stages] == [False, False, False, True]
    assert [stage.stage_index for stage in stages] == [0, 1, 2, 3]
    assert {stage.num_stages for stage in stages} == {4}
    assert (stages[0].group_rank, stages[0].group_size) == (0, 1)
    assert not stages[0].has_backward
    ScheduleGPipe(stages, 2, loss_fn=mean_loss)
    assert stages[0].has_backward
    assert stages[1].remap_qualname("layers.1.weight") == "layers.1.weight"
    assert [name for name, _ in stages[1].named_parameters()] == [
        "layers.1.weight",
        "layers.1.bias",
    ]


def test_build_stage_takes_the_info_of_a_pipe() -> None:
    pipe = pipeline(untied(), (batch()[0],), split_spec=SPEC)
    stage = build_stage(pipe.get_stage_module(1), 1, pipe.info(), torch.device("cpu"))
    assert stage.submod is pipe.get_stage_module(1)
    with pytest.raises(ValueError, match=r"wrap_stage=\.\.\."):
        build_stage(nn.Sequential(pipe.get_stage_module(1)), 1, pipe.info(), "cpu")


def test_a_manual_stage_of_pippy() -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    x = batch()[0]
    stages = [ManualPipelineStage(layer, i, 2, "cpu", 4, x) for i, layer in enumerate(layers)]
    assert stages[0].chunks == 4
    wanted = torch.cat([layers[1](layers[0](part)) for part in x.tensor_split(4)])
    assert torch.equal(ScheduleGPipe(stages, 4).step(x), wanted)


@pytest.mark.parametrize("name", ["1f1b", "1F1B", "GPIPE", "interleaved1f1b", "ZBVZeroBubble"])
def test_schedules_by_name(name: str) -> None:
    found = get_schedule_class(name)
    assert found.__name__.lower() == f"schedule{name.lower()}"


def test_arguments_of_schedules_have_the_places_and_names_of_torch() -> None:
    """`stage=` was a TypeError, and the merge spec of LoopedBFS was taken for that of arguments."""
    for name in ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"):
        theirs = inspect.signature(torch_schedules.get_schedule_class(name))
        first, *others = theirs.parameters
        stages = [PipelineStage(nn.Linear(2, 2), i, 2, "cpu") for i in range(2)]
        given: dict[str, Any] = {
            first: stages,
            "n_microbatches": 2,
            "loss_fn": mean_loss,
            "scale_grads": False,
        }
        assert get_schedule_class(name)(**given).scale_grads is False
        assert others[:2] == ["n_microbatches", "loss_fn"]
    largest = _CustomReducer(torch.tensor(-9.0), torch.maximum)
    stage = PipelineStage(nn.Identity(), 0, 1, "cpu")
    x = batch()[0]
    assert torch.equal(
        ScheduleLoopedBFS([stage], 2, None, largest).step(x), torch.maximum(x[:8], x[8:])
    )


def test_which_schedules_take_one_stage() -> None:
    assert issubclass(Schedule1F1B, PipelineScheduleSingle)
    assert issubclass(ScheduleDualPipeV, PipelineScheduleMulti)
    assert get_schedule_class("PipelineScheduleMulti") is PipelineScheduleMulti
    with pytest.raises(ValueError, match=r"Unknown schedule name '2f2b'\. The valid options are"):
        get_schedule_class("2f2b")


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    """Stages 0, 1 and 3 on one rank and 2 on the other, which no class of torch has."""
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,1F0,0F1,1F1,3F0,3B0,3F1,3B1,1B0,0B0,1B1,0B1\n2F0,2F1,2B0,2B1\n")
    model = untied()
    plain = copy.deepcopy(model)
    x, y = batch()
    schedule = PipelineScheduleMulti(traced(model, x, spec=SPEC), 2, loss_fn=mean_loss)
    schedule._load_csv(str(file))
    schedule.step(x, target=y)
    plain_step(plain, x, target=y, num_microbatches=2, loss_fn=mean_loss)
    assert differing(model, plain) == []


class Unbalanced(PipelineScheduleMulti):
    """A schedule of a user, as torch has its subclasses write them: rows of actions and waits."""

    def __init__(self, stages: list[PipelineStage], n_microbatches: int, loss_fn: Any) -> None:
        super().__init__(stages, n_microbatches, loss_fn)
        self.pipeline_order: dict[int, list[str | None]] = {
            0: [
                "0F0",
                "1F0",
                "0F1",
                "1F1",
                "3F0",
                "3B0",
                "3F1",
                "3B1",
                "1I0",
                "1W0",
                "0B0",
                "1B1",
                "0B1",
            ],
            1: [None, "2F0", "2F1", None, "2B0", "2I1", "2W1"],
        }
        self._validate_and_set_stage_mapping(self.pipeline_order)


def test_a_schedule_of_a_subclass() -> None:
    model = untied()
    plain = copy.deepcopy(model)
    x, y = batch()
    Unbalanced(traced(model, x, spec=SPEC), 2, mean_loss).step(x, target=y)
    plain_step(plain, x, target=y, num_microbatches=2, loss_fn=mean_loss)
    assert differing(model, plain) == []


# ---- what is wrong ---------------------------------------------------------------------------


def test_a_schedule_without_an_order() -> None:
    """It was an AttributeError about the door's own attribute."""
    schedule = PipelineScheduleMulti(traced(untied(), batch()[0], spec=SPEC), 2)
    with pytest.raises(RuntimeError, match=r"no order of its own: load one with _load_csv\(file\)"):
        schedule.step(batch()[0])


def test_what_is_no_stage() -> None:
    """An empty list was an IndexError, and a module "is not iterable"."""
    for stages, text in (([], "an empty list"), (nn.Linear(2, 2), "Linear"), ([None], "NoneType")):
        with pytest.raises(
            TypeError, match=f"wanted a PipelineStage or a list of them, got {text}"
        ):
            ScheduleGPipe(stages, 2)  # type: ignore[arg-type]  # as a caller might


def test_a_step_without_gradients() -> None:
    model = untied()
    x, y = batch()
    schedule = ScheduleGPipe(traced(model, x, spec=SPEC), 4, loss_fn=mean_loss)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"Please call eval\(\) instead"):
        schedule.step(x, target=y)


def test_wrong_stages() -> None:
    with pytest.raises(ValueError, match="Stage index 2 is out of range of 2"):
        PipelineStage(nn.Linear(2, 2), 2, 2, "cpu")
    stage = PipelineStage(nn.Linear(2, 2), 1, 2, "cpu")
    with pytest.raises(ValueError, match="was given stage 1 of 2: give it all stages, or start"):
        ScheduleGPipe(stage, 2)
    one, other = (traced(untied(), batch()[0], spec=SPEC) for _ in range(2))
    with pytest.raises(ValueError, match="the stages belong to different pipelines"):
        ScheduleGPipe([*one[:2], *other[2:]], 2)


def test_wrong_losses_and_targets() -> None:
    model = untied()
    x, y = batch()
    schedule = ScheduleGPipe(traced(model, x, spec=SPEC), 4, loss_fn=mean_loss)
    with pytest.raises(TypeError, match="losses must be a list but got a <class 'tuple'>"):
        schedule.step(x, target=y, losses=())  # type: ignore[arg-type]  # as a caller might
    with pytest.raises(ValueError, match="needs a target"):
        schedule.step(x)
    with pytest.raises(RuntimeError, match="does not support loss"):
        _ScheduleForwardOnly(traced(model, x, spec=SPEC), 4).step(x, target=y)


def test_an_exception_of_a_layer_keeps_its_type() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise LookupError("no such word")

    stages = [PipelineStage(Failing(), i, 2, "cpu") for i in range(2)]
    with pytest.raises(LookupError, match="no such word"):
        ScheduleGPipe(stages, 2).step(torch.ones(4, 4))


def test_a_stage_is_called_as_in_pippy() -> None:
    """In one process every rank is a thread: a call of one stage has no other rank to run with."""
    model = nn.Linear(WIDTH, 2)
    pipe = pipeline(model, 4, (batch()[0],))
    stage = PipelineStage(pipe, 0, "cpu")
    x = batch()[0]
    assert torch.equal(stage(x), torch.cat([model(part) for part in x.tensor_split(4)]))
    with pytest.raises(ValueError, match="num_chunks is not known"):
        pipeline(model, (x,)).build_stage(0, "cpu")(x)
    pipe.output_chunk_spec = sum_reducer
    with pytest.raises(ValueError, match=r"use\s+ScheduleGPipe\(stage, num_chunks, loss_fn"):
        PipelineStage(pipe, 0, "cpu")(x)
