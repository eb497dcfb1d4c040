"""FairScale's Pipe on stageline: change ``import fairscale`` and nothing else.

import stageline.compat.fairscale as fairscale

model = fairscale.nn.Pipe(model, balance=[2, 1])
"""

from stageline.compat.fairscale import nn
from stageline.compat.fairscale.nn.pipe import Pipe, is_checkpointing, is_recomputing

__all__ = ["Pipe", "is_checkpointing", "is_recomputing", "nn"]
