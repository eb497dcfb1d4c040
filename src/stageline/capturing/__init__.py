"""What is there? A model in, a ``Graph`` of blocks out: the pieces between which it may be cut.

graph.py        blocks, and the graph they form
sequential.py   an ``nn.Sequential`` read as a chain of blocks
"""

from stageline.capturing.graph import Block, Graph
from stageline.capturing.sequential import capture_sequential

__all__ = ["Block", "Graph", "capture_sequential"]
