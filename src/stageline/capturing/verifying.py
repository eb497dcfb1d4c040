"""A recording is believed only after it has given, replayed, what the plain model gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stageline.capturing.binding import is_cache
from stageline.capturing.guards import same_value
from stageline.capturing.inputs import Arguments
from stageline.capturing.recording import without_cache
from stageline.capturing.snapshot import preserved
from stageline.errors import CaptureError, GuardError, StagelineError
from stageline.torch_private import tree_flatten_with_path
from stageline.wording import a_kind

Replay = Callable[[list[Any]], Any]


def verify(
    model: nn.Module,
    replay: Replay,
    arguments: Arguments,
    *,
    grad: bool = True,
    wanted: tuple[Any] | None = None,
) -> bool:
    """Raise unless a replay gives what the model gives, on these arguments.

    Random numbers are drawn from the same state in both; the model is left as it was.

    Args:
        model: The plain model.
        replay: Takes the leaves of the arguments, and does what was recorded.
        arguments: What both are called with.
        grad: Whether gradients are enabled.
        wanted: What the model gives, if that is known; else it is called.

    Returns:
        Whether both gave something that could be compared.
    """
    tensors = (*model.parameters(), *model.buffers())
    if any(tensor.is_meta for tensor in tensors):
        return False  # nothing can be computed, so nothing can be compared
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        wanted = wanted or _plain(model, arguments)
        if wanted is None:
            return False
        with preserved(model):
            try:
                found = replay(arguments.copied().leaves)
            except GuardError:
                return False  # the code decides otherwise here: another recording, not a wrong one
            except StagelineError:
                raise
            except Exception as error:
                raise CaptureError(
                    f"{type(model).__name__} was recorded, but replaying it fails where the model "
                    f"itself does not: {type(error).__name__}: {error}. {_WAY_OUT}"
                ) from error
    differences = _differences(found, wanted)
    if differences:
        raise CaptureError(
            f"{type(model).__name__} was recorded, but replaying it gives something else than the "
            f"model itself: {differences}. {_WAY_OUT}"
        )
    return True


_WAY_OUT = (
    "Its code does something that cannot be seen (it keeps values between calls, draws random "
    "numbers elsewhere, or asks for the exact type of a number): move that code into a module "
    "that is not cut"
)


def _plain(model: nn.Module, arguments: Arguments) -> tuple[Any] | None:
    """Return what the model gives; None if it cannot take these arguments."""
    args, kwargs = arguments.copied().unpacked()
    with preserved(model):
        try:
            return (model(*args, **{**kwargs, **without_cache(model, kwargs)}),)
        except Exception:
            return None


def _differences(found: Any, wanted: Any) -> str:
    got = tree_flatten_with_path((found,))[0]
    flat = tree_flatten_with_path(wanted)[0]
    want: list[Any] = [(path, None if is_cache(leaf) else leaf) for path, leaf in flat]
    if len(got) != len(want):
        return f"{len(got)} values instead of {len(want)}"
    for (path, one), (_, other) in zip(got, want, strict=True):
        where = "".join(str(key) for key in path[1:]) or "the result"
        if isinstance(one, Tensor) != isinstance(other, Tensor):
            return f"{where} is {a_kind(one)} instead of {a_kind(other)}"
        if isinstance(one, Tensor) and not same_value(one.detach(), other.detach()):
            return f"{where} differs"
        if isinstance(one, Tensor) and one.requires_grad != other.requires_grad:
            return (
                f"{where} has lost its gradient" if other.requires_grad else f"{where} gained one"
            )
        if not isinstance(one, Tensor) and not _same(one, other):
            return f"{where} is {one!r} instead of {other!r}"
    return ""


def _same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    try:
        return same_value(one, other)
    except Exception:
        return True  # two objects that cannot be compared
