"""What each node of a recording costs, and whether it is random: read off torch's own operations.

Times are estimates for a nominal machine, good for comparing blocks with each other: arithmetic at
``FLOPS`` and memory traffic at ``BANDWIDTH``, the backward counted as twice the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from stageline.capturing.values import leaves_of
from stageline.torch_private import (
    CPU_ATTENTION,
    DisableTorchFunction,
    TorchDispatchMode,
)

FLOPS = 50e9
BANDWIDTH = 10e9
_BACKWARD = 2  # twice the forward: one product for the input's gradient, one for the weight's


@dataclass
class Reading:
    """What was spent since the last reset.

    Attributes:
        flops: Multiplications and additions of matrix products, convolutions and attention.
        moved: Bytes read and written.
        made: Bytes of results that are no views.
        is_random: Whether random numbers were drawn.
    """

    flops: int = 0
    moved: int = 0
    made: int = 0
    is_random: bool = False

    @property
    def time(self) -> int:
        """Nanoseconds of forward and backward on the nominal machine."""
        forward = self.flops / FLOPS + self.moved / BANDWIDTH
        return round(1e9 * (1 + _BACKWARD) * forward)


class Meter(TorchDispatchMode):
    """Counts while it is active; ``take`` returns what came together since the last time."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._reading = Reading()

    def take(self) -> Reading:
        reading, self._reading = self._reading, Reading()
        return reading

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunction():  # below autograd it is not the model's doing
            return self._measured(func, args, kwargs)

    def _measured(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        reading = self._reading
        reading.flops += flops_of(func, args, kwargs, result)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            reading.is_random = True
        if not getattr(func, "is_view", False):
            made = bytes_of(result)
            reading.made += made
            reading.moved += made + bytes_of((args, kwargs))
        return result


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape))


# Attention on the CPU, which torch's own counter leaves out.
_FURTHER: dict[Any, Callable[..., int]] = dict(
    zip(CPU_ATTENTION, (_attention, _attention_backward), strict=True)
)


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Return the operations of one call: products, convolutions and attention; else 0."""
    packet = getattr(func, "_overloadpacket", func)
    if packet in _FURTHER:
        return _FURTHER[packet](*args, **kwargs)
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def bytes_of(tree: Any) -> int:
    """Return the bytes of all tensors in some values."""
    return sum(
        leaf.numel() * leaf.element_size()
        for leaf in leaves_of(tree)
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided
    )
