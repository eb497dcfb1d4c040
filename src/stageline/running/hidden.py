"""Tensors inside objects that torch's pytrees cannot open: found, so that they can be refused.

Such a tensor would go unsplit to every microbatch, or take its graph across a cut unseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_DEPTH = 4
_PLAIN = (type(None), bool, int, float, str, bytes, complex)


def find_hidden_tensor(value: Any) -> str | None:
    """Return where inside an object a tensor lies; None if there is none, or it may stay there.

    Example:
        >>> import torch
        >>> class Box:
        ...     def __init__(self, tensor): self.content = [tensor]
        >>> find_hidden_tensor(Box(torch.zeros(1)))
        '.content[0]'
        >>> find_hidden_tensor("text") is None
        True
    """
    # A module is no value: its parameters are found, and checked, as parameters.
    if type(value) in _PLAIN or isinstance(value, (nn.Module, type)):
        return None
    return _search(value, _DEPTH)


def _search(value: Any, depth: int) -> str | None:
    if isinstance(value, Tensor):
        return ""
    if depth == 0 or type(value) in _PLAIN or isinstance(value, (nn.Module, type)):
        return None
    for name, part in _parts(value):
        found = _search(part, depth - 1)
        if found is not None:
            return name + found
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from (("{...}", part) for part in value)
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
        slots = getattr(type(value), "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)
