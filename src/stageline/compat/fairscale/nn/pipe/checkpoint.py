"""Tells a layer which run it is in: one whose activations are dropped, or the one after it."""

from stageline.running.recompute import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
