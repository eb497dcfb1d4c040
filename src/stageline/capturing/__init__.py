"""What is there? A model in, blocks out: the pieces between which it may be cut.

graph.py        positions, calls and marks: what every model that can be cut looks like
sequential.py   an ``nn.Sequential`` read as a chain of blocks
"""

from stageline.capturing.sequential import Block, Chain, capture_sequential

__all__ = ["Block", "Chain", "capture_sequential"]
