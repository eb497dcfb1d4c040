"""Which skip tensors cross from one partition to the next.

partition 0           partition 1        partition 2
stash a, stash b ──▶ a, b ──▶ pop b ──▶ a ──▶ pop a
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from stageline.compat.fairscale.nn.pipe.skip.carrying import SkipKey
from stageline.compat.fairscale.nn.pipe.skip.skippable import Skippable


def crossing(partitions: Sequence[Iterable[nn.Module]]) -> list[list[SkipKey]]:
    """Return the skip tensors that leave each partition for a later one, in a fixed order.

    Args:
        partitions: The layers of each; they have passed ``verify_skippables``.
    """
    stashed: dict[SkipKey, int] = {}
    leaving: list[list[SkipKey]] = [[] for _ in partitions]
    for index, partition in enumerate(partitions):
        for layer in partition:
            if isinstance(layer, Skippable):
                for key in layer.poppable():
                    for passed in leaving[stashed.pop(key) : index]:
                        passed.append(key)
                stashed.update((key, index) for key in layer.stashable())
    return leaving
