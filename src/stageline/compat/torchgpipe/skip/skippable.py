"""``torchgpipe.skip.skippable``."""

from stageline.compat.fairscale.nn.pipe.skip.skippable import (
    Skippable,
    pop,
    skippable,
    stash,
    verify_skippables,
)

__all__ = ["Skippable", "pop", "skippable", "stash", "verify_skippables"]
