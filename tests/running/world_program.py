"""A job that trains before it has a world of torch's, within it, and after it.

python -m tests.running.world_program FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

import stageline as sl
from tests.running.job_program import MICROBATCHES, Reporter, is_equal, model


def is_exact() -> bool:
    """Train a step of a new pipeline; return whether it was that of the plain model."""
    pipe = sl.Pipeline(
        model(), split=2, num_microbatches=MICROBATCHES, loss_fn=F.cross_entropy, timeout=60
    )
    equal = is_equal(pipe, model(), step=0)
    threads = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    reporter.say("threads", gloo=[name for name in threads if "gloo" in name])
    pipe.close()
    return equal


if __name__ == "__main__":
    torch.set_num_threads(1)
    reporter = Reporter(Path(sys.argv[1]))
    reporter.say("before", equal=is_exact(), has_world=dist.is_initialized())
    dist.init_process_group("gloo")
    ones = torch.ones(())
    dist.all_reduce(ones)
    reporter.say("within", equal=is_exact(), sum=ones.item())
    dist.destroy_process_group()
    reporter.say("after", equal=is_exact(), has_world=dist.is_initialized())
