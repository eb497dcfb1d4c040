"""``pippy.PipelineStage``: where PiPPy 0.2 had the class of this name."""

from stageline.compat.pippy.stage import (
    PipelineStage,
)

__all__ = [
    "PipelineStage",
]
