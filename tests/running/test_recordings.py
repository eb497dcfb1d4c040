"""Which recording a microbatch follows: one choice for those that look alike, and never another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

import stageline as sl
from stageline.capturing.inputs import Arguments
from stageline.capturing.staged import StagedModel
from stageline.running.microbatches import Microbatches
from stageline.running.recordings import Chosen, Recordings
from stageline.torch_private import GetAttrKey, tree_flatten
from tests.capturing.test_recording_checked import WIDTH, Three, planned

Code = Callable[..., Any]


def signs(*wanted: int) -> Tensor:
    """Two rows for each sign."""
    rows = torch.arange(1.0, 2 * len(wanted) * WIDTH + 1).view(-1, WIDTH)
    return rows * torch.tensor(wanted).repeat_interleave(2)[:, None]


PLUS = signs(1, 1, 1, 1)
MIXED = signs(1, 1, -1, 1)


class Judged:
    """A container that torch can look into; what it says of itself goes by what is in it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.is_positive = bool(x.sum() > 0)


register_pytree_node(
    Judged,
    lambda judged: ([judged.x], judged.is_positive),
    lambda parts, _: Judged(*parts),
    flatten_with_keys_fn=lambda judged: ([(GetAttrKey("x"), judged.x)], judged.is_positive),
)


@dataclass(frozen=True)
class Case:
    """A model and a batch of four microbatches.

    Attributes:
        code: What the model does.
        args: The whole batch.
        num_asked: For how many microbatches recordings are asked.
        num_variants: How many recordings the microbatches follow.
        kwargs: The batch, by name.
    """

    code: Code
    args: tuple[Any, ...]
    num_asked: int
    num_variants: int = 1
    kwargs: dict[str, Any] = field(default_factory=dict)

    def batch(self) -> Microbatches:
        batch = Microbatches(self.args, self.kwargs, None, num_microbatches=4)
        batch.slice_ahead(inputs=True, targets=False)
        return batch

    def staged(self) -> StagedModel:
        """Return the model recorded on the first microbatch."""
        args, kwargs = self.batch().inputs(0)
        torch.manual_seed(0)
        staged = planned(Three(self.code), {"a": "end"}, args, kwargs).parts
        assert isinstance(staged, StagedModel)
        return staged


def scaled(condition: Callable[..., Any]) -> Code:
    """Return code that takes one of two ways."""
    return lambda self, x, *args, **kwargs: self.b(
        self.a(x) * (2 if condition(x, *args, **kwargs) else 3)
    )


CASES = {
    "decides nothing": Case(lambda self, x: self.b(self.a(x)), (PLUS,), 1),
    "a size": Case(scaled(lambda x: x.shape[1] > 2), (PLUS,), 1),
    "a size computed with": Case(scaled(lambda x: (x.numel() // len(x)) % 2), (PLUS,), 1),
    "a stride": Case(scaled(lambda x: x.stride()[0] > 1), (PLUS,), 1),
    "whether contiguous": Case(scaled(lambda x: x.is_contiguous()), (PLUS.T.contiguous().T,), 1),
    "the mode": Case(lambda self, x: self.b(self.a(x) * (1 + self.training)), (PLUS,), 1),
    "a number": Case(scaled(lambda x, n: n > 2), (PLUS, 3), 1),
    "a flag and a word": Case(
        scaled(lambda x, flag, word: flag and word == "a"), (PLUS, True), 1, 1, {"word": "a"}
    ),
    "a value": Case(scaled(lambda x: x.sum() > 0), (MIXED,), 4, 2),
    "a value that is the same": Case(scaled(lambda x: x.sum() > 0), (PLUS,), 4),
    "a value of a sum": Case(scaled(lambda x: (x + x.shape[0]).sum() > 0), (MIXED,), 4, 2),
    "a value and a size": Case(
        scaled(lambda x: x.shape[1] > 2 and bool((x > 0).all())), (MIXED,), 4, 2
    ),
    "a value of another argument": Case(
        scaled(lambda x, y: y[0] > 0), (PLUS,), 4, 2, {"y": MIXED[:, 0]}
    ),
    "a value that all get": Case(scaled(lambda x, y: y > 0), (PLUS, torch.tensor(1)), 4),
    "where it lies": Case(scaled(lambda x: x.storage_offset() > 0), (PLUS,), 4),
    "rows of the last": Case(scaled(lambda x: len(x) > 1), (PLUS[:7],), 2, 2),
    "rows that do not matter": Case(lambda self, x: self.b(self.a(x)), (PLUS[:7],), 2),
    "a list": Case(lambda self, parts: self.b(self.a(parts[0])), ([PLUS],), 4),
    "a container": Case(
        lambda self, judged: self.b(self.a(judged.x) * (2 if judged.is_positive else 3)),
        (Judged(MIXED),),
        4,
        2,
    ),
    "an object": Case(
        lambda self, x, judge: self.b(self.a(x)), (PLUS, sl.replicate(torch.device("cpu"))), 4
    ),
}


def count_asked(staged: StagedModel, monkeypatch: pytest.MonkeyPatch) -> list[Arguments]:
    """Note for which arguments recordings are asked."""
    asked: list[Arguments] = []
    choice = staged.choice

    def noted(arguments: Arguments) -> tuple[str, bool]:
        asked.append(arguments)
        return choice(arguments)

    monkeypatch.setattr(staged, "choice", noted)
    return asked


def chosen_alone(staged: StagedModel, batch: Microbatches) -> list[str]:
    """Return what each microbatch follows if nobody knows of the others."""
    with torch.enable_grad():
        return [staged.choose(*batch.inputs(index))[0] for index in range(batch.count)]


@pytest.mark.parametrize("name", CASES)
def test_microbatches_follow_what_they_would_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, batch = CASES[name], CASES[name].batch()
    staged = case.staged()
    asked = count_asked(staged, monkeypatch)
    found = Recordings(staged).choose(batch, builds_graph=True)
    assert [chosen.variant for chosen in found] == chosen_alone(case.staged(), batch)
    assert len({chosen.variant for chosen in found}) == case.num_variants
    assert len(asked) == case.num_asked
    assert_own_leaves(found, batch)
    again = Recordings(staged).choose(batch, builds_graph=True)
    assert [chosen.variant for chosen in again] == [chosen.variant for chosen in found]
    assert len(asked) == 2 * case.num_asked
    assert_own_leaves(again, batch)


def assert_own_leaves(found: list[Chosen], batch: Microbatches) -> None:
    assert len(found) == batch.count
    for index, chosen in enumerate(found):
        wanted = tree_flatten(batch.inputs(index))[0]
        assert len(chosen.leaves) == len(wanted)
        assert all(one is other for one, other in zip(chosen.leaves, wanted, strict=True))


def test_what_is_recorded_for_one_is_asked_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether all that look alike follow a new recording, only its own guards can say."""
    case = CASES["the mode"]
    staged, batch = case.staged(), case.batch()
    asked = count_asked(staged, monkeypatch)
    recordings = Recordings(staged)
    recordings.train(False)
    (name,) = {chosen.variant for chosen in recordings.choose(batch, builds_graph=True)}
    assert name != staged.variants[0].name
    assert len(asked) == 2


def test_a_recording_that_fails_by_a_value_makes_all_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is found goes by no value, but the one before it in the list does."""

    def forward(self: Three, x: Tensor, n: int) -> Any:
        if n > 2 or x.sum() > 0:
            return self.b(self.a(x))
        return self.b(self.a(x) * 2)

    case = Case(forward, (MIXED, 1), 4, 2)
    staged, batch = case.staged(), Case(forward, (MIXED, 3), 4).batch()
    recordings = Recordings(staged)
    recordings.choose(batch, builds_graph=True)  # records what is missing
    asked = count_asked(staged, monkeypatch)
    (name,) = {chosen.variant for chosen in recordings.choose(batch, builds_graph=True)}
    assert name != staged.variants[0].name
    assert len(asked) == 4


def test_a_choice_is_not_kept_for_the_next_call() -> None:
    model = Three(scaled(lambda x, n: n > 2))
    example = (PLUS[:2], 1)
    pipe = sl.Pipeline(model, example_args=example, split={"a": "end"}, num_microbatches=4)
    for number in (3, 1, 3, True, 2.5, 2):
        with torch.no_grad():
            wanted = torch.cat([model(part, number) for part in PLUS.split(2)])
            assert torch.equal(pipe(PLUS, number), wanted), number
    pipe.close()


def test_an_evaluation_follows_what_is_done_without_gradients() -> None:
    """Stages run without them then, whatever the caller has set."""
    model = Three(scaled(lambda x: torch.is_grad_enabled()))
    pipe = sl.Pipeline(model, example_args=(PLUS[:2],), split={"a": "end"}, num_microbatches=4)
    pipe.eval()
    found = pipe(PLUS)
    with torch.no_grad():
        assert torch.equal(found, torch.cat([model(part) for part in PLUS.split(2)]))
    assert not torch.equal(found, torch.cat([model(part) for part in PLUS.split(2)]))
    pipe.close()


@pytest.mark.parametrize("wants", [True, False])
def test_what_asks_for_a_gradient_is_recorded_so(
    wants: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = PLUS.clone().requires_grad_()
    case = Case(scaled(lambda x: x.requires_grad), (x,), 1)
    staged, batch = case.staged(), case.batch()
    without = staged.variants[0].name
    recordings = Recordings(staged)
    recordings.choose(batch, builds_graph=wants)  # records what is missing
    asked = count_asked(staged, monkeypatch)
    found = recordings.choose(batch, builds_graph=wants)
    assert len(asked) == 1
    assert [leaf.requires_grad for leaf in asked[0].leaves] == [wants]
    assert all((chosen.variant != without) is wants for chosen in found)
    assert_own_leaves(found, batch)
    assert not any(leaf.requires_grad for chosen in found for leaf in chosen.leaves)


def test_one_tensor_given_twice_is_no_two_tensors() -> None:
    whole = sl.replicate(PLUS)
    case = Case(scaled(lambda x, y, z: y is z), (PLUS, whole, whole), 1)
    staged = case.staged()
    recordings = Recordings(staged)
    (one,) = {chosen.variant for chosen in recordings.choose(case.batch(), builds_graph=True)}
    other = Case(case.code, (PLUS, whole, sl.replicate(PLUS.clone())), 1)
    (two,) = {chosen.variant for chosen in recordings.choose(other.batch(), builds_graph=True)}
    assert one != two


def test_what_another_rank_has_recorded_is_recorded_from_its_arguments() -> None:
    """Two copies of a model, as two processes have them; the second is given no batch."""
    case = CASES["a value"]
    mine, theirs = Recordings(case.staged()), Recordings(case.staged())
    batch = case.batch()
    chosen = mine.choose(batch, builds_graph=True)
    names = [each.variant for each in chosen]
    assert mine.added == [2]
    with pytest.raises(sl.PeerError, match="the model does something else on this rank"):
        theirs.check(names, {})
    for index in mine.added:
        theirs.record(*batch.inputs(index), [], builds_graph=True)
    theirs.check(names, {})
    assert mine.choose(batch, builds_graph=True) == chosen
    assert mine.added == []


def test_recordings_of_a_call_that_failed_are_forgotten() -> None:
    case = CASES["a value"]
    staged = case.staged()
    recordings, batch = Recordings(staged), case.batch()
    first, second = dict.fromkeys(
        each.variant for each in recordings.choose(batch, builds_graph=True)
    )
    recordings.forget()
    recordings.check([first], {})
    with pytest.raises(sl.PeerError):
        recordings.check([second], {})
    again = recordings.choose(batch, builds_graph=True)
    assert {each.variant for each in again} == {first, second}
    recordings.keep()
    recordings.forget()
    recordings.check([first, second], {})
