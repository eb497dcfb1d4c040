"""A capture runs the model three times: a look, the recording, and its replay."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import stageline as sl
from stageline.capturing.earlier import Earlier


class Counted(nn.Module):
    """Notes the rows of each call."""

    rows: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        Counted.rows.append(len(x))
        return self.layers(x)  # type: ignore[no-any-return]  # torch has no types here


@pytest.fixture(autouse=True)
def _no_rows() -> None:
    Counted.rows = []


def test_the_look_has_one_row_more_and_is_what_the_replay_is_compared_with() -> None:
    graph = sl.capture(Counted(), (torch.randn(2, 4),))
    assert Counted.rows == [3, 2]  # the replay calls the layers, not this forward
    assert len(graph.cuts) + 1 == 3


def test_with_frozen_parameters_the_model_is_run_once_more() -> None:
    """A look unfreezes them to see what feeds what, so its result says it has a gradient."""
    model = Counted().requires_grad_(False)
    sl.capture(model, (torch.randn(2, 4),))
    assert Counted.rows == [3, 2, 3]


def test_one_row_is_looked_at_as_it_is() -> None:
    sl.capture(Counted(), (torch.randn(1, 4),))
    assert Counted.rows[:2] == [1, 1]


class OnlyTwo(Counted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(2, 4))


def test_a_model_that_takes_no_other_size_is_looked_at_with_its_own() -> None:
    graph = sl.capture(OnlyTwo(), (torch.randn(2, 4),))
    assert len(graph.cuts) == 3  # before the first layer, too: the view is work


class OddAndEven(nn.Module):
    """Other layers for an odd batch."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = Counted()
        self.even = Counted()

    def forward(self, x: Tensor) -> Tensor:
        trunk = self.odd if x.shape[0] % 2 else self.even
        return trunk(x)  # type: ignore[no-any-return]  # torch has no types here


def test_cuts_lie_between_the_layers_of_the_example_though_one_row_more_takes_others() -> None:
    x = torch.randn(2, 4)
    model = OddAndEven()
    graph = sl.capture(model, (x,))
    assert "even.layers.0" in {call.path for call in graph.calls}
    assert len(graph.cuts) + 1 == 3


def test_a_wrong_example_raises_the_model_s_own_error() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        sl.capture(Counted(), (torch.randn(2, 5),))


TABLE = torch.arange(4.0)


class WithConstant(Counted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + TABLE)


@pytest.fixture
def frozen_by_somebody() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen_by_somebody")
def test_objects_that_somebody_froze_are_known_and_stay_frozen() -> None:
    """A server that forks freezes its objects. TABLE was taken for a tensor made unseen."""
    count = gc.get_freeze_count()
    x = torch.randn(2, 4)
    model = WithConstant()
    graph = sl.capture(model, (x,))
    assert 0 < gc.get_freeze_count() <= count
    assert torch.equal(graph.cut(()).run((x,), {}), model(x))


def test_what_was_there_before_is_told_from_what_is_new() -> None:
    before = torch.zeros(1)
    earlier = Earlier()
    try:
        after = torch.zeros(1)
        gc.collect()
        assert earlier.holds(before)
        assert earlier.holds(before)
        assert not earlier.holds(after)
        assert not earlier.holds(3)
    finally:
        earlier.forget()
    assert gc.get_freeze_count() == 0


def test_nothing_stays_frozen_after_a_failed_recording() -> None:
    class Odd(Counted):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = x
            return super().forward(x)

    with pytest.raises(sl.CaptureError):
        sl.capture(Odd(), (torch.randn(2, 4),))
    assert gc.get_freeze_count() == 0
