"""How long a described device would take for some operations: each by itself, nothing fused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from stageline.capturing.meter import bytes_of, flops_of
from stageline.partitioning.device import Device
from stageline.torch_private import OpOverload, TorchDispatchMode, storage_of, tree_flatten

_NANOSECONDS = 1e9
_SILENT = ("prim", "profiler")  # ask for a device, mark a region: nothing runs


class Counting(TorchDispatchMode):
    """Adds up what the operations inside take; a view takes nothing.

    An operation takes as long as its arithmetic or its memory traffic, whichever is longer.

    Args:
        device: What they would run on.
        state: Parameters: products with one of them are told from products of the same shape.

    Attributes:
        nanoseconds: The time of all.
        flops: The arithmetic of all.
        products: The operations with arithmetic, and how often each was run.
        used: What these were run on, by what they are.
    """

    def __init__(self, device: Device, state: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._device = device
        self._state = {storage_of(tensor) for tensor in state}
        self.nanoseconds = 0.0
        self.flops = 0
        self.products: Counter[Any] = Counter()
        self.used: list[tuple[Any, list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        silent = isinstance(func, OpOverload) and func.namespace in _SILENT
        if not silent and not getattr(func, "is_view", False):
            self._add(func, args, given, result)
        return result

    def _add(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        flops = flops_of(func, args, kwargs, result)
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        moved = (bytes_of(tensors) + bytes_of(result)) / self._device.bandwidth
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        computed = flops / self._device.speed(dtype)
        self.nanoseconds += _NANOSECONDS * (max(moved, computed) + self._device.overhead)
        self.flops += flops
        if flops:
            fixed = [storage_of(tensor) in self._state for tensor in tensors]
            what = (str(func), *(tuple(tensor.shape) for tensor in tensors), *fixed)
            self.products[what] += 1
            self.used.append((what, tensors))
