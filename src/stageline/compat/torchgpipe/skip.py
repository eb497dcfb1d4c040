"""``torchgpipe.skip``."""

from stageline.compat.fairscale.nn.pipe.skip import (
    Namespace,
    pop,
    skippable,
    stash,
    verify_skippables,
)

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
