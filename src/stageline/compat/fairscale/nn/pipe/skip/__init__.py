"""Skip connections between layers of a Pipe."""

from stageline.compat.fairscale.nn.pipe.skip.namespace import Namespace
from stageline.compat.fairscale.nn.pipe.skip.skippable import (
    pop,
    skippable,
    stash,
    verify_skippables,
)

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
