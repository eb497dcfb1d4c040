"""Split points: where the stages of a model end."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch import nn

from stageline.capturing.marks import CutPoint

_POINTS = "pippy_split_points"  # an attribute of an annotated model
_SIDES = {"BEGINNING": "begin", "END": "end"}


class SplitPoint(Enum):
    """On which side of each call of a module a stage ends."""

    BEGINNING = 1
    END = 2


class PipeSplitWrapper:
    """Where PiPPy 0.1 and 0.2 had SplitPoint."""

    SplitPoint = SplitPoint


def pipe_split() -> None:
    """End a stage here; written in ``forward``. Outside of a pipe it does nothing."""
    CutPoint()(None)


def annotate_split_points(mod: nn.Module, spec: Mapping[str, Any]) -> None:
    """Say where stages end: before or after each call of a module.

    The model computes as before. ``pipeline`` and ``Pipe.from_tracing`` read the annotation.

    Example:
        >>> import torch
        >>> from stageline.compat.pippy import Pipe
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> annotate_split_points(model, {"1": SplitPoint.END})
        >>> Pipe.from_tracing(model, 2, example_args=(torch.zeros(4, 4),)).num_stages
        2

    Args:
        mod: The model.
        spec: ``{"layers.4": SplitPoint.BEGINNING}``.

    Raises:
        AttributeError: The model has no such module.
        ValueError: A value is no SplitPoint.
    """
    setattr(mod, _POINTS, sides_of(mod, spec))


def sides_of(model: nn.Module, spec: Mapping[str, Any]) -> dict[str, str]:
    """Return on which side of each module stages end: by a spec, and where it is annotated."""
    return {**getattr(model, _POINTS, {}), **_checked(model, spec)}


def _checked(model: nn.Module, spec: Mapping[str, Any]) -> dict[str, str]:
    """Return a spec in the words of ``sl.partition``: begin or end."""
    sides = {}
    for name, point in spec.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            if not _has_module(model, path):
                raise AttributeError(
                    f"Specified target {name} referenced nonexistent module {path}"
                )
        if getattr(point, "name", None) not in _SIDES:
            raise ValueError(
                f"Unknown split point type. {name!r}: wanted SplitPoint.BEGINNING or "
                f"SplitPoint.END, got {point!r}"
            )
        sides[name] = _SIDES[point.name]
    return sides


def _has_module(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True
