"""How many microbatches a stage holds, against what the simulator counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.partitioning.blocks import COPIES_OF_PARAMETERS, Blocks
from stageline.partitioning.budget import Budget
from stageline.partitioning.costs import TIMES, BlockCosts, BoundaryCosts, ModelCosts
from stageline.partitioning.holdings import Holding, holdings_of, holdings_of_1f1b
from stageline.scheduling import parse, schedules, simulate

RUN = [name for name in schedules.NAMES if schedules.family(name).refusal is None]


@st.composite
def blocks(draw: st.DrawFn) -> BlockCosts:
    """Draw a block whose memory is possible: parts are no larger than the whole."""
    size = st.integers(0, 20)
    given, kept = draw(size), draw(size)
    return BlockCosts(
        name="block",
        forward=draw(size),
        input_gradient=draw(size),
        weight_gradient=draw(size),
        backward=draw(size),
        input_bytes=given,
        activation_bytes=kept,
        input_gradient_frees=draw(st.integers(-10, given + kept)),
        parameters=draw(size),
        parameter_bytes=draw(size),
        output_bytes=draw(size),
        kept_output_bytes=draw(st.integers(0, kept)),
    )


@st.composite
def models(draw: st.DrawFn, least: int = 1) -> ModelCosts:
    """Draw a model of data, perhaps with a frozen block before the others; or of a gradient."""
    found = draw(st.lists(blocks(), min_size=least, max_size=8))
    unwanted = draw(st.integers(0, 2))
    drawn = (
        replace(block, wants_input_gradient=index >= unwanted) for index, block in enumerate(found)
    )
    boundary = BoundaryCosts(*(draw(st.integers(0, 5)) for _ in TIMES))
    return ModelCosts(tuple(drawn), rows=4, origin="drawn", boundary=boundary)


def test_moments_at_which_a_stage_holds_most() -> None:
    assert holdings_of(schedules.one_f_one_b(3, 8)) == holdings_of_1f1b(3)
    assert holdings_of(parse("0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2")) == [(Holding(2, 1),)]
    assert holdings_of(parse("0F0 0F1 0R0 0B0 0R1 0B1")) == [(Holding(1, 0, 1), Holding(0, 0, 2))]
    assert holdings_of(schedules.forward_only(2, 4)) == [(Holding(1),)] * 2
    assert holdings_of(schedules.gpipe(2, 5)) == [(Holding(5),)] * 2


@pytest.mark.parametrize("name", RUN)
@settings(max_examples=25, deadline=None)
@given(models(least=4), st.integers(1, 6))
def test_every_schedule_needs_what_the_simulator_says(
    name: str, costs: ModelCosts, microbatches: int
) -> None:
    sizes = [1, 1, 1, len(costs.blocks) - 3]
    schedule = schedules.fitted(name, 4, microbatches)
    found = Blocks.of_costs(costs, schedule.kinds())
    fixed = [COPIES_OF_PARAMETERS * stage.parameter_bytes for stage in costs.stages(sizes)]
    expected = list(simulate(schedule, costs.simulated(sizes)).peak_bytes or ())
    for stage, rank in enumerate(schedule.placement):
        expected[rank] += fixed[stage]
    assert Budget(schedule=schedule).rank_memory(found, sizes) == expected
    if schedule.num_ranks == 4:  # one stage each: moments say the same
        assert found.needed(sizes, holdings_of(schedule)) == expected
