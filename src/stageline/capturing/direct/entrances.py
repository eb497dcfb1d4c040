"""The layer into which all of a stage's input goes: the one place where it can be met.

    def forward(self, x):
        return torch.relu(self.first(x))      x is read once: ``self.first`` is its entrance

That nothing else happens to the input is read off the code, through as many modules as it takes.
"""

from __future__ import annotations

from typing import Protocol
from weakref import ReferenceType, ref

from torch import Tensor, nn

from stageline.torch_private import is_bare

Way = tuple[nn.Module, ...] | None
"""The modules through whose calls all of the input has come; None if some of it goes elsewhere."""


class Guest(Protocol):
    """An input on its way through the code.

    Attributes:
        tensor: The input.
    """

    tensor: Tensor

    def meet(self, input: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        """Return what the layer makes of it."""


class Entrance:
    """An ``nn.Linear``, and whom it waits for.

    Args:
        layer: The layer.
        way: The modules around it, through whose calls the input comes.

    Attributes:
        layer: The layer.
    """

    def __init__(self, layer: nn.Linear, way: tuple[nn.Module, ...] = ()) -> None:
        self.layer = layer
        self._way = way
        self._guest: ReferenceType[Guest] | None = None

    @property
    def is_bare(self) -> bool:
        """Whether nobody listens at the layer, nor on the way to it."""
        return all(map(is_bare, (*self._way, self.layer)))

    def expect(self, guest: Guest) -> None:
        """Let a guest be met when it comes, once; if it is gone before, nobody is."""
        self._guest = ref(guest)

    def met(self, input: object) -> Guest | None:
        """Return the guest that is expected, if this is its tensor."""
        if self._guest is None:
            return None
        guest = self._guest()
        if guest is None or guest.tensor is not input:
            return None
        self._guest = None
        return guest
