"""stageline: pipeline-parallel training in PyTorch, with exactly the plain model's gradients.

import stageline as sl

pipe = sl.Pipeline(model, split=4, num_microbatches=8, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.AdamW(pipe.parameters())
result = pipe.step(x, target=y)
"""

from stageline import collecting as _collecting
from stageline import log as _log
from stageline.capturing.layers import layer_list
from stageline.capturing.marks import Block, CutPoint, begin_block, remove_blocks
from stageline.capturing.recorded import Graph, capture
from stageline.errors import (
    BatchError,
    CaptureError,
    ConfigError,
    EdgeError,
    GuardError,
    PeerError,
    PipeError,
    RemoteCause,
    ScheduleError,
    StagelineError,
    StateError,
    StepError,
)
from stageline.observing.measuring import measure_costs
from stageline.partitioning import Plan
from stageline.partitioning.costs import BlockCosts, ModelCosts
from stageline.partitioning.device import Device, Link
from stageline.partitioning.partition import partition
from stageline.pipeline import Pipeline
from stageline.planning import find_schedule
from stageline.planning.estimating import estimate_costs
from stageline.planning.proposal import Proposal
from stageline.planning.proposals import Proposals
from stageline.plans import find_plans
from stageline.running.current import current_microbatch
from stageline.running.events import ActionDone
from stageline.running.merging import PerMicrobatch
from stageline.running.microbatches import Batch, replicate
from stageline.running.recompute import is_checkpointing, is_recomputing
from stageline.running.result import StepResult
from stageline.scheduling import Costs, Schedule, parse, schedules, simulate

__version__ = "0.1.0"

__all__ = [
    "ActionDone",
    "Batch",
    "BatchError",
    "Block",
    "BlockCosts",
    "CaptureError",
    "ConfigError",
    "Costs",
    "CutPoint",
    "Device",
    "EdgeError",
    "Graph",
    "GuardError",
    "Link",
    "ModelCosts",
    "PeerError",
    "PerMicrobatch",
    "PipeError",
    "Pipeline",
    "Plan",
    "Proposal",
    "Proposals",
    "RemoteCause",
    "Schedule",
    "ScheduleError",
    "StagelineError",
    "StateError",
    "StepError",
    "StepResult",
    "begin_block",
    "capture",
    "current_microbatch",
    "estimate_costs",
    "find_plans",
    "find_schedule",
    "is_checkpointing",
    "is_recomputing",
    "layer_list",
    "measure_costs",
    "parse",
    "partition",
    "remove_blocks",
    "replicate",
    "schedules",
    "simulate",
]

_log.configure()
_collecting.resume()
