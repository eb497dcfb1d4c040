"""The key of a draw: names, calls and counts mixed into one whole number.

    path     model ──▶ encoder, first call ──▶ dropout, second call      64 bits
    place    the path, and how many draws came before there
    base     seed, kind of call, step, microbatch
    key      base and place: what a generator is seeded with             32 bits

torch's CPU generator keeps the low 32 bits of a seed, so everything must have reached them.
"""

from __future__ import annotations

from hashlib import blake2b

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
ROOT = 0x5741_47E1_1A5E_0001
"""The path of whoever calls the model."""


def mix(value: int, other: int) -> int:
    """Return 64 bits that depend on all bits of both numbers (the mixer of splitmix64).

    Example:
        >>> mix(1, 2) == mix(1, 2), mix(1, 2) == mix(2, 1)
        (True, False)
    """
    x = (value + (other + 1) * _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def number_of(name: str) -> int:
    """Return a name as a number, the same one in every process."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


def inside(path: int, number: int, index: int) -> int:
    """Return the path of a call that the code at a path makes."""
    return mix(path ^ number, index)


def base_of(seed: int, kind: int, step: int, microbatch: int) -> int:
    """Return what all draws of one microbatch of one step have in common."""
    return mix(mix(mix(mix(seed & _MASK, kind), step), microbatch), 0)


def key_of(base: int, place: int, index: int) -> int:
    """Return the seed of the generator for one of the operations of a draw.

    Example:
        >>> base = base_of(seed=0, kind=0, step=0, microbatch=0)
        >>> keys = {key_of(base, mix(ROOT, draw), 0) for draw in range(1000)}
        >>> len(keys), max(keys) < 2**32
        (1000, True)
    """
    return mix(base ^ place, index) & 0xFFFFFFFF


MODEL = inside(ROOT, number_of(""), 0)
"""The path of the model's own forward."""
