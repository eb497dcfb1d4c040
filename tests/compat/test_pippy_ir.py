"""Split points, and the Pipe that they make."""

from __future__ import annotations

import copy
import pickle
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.compat import pippy
from stageline.compat.pippy import (
    LossWrapper,
    Pipe,
    PipeSequential,
    PipeSplitWrapper,
    SplitPoint,
    TrivialLossWrapper,
    annotate_split_points,
    pipe_split,
    pipeline,
    split_by_graph,
    split_into_equal_size,
    split_on_size_threshold,
)
from tests.compat.pippy_models import WIDTH, IterativeNetwork, Layers, Nested, Split, Untied

X = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


def unrolled(num_iters: int = 3) -> Pipe:
    torch.manual_seed(0)
    model = IterativeNetwork(num_iters=num_iters)
    annotate_split_points(model, {"iter_block": PipeSplitWrapper.SplitPoint.END})
    return Pipe.from_tracing(model, 2, example_args=(X,))


# ---- where stages end ------------------------------------------------------------------------


def test_a_stage_ends_after_each_call_of_an_annotated_module() -> None:
    assert [unrolled(count).num_stages for count in (1, 2, 3)] == [2, 3, 4]


def test_an_annotated_model_computes_as_before() -> None:
    model = IterativeNetwork()
    plain = copy.deepcopy(model)
    annotate_split_points(model, {"iter_block": SplitPoint.END})
    annotate_split_points(model, {"output_proj": SplitPoint.END})
    assert torch.equal(model(X), plain(X))
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_annotations_add_up_and_are_copied_with_the_model() -> None:
    model = Layers()
    tokens = torch.arange(12).reshape(3, 4) % 11
    annotate_split_points(model, {"layers.0": SplitPoint.END})
    annotate_split_points(model, {"layers.2": SplitPoint.BEGINNING})
    assert pipeline(model, (tokens,)).num_stages == 3
    assert pipeline(copy.deepcopy(model), (tokens,)).num_stages == 3


def test_a_split_spec_is_forgotten_after_the_call() -> None:
    """In torch it stays in the model, and a second pipeline() ends in a RecursionError."""
    model = Layers()
    tokens = torch.arange(12).reshape(3, 4) % 11
    for name in ("layers.1", "layers.2", "layers.1"):
        assert pipeline(model, (tokens,), split_spec={name: SplitPoint.END}).num_stages == 2
    assert pipeline(model, (tokens,)).num_stages == 1


def test_marks_in_the_code_and_a_split_spec_count_both() -> None:
    """A prototype took the one and ignored the other, without a word."""
    pipe = pipeline(Nested(), (X,))
    assert pipe.num_stages == 4
    model = Split()
    mask = torch.ones(4, WIDTH)
    assert pipeline(model, (X, mask)).num_stages == 3
    assert pipeline(model, (X, mask), split_spec={"first": SplitPoint.END}).num_stages == 4
    # A mark where the spec cuts already is no second cut.
    assert pipeline(Nested(), (X,), split_spec={"block0": SplitPoint.END}).num_stages == 4


def test_pipe_split_does_nothing_outside_of_a_pipe() -> None:
    pipe_split()
    assert Split()(X, torch.ones(4, WIDTH)).shape == (4, 3)


def test_splits_at_an_end_of_the_model_make_no_empty_stage() -> None:
    """In torch the first stage of such a pipe is missing, and get_stage_module(0) fails."""
    tokens = torch.arange(12).reshape(3, 4) % 11
    spec = {"embed": SplitPoint.BEGINNING, "layers.0": SplitPoint.END}
    spec["layers.1"] = SplitPoint.BEGINNING
    pipe = pipeline(Layers(), (tokens,), split_spec=spec)
    assert pipe.num_stages == 2
    assert [name for name, _ in pipe.split_gm.named_children()] == ["submod_0", "submod_1"]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (pipeline, {"mb_args": (X,)}),
        (pipeline, {"num_chunks": 2, "example_args": (X,)}),
        (Pipe.from_tracing, {"example_args": (X,)}),
        (Pipe.from_tracing, {"num_chunks": 2, "example_args": (X,)}),
    ],
)
def test_both_spellings(call: Any, arguments: dict[str, Any]) -> None:
    model = IterativeNetwork()
    annotate_split_points(model, {"iter_block": SplitPoint.END})
    pipe = call(model, **arguments)
    assert (pipe.num_stages, pipe.num_chunks) == (4, arguments.get("num_chunks"))
    pipe = call(model, *arguments.values())
    assert (pipe.num_stages, pipe.num_chunks) == (4, arguments.get("num_chunks"))


def test_keyword_arguments_of_the_example() -> None:
    constant = torch.ones(WIDTH)
    for pipe in (
        pipeline(Nested(), (X,), {"constant": constant}),
        pipeline(Nested(), 2, (X,), {"constant": constant}),
        Pipe.from_tracing(Nested(), 2, (X,), {"constant": constant}),
        Pipe.from_tracing(Nested(), (X,), {"constant": constant}),
    ):
        (out,) = pipe(X, constant=constant)
        assert out.shape == (4, WIDTH)


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        (split_into_equal_size(2), [2, 2]),
        (split_by_graph(2), [2, 2]),
        (split_on_size_threshold(2 * (WIDTH * WIDTH + WIDTH)), [2, 2]),
        (split_on_size_threshold(1), [1, 1, 1, 1]),
        (split_on_size_threshold(1, max_stages=2), [1, 3]),
    ],
)
def test_policies(policy: Any, sizes: list[int]) -> None:
    pipe = pipeline(Untied(), (X,), split_policy=policy)
    held = [
        sum(isinstance(m, nn.Linear) for m in pipe.get_stage_module(i).modules())
        for i in range(pipe.num_stages)
    ]
    assert held == sizes


def test_a_sequential_whose_children_are_stages() -> None:
    model = PipeSequential.from_sequential(nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 2)))
    pipe = pipeline(model, (X,))
    assert pipe.num_stages == 2
    assert torch.equal(pipe(X)[0], model(X))


def test_a_model_with_its_loss() -> None:
    target = torch.zeros(4, 3)
    wrapped = TrivialLossWrapper(IterativeNetwork(), nn.MSELoss())
    annotate_split_points(wrapped, {"module.iter_block": SplitPoint.END})
    pipe = pipeline(wrapped, (X, target))
    assert pipe.num_stages == 4
    assert torch.equal(pipe(X, target)[0], wrapped(X, target))
    with pytest.raises(NotImplementedError, match="overridden forward"):
        LossWrapper(nn.Linear(1, 1), nn.MSELoss())(X)


# ---- the pipe --------------------------------------------------------------------------------


def test_a_pipe_returns_a_sequence_with_the_output() -> None:
    model = Split()
    mask = (X > 0).float()
    pipe = pipeline(model, (X[:2], mask[:2]), {"scale": 2.0})
    (out,) = pipe(X, mask, scale=2.0)
    assert torch.equal(out, model(X, mask, 2.0))


def test_keys_of_a_stage_are_those_of_the_model() -> None:
    """In torch a loop leaves `iter_block@1.lin@1.weight`, and a checkpoint fills other keys."""
    pipe = unrolled()
    keys = [list(pipe.get_stage_module(i).state_dict()) for i in range(4)]
    assert keys == [["iter_block.lin.weight", "iter_block.lin.bias"]] * 3 + [
        ["output_proj.weight", "output_proj.bias"]
    ]
    names = {pipe.remap_qualname(key) for key in pipe.state_dict()}
    assert names == set(IterativeNetwork().state_dict())


def test_a_stage_has_the_modules_of_the_model() -> None:
    tokens = torch.arange(12).reshape(3, 4) % 11
    model = Layers()
    pipe = pipeline(model, (tokens,), split_spec={"layers.2": SplitPoint.BEGINNING})
    first, second = (pipe.get_stage_module(i) for i in range(2))
    assert [name for name, _ in first.layers.named_children()] == ["0", "1"]  # type: ignore[union-attr]
    assert [name for name, _ in second.layers.named_children()] == ["2", "3"]  # type: ignore[union-attr]
    assert first.get_submodule("layers.0") is model.layers[0]


def test_a_stage_can_be_called() -> None:
    model = Split()
    mask = (X > 0).float()
    pipe = pipeline(model, (X, mask))
    skip = pipe.get_stage_module(0)(X)
    made = pipe.get_stage_module(1)(skip, mask)
    (out,) = pipe.get_stage_module(2)(skip, made)
    assert torch.equal(out, model(X, mask))


def test_shared_parameters_are_listed() -> None:
    assert unrolled().replicated_params == [
        {f"submod_{i}": f"iter_block.lin.{name}" for i in range(3)} for name in ("weight", "bias")
    ]


def test_a_pipe_prints_its_stages_and_a_stage_its_code() -> None:
    pipe = unrolled()
    block = "(iter_block.lin): Linear(in_features=8, out_features=8, bias=True)"
    assert str(pipe) == textwrap.dedent(f"""\
        GraphModule(
          (submod_0): PipeStageModule(
            {block}
          )
          (submod_1): PipeStageModule(
            {block}
          )
          (submod_2): PipeStageModule(
            {block}
          )
          (submod_3): PipeStageModule(
            (output_proj): Linear(in_features=8, out_features=3, bias=True)
          )
        )

        def forward(self, arg0):
            submod_0 = self.submod_0(arg0);  arg0 = None
            submod_1 = self.submod_1(submod_0);  submod_0 = None
            submod_2 = self.submod_2(submod_1);  submod_1 = None
            submod_3 = self.submod_3(submod_2);  submod_2 = None
            return [submod_3]""")
    assert str(pipe.split_gm) == str(pipe)
    assert str(pipe.split_gm.submod_0) == textwrap.dedent(f"""\
        PipeStageModule(
          {block}
        )

        def forward(self, x):
            iter_block_lin = self.iter_block.lin(x);  x = None
            relu = torch.relu(iter_block_lin);  iter_block_lin = None
            return relu""")


def test_a_pipe_prints_what_skips_a_stage() -> None:
    text = str(pipeline(Split(), (X, torch.ones(4, WIDTH))))
    assert "submod_1 = self.submod_1(submod_0, arg1);  arg1 = None" in text
    assert "submod_2 = self.submod_2(submod_0, submod_1);  submod_0 = submod_1 = None" in text


class Branching(nn.Module):
    """A layer whose code cannot be recorded: it stays closed, also when it is printed."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().numpy().sum()) > 0 else x


def test_a_pipe_prints_layers_that_cannot_be_opened() -> None:
    model = nn.Sequential(Branching(), nn.Linear(WIDTH, 2))
    pipe = pipeline(model, (X,), split_spec={"1": SplitPoint.BEGINNING})
    assert "(0): Branching()" in str(pipe.get_stage_module(0))


def test_print_readable_prints_all_stages(capsys: pytest.CaptureFixture[str]) -> None:
    unrolled().print_readable()
    assert capsys.readouterr().out.count("def forward") == 5


def test_info() -> None:
    info = unrolled().info()
    assert (info.num_stages, info.has_loss_and_backward, info.num_chunks) == (4, False, 2)
    assert "self.submod_3(submod_2)" in info.graph


def test_the_mode_of_a_stage() -> None:
    model = Untied()
    pipe = pipeline(model, (X,), split_spec={"layers.2": SplitPoint.BEGINNING})
    stage = pipe.get_stage_module(1)
    assert stage.training
    stage.eval()
    assert not stage.training
    assert [layer.training for layer in model.layers] == [True, True, False, False]


# ---- what is wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "kind", "text"),
    [
        ({"layers.9": SplitPoint.END}, AttributeError, "nonexistent module layers.9"),
        ({"blocks.1.lin": SplitPoint.END}, AttributeError, "nonexistent module blocks$"),
        ({"layers.1": "end"}, ValueError, "Unknown split point type.*SplitPoint.END, got 'end'"),
    ],
)
def test_wrong_split_points(spec: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        annotate_split_points(Layers(), spec)
    with pytest.raises(kind, match=text):
        pipeline(Layers(), (torch.zeros(2, 3, dtype=torch.int64),), split_spec=spec)


def test_a_module_that_is_never_called() -> None:
    spec = {"layers": SplitPoint.END}
    with pytest.raises(ValueError, match=r"'layers' is never called itself: name one inside it"):
        pipeline(Layers(), (torch.zeros(2, 3, dtype=torch.int64),), split_spec=spec)


def test_a_spec_and_a_policy_exclude_each_other() -> None:
    spec = {"iter_block": SplitPoint.END}
    with pytest.raises(ValueError, match="Cannot specify both `split_spec` and `split_policy`"):
        pipeline(IterativeNetwork(), (X,), split_spec=spec, split_policy=split_into_equal_size(2))


def test_a_policy_that_changes_an_fx_graph() -> None:
    with pytest.raises(TypeError, match=r"use split_into_equal_size\(n\)"):
        pipeline(IterativeNetwork(), (X,), split_policy=lambda graph: graph)


def test_a_stage_that_does_not_exist() -> None:
    for index in (-1, 4):
        with pytest.raises(ValueError, match=f"Invalid stage index {index}!"):
            unrolled().get_stage_module(index)


def test_a_hook_around_a_whole_stage() -> None:
    """It was taken and never called: a schedule runs the layers, not the module around them."""
    stage = unrolled().get_stage_module(0)
    for register in (
        stage.register_forward_hook,
        stage.register_forward_pre_hook,
        stage.register_full_backward_hook,
        stage.register_full_backward_pre_hook,
        stage.register_backward_hook,
    ):
        with pytest.raises(RuntimeError, match="register it on a layer"):
            register(lambda *_: None)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_what_cannot_be_copied(copied: Any) -> None:
    """It was an error about a lock of a thread."""
    pipe = unrolled()
    for each in (pipe, pipe.get_stage_module(0)):
        with pytest.raises(TypeError, match=r"copy the model and call pipeline\(\) on the copy"):
            copied(each)


def test_too_many_arguments() -> None:
    """What came after the last known argument was ignored."""
    settings = [None] * 6
    with pytest.raises(TypeError, match=r"\(9,\) is too many arguments"):
        Pipe.from_tracing(Untied(), 2, (X,), *settings, 9)


def test_split_gm_is_not_to_be_called() -> None:
    with pytest.raises(RuntimeError, match="invoke the Pipe object directly"):
        unrolled().split_gm(X)


# ---- paths -----------------------------------------------------------------------------------


def test_the_paths_of_the_original_packages_exist() -> None:
    for line in (
        "from stageline.compat.pippy.IR import Pipe, PipeSplitWrapper, annotate_split_points",
        "from stageline.compat.pippy._IR import SplitPoint, pipe_split, pipeline",
        "from stageline.compat.pippy.PipelineStage import PipelineStage",
        "from stageline.compat.pippy._PipelineStage import PipelineStage",
        "from stageline.compat.pippy.ManualPipelineStage import ManualPipelineStage",
        "from stageline.compat.pippy.PipelineSchedule import ScheduleGPipe",
        "from stageline.compat.pippy.ModelSplit import split_into_equal_size",
        "from stageline.compat.pippy.microbatch import TensorChunkSpec, sum_reducer, LossReducer",
        "from stageline.compat.pippy.stage import PipelineStage, build_stage",
        "from stageline.compat.pippy.schedules import get_schedule_class, ScheduleZBVZeroBubble",
    ):
        exec(line, {})
    # At the root the names of classes, also where a module has the same name.
    assert isinstance(pippy.PipelineStage, type)
    assert isinstance(pippy.ManualPipelineStage, type)
