"""``fairscale.nn.pipe``: Pipe and what belongs to it."""

from stageline.compat.fairscale.nn.pipe import balance, batchnorm, checkpoint, skip
from stageline.compat.fairscale.nn.pipe.checkpoint import is_checkpointing, is_recomputing
from stageline.compat.fairscale.nn.pipe.pipe import Pipe

__all__ = [
    "Pipe",
    "balance",
    "batchnorm",
    "checkpoint",
    "is_checkpointing",
    "is_recomputing",
    "skip",
]
