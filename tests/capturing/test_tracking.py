"""Calls of modules, followed: paths that do not depend on what stands around the model."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from stageline.capturing.streams.frames import Frame, Planned, Route, here
from stageline.capturing.streams.keys import ROOT, inside, number_of
from stageline.capturing.streams.tracking import calls_followed, numbers_of, tracked
from stageline.torch_private import CALL


class Asking(nn.Module):
    """Notes where it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        assert here.track is not None
        self.paths.append(here.track.frame.path)
        return x


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Asking()

    def forward(self, x: Tensor) -> Tensor:
        made = nn.Sequential(nn.Identity(), self.inner)  # a module made on the way: transparent
        out: Tensor = made(self.inner(x))
        return out


def _path(*steps: tuple[str, int]) -> int:
    path = ROOT
    for name, index in steps:
        path = inside(path, number_of(name), index)
    return path


def test_a_path_is_names_and_counts() -> None:
    twice = Twice()
    model = nn.Sequential(twice, nn.Tanh(), twice)
    with calls_followed(), tracked(numbers_of(model), Frame.at(ROOT)):
        model(torch.ones(1))
    first, second = (("", 0), ("0", 0)), (("", 0), ("0", 1))
    assert twice.inner.paths == [
        _path(*first, ("0.inner", 0)),
        _path(*first, ("0.inner", 1)),
        _path(*second, ("0.inner", 0)),
        _path(*second, ("0.inner", 1)),
    ]


def test_a_stage_follows_its_route() -> None:
    twice = Twice()
    number = number_of("0")
    route = Route({(number, 0): 11, (number, 1): None}, draws=(5, 6), path=ROOT)
    frame = Planned(route)
    numbers = {id(twice): number, id(twice.inner): number_of("0.inner")}
    with calls_followed(), tracked(numbers, frame):
        twice(torch.ones(1))
        twice(torch.ones(1))  # without a frame: its call of inner is the stage's own
    assert twice.inner.paths[0] == inside(11, number_of("0.inner"), 0)
    assert twice.inner.paths[2] == inside(ROOT, number_of("0.inner"), 0)
    assert [frame.draw(), frame.draw()] == [5, 6]
    assert frame.draw() not in (5, 6)


def test_other_threads_are_not_followed_and_torch_is_put_back() -> None:
    original = getattr(nn.Module, CALL)
    model = Asking()
    seen = []
    with calls_followed(), calls_followed(), tracked({}, Frame.at(ROOT)):
        thread = threading.Thread(target=lambda: seen.append(here.track))
        thread.start()
        thread.join()
        assert getattr(nn.Module, CALL) is not original
        model(torch.ones(1))
    assert seen == [None]
    assert model.paths == [ROOT]
    assert getattr(nn.Module, CALL) is original
    assert here.track is None
