"""A job that trains, and fails until torchrun has started it again three times.

python -m tests.running.restarted_program FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import stageline as sl
from tests.running.job_program import MICROBATCHES, Reporter, is_equal, model

if __name__ == "__main__":
    torch.set_num_threads(1)
    reporter = Reporter(Path(sys.argv[1]))
    pipe = sl.Pipeline(
        model(), split=2, num_microbatches=MICROBATCHES, loss_fn=F.cross_entropy, timeout=60
    )
    reporter.say("trained", equal=is_equal(pipe, model(), step=0))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "3":
        os._exit(1)  # at once, as a process that is killed
    pipe.close()
