"""``torchgpipe.balance``."""

from stageline.compat.fairscale.nn.pipe.balance import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
