"""Models as users write them: every kind of input, plans and pipelines."""

from __future__ import annotations

import pytest

from tests.models.kinds import KINDS, Kind, check_pipeline, check_plan
from tests.models.local import LOCAL, Local

pytestmark = pytest.mark.usefixtures("one_thread")

# What the kinds for labels and masks would repeat.
REPEATED = ("no labels",)
CASES = [
    pytest.param(entry, kind, id=f"{entry.name}-{kind.name}")
    for entry in LOCAL
    for kind in KINDS
    if kind.fits(entry) and kind.name not in REPEATED
]


@pytest.mark.parametrize(("entry", "kind"), CASES)
def test_a_plan_gives_what_the_plain_model_gives(entry: Local, kind: Kind) -> None:
    outcome = check_plan(entry, kind, split=3)
    assert outcome.is_right, outcome


@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize("entry", LOCAL, ids=lambda entry: entry.name)
def test_a_pipeline_gives_what_the_plain_model_gives(entry: Local, split: int) -> None:
    outcome = check_pipeline(entry, split)
    assert outcome.is_right, outcome
