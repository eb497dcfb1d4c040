"""The order of transfers: the same at both ends of every pair, and free of deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.errors import ScheduleError
from stageline.scheduling import Action, Costs, Kind, Schedule, order_transfers, parse
from stageline.scheduling.schedules import forward_only, gpipe, one_f_one_b
from tests.scheduling.families import RUNNABLE, example
from tests.scheduling.random_schedules import random_schedules

MAKERS = {
    "F": (Kind.FORWARD,),
    "B": (Kind.BACKWARD, Kind.INPUT_GRADIENT),
}

# Zero is among them on purpose: actions that take no time end together, and only their order of
# execution tells which one feeds the other.
numbers: st.SearchStrategy[int | float | Fraction] = st.sampled_from(
    [0, 0, 1, 2, 3, Fraction(1, 3), 0.5]
)


@st.composite
def schedules_with_costs(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    schedule = draw(random_schedules())
    per_stage = (
        st.lists(numbers, min_size=schedule.num_stages, max_size=schedule.num_stages) | numbers
    )
    costs = Costs(
        forward=draw(per_stage),
        backward=draw(per_stage),
        weight_gradient=draw(per_stage),
        recompute=draw(per_stage),
        latency=draw(numbers),
    )
    return schedule, costs


class Stuck(Exception):
    """No rank can go on."""


@dataclass
class Rendezvous:
    """Runs a schedule over one untagged channel per pair of ranks.

    The k-th transfer that one end of a pair issues meets the k-th of the other end, whatever they
    are; if they do not belong together, values would be swapped, and this raises.

    With ``blocking``, a rank stands at each transfer until the other end has come to it. Without,
    it goes on and waits only at the action that uses the value.
    """

    schedule: Schedule
    blocking: bool
    positions: list[int] = field(default_factory=list)
    issued: dict[tuple[int, int], list[Action]] = field(default_factory=lambda: defaultdict(list))
    number: dict[tuple[int, int], int] = field(default_factory=dict)
    arrived: set[tuple[int, str, int]] = field(default_factory=set)

    def run(self) -> None:
        rows = list(self.schedule.rows())
        self.positions = [0] * len(rows)
        while any(position < len(row) for position, row in zip(self.positions, rows, strict=True)):
            if not any([self._advance(rank, row) for rank, row in enumerate(rows)]):
                standing = [
                    str(row[position])
                    for position, row in zip(self.positions, rows, strict=True)
                    if position < len(row)
                ]
                raise Stuck(f"ranks stand at {standing}")

    def _advance(self, rank: int, row: Sequence[Action]) -> bool:
        if self.positions[rank] == len(row):
            return False
        action = row[self.positions[rank]]
        if action.kind.is_transfer:
            was_issued = self._issue(rank, action)
            if self.blocking and not self._is_met(rank, action):
                return was_issued
        elif not self._has_input(rank, action):
            return False
        self.positions[rank] += 1
        return True

    def _issue(self, rank: int, action: Action) -> bool:
        """Post one end of a transfer, once; match it if the other end is there."""
        at = (rank, self.positions[rank])
        if at in self.number:
            return False
        other = self._other(action)
        mine, theirs = self.issued[rank, other], self.issued[other, rank]
        self.number[at] = len(mine)
        mine.append(action)
        if len(theirs) >= len(mine):
            self._match(action, theirs[len(mine) - 1])
        return True

    def _match(self, one: Action, two: Action) -> None:
        send, receive = (one, two) if one.kind.is_send else (two, one)
        assert (send.kind.is_send, receive.kind.is_receive) == (True, True), (one, two)
        assert send.kind.letter == receive.kind.letter, (one, two)
        assert (send.stage, send.peer) == (receive.peer, receive.stage), (one, two)
        assert send.microbatch == receive.microbatch, (one, two)
        self.arrived.add((receive.stage, receive.kind.letter, receive.microbatch))

    def _is_met(self, rank: int, action: Action) -> bool:
        return len(self.issued[self._other(action), rank]) > self.number[rank, self.positions[rank]]

    def _other(self, action: Action) -> int:
        assert action.peer is not None
        return self.schedule.placement[action.peer]

    def _has_input(self, rank: int, action: Action) -> bool:
        for letter, kinds in MAKERS.items():
            source = action.stage + (-1 if letter == "F" else 1)
            if action.kind not in kinds or not 0 <= source < self.schedule.num_stages:
                continue
            if self.schedule.placement[source] != rank:
                return (action.stage, letter, action.microbatch) in self.arrived
        return True


def add_naively(schedule: Schedule) -> Schedule:
    """Send as soon as a value is made, receive right before it is used: what deadlocks on NCCL."""
    complete = order_transfers(schedule)
    rows = []
    for row in complete.rows():
        receives = {
            (action.stage, action.kind.letter, action.microbatch): action
            for action in row
            if action.kind.is_receive
        }
        new: list[Action] = []
        for action in row:
            if not action.kind.is_receive:
                key = (action.stage, action.kind.letter, action.microbatch)
                if not action.kind.is_transfer and key in receives:
                    new.append(receives[key])
                new.append(action)
        rows.append(new)
    return Schedule.from_rows(rows)


def between(schedule: Schedule, rank: int, other: int) -> list[tuple[int, int, str, int]]:
    """Return what one rank exchanges with another, in its order: (from, to, letter, microbatch)."""
    transfers = []
    for action in schedule.row(rank):
        if action.peer is not None and schedule.placement[action.peer] == other:
            stages = (action.stage, action.peer)
            source, target = stages if action.kind.is_send else reversed(stages)
            transfers.append((source, target, action.kind.letter, action.microbatch))
    return transfers


def test_one_f_one_b_looks_like_its_picture() -> None:
    assert order_transfers(one_f_one_b(2, 3), Costs([1, 2], 5)) == parse("""
        0F0 0F0>1 0F1 0F1>1 0B0<1 0B0 0F2 0F2>1 0B1<1 0B1 0B2<1 0B2
        1F0<0 1F1<0 1F0 1B0 1B0>0 1F1 1F2<0 1B1 1B1>0 1F2 1B2 1B2>0""")


def test_at_equal_times_one_end_gives_way() -> None:
    """0F2 and 1B1 end together, so one of the ranks must receive before it sends."""
    assert order_transfers(one_f_one_b(2, 3), Costs(1, 2)) == parse("""
        0F0 0F0>1 0F1 0F1>1 0B0<1 0B0 0F2 0B1<1 0F2>1 0B1 0B2<1 0B2
        1F0<0 1F0 1F1<0 1B0 1B0>0 1F1 1B1 1B1>0 1F2<0 1F2 1B2 1B2>0""")


def test_stages_of_one_rank_exchange_nothing() -> None:
    schedule = one_f_one_b(4, 2, num_ranks=1)
    assert order_transfers(schedule) == schedule


def test_forward_only_sends_forward_only() -> None:
    complete = order_transfers(forward_only(3, 2))
    assert complete.kinds() == {Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD}


def test_a_v_crosses_only_where_ranks_differ() -> None:
    complete = order_transfers(parse("0F0 3F0 3B0 0B0 \n 1F0 2F0 2B0 1B0"))
    assert complete == parse("""
        0F0 0F0>1 3F0<2 3F0 3B0 3B0>2 0B0<1 0B0
        1F0<0 1F0 2F0 2F0>3 2B0<3 2B0 1B0 1B0>0""")


def test_a_split_backward_sends_after_the_input_gradient() -> None:
    complete = order_transfers(parse("0F0 0I0 0W0 \n 1F0 1I0 1W0"))
    assert complete == parse("""
        0F0 0F0>1 0B0<1 0I0 0W0
        1F0<0 1F0 1I0 1B0>0 1W0""")


def test_a_reduction_keeps_its_place() -> None:
    complete = order_transfers(parse("0F0 0B0 0REDUCE \n 1F0 1B0 1REDUCE"))
    assert complete == parse("""
        0F0 0F0>1 0B0<1 0B0 0REDUCE
        1F0<0 1F0 1B0 1B0>0 1REDUCE""")


def test_transfers_that_are_there_are_replaced() -> None:
    for name in RUNNABLE:
        once = order_transfers(example(name, num_ranks=3, num_microbatches=6))
        assert order_transfers(once) == once
    assert order_transfers(add_naively(one_f_one_b(3, 4))) == order_transfers(one_f_one_b(3, 4))


def test_the_name_stays() -> None:
    assert order_transfers(gpipe(2, 2)).name == "gpipe"


def test_a_deadlock_cannot_be_ordered() -> None:
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits at 0B0 for 1B0"):
        order_transfers(parse("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1"))


@given(schedules_with_costs())
def test_both_ends_of_every_pair_have_one_order(case: tuple[Schedule, Costs]) -> None:
    complete = order_transfers(*case)
    for rank in range(complete.num_ranks):
        for other in range(rank):
            assert between(complete, rank, other) == between(complete, other, rank)


@given(schedules_with_costs())
def test_sends_follow_makers_and_receives_precede_users(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    complete = order_transfers(schedule, costs)
    assert complete.compute_only() == schedule
    complete.check()
    num_crossing = sum(a != b for a, b in pairwise(schedule.placement))
    num_values = 2 * num_crossing * schedule.num_microbatches
    assert len(complete) == len(schedule) + 2 * num_values
    for row in complete.rows():
        place = {action: index for index, action in enumerate(row)}
        for action in row:
            if action.kind.is_transfer:
                computes = [
                    place[maker]
                    for kind in MAKERS[action.kind.letter]
                    if (maker := Action(action.stage, kind, action.microbatch)) in place
                ]
                assert len(computes) == 1
                assert (computes[0] < place[action]) == action.kind.is_send


@pytest.mark.parametrize("blocking", [False, True], ids=["waits at use", "blocks at transfer"])
@given(case=schedules_with_costs())
def test_no_deadlock_on_one_untagged_channel_per_pair(
    blocking: bool, case: tuple[Schedule, Costs]
) -> None:
    Rendezvous(order_transfers(*case), blocking).run()


@pytest.mark.parametrize("blocking", [False, True], ids=["waits at use", "blocks at transfer"])
@pytest.mark.parametrize("name", RUNNABLE)
def test_no_deadlock_of_the_families(name: str, blocking: bool) -> None:
    for ranks, microbatches in [(2, 1), (2, 5), (4, 3), (4, 9), (3, 5)]:
        schedule = example(name, num_ranks=ranks, num_microbatches=microbatches)
        for costs in (Costs(), Costs(1, 1), Costs(0, 0), Costs(1, 2, latency=7)):
            Rendezvous(order_transfers(schedule, costs), blocking).run()


@pytest.mark.parametrize("blocking", [False, True], ids=["waits at use", "blocks at transfer"])
def test_the_rendezvous_above_does_find_a_wrong_order(blocking: bool) -> None:
    with pytest.raises((Stuck, AssertionError)):
        Rendezvous(add_naively(one_f_one_b(2, 3)), blocking).run()
