"""Every model of the zoo with every kind of input and every split; and more models."""

from __future__ import annotations

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


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("entry", TWENTY, ids=lambda entry: entry.name)
def test_plans_of_the_twenty(entry: Entry, kind: Kind, split: int) -> None:
    if not kind.fits(entry):
        pytest.skip(f"{entry.name} takes no such input")
    outcome = check_plan(entry, kind, split)
    assert outcome.is_right, outcome


@pytest.mark.parametrize("kind", PIPED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("entry", TWENTY, ids=lambda entry: entry.name)
def test_pipelines_of_the_twenty(entry: Entry, kind: Kind) -> None:
    if not kind.fits(entry):
        pytest.skip(f"{entry.name} takes no such input")
    outcome = check_pipeline(entry, 3, kind=kind)
    assert outcome.is_right, outcome


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("entry", FURTHER, ids=lambda entry: entry.name)
def test_plans_of_further_models_are_right_or_refused(entry: Entry, kind: Kind) -> None:
    """docs/models.md lists what is refused; nothing may be wrong, nothing may crash."""
    if not kind.fits(entry):
        pytest.skip(f"{entry.name} takes no such input")
    outcome = check_plan(entry, kind, 3)
    assert outcome.is_right or outcome.verdict == "refused", outcome


@pytest.mark.parametrize("entry", FURTHER, ids=lambda entry: entry.name)
def test_pipelines_of_further_models_are_right_or_refused(entry: Entry) -> None:
    outcome = check_pipeline(entry, 3)
    assert outcome.is_right or outcome.verdict == "refused", outcome
