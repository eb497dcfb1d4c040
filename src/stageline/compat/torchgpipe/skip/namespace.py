"""``torchgpipe.skip.namespace``."""

from stageline.compat.fairscale.nn.pipe.skip.namespace import Namespace

__all__ = ["Namespace"]
