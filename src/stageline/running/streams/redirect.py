"""Every draw of a thread from the generator of its key, instead of the one that all threads share.

    F.dropout, attention    torch's own operations one by one, with ``generator=``
    functions in Python     run as they are: they come to one of the others
    operations in C++       run under a dispatch mode that adds ``generator=`` to their parts
    everything else         passes

Which functions draw is listed (capturing/streams/functions.py). Should another one draw, the escape
check after the step finds the default generator moved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stageline.capturing.streams.frames import Track, here
from stageline.capturing.streams.functions import DRAWING, DROPOUTS
from stageline.capturing.streams.keys import key_of
from stageline.running.streams.silent import is_silent
from stageline.torch_private import (
    NESTED_BACKWARDS,
    OpOverload,
    TorchDispatchMode,
    attention_weights,
    backward_of,
    default_generator,
    is_composite,
    taken_apart,
    without_overrides,
)

_CPU = torch.device("cpu")
_PLAIN = (Tensor, nn.Parameter)
_FULL = (torch.float32, torch.float64)


class _Generators(threading.local):
    """The generators of this thread, one for each device; every draw seeds its own anew."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, torch.Generator] = {}


_generators = _Generators()


def _seeded(device: torch.device, key: int) -> torch.Generator:
    generator = _generators.by_device.get(device)
    if generator is None:
        generator = _generators.by_device[device] = torch.Generator(device)
    return generator.manual_seed(key)


class Draw:
    """One call of a drawing function: gives each of its operations a generator."""

    def __init__(self, track: Track) -> None:
        assert track.base is not None
        frame = track.frame
        self._base = track.base
        self._place = frame.draw()
        self._seeded = frame.seeded
        self._count = 0

    @property
    def is_seeded(self) -> bool:
        """Whether the code of the model has said which seed, and wants torch's own numbers."""
        return self._seeded is not None

    def generator(self, device: torch.device = _CPU) -> torch.Generator:
        if self._seeded is not None:
            generator: torch.Generator = self._seeded.on(device)
            return generator
        self._count += 1
        return _seeded(device, key_of(self._base, self._place, self._count))


class Redirect(TorchFunctionMode):
    """Sends the draws of the thread that enters it to the generators of their keys."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DRAWING:
            return _drawn(func, args, kwargs)
        if type(func) is not FunctionType:
            return func(*args, **kwargs)
        if func in NESTED_BACKWARDS:
            with self:  # a checkpoint inside a checkpoint computes again in there
                return backward_of(func, args, kwargs)
        if func.__module__.startswith("torch"):
            return func(*args, **kwargs)
        return _drawn(func, args, kwargs)  # somebody's own: nobody knows what is in it


REDIRECT = Redirect()  # it has no state, so one serves all threads


def _drawn(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    track = here.track
    if track is None or track.base is None:
        return func(*args, **kwargs)
    draw = Draw(track) if track.draw is None else track.draw
    if func in DROPOUTS:
        return _dropout(draw, func, args, kwargs)
    if is_silent(func, args, kwargs):
        return func(*args, **kwargs)
    if func is F.scaled_dot_product_attention:
        return _attention(draw, args, kwargs)
    if kwargs.get("generator") is default_generator:
        kwargs = {**kwargs, "generator": None}
    if type(func) is FunctionType and func.__globals__ is vars(F):
        return _inside(track, draw, func, args, kwargs)
    return _adding(draw, func, args, kwargs)


def _inside(track: Track, draw: Draw, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a function that is written in Python with the redirection on; all it draws is one draw.

    Under the dispatch mode it would cost ten microseconds for each of its operations.
    """
    before = track.draw
    track.draw = draw
    try:
        with REDIRECT:
            return without_overrides(func)(*args, **kwargs)
    finally:
        track.draw = before


def _dropout(draw: Draw, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do what torch does on the CPU, with a generator."""
    read = _read_dropout if func is F.dropout else _read_native
    given, p, training, inplace = read(*args, **kwargs)
    if not training or not 0.0 < p < 1.0 or not given.numel():
        return func(*args, **kwargs)
    if type(given) not in _PLAIN or given.is_meta:
        return _adding(draw, func, args, kwargs)
    keep = 1 - p
    noise = _ones_and_zeros(given, keep, draw).div_(keep)
    if inplace or func is torch.dropout_:
        return given.mul_(noise)
    return given * noise


def _ones_and_zeros(given: Tensor, chance: float, draw: Draw) -> Tensor:
    """Return a tensor like another one, in which each element is a one by this chance.

    ``bernoulli_`` draws a double for each on the CPU. A float is drawn in half the time, and says
    as well on which side of the chance it lies, to 24 bits.
    """
    noise, generator = torch.empty_like(given), draw.generator(given.device)
    if given.dtype is torch.float32 and given.is_cpu and not draw.is_seeded:
        return noise.uniform_(generator=generator).lt_(chance)
    return noise.bernoulli_(chance, generator=generator)


def _read_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool, bool]:
    return input, p, training, inplace


def _read_native(input: Tensor, p: float, train: bool) -> tuple[Tensor, float, bool, bool]:
    return input, p, train, False


def _attention(draw: Draw, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do what torch does on the CPU where it drops weights: two products, no fused kernel."""
    found = _read_attention(*args, **kwargs)
    tensors = (found.query, found.key, found.value)
    if (
        found.enable_gqa
        or torch.is_autocast_enabled("cpu")
        or not torch.backends.cuda.math_sdp_enabled()
        or any(type(t) is not Tensor or t.dtype not in _FULL or t.device != _CPU for t in tensors)
    ):
        return _adding(draw, F.scaled_dot_product_attention, args, kwargs)
    mask = found.mask
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=found.query.dtype).masked_fill_(~mask, float("-inf"))
    weights = attention_weights(found.query, found.key, mask, found.is_causal, found.scale)
    return _dropout(draw, F.dropout, (weights, found.p), {}) @ found.value


class _Attention(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def _read_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Attention:
    return _Attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _adding(draw: Draw, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with _Adding(draw):
        return func(*args, **kwargs)


class _Adding(TorchDispatchMode):
    """Adds ``generator=`` to every operation that takes one and was given none."""

    supports_higher_order_operators = True

    def __init__(self, draw: Draw) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._draw = draw

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        way = _ways.get(func)
        if way is None:
            way = _ways[func] = _way(func)
        if way is _as_it_is:
            return func(*args, **kwargs)
        if kwargs.get("generator") not in (None, default_generator):
            return func(*args, **kwargs)
        return way(self, func, args, kwargs)

    def with_generator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device = _device(args, kwargs)
        if device.type == "meta":
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "generator": self._draw.generator(device)})


_Way = Callable[[_Adding, Any, Any, dict[str, Any]], Any]
_ways: dict[Any, _Way] = {}  # what is to be done with each operation: found once


def _way(func: Any) -> _Way:
    if not isinstance(func, OpOverload):
        return _as_it_is
    if _takes_generator(func):
        return _Adding.with_generator
    twin = _twin(func)
    if twin is not None:
        return lambda mode, _, args, kwargs: mode.with_generator(twin, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags and is_composite(func):
        return _decomposed  # as it comes in inference mode, where nobody has taken it apart yet
    return _as_it_is


def _as_it_is(mode: _Adding, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _decomposed(mode: _Adding, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with mode:
        return taken_apart(func, args, kwargs)


def _names(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


def _takes_generator(func: Any) -> bool:
    return "generator" in _names(func)


def _twin(func: Any) -> Any:
    """Return the operation of the same name that takes a generator besides, if there is one."""
    packet = func._overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        if _takes_generator(other) and [n for n in _names(other) if n != "generator"] == _names(
            func
        ):
            return other
    return None


def _device(args: Any, kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device
    device = kwargs.get("device")
    return _CPU if device is None else torch.device(device)
