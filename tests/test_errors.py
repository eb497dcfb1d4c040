"""The exceptions: who must act, what they say, and that they survive a journey."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
from torch import nn

import stageline as sl
from stageline import errors


def step_error() -> sl.StepError:
    return sl.StepError(rank=1, stage=2, microbatch=0, action="2F0", hint="Call zero_grad().")


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (sl.ConfigError, ValueError),
        (sl.ScheduleError, ValueError),
        (sl.BatchError, ValueError),
        (sl.CaptureError, RuntimeError),
        (sl.GuardError, sl.CaptureError),
        (sl.StateError, RuntimeError),
        (sl.PipeError, RuntimeError),
        (sl.StepError, sl.PipeError),
        (sl.EdgeError, sl.PipeError),
        (sl.PeerError, sl.PipeError),
    ],
)
def test_the_class_says_who_must_act(error: type[Exception], base: type[Exception]) -> None:
    assert issubclass(error, base)
    assert issubclass(error, sl.StagelineError)


def test_the_tree_names_every_class_and_the_front_door_leads_to_it() -> None:
    tree = errors.__doc__
    assert tree is not None
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert name in tree
            assert getattr(sl, name) is value


def test_a_config_error_has_a_bullet_for_every_finding() -> None:
    error = sl.ConfigError("sl.Pipeline", ["split=0: wanted 1", "ranks=0: wanted 1"])
    assert error.findings == ("split=0: wanted 1", "ranks=0: wanted 1")
    assert str(error) == (
        "sl.Pipeline is not possible:\n  - split=0: wanted 1\n  - ranks=0: wanted 1"
    )


@pytest.mark.parametrize(
    ("wrong", "beginning"),
    [
        (lambda: sl.partition(3, split=2), "sl.partition is not possible:"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: sl.capture(3, ()), "sl.capture is not possible:"),  # type: ignore[arg-type]  # wrong on purpose
        (
            lambda: sl.Pipeline.from_stages([nn.ReLU()]).plan.to_json(),
            "a copy of this plan in JSON is",
        ),
    ],
)
def test_the_words_fit_a_pipeline_a_function_and_a_deed(
    wrong: Callable[[], object], beginning: str
) -> None:
    """Of sl.partition it said that it "cannot be built"."""
    with pytest.raises(sl.ConfigError) as caught:
        wrong()
    assert str(caught.value).startswith(beginning)


def test_a_step_error_says_where_and_why() -> None:
    error = step_error()
    assert (error.rank, error.stage, error.microbatch, error.action) == (1, 2, 0, "2F0")
    error.__cause__ = KeyError("missing")
    assert str(error) == (
        "rank 1, stage 2, microbatch 0: action 2F0 failed: KeyError: 'missing' Call zero_grad()."
    )


def test_a_step_error_without_hint_ends_with_its_cause() -> None:
    error = sl.StepError(rank=0, stage=0, microbatch=3, action="0B3")
    error.__cause__ = ValueError("no")
    assert str(error) == "rank 0, stage 0, microbatch 3: action 0B3 failed: ValueError: no"


@pytest.mark.parametrize(
    "error",
    [
        sl.ConfigError("sl.Pipeline", ["split=0: wanted 1"]),
        step_error(),
        sl.BatchError("no rows"),
        sl.StateError("does not fit"),
        sl.PeerError("gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: sl.StagelineError) -> None:
    """A pool of processes pickles what a worker raises; an error that cannot be is lost there."""
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)
