"""Arguments, outputs and losses of PiPPy's schedules: how they are cut, joined and passed on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention

from stageline.compat.pippy import (
    ArgsChunkSpec,
    KwargsChunkSpec,
    PipelineStage,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    TensorChunkSpec,
    pipeline,
)
from stageline.compat.pippy.microbatch import _CustomReducer, _Replicate, sum_reducer
from tests.compat.pippy_models import WIDTH
from tests.compat.pippy_stages import (
    SPEC,
    batch,
    mean_loss,
    traced,
    untied,
)

pytestmark = pytest.mark.usefixtures("one_thread")


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


class Attention(nn.Module):
    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        output: Tensor = flex_attention.flex_attention(x, x, x, block_mask=mask)
        return output


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_block_mask_is_cut_with_the_batch() -> None:
    """Every microbatch was given the whole mask, and took that of the first rows."""
    torch.manual_seed(0)
    lengths, x = torch.tensor([40, 128, 7, 90, 64, 13]), torch.randn(6, 1, 128, 16)

    def is_seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (kv < lengths[b])

    mask = flex_attention.create_block_mask(is_seen, 6, 1, 128, 128, device="cpu")
    schedule = ScheduleGPipe([PipelineStage(Attention(), 0, 1, "cpu")], 4)
    with torch.no_grad():
        assert torch.equal(schedule.step(x, mask=mask), Attention()(x, mask))
    with pytest.raises(ValueError, match="is a BlockMask with a tensor in"):
        schedule.step(x, mask)


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
