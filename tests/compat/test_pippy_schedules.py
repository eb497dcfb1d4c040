"""Schedules of PiPPy's door in one process: names, orders of a user, and what is wrong."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules

from stageline.compat.pippy import (
    ManualPipelineStage,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleLoopedBFS,
    _ScheduleForwardOnly,
    build_stage,
    get_schedule_class,
    pipeline,
)
from stageline.compat.pippy.microbatch import _CustomReducer, sum_reducer
from stageline.testing import plain_step
from tests.compat.pippy_models import WIDTH
from tests.compat.pippy_stages import (
    SPEC,
    batch,
    differing,
    mean_loss,
    traced,
    untied,
)

pytestmark = pytest.mark.usefixtures("one_thread")


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
