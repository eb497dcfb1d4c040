"""Gradients of PiPPy's door in one process: the plain model's, also where torch's are wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stageline.compat.pippy import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    _ScheduleForwardOnly,
)
from stageline.running.microbatches import Batch
from stageline.testing import plain_step
from tests.compat.pippy_models import WIDTH, IterativeNetwork, Split, Untied
from tests.compat.pippy_stages import (
    ALL,
    SPEC,
    Tanh,
    batch,
    differing,
    mean_loss,
    stages_of,
    sum_loss,
    traced,
    untied,
)

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_training_with_batches_of_any_size() -> None:
    """In torch a smaller batch is a shape error, and a larger one ends a process."""
    model = untied()
    plain = copy.deepcopy(model)
    schedule = Schedule1F1B(traced(model, batch()[0], spec=SPEC), 4, loss_fn=mean_loss)
    for rows in (16, 10, 3, 32):
        x, y = batch(rows)
        schedule.step(x, target=y)
        plain_step(plain, x, target=y, num_microbatches=4, loss_fn=mean_loss)
        assert differing(model, plain) == [], rows


@pytest.mark.parametrize("schedule_class", [ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble])
def test_a_parameter_whose_gradient_passes_no_input(schedule_class: Any) -> None:
    """In torch it gets no gradient under zero bubble."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.code, self.mix = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            shift = torch.tanh(self.code @ self.mix)[0]
            output: Tensor = self.layer(x) + shift
            return output

    torch.manual_seed(0)
    model = nn.Sequential(*(Shifted() for _ in range(4)))
    plain = copy.deepcopy(model)
    stages = [PipelineStage(each, i, 4, "cpu") for i, each in enumerate(model)]
    x, y = batch()
    schedule_class(stages, 4, loss_fn=mean_loss).step(x, target=y)
    plain_step(plain, x, target=y, num_microbatches=4, loss_fn=mean_loss)
    assert differing(model, plain) == []


def test_integers_between_stages() -> None:
    """torch learns shapes by running the embedding on uninitialised numbers: an IndexError."""

    class Remainder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x % 7

    model = nn.Sequential(Remainder(), nn.Embedding(7, WIDTH))
    plain = copy.deepcopy(model)
    stages = [PipelineStage(each, i, 2, "cpu") for i, each in enumerate(model)]
    x, y = torch.arange(16), batch()[1]
    ScheduleGPipe(stages, 4, loss_fn=mean_loss).step(x, target=y)
    plain_step(plain, x, target=y, num_microbatches=4, loss_fn=mean_loss)
    assert differing(model, plain) == []


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
