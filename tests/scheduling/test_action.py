"""One action and its text form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.errors import ScheduleError
from stageline.scheduling import Action, Kind

TEXTS = {
    "2F0": Action(2, Kind.FORWARD, 0),
    "0B11": Action(0, Kind.BACKWARD, 11),
    "1I3": Action(1, Kind.INPUT_GRADIENT, 3),
    "1W3": Action(1, Kind.WEIGHT_GRADIENT, 3),
    "1R2": Action(1, Kind.RECOMPUTE, 2),
    "0F3>1": Action(0, Kind.SEND_FORWARD, 3, peer=1),
    "1F3<0": Action(1, Kind.RECEIVE_FORWARD, 3, peer=0),
    "1B3>0": Action(1, Kind.SEND_BACKWARD, 3, peer=0),
    "0B3<1": Action(0, Kind.RECEIVE_BACKWARD, 3, peer=1),
    "2REDUCE": Action(2, Kind.REDUCE, 0),
}


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from(Kind))
    number = st.integers(0, 2**31 - 1)
    return Action(
        stage=draw(number),
        kind=kind,
        microbatch=0 if kind is Kind.REDUCE else draw(number),
        peer=draw(number) if kind.is_transfer else None,
    )


@pytest.mark.parametrize(("text", "action"), TEXTS.items())
def test_text_form_of_each_kind(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


def test_every_kind_has_an_example_above() -> None:
    assert {action.kind for action in TEXTS.values()} == set(Kind)


@given(actions())
def test_text_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "token", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0>", "2F0<x", "2REDUCE0", "2F0 ", "٢F0"]
)
def test_what_is_no_action_is_refused_with_what_was_wanted(token: str) -> None:
    with pytest.raises(ScheduleError, match=r"is not an action such as 2F0"):
        Action.parse(token)


def test_only_f_and_b_travel() -> None:
    with pytest.raises(ScheduleError, match="'1W3>0': a transfer carries F or B, not W"):
        Action.parse("1W3>0")


def test_numbers_have_32_bits() -> None:
    assert Action.parse("0F2147483647").microbatch == 2147483647
    with pytest.raises(ScheduleError, match="may not exceed 2147483647"):
        Action.parse("0F2147483648")


@pytest.mark.parametrize(
    ("stage", "kind", "microbatch", "peer", "message"),
    [
        (-1, Kind.FORWARD, 0, None, "lie between 0 and"),
        (0, Kind.FORWARD, 2**31, None, "lie between 0 and"),
        (0, Kind.FORWARD, 0, 1, "names its peer"),
        (0, Kind.SEND_FORWARD, 0, None, "names its peer"),
        (0, Kind.REDUCE, 1, None, "give it microbatch 0"),
    ],
)
def test_what_cannot_be_written_down_cannot_be_built(
    stage: int, kind: Kind, microbatch: int, peer: int | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        Action(stage, kind, microbatch, peer)


def test_kinds_fall_into_compute_sends_receives_and_reduction() -> None:
    compute = {kind for kind in Kind if kind.is_compute}
    sends = {kind for kind in Kind if kind.is_send}
    receives = {kind for kind in Kind if kind.is_receive}
    assert "".join(kind.letter for kind in sorted(compute)) == "FBIWR"
    assert sends == {Kind.SEND_FORWARD, Kind.SEND_BACKWARD}
    assert receives == {Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD}
    assert sends | receives == {kind for kind in Kind if kind.is_transfer}
    assert set(Kind) - compute - sends - receives == {Kind.REDUCE}
