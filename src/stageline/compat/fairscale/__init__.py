"""FairScale's Pipe on stageline: change ``import fairscale`` and nothing else.

import stageline.compat.fairscale as fairscale

model = fairscale.nn.Pipe(model, balance=[2, 1])
"""

from stageline.compat.fairscale import nn
from stageline.compat.fairscale.nn.pipe import Pipe, is_checkpointing, is_recomputing
from stageline.compat.fairscale.nn.pipe.balance import balance_by_size, balance_by_time
from stageline.compat.fairscale.nn.pipe.batchnorm import DeferredBatchNorm
from stageline.compat.fairscale.nn.pipe.skip import (
    Namespace,
    pop,
    skippable,
    stash,
    verify_skippables,
)

__version__ = "0.4.13"  # the release whose names these are

__all__ = [
    "DeferredBatchNorm",
    "Namespace",
    "Pipe",
    "balance_by_size",
    "balance_by_time",
    "is_checkpointing",
    "is_recomputing",
    "nn",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]
