"""Models of the transformers library, unchanged: a sample of every model and every kind of input.

The whole product, and more models, are in test_zoo_full.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from stageline.testing import RankPool
from tests.models.further import FURTHER
from tests.models.kinds import KINDS, Kind, check_pipeline, check_plan
from tests.models.zoo import TWENTY, Entry

pytestmark = pytest.mark.usefixtures("one_thread")

SPLITS = (2, 3, 4)
KINDS_PER_MODEL = 1


@dataclass(frozen=True)
class Checkpointed:
    """A model of the zoo whose layers are computed again in backward."""

    entry: Entry
    reentrant: bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.entry, name)

    def build(self, *, dropout: bool = True) -> Any:
        model: Any = self.entry.build(dropout=dropout)
        model.gradient_checkpointing_enable({"use_reentrant": self.reentrant})
        return model


def sample() -> list[tuple[Entry, Kind, int]]:
    """Give every model some kinds in turn, so that all kinds and all splits have several models."""
    chosen, turn = [], 0
    for entry in TWENTY:
        fitting = [kind for kind in KINDS if kind.fits(entry)]
        for _ in range(KINDS_PER_MODEL):
            kind = fitting[turn % len(fitting)]
            chosen.append((entry, kind, SPLITS[turn % len(SPLITS)]))
            turn += 1
    return chosen


@pytest.mark.parametrize(
    ("entry", "kind", "split"),
    [pytest.param(*case, id=f"{case[0].name}-{case[1].name}-{case[2]}") for case in sample()],
)
def test_a_plan_gives_what_the_plain_model_gives(entry: Entry, kind: Kind, split: int) -> None:
    outcome = check_plan(entry, kind, split)
    assert outcome.is_right, outcome


@pytest.mark.parametrize(
    ("entry", "split"),
    [pytest.param(entry, SPLITS[i % 3], id=entry.name) for i, entry in enumerate(TWENTY)],
)
def test_a_pipeline_gives_what_the_plain_model_gives(entry: Entry, split: int) -> None:
    outcome = check_pipeline(entry, split)
    assert outcome.is_right, outcome


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_under_gradient_checkpointing_draw_the_same_masks_again(reentrant: bool) -> None:
    """Layers of transformers override __call__ for it, so a checkpoint begins in opened code."""
    (bert,) = (entry for entry in TWENTY if entry.name == "BERT")
    assert check_pipeline(Checkpointed(bert, reentrant), 3).verdict == "exact"


def test_the_sample_covers_all_kinds_and_splits() -> None:
    cases = sample()
    assert {kind.name for _, kind, _ in cases} == {kind.name for kind in KINDS}
    assert {split for _, _, split in cases} == set(SPLITS)
    assert {entry.name for entry, _, _ in cases} == {entry.name for entry in TWENTY}


def _in_processes(rank: int, name: str) -> str:
    (entry,) = (entry for entry in TWENTY if entry.name == name)
    outcome = check_pipeline(entry, 2, transport="process-group")
    return "" if outcome.is_right else str(outcome)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["GPT-2", pytest.param("T5", marks=pytest.mark.slow), "ViT"])
def test_processes_give_what_the_plain_model_gives(name: str, two_ranks: RankPool) -> None:
    assert two_ranks.run(_in_processes, name) == ["", ""]


def test_names_are_unique() -> None:
    names = [entry.name for entry in (*TWENTY, *FURTHER)]
    assert sorted(set(names)) == sorted(names)
