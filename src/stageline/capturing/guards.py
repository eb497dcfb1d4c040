"""What a recording relies on, checked at run time: the outcome of every decision of the code.

A guard stands in the graph as a call of one of these functions. One that depends on the inputs
alone is checked before anything runs and chooses the recording; every other one is checked where
its value is made. None lets a run follow the wrong branch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stageline.errors import GuardError


def check(value: Any, wanted: Any, where: str) -> None:
    """Raise unless a decision has the outcome that was recorded."""
    if value is wanted or (type(value) is type(wanted) and _is_equal(value, wanted)):
        return
    raise GuardError(
        f"{where}: the code decides by a value that was {wanted!r} when the model was recorded and "
        f"is {value!r} now, so it may take another way. Keep the decision inside a module that is "
        "not cut, or out of the model"
    )


def _is_equal(value: Any, wanted: Any) -> bool:
    if isinstance(value, float):  # nan is itself here, and 0.0 is not -0.0
        return repr(value) == repr(wanted)
    return bool(value == wanted)


def check_structure(value: Any, wanted: Any, where: str) -> None:
    """Raise unless a module returned a value of the recorded structure: lengths, keys, None."""
    if wanted == "Tensor" and isinstance(value, Tensor):  # by far the most common
        return
    found = structure(value)
    if found != wanted:
        raise GuardError(
            f"{where}: the module returned {found} and {wanted} when it was recorded, so the code "
            "after it may do something else"
        )


def structure(value: Any) -> Any:
    """Return what stays of a value without its numbers: nested types, keys, bools and None.

    Example:
        >>> structure((torch.zeros(2), None, {"a": 1}))
        ('tuple', 'Tensor', None, ('dict', ('a', 'int')))
    """
    if isinstance(value, Tensor):
        return "Tensor"
    if value is None:
        return None
    if type(value) in (str, bool):
        return (type(value).__name__, value)
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(structure(part) for part in value))
    if isinstance(value, dict):
        parts = ((str(key), structure(part)) for key, part in value.items())
        return (type(value).__name__, *parts)
    return type(value).__name__


def is_guard(target: Any) -> bool:
    """Whether a node that calls this is a guard."""
    return target in (check, check_structure)


def same_value(one: Any, other: Any) -> bool:
    """Whether two results are equal; nan equals nan, and dtype and shape count."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
            return False
        if torch.equal(one, other):
            return True  # without nan, which costs six passes over a model's output to see
        if one.is_floating_point() or one.is_complex():
            return bool(torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))) and bool(
                torch.equal(torch.isnan(one), torch.isnan(other))
            )
        return False
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (one != one and other != other)
    return type(one) is type(other) and bool(one == other)
