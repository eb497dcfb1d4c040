"""``torchgpipe.checkpoint``."""

from stageline.compat.fairscale.nn.pipe.checkpoint import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
