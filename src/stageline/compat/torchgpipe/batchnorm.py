"""``torchgpipe.batchnorm``."""

from stageline.compat.fairscale.nn.pipe.batchnorm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
