"""``pippy._PipelineStage``: where later versions had PipelineStage."""

from stageline.compat.pippy.stage import (
    PipelineStage,
)

__all__ = [
    "PipelineStage",
]
