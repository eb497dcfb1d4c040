"""Calls of modules followed, in all threads that are inside a model, for as long as one is."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn

from stageline.capturing.naming import named_everywhere
from stageline.capturing.streams.frames import Frame, Track, here
from stageline.capturing.streams.keys import number_of
from stageline.torch_private import CALL

FOLLOWS = "stageline_follows"
"""The attribute of a method that does what another one does, and looks on."""


def numbers_of(model: nn.Module) -> dict[int, int]:
    """Return the number of every module of a model, by identity: it stands for its first name."""
    return {id(module): number_of(name) for name, module in named_everywhere(model).items()}


def numbers_of_copy(
    numbers: Mapping[int, int], given: nn.Module, made: nn.Module
) -> dict[int, int]:
    """Return the numbers of the modules in a copy: those of the modules they are copies of."""
    pairs = zip(named_everywhere(given).values(), named_everywhere(made).values(), strict=True)
    return {id(copy): numbers[id(own)] for own, copy in pairs if id(own) in numbers}


@contextmanager
def tracked(numbers: Mapping[int, int], frame: Frame, base: int | None = None) -> Iterator[Track]:
    """Follow this thread's calls of modules, beginning in a frame; see ``calls_followed``."""
    before, track = here.track, Track(numbers, frame, base)
    here.track = track
    try:
        yield track
    finally:
        here.track = before


class _Following:
    """Replaces the method behind every call of a module, while somebody needs it.

    Not ``__call__`` itself: setting that takes a microsecond for every five classes of modules.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._original: Any = None

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            if not self._holders:
                self._original = getattr(nn.Module, CALL)
                setattr(nn.Module, CALL, _followed(self._original))
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    setattr(nn.Module, CALL, self._original)
                    self._original = None


def _followed(original: Any) -> Any:
    # Runs for every call of a module in the process: no call that can be avoided.
    @wraps(original)
    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        track = here.track
        if track is None:
            return original(module, *args, **kwargs)
        number = track.numbers.get(id(module))
        if number is None:  # no part of the model: what happens inside is its caller's doing
            return original(module, *args, **kwargs)
        frame = track.frame
        child = frame.child(number)
        if child is None:
            return original(module, *args, **kwargs)
        track.frame = child
        try:
            return original(module, *args, **kwargs)
        finally:
            track.frame = frame

    setattr(call, FOLLOWS, original)
    return call


def original_call() -> Any:
    """Return what every call of a module goes through, as it is when nobody follows it."""
    call = getattr(nn.Module, CALL)
    while hasattr(call, FOLLOWS):
        call = getattr(call, FOLLOWS)
    return call


_following = _Following()  # the class belongs to the whole process, and so does what was done to it
calls_followed = _following.held
"""A context in which calls of modules are followed, in every thread that has a track."""
