"""torchgpipe's GPipe on stageline: change ``from torchgpipe import`` and nothing else.

from stageline.compat.torchgpipe import GPipe

model = GPipe(model, balance=[2, 1])
"""

from stageline.compat.torchgpipe import balance, batchnorm, checkpoint, skip
from stageline.compat.torchgpipe.balance import balance_by_size, balance_by_time
from stageline.compat.torchgpipe.batchnorm import DeferredBatchNorm
from stageline.compat.torchgpipe.checkpoint import is_checkpointing, is_recomputing
from stageline.compat.torchgpipe.gpipe import GPipe
from stageline.compat.torchgpipe.skip import (
    Namespace,
    pop,
    skippable,
    stash,
    verify_skippables,
)

__version__ = "0.0.7"  # the release whose names these are

__all__ = [
    "DeferredBatchNorm",
    "GPipe",
    "Namespace",
    "balance",
    "balance_by_size",
    "balance_by_time",
    "batchnorm",
    "checkpoint",
    "is_checkpointing",
    "is_recomputing",
    "pop",
    "skip",
    "skippable",
    "stash",
    "verify_skippables",
]
