"""A plain run shows which layers repeat, and so what to open and where to cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stageline.capturing.survey import Choice, survey
from tests.capturing.survey_models import (
    WIDTH,
    Block,
    EncoderDecoder,
    Experts,
    Hidden,
    Model,
    Repeat,
    Stack,
    Sum,
    blocks,
    chosen,
    families,
    numbered,
    rows,
    surveyed,
)


def test_the_call_tree() -> None:
    found = surveyed(Model(Repeat(2)))
    lines = [
        ". " * len(list(visit.ancestors())) + f"{visit.path}:{visit.occurrence}"
        for visit in found.visits
    ]
    assert lines == [
        ":0",
        ". stem:0",
        ". trunk:0",
        ". . trunk.block:0",
        ". . . trunk.block.norm:0",
        ". . . trunk.block.linear:0",
        ". . trunk.block:1",
        ". . . trunk.block.norm:1",
        ". . . trunk.block.linear:1",
        ". head:0",
    ]
    assert [visit.path for visit in found.visits[0].children] == ["stem", "trunk", "head"]
    assert list(found.visits[0].descendants()) == list(found.visits[1:])
    assert repr(found.visits[1]).startswith("Visit(path='stem', occurrence=0, has_hooks=False")


@pytest.mark.parametrize(
    ("trunk", "opened", "members"),
    [
        (lambda: nn.Sequential(*blocks(3)), ["trunk"], numbered("trunk", 3)),
        (lambda: Stack(blocks(3)), ["trunk"], numbered("trunk.blocks", 3)),
        (lambda: Stack([*blocks(2)] * 2), ["trunk"], numbered("trunk.blocks", 2)),
        (lambda: Repeat(3), ["trunk"], ["trunk.block"]),
        (Hidden, ["trunk"], numbered("trunk.layers", 3)),
        (
            EncoderDecoder,
            ["trunk", "trunk.decoder", "trunk.encoder"],
            [*numbered("trunk.encoder.blocks", 2), *numbered("trunk.decoder.blocks", 3)],
        ),
        (lambda: nn.Sequential(*(Experts() for _ in range(4))), ["trunk"], numbered("trunk", 4)),
    ],
)
def test_repeated_layers_are_found(
    trunk: Callable[[], nn.Module], opened: list[str], members: list[str]
) -> None:
    assert chosen(Model(trunk())) == (["", *opened], members)


def test_a_list_of_lists_is_one_family() -> None:
    class Nested(Stack):
        def __init__(self) -> None:
            super().__init__([])
            self.groups = nn.ModuleList(nn.ModuleList(blocks(1 + n)) for n in range(2))

        def forward(self, x: Tensor, *memory: Tensor) -> Any:
            for group in self.groups:
                assert isinstance(group, nn.ModuleList)
                for block in group:
                    x = block(x)
            return x

    assert families(surveyed(Model(Nested()))) == [
        ["trunk.groups.0.0", "trunk.groups.1.0", "trunk.groups.1.1"]
    ]


@pytest.mark.parametrize("trunk", [Experts, lambda: Sum(blocks(3))])
def test_what_is_not_chained_is_no_family(trunk: Callable[[], nn.Module]) -> None:
    assert families(surveyed(Model(trunk()))) == []


def test_small_parts_are_no_family() -> None:
    assert families(surveyed(Model(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))))) == []


def test_the_rest_of_a_family_that_a_run_left_out_is_added() -> None:
    class Dropping(Stack):
        def forward(self, x: Tensor, *memory: Tensor) -> Any:
            for index in (1, 2, 4):
                x = self.blocks[index](x)
            return x

    model = Model(Dropping([*blocks(6), nn.Linear(WIDTH, WIDTH)]))
    assert chosen(model)[1] == numbered("trunk.blocks", 6)


def test_a_stage_of_layers_is_opened_only_where_it_is_too_big() -> None:
    trunk = nn.Sequential(Stack(blocks(2)), Stack(blocks(2)), Stack(blocks(9)))
    assert chosen(Model(trunk), 3) == (
        ["", "trunk", "trunk.2"],
        ["trunk.0", "trunk.1", *numbered("trunk.2.blocks", 9)],
    )
    assert chosen(Model(nn.Sequential(*(Stack(blocks(2)) for _ in range(9)))), 3)[1] == (
        numbered("trunk", 9)
    )


def test_a_big_layer_that_is_mostly_something_else_stays_closed() -> None:
    class Mixed(Stack):
        def __init__(self) -> None:
            super().__init__(blocks(2))
            self.wide = nn.Sequential(nn.Linear(WIDTH, 99), nn.Linear(99, WIDTH))

        def forward(self, x: Tensor, *memory: Tensor) -> Any:
            return super().forward(self.wide(x))

    assert chosen(Model(nn.Sequential(Mixed(), Mixed())))[1] == ["trunk.0", "trunk.1"]


@pytest.mark.parametrize("how", ["all", "first", "inside"])
def test_frozen_layers_are_found_and_stay_frozen(how: str) -> None:
    model = Model(Stack(blocks(3)))
    frozen = model if how == "all" else model.trunk.get_submodule("blocks.0")
    frozen.requires_grad_(False)
    model.stem.requires_grad_(how == "inside")
    flags = [parameter.requires_grad for parameter in model.parameters()]
    with torch.no_grad():
        assert chosen(model)[1] == numbered("trunk.blocks", 3)
    assert [parameter.requires_grad for parameter in model.parameters()] == flags


def test_layers_without_gradients_are_found_by_what_they_pass_on() -> None:
    class Still(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                return super().forward(x)  # type: ignore[no-untyped-call]  # torch has no types here

    assert chosen(Model(Still(*blocks(3))))[1] == numbered("trunk", 3)


def test_a_survey_may_be_made_in_inference_mode() -> None:
    model, x = Model(Stack(blocks(3))), rows()
    with torch.inference_mode():
        assert list(survey(model, (x,), {}).choose(2).members) == numbered("trunk.blocks", 3)
        made_here = Model(nn.Sequential(*blocks(3)))
    for other in (model, made_here):
        with torch.inference_mode():
            x = rows()
        assert len(survey(other, (x,), {}).visits) > 3


def test_a_frozen_parameter_may_be_written_to() -> None:
    class Average(Block):
        def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:
            self.norm.weight.mul_(1.0)
            return super().forward(x, memory)

    trunk = nn.Sequential(*(Average() for _ in range(3)))
    for block in trunk:
        block.norm.requires_grad_(False)
    assert chosen(Model(trunk))[1] == numbered("trunk", 3)


def test_model_and_arguments_are_left_as_they_were() -> None:
    class Careless(Block):
        def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:
            self.last = x
            x.add_(1)
            return super().forward(torch.nn.functional.dropout(x), memory)

    model, x = nn.Sequential(nn.Flatten(), Careless(), nn.BatchNorm1d(WIDTH)), torch.zeros(3, 4)
    state, before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    survey(model, (x,), {})
    assert not hasattr(model[1], "last")
    assert x.count_nonzero() == 0
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_of_the_model_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        survey(Model(nn.ReLU()), (torch.zeros(2, 3),), {})


# Without families, or with too few layers.


def test_without_families_the_largest_is_opened_until_there_is_enough() -> None:
    model = Model(nn.Sequential(Block(), nn.ReLU(), nn.Sequential(nn.Linear(WIDTH, WIDTH))))
    assert chosen(model, 1) == ([""], ["stem", "trunk", "head"])
    assert chosen(model, 2) == (
        ["", "trunk"],
        ["stem", "trunk.0", "trunk.1", "trunk.2", "head"],
    )
    assert chosen(model, 9) == (
        ["", "trunk", "trunk.0", "trunk.2"],
        ["stem", "trunk.0.norm", "trunk.0.linear", "trunk.1", "trunk.2.0", "head"],
    )


def test_more_stages_than_layers() -> None:
    model = Model(nn.Sequential(*blocks(2)))
    assert chosen(model, 2)[1] == ["trunk.0", "trunk.1"]
    opened, members = chosen(model, 3)
    assert opened == ["", "trunk", "trunk.0", "trunk.1"]
    assert members == [
        *("stem", "trunk.0.norm", "trunk.0.linear", "trunk.1.norm", "trunk.1.linear", "head"),
    ]


def test_nobody_knows_the_number_of_stages() -> None:
    assert chosen(Model(Stack(blocks(3))), None)[1] == numbered("trunk.blocks", 3)


def test_a_model_without_parts_is_not_opened() -> None:
    assert survey(nn.Linear(2, 2), (rows(),), {}).choose(2) == Choice(frozenset(), ())


def test_a_model_without_parameters_can_be_cut() -> None:
    assert chosen(nn.Sequential(nn.Tanh(), nn.ReLU())) == ([""], ["0", "1"])
