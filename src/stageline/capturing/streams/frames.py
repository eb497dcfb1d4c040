"""The call of a module that a thread is in: its path in the model, and how often it has drawn.

    Frame      code that runs in the module itself, as in the plain model
    Planned    code of a stage: it stands for modules that were opened, and knows from a route
               what their calls and draws are called in the plain model
    Logged     code that is being recorded: writes that route

A frame is made for every call of a module, so it is cheap; its path is computed when something
draws.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from stageline.capturing.streams.keys import ROOT, inside, mix, number_of


class Frame:
    """One call of a module.

    Attributes:
        calls: How often each module was called from here, by its number.
        draws: How often something was drawn here.
        seeded: A generator that the code has seeded itself; draws come from it, not from keys.
    """

    __slots__ = ("_index", "_number", "_parent", "_path", "calls", "draws", "seeded")

    def __init__(self, parent: Frame | None, number: int = 0, index: int = 0) -> None:
        self._parent = parent
        self._number = number
        self._index = index
        self._path: int | None = None
        self.calls: dict[int, int] = {}
        self.draws = 0
        self.seeded: Any = None if parent is None else parent.seeded

    @classmethod
    def at(cls, path: int) -> Frame:
        """Return a frame whose path is known."""
        frame = Frame(None)
        frame._path = path
        return frame

    @property
    def path(self) -> int:
        if self._path is None:
            parent = self._parent
            self._path = inside(ROOT if parent is None else parent.path, self._number, self._index)
        return self._path

    def child(self, number: int) -> Frame | None:
        """Return the frame of a call from here; None if the call has none of its own."""
        index = self.calls.get(number, 0)
        self.calls[number] = index + 1
        return Frame(self, number, index)

    def draw(self) -> int:
        """Return the place of the next draw."""
        index = self.draws
        self.draws = index + 1
        return mix(self.path, index)

    def copied(self) -> Frame:
        """Return a frame that stands where this one does now."""
        twin = Frame.at(self.path)
        twin.calls, twin.draws, twin.seeded = dict(self.calls), self.draws, self.seeded
        return twin


@dataclass(frozen=True, eq=False)
class Route:
    """What the calls and draws of a stage are called in the plain model.

    Attributes:
        calls: The path of the n-th call of a module by the stage; None if that call has no frame.
        draws: The places of what the stage itself draws, in order.
        path: Where draws and calls lie that are in no plan: those of a wrapper around the stage.
    """

    calls: Mapping[tuple[int, int], int | None] = field(default_factory=dict)
    draws: tuple[int, ...] = ()
    path: int = ROOT

    def __post_init__(self) -> None:
        routes[id(self)] = self


routes: WeakValueDictionary[int, Route] = WeakValueDictionary()  # what a token of a state names


class Planned(Frame):
    """The frame of a stage, whose code stands for several modules of the model."""

    __slots__ = ("route",)

    def __init__(self, route: Route) -> None:
        super().__init__(None)
        self._path = route.path
        self.route = route

    def child(self, number: int) -> Frame | None:
        index = self.calls.get(number, 0)
        self.calls[number] = index + 1
        path = self.route.calls.get((number, index), -1)
        if path is None:
            return None
        frame = Frame.at(path) if path >= 0 else Frame(self, number, index)
        frame.seeded = self.seeded
        return frame

    def draw(self) -> int:
        index = self.draws
        self.draws = index + 1
        planned = self.route.draws
        return planned[index] if index < len(planned) else mix(self.path, index)

    def copied(self) -> Planned:
        twin = Planned(self.route)
        twin.calls, twin.draws, twin.seeded = dict(self.calls), self.draws, self.seeded
        return twin


class RouteLog:
    """Collects what opened code calls and draws, node by node.

    Attributes:
        opened: The numbers of the opened modules.
    """

    def __init__(self, opened: frozenset[str]) -> None:
        self.opened = frozenset(map(number_of, opened))
        self._events: list[Event] = []

    def caller(self) -> Logged:
        """Return the frame of whoever calls the model."""
        frame = Logged(None, 0, 0, self)
        frame._path = ROOT
        return frame

    def note(self, event: Event) -> None:
        self._events.append(event)

    def take(self) -> tuple[Event, ...]:
        """Return what has happened since the last node."""
        events, self._events = self._events, []
        return tuple(events)


Event = tuple[int, int | None] | int  # a call: number and path; a draw: its place


class Logged(Frame):
    """The frame of an opened module, while it is recorded."""

    __slots__ = ("_log",)

    def __init__(self, parent: Frame | None, number: int, index: int, log: RouteLog) -> None:
        super().__init__(parent, number, index)
        self._log = log

    def child(self, number: int) -> Frame | None:
        index = self.calls.get(number, 0)
        self.calls[number] = index + 1
        if number in self._log.opened:
            return Logged(self, number, index, self._log)
        frame = Frame(self, number, index)
        self._log.note((number, frame.path))
        return frame

    def draw(self) -> int:
        place = super().draw()
        self._log.note(place)
        return place


def route_of(events: list[Event], path: int = ROOT) -> Route:
    """Return the route of a stage in which these things happen, in this order."""
    calls: dict[tuple[int, int], int | None] = {}
    counts: dict[int, int] = {}
    draws = []
    for event in events:
        if isinstance(event, int):
            draws.append(event)
            continue
        number, called = event
        index = counts[number] = counts.get(number, -1) + 1
        calls[number, index] = called
    return Route(calls, tuple(draws), path)


class Track:
    """What a thread is doing for a model.

    Attributes:
        numbers: The modules of the model, by identity.
        frame: The call that runs now.
        base: What the keys of this microbatch begin with; None while a model is recorded.
        draw: The draw that this thread is in, if one drawing function calls others.
    """

    __slots__ = ("base", "draw", "frame", "numbers")

    def __init__(self, numbers: Mapping[int, int], frame: Frame, base: int | None = None) -> None:
        self.numbers = numbers
        self.frame = frame
        self.base = base
        self.draw: Any = None


class _Here(threading.local):
    """What this thread follows; None: nothing."""

    track: Track | None = None


here = _Here()
