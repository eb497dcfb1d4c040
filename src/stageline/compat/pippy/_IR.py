"""Another name of ``pippy.IR``, as in later versions and in torch."""

from stageline.compat.pippy.IR import (
    LossWrapper,
    Pipe,
    PipeInfo,
    PipeSequential,
    PipeSplitWrapper,
    SplitPoint,
    TrivialLossWrapper,
    annotate_split_points,
    pipe_split,
    pipeline,
)

__all__ = [
    "LossWrapper",
    "Pipe",
    "PipeInfo",
    "PipeSequential",
    "PipeSplitWrapper",
    "SplitPoint",
    "TrivialLossWrapper",
    "annotate_split_points",
    "pipe_split",
    "pipeline",
]
