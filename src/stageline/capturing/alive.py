"""Which memory is alive: seen where operations make it, asked for later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from stageline.torch_private import TorchDispatchMode, tree_flatten


class Alive(TorchDispatchMode):
    """Sees all memory that operations make, and tells how much of it is alive.

    Example:
        >>> with Alive() as alive:
        ...     kept, dropped = torch.ones(3), torch.ones(5)
        >>> del dropped
        >>> alive.count([]), alive.count([kept])
        (12, 0)

    Args:
        known: Tensors that were there before and count as well.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._look(known)

    def _look(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                ref = StorageWeakRef(storage)
                self._seen[ref.cdata] = (ref, storage.nbytes())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._look(tree_flatten(result)[0])
        return result

    def count(self, but: Iterable[Tensor | None]) -> int:
        """Return the bytes that are alive, without those of some tensors."""
        others = {StorageWeakRef(t.untyped_storage()).cdata for t in but if t is not None}
        return sum(
            size
            for cdata, (ref, size) in self._seen.items()
            if cdata not in others and not ref.expired()
        )
