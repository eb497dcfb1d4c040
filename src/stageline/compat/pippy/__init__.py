"""PiPPy and torch.distributed.pipelining on stageline: change the first word of the imports.

from stageline.compat.pippy import PipelineStage, ScheduleGPipe, SplitPoint, pipeline

The module paths of both packages exist: ``.IR``, ``._IR``, ``.stage``, ``.PipelineStage``,
``.schedules``, ``.PipelineSchedule``, ``.microbatch``, ``.ModelSplit``, ``.ManualPipelineStage``.
"""

from stageline.compat.pippy import (
    _IR,
    IR,
    PipelineSchedule,
    _PipelineStage,
    microbatch,
    schedules,
    stage,
)
from stageline.compat.pippy.IR import (
    LossWrapper,
    Pipe,
    PipeSequential,
    PipeSplitWrapper,
    SplitPoint,
    TrivialLossWrapper,
    annotate_split_points,
    pipe_split,
    pipeline,
)
from stageline.compat.pippy.ManualPipelineStage import ManualPipelineStage
from stageline.compat.pippy.microbatch import ArgsChunkSpec, KwargsChunkSpec, TensorChunkSpec
from stageline.compat.pippy.ModelSplit import (
    split_by_graph,
    split_into_equal_size,
    split_on_size_threshold,
)
from stageline.compat.pippy.PipelineStage import PipelineStage
from stageline.compat.pippy.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _ScheduleForwardOnly,
    get_schedule_class,
)
from stageline.compat.pippy.stage import build_stage

__all__ = [
    "IR",
    "_IR",
    "ArgsChunkSpec",
    "KwargsChunkSpec",
    "LossWrapper",
    "ManualPipelineStage",
    "Pipe",
    "PipeSequential",
    "PipeSplitWrapper",
    "PipelineSchedule",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "TensorChunkSpec",
    "TrivialLossWrapper",
    "_PipelineStage",
    "_ScheduleForwardOnly",
    "annotate_split_points",
    "build_stage",
    "get_schedule_class",
    "microbatch",
    "pipe_split",
    "pipeline",
    "schedules",
    "split_by_graph",
    "split_into_equal_size",
    "split_on_size_threshold",
    "stage",
]
