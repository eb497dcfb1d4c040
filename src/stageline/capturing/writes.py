"""Parameters that a forward changes in place: copied just before, and put back afterwards.

Parameters are too big to copy beforehand, and hardly any model writes to them. Those that do (an
average kept by hand, a clamped weight) are caught at the operation that writes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stageline.capturing.values import leaves_of
from stageline.torch_private import (
    DisableTorchFunction,
    TorchDispatchMode,
    storage_of,
)


class KeptParameters(TorchDispatchMode):
    """While it is active, notes what is written to; ``restore`` undoes it.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> before = layer.weight.detach().clone()
        >>> kept = KeptParameters(layer)
        >>> with kept:
        ...     _ = layer.weight.data.mul_(0.5)
        >>> kept.restore()
        >>> torch.equal(layer.weight, before)
        True
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._parameters = {
            storage_of(parameter): parameter
            for parameter in model.parameters()
            if not is_lazy(parameter) and not parameter.is_meta
        }
        self._copies: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunction():
            if getattr(getattr(func, "_schema", None), "is_mutable", False):
                for leaf in leaves_of((args, kwargs)):
                    if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                        self._keep(storage_of(leaf))
            return func(*args, **(kwargs or {}))

    def _keep(self, storage: int) -> None:
        if storage in self._parameters and storage not in self._copies:
            self._copies[storage] = self._parameters[storage].detach().clone()

    def restore(self) -> None:
        """Put back what was changed."""
        with torch.no_grad():
            for storage, copy in self._copies.items():
                parameter = self._parameters[storage]
                if not torch.equal(parameter, copy):
                    parameter.data.copy_(copy)
