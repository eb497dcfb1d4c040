"""What a rank was given for a call, in a form that ranks can compare.

Names, shapes and dtypes of all leaves go along with every call; a sample of their values with the
first calls, and with one in fifty later on.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from stageline.running.control.agreement import (
    CONTENTS,
    DRAWS,
    LEAVES,
    OUTPUTS,
    ROWS,
    SEED,
    STEP,
    Facts,
)
from stageline.running.microbatches import Replicated
from stageline.torch_private import leaf_names, tree_flatten

_ALWAYS, _EVERY = 3, 50  # the first calls, then one in so many
_SAMPLE = 1024  # values of a tensor that are compared
_SHOWN = 3
_NUMPY = (torch.float32, torch.float64, torch.int64)
_MADE_UP = 1 << 32


def facts_of(
    rows: int | None,
    leaves: Iterable[tuple[str, Any]],
    *,
    call: int,
    step: int,
    draws: bool,
    outputs: bool | None = None,
) -> Facts:
    """Return what the ranks must agree on.

    Args:
        rows: How many rows the batch has; None if this rank was given no tensor.
        leaves: All that it was given, with names.
        call: The number of the call.
        step: How many steps are complete.
        draws: Whether something draws random numbers here.
        outputs: Whether outputs are kept; None if they stay on one rank, which then decides.
    """
    leaves = [(name, leaf) for name, leaf in leaves if leaf is not None]
    facts: dict[str, Any] = {ROWS: rows, SEED: told_seed(), DRAWS: draws, STEP: step}
    if outputs is not None:
        facts[OUTPUTS] = outputs
    if not leaves:
        return facts
    facts[LEAVES] = {name: _told(leaf) for name, leaf in leaves}
    if call <= _ALWAYS or call % _EVERY == 0:
        facts[CONTENTS] = {n: _content(leaf) for n, leaf in leaves if isinstance(leaf, Tensor)}
    return facts


def named_leaves(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any
) -> list[tuple[str, Any]]:
    """Return all leaves of what a call was given that has no rows, with their names.

    Example:
        >>> named_leaves((None, 2.5), {}, None)
        [('args[0]', None), ('args[1]', 2.5), ('target', None)]
    """
    return [
        (name, leaf.value if isinstance(leaf, Replicated) else leaf)
        for root, tree in (("args", args), ("kwargs", kwargs), ("target", target))
        for name, leaf in zip(leaf_names(tree, root=root), tree_flatten(tree)[0], strict=True)
    ]


def told_seed() -> int | None:
    """Return the seed that the user has set; None if torch has made one up.

    A made-up seed has 64 random bits; nobody types such a number.
    """
    seed = torch.initial_seed()
    return seed if seed < _MADE_UP else None


def _told(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, (bool, int, float, str)) else type(leaf).__name__


def _content(leaf: Tensor) -> str:
    """Return the first values of a leaf and a checksum over a sample of all."""
    if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_meta or not leaf.numel():
        return "not compared"
    first = leaf.detach().reshape(-1)[:_SHOWN].tolist()
    shown = ", ".join(f"{value:.6g}" for value in first)
    return f"[{shown}, ...] (checksum {checksum(leaf):08x})"


def checksum(tensor: Tensor) -> int:
    """Return a checksum over a sample of a tensor's values.

    Example:
        >>> checksum(torch.zeros(3)) == checksum(torch.zeros(3)), checksum(torch.ones(3)) == 0
        (True, False)
    """
    apart = max(1, tensor.numel() // _SAMPLE)
    if tensor.is_cpu and tensor.dtype in _NUMPY:  # whose own operations are much shorter
        return crc32(tensor.detach().resolve_neg().numpy().reshape(-1)[::apart].tobytes())
    some = tensor.detach().reshape(-1)[::apart].cpu().resolve_conj().resolve_neg()
    return crc32(some.contiguous().view(torch.uint8).numpy().tobytes())


class Checksum:
    """The checksum of one tensor, again and again: where its sample lies is looked up once.

    Example:
        >>> ones = torch.ones(3)
        >>> Checksum(ones)() == checksum(ones)
        True
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._address = 0
        self._sample: Any = None

    def __call__(self) -> int:
        tensor = self._tensor
        is_there = tensor.data_ptr() == self._address and tensor.is_contiguous()
        if self._sample is None or not is_there:  # as `p.data = ...` makes it
            self._sample, self._address = _sample_in_place(tensor), tensor.data_ptr()
        return checksum(tensor) if self._sample is None else crc32(self._sample.tobytes())


def _sample_in_place(tensor: Tensor) -> Any:
    """Return the sample of a tensor as an array over its memory; None if there is no such array."""
    is_plain = tensor.is_cpu and tensor.dtype in _NUMPY and tensor.is_contiguous()
    if not is_plain or tensor.is_neg() or not tensor.numel():
        return None
    return tensor.detach().numpy().reshape(-1)[:: max(1, tensor.numel() // _SAMPLE)]


def number_to_json(number: Tensor) -> str:
    """Return a tensor of a few elements as JSON, to the last bit."""
    plain = number.detach().cpu().contiguous()
    dtype = str(number.dtype).removeprefix("torch.")
    content = ctypes.string_at(plain.data_ptr(), plain.nbytes).hex()
    return json.dumps([dtype, list(number.shape), content])


def number_from_json(text: str) -> Tensor:
    """Return what ``number_to_json`` has told.

    Example:
        >>> number_from_json(number_to_json(torch.tensor(0.1)))
        tensor(0.1000)
    """
    dtype, shape, content = json.loads(text)
    number = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    ctypes.memmove(number.data_ptr(), bytes.fromhex(content), number.nbytes)
    return number
