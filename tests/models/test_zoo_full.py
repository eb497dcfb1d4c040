"""Every model of the zoo with every kind of input and every split; and more models."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest

from tests.models.further import FURTHER
from tests.models.kinds import KINDS, Kind, check_pipeline, check_plan
from tests.models.zoo import TWENTY, Entry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    # WavLM passes masks of two types to torch, trained or piped.
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask"),
]

SPLITS = (2, 3, 4)
PIPED = [kind for kind in KINDS if kind.modes == (True, True)]


def fitting(entries: Iterable[Entry], kinds: Iterable[Kind]) -> pytest.MarkDecorator:
    """Parametrize with every entry and the kinds of input that it takes."""
    pairs = [
        pytest.param(entry, kind, id=f"{entry.name}-{kind.name}")
        for entry, kind in product(entries, kinds)
        if kind.fits(entry)
    ]
    return pytest.mark.parametrize(("entry", "kind"), pairs)


@pytest.mark.parametrize("split", SPLITS)
@fitting(TWENTY, KINDS)
def test_plans_of_the_twenty(entry: Entry, kind: Kind, split: int) -> None:
    outcome = check_plan(entry, kind, split)
    assert outcome.is_right, outcome


@fitting(TWENTY, PIPED)
def test_pipelines_of_the_twenty(entry: Entry, kind: Kind) -> None:
    outcome = check_pipeline(entry, 3, kind=kind)
    assert outcome.is_right, outcome


@fitting(FURTHER, KINDS)
def test_plans_of_further_models_are_right_or_refused(entry: Entry, kind: Kind) -> None:
    """docs/models.md lists what is refused; nothing may be wrong, nothing may crash."""
    outcome = check_plan(entry, kind, 3)
    assert outcome.is_right or outcome.verdict == "refused", outcome


@pytest.mark.parametrize("entry", FURTHER, ids=lambda entry: entry.name)
def test_pipelines_of_further_models_are_right_or_refused(entry: Entry) -> None:
    outcome = check_pipeline(entry, 3)
    assert outcome.is_right or outcome.verdict == "refused", outcome
