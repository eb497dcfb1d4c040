"""Costs of blocks: what stages cost, other sizes, text and back."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given

from stageline.errors import ConfigError
from stageline.partitioning.costs import TIMES, BlockCosts, BoundaryCosts, ModelCosts
from stageline.scheduling import Costs
from tests.partitioning.test_holding import models

BLOCK = BlockCosts("layer", 10, 11, 12, 20, 8, 32, 16, 5, 20, 8)


def test_a_stage_adds_up_its_blocks_and_counts_no_byte_twice() -> None:
    keeping = replace(BLOCK, kept_output_bytes=6)
    apart = ModelCosts((BLOCK, BLOCK, BLOCK), 4, "by hand").stages([3])[0]
    shared = ModelCosts((keeping, keeping, keeping), 4, "by hand").stages([3])[0]
    assert apart.forward == 30
    assert (apart.input_bytes, apart.activation_bytes) == (8, 3 * 32 + 2 * 8)
    assert shared.activation_bytes == apart.activation_bytes - 2 * 6
    assert shared.input_gradient_frees == apart.input_gradient_frees - 2 * 6
    assert (shared.output_bytes, shared.kept_output_bytes) == (8, 6)


def test_a_stage_for_which_nobody_waits_has_its_backward_in_w() -> None:
    first = replace(BLOCK, input_gradient=1, weight_gradient=19, wants_input_gradient=False)
    costs = ModelCosts((first, BLOCK, BLOCK, BLOCK), 4, "by hand")
    alone, joined, other = costs.stages([1, 3])[0], *costs.stages([2, 2])
    for stage, count in ((alone, 1), (joined, 2)):
        assert (stage.input_gradient, stage.weight_gradient) == (0, 20 * count)
        assert stage.weight_gradient == stage.backward
        assert stage.input_gradient_frees == -8  # the gradient of the output, which came
        assert not stage.wants_input_gradient
    assert (other.input_gradient, other.weight_gradient, other.backward) == (22, 24, 40)
    assert costs.at(8).blocks[0].wants_input_gradient is False


def test_blocks_that_go_together_have_one_boundary() -> None:
    """Every block is measured as a stage of its own; in 0.1 a stage paid for all of that."""
    boundary = BoundaryCosts(forward=1, input_gradient=2, weight_gradient=3, backward=4)
    costs = ModelCosts((BLOCK,) * 4, 4, "by hand", boundary=boundary)
    one, three = costs.stages([1, 3])
    assert [getattr(one, time) for time in TIMES] == [10, 11, 12, 20]
    assert [getattr(three, time) for time in TIMES] == [28, 29, 30, 52]
    assert (three.activation_bytes, three.parameters) == (3 * 32 + 2 * 8, 15)
    assert costs.at(8).boundary == boundary  # whatever the number of rows


def test_a_boundary_is_never_more_than_a_block() -> None:
    much = BoundaryCosts(forward=99, input_gradient=99, weight_gradient=3, backward=99)
    costs = ModelCosts((BLOCK,) * 4, 4, "by hand", boundary=much)
    assert costs.boundary == BoundaryCosts(10, 11, 3, 20)
    assert costs.stages([4])[0].forward == 10


def test_costs_saved_before_these_were_known_can_be_read() -> None:
    costs = ModelCosts((BLOCK, BLOCK), 4, "by hand")
    old = costs.to_json().replace(', "wants_input_gradient": true', "")
    old = re.sub(r',\n *"boundary": .*', "", old)
    assert "wants" not in old
    assert "boundary" not in old
    assert ModelCosts.from_json(old) == costs


def test_stages_must_take_all_blocks() -> None:
    costs = ModelCosts((BLOCK, BLOCK), 4, "by hand")
    for sizes in ([1], [3], [2, 0], []):
        with pytest.raises(ValueError, match="2 blocks cannot make stages"):
            costs.stages(sizes)


def test_what_a_simulation_is_told() -> None:
    told = ModelCosts((BLOCK, BLOCK), 4, "by hand").simulated([1, 1], latency=7, bandwidth=2)
    assert told == Costs(
        forward=(10, 10),
        backward=(20, 20),
        input_gradient=(11, 11),
        weight_gradient=(12, 12),
        activation_bytes=(40, 40),
        input_bytes=(8, 8),
        input_gradient_frees=(16, 16),
        edge_bytes=(8,),
        latency=7,
        bandwidth=2,
    )


def test_other_sizes_lie_on_a_line() -> None:
    small = ModelCosts((BLOCK,), 4, "by hand")
    large = ModelCosts((replace(BLOCK, forward=30, activation_bytes=64),), 8, "by hand")
    both = replace(small, others=(large,))
    between = both.at(6).blocks[0]
    assert (between.forward, between.activation_bytes, between.parameters) == (20, 48, 5)
    assert both.at(8).blocks == large.blocks
    assert both.at(16).blocks[0].forward == 70
    assert both.at(1).blocks[0].forward == 0  # the line goes below zero there
    assert small.at(2).blocks[0].forward == 5


@given(models())
def test_costs_survive_a_trip_through_text(costs: ModelCosts) -> None:
    whole = replace(costs, others=(replace(costs, rows=9),))
    assert ModelCosts.from_json(whole.to_json()) == whole


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "this is no JSON"),
        ("[]", "this JSON holds no costs"),
        ("{}", "this JSON holds no costs"),
        ('{"format": "stageline costs", "version": 99}', "version 99, wanted 1"),
        ('{"format": "stageline costs", "version": 1}', "an entry is missing or wrong"),
    ],
)
def test_text_that_is_something_else(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelCosts.from_json(text)
