"""``fairscale.nn``."""

from stageline.compat.fairscale.nn import pipe
from stageline.compat.fairscale.nn.pipe import Pipe

__all__ = ["Pipe", "pipe"]
