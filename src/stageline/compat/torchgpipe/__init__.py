"""torchgpipe's GPipe on stageline: change ``from torchgpipe import`` and nothing else.

from stageline.compat.torchgpipe import GPipe

model = GPipe(model, balance=[2, 1])
"""

from stageline.compat.fairscale.nn.pipe import is_checkpointing, is_recomputing
from stageline.compat.torchgpipe import balance, batchnorm, checkpoint, skip
from stageline.compat.torchgpipe.gpipe import GPipe

__all__ = [
    "GPipe",
    "balance",
    "batchnorm",
    "checkpoint",
    "is_checkpointing",
    "is_recomputing",
    "skip",
]
