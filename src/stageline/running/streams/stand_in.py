"""The default generator as code inside a step sees it: a position in its streams, not a state.

``torch.utils.checkpoint`` notes the state of the generator in forward and puts it back before it
computes again. All threads share that generator, so while a step runs another object stands in
``torch.random``. In a thread of the step:

    get_state()        where in the model this thread is, as bytes
    set_state(those)   the thread is there again: what is drawn next is what was drawn then
    manual_seed(s)     until the module that said so returns, draws come from a generator of seed s

All other threads reach the real generator.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stageline.capturing.streams.frames import Frame, Planned, Track, here, routes
from stageline.errors import PipeError
from stageline.torch_private import DisableTorchFunction, default_generator

_MAGIC = b"stageline stream"  # a state of torch's own is far longer, and begins otherwise
_HEAD = struct.Struct("<QQQ")  # the route or 0, the path, the number of draws
_CALL = struct.Struct("<QQ")  # a module, and how often it was called


class Seeded:
    """Generators that the code of a model has seeded itself."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._others: dict[torch.device, torch.Generator] = {}
        self.cpu = torch.Generator().manual_seed(seed)

    def on(self, device: torch.device) -> torch.Generator:
        if device.type == "cpu":
            return self.cpu
        if device not in self._others:
            self._others[device] = torch.Generator(device).manual_seed(self._seed)
        return self._others[device]


def token(frame: Frame) -> Tensor:
    """Return where a thread is, as a tensor of bytes."""
    route = id(frame.route) if isinstance(frame, Planned) else 0
    calls = b"".join(_CALL.pack(number, count) for number, count in frame.calls.items())
    data = _MAGIC + _HEAD.pack(route, frame.path, frame.draws) + calls
    with DisableTorchFunction():
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def frame_of(data: bytes) -> Frame:
    """Return the frame that a token stands for."""
    start = len(_MAGIC)
    route, path, draws = _HEAD.unpack_from(data, start)
    if route and route not in routes:
        raise PipeError(
            "the state that torch.set_rng_state was given is a position in a pipeline that is "
            "gone: keep states only for as long as the step that they come from"
        )
    frame = Planned(routes[route]) if route else Frame.at(path)
    frame.draws = draws
    frame.calls = dict(_CALL.iter_unpack(data[start + _HEAD.size :]))
    return frame


def _streaming() -> Track | None:
    track = here.track
    return None if track is None or track.base is None else track


class StandIn:
    """Stands where torch keeps its default generator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(default_generator, name)

    def get_state(self) -> Tensor:
        track = _streaming()
        if track is None:
            return default_generator.get_state()
        seeded = track.frame.seeded
        if seeded is not None:
            state: Tensor = seeded.cpu.get_state()
            return state
        return token(track.frame)

    def set_state(self, new_state: Tensor) -> Any:
        with DisableTorchFunction():
            data = bytes(new_state[: len(_MAGIC)].tolist())
            is_token = data == _MAGIC
            data = bytes(new_state.tolist()) if is_token else b""
        track = _streaming()
        if track is None:
            if is_token:
                raise PipeError(
                    "torch.set_rng_state was given the state of a thread inside a pipeline, but "
                    "this thread is in none: keep such a state within forward"
                )
            return default_generator.set_state(new_state)
        if is_token:
            track.frame = frame_of(data)
        else:
            self._own(track).cpu.set_state(new_state)
        return self

    def manual_seed(self, seed: int) -> Any:
        track = _streaming()
        if track is None:
            return default_generator.manual_seed(seed)
        return self._own(track, seed).cpu

    def seed(self) -> int:
        track = _streaming()
        return default_generator.seed() if track is None else int(self._own(track).cpu.seed())

    def initial_seed(self) -> int:
        track = _streaming()
        if track is None or track.frame.seeded is None:
            return int(default_generator.initial_seed())
        return int(track.frame.seeded.cpu.initial_seed())

    def _own(self, track: Track, seed: int = 0) -> Seeded:
        """Let what is drawn from here on come from a generator of the code's own."""
        if track.frame.seeded is None:
            track.frame = track.frame.copied()
            track.frame.seeded = Seeded(seed)
        else:  # whoever has seeded it before goes on with this one, as without streams
            track.frame.seeded.__init__(seed)
        own: Seeded = track.frame.seeded
        return own


class _Installed:
    """Puts the stand-in where torch looks for its generator, while somebody needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._stand_in = StandIn()

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            self._holders += 1
            vars(torch.random)["default_generator"] = self._stand_in
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    vars(torch.random)["default_generator"] = default_generator


_installed = _Installed()
standing_in = _installed.held
