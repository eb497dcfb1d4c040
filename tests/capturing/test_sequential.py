"""An nn.Sequential read as a chain of blocks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.capturing import Block, Chain, capture_sequential
from stageline.capturing.graph import Call, Mark, Tie
from stageline.capturing.marks import CutPoint, begin_block
from stageline.capturing.sequential import has_hooks, is_plain_sequential


class Twice(nn.Sequential):
    """A Sequential with a forward of its own."""

    def forward(self, x: Tensor) -> Any:
        return self[0](self[0](x))


class Named(nn.Sequential):
    """A Sequential with nothing of its own but a name."""


def nested() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2))),
        nn.Linear(2, 1),
    )


def names(graph: Chain) -> list[str]:
    return [block.name for block in graph.blocks]


@pytest.mark.parametrize(
    ("at_least", "expected"),
    [
        (1, ["0", "1"]),
        (2, ["0", "1"]),
        (3, ["0.0", "0.1", "1"]),
        (4, ["0.0", "0.1.0", "0.1.1", "1"]),
        (9, ["0.0", "0.1.0", "0.1.1", "1"]),
    ],
)
def test_nested_sequentials_are_opened_only_as_far_as_needed(
    at_least: int, expected: list[str]
) -> None:
    assert names(capture_sequential(nested(), at_least=at_least)) == expected


def test_named_children_keep_their_names() -> None:
    model = nn.Sequential(OrderedDict(stem=nn.Linear(2, 2), act=nn.ReLU()))
    assert [str(block) for block in capture_sequential(model).blocks] == ["stem Linear", "act ReLU"]


def test_a_module_that_stands_twice_is_two_blocks() -> None:
    layer = nn.Linear(2, 2)
    graph = capture_sequential(nn.Sequential(layer, nn.ReLU(), layer))
    assert names(graph) == ["0", "1", "2"]
    assert graph.blocks[0].module is graph.blocks[2].module


@pytest.mark.parametrize("inner", [Twice(nn.Linear(2, 2)), nn.Sequential()])
def test_what_cannot_be_opened_stays_one_block(inner: nn.Module) -> None:
    model = nn.Sequential(inner, nn.Linear(2, 2))
    assert names(capture_sequential(model, at_least=5)) == ["0", "1"]


def test_a_subclass_without_a_forward_is_opened() -> None:
    model = nn.Sequential(Named(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    assert is_plain_sequential(model[0])
    assert names(capture_sequential(model, at_least=3)) == ["0.0", "0.1", "1"]


def test_a_sequential_with_hooks_is_not_opened() -> None:
    """Its hook runs around the whole; nobody would call it if its children stood alone."""
    model = nested()
    model[0].register_forward_hook(lambda module, args, output: None)
    assert has_hooks(model[0])
    assert names(capture_sequential(model, at_least=3)) == ["0", "1"]


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_every_kind_of_hook_is_seen(register: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert not has_hooks(model)
    getattr(model, register)(lambda *_: None)
    assert has_hooks(model)
    assert not is_plain_sequential(model)


def test_a_forward_put_on_the_instance_is_seen() -> None:
    """accelerate and others replace ``forward`` on the object; opened, it would be ignored."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.forward = lambda x: x * 0  # type: ignore[method-assign]  # that is the point
    assert not is_plain_sequential(model)


def test_a_sequential_with_a_tensor_of_its_own_is_not_opened() -> None:
    """Opened, its gain would belong to no stage, and be missing in the state of the pipeline."""
    model = nested()
    model[0].register_parameter("gain", nn.Parameter(torch.ones(1)))
    assert names(capture_sequential(model, at_least=3)) == ["0", "1"]
    model = nested()
    model[0].register_buffer("seen", torch.ones(1))
    assert names(capture_sequential(model, at_least=3)) == ["0", "1"]


def test_parameters_are_counted_per_block() -> None:
    assert [block.num_parameters for block in capture_sequential(nested()).blocks] == [12, 3]
    assert Block("a", nn.ReLU()).num_parameters == 0


def test_capturing_leaves_the_model_alone_and_repeats_itself() -> None:
    model = nested()
    before = {name: module for name, module in model.named_modules()}
    first, second = (capture_sequential(model, at_least=4) for _ in range(2))
    assert first.blocks == second.blocks
    assert first.calls == second.calls
    assert first.fingerprint == second.fingerprint
    assert {name: module for name, module in model.named_modules()} == before


def test_a_stage_has_the_original_names_and_computes_the_same() -> None:
    model = nested()
    graph = capture_sequential(model, at_least=4)
    first, last = graph.stage_module(0, 2), graph.stage_module(2, 4)
    assert list(first.state_dict()) == ["0.0.weight", "0.0.bias"]
    assert list(last.state_dict()) == ["0.1.1.weight", "0.1.1.bias", "1.weight", "1.bias"]
    assert {**first.state_dict(), **last.state_dict()}.keys() == model.state_dict().keys()
    x = torch.randn(3, 2)
    assert torch.equal(last(first(x)), model(x))


def test_a_chain_is_seen_as_calls_between_positions() -> None:
    chain = capture_sequential(nested(), at_least=3)
    assert chain.num_nodes == 3
    assert chain.calls == [
        Call("", 0, "Sequential", 0, 3, True),
        Call("0", 0, "Sequential", 0, 2, True),
        Call("0.0", 0, "Linear", 0, 1, False),
        Call("0.1", 0, "Sequential", 1, 2, False),
        Call("1", 0, "Linear", 2, 3, False),
    ]
    assert chain.cuts == [1, 2]
    assert chain.marks == []
    assert "0.1.0" in chain.module_names
    assert chain.label(1, 3) == ("0.1 Sequential", "1 Linear")
    assert list(chain.crossing(1)) == []


def test_sequentials_on_the_way_to_a_module_are_opened() -> None:
    chain = capture_sequential(nested())
    assert names(chain.opened_at(["0.1.0"])) == ["0.0", "0.1.0", "0.1.1", "1"]
    assert names(chain.opened_at(["0.0"])) == ["0.0", "0.1", "1"]
    assert names(chain.opened_at(["nowhere.at.all", "1"])) == ["0", "1"]
    assert names(chain.opened_at(["0.0"], num_stages=4)) == ["0.0", "0.1.0", "0.1.1", "1"]
    again = chain.opened_at(["0.0"]).opened_at([])
    assert names(again) == ["0.0", "0.1", "1"]


def test_a_load_counts_a_shared_parameter_once() -> None:
    layer = nn.Linear(2, 2, dtype=torch.float64)
    load = capture_sequential(nn.Sequential(layer, nn.ReLU(), layer)).load(0, 3)
    assert (load.time, load.parameters, load.parameter_bytes) == (6, 6, 48)


def test_ties_are_found_by_memory_under_all_names() -> None:
    """Two Parameters over one tensor, as in Varuna's document, and a module that stands twice."""
    first, last, twice = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)
    last.weight = nn.Parameter(first.weight.data)
    chain = capture_sequential(nn.Sequential(first, twice, last, twice))
    assert chain.ties([2]) == [
        Tie(("0.weight", "2.weight"), (0, 1), 4),
        Tie(("1.weight", "3.weight"), (0, 1), 2),
        Tie(("1.bias", "3.bias"), (0, 1), 2),
        Tie(("1.running_mean", "3.running_mean"), (0, 1)),
        Tie(("1.running_var", "3.running_var"), (0, 1)),
        Tie(("1.num_batches_tracked", "3.num_batches_tracked"), (0, 1)),
    ]
    assert chain.ties([]) == []


def test_a_fingerprint_tells_models_apart() -> None:
    def prints(*layers: nn.Module) -> str:
        return capture_sequential(nn.Sequential(*layers)).fingerprint

    assert prints(nn.Linear(2, 2)) == prints(nn.Linear(2, 2))
    different = {
        prints(nn.Linear(2, 2)),
        prints(nn.Linear(2, 2), nn.ReLU()),
        prints(nn.Linear(2, 2), nn.Tanh()),
        prints(nn.Linear(2, 2, dtype=torch.float64)),
        prints(nn.Linear(2, 3)),
    }
    assert len(different) == 5


def test_a_cut_chain_runs_as_the_model_does() -> None:
    model = nested()
    chain = capture_sequential(model, at_least=4)
    parts = chain.cut([1, 3])
    x = torch.randn(3, 2)
    assert len(parts.stages) == 3
    assert torch.equal(parts.run((x,), {}), model(x))


def test_marks_among_the_children_leave_only_their_cuts() -> None:
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.ReLU(), CutPoint(), nn.Linear(2, 2)), nn.ReLU()
    )
    begin_block(model[2], "B")
    chain = capture_sequential(model)
    assert names(chain) == ["0", "1.0", "1.2", "2"]
    assert chain.marks == [Mark("cut", "1.1", 2, 2), Mark("block", "B", 3, 4)]
    assert chain.cuts == [2, 3]
    assert chain.findings == []
    x = torch.randn(3, 2)
    assert torch.equal(chain.cut([2, 3]).run((x,), {}), model(x))


def test_a_begun_block_is_no_hook_that_keeps_a_sequential_closed() -> None:
    model = nested()
    begin_block(model[0], "B")
    assert not has_hooks(model[0])
    chain = capture_sequential(model, at_least=4)
    assert chain.marks == [Mark("block", "B", 0, chain.num_nodes)]
