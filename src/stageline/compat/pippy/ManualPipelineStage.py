"""``pippy.ManualPipelineStage``: where PiPPy had the class of this name."""

from stageline.compat.pippy.stage import (
    ManualPipelineStage,
)

__all__ = [
    "ManualPipelineStage",
]
