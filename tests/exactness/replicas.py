"""Two replicas of a pipeline, one in each process, whose gradients are reduced by hooks."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import stageline as sl
from tests.running.placements import looped

MICROBATCHES = 4


class _ReducesLast:
    """Sums a gradient over the replicas once its last microbatch is in, as DDP's hook does."""

    def __init__(self) -> None:
        self.left = MICROBATCHES

    def __call__(self, parameter: Tensor) -> None:
        self.left -= 1
        if not self.left:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _one_rank(microbatches: int) -> str:
    return looped(lambda _: range(4), 1, microbatches, letters="IW")


def replica_faults(rank: int, wrapper: str) -> list[str]:
    """Train one of two replicas, each a pipeline of its own, on its half of the batch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(4)]
    plain = copy.deepcopy(nn.Sequential(*stages))
    x, y = torch.randn(16, 4).double(), torch.randint(4, (16,))
    count = 1 if wrapper == "DDP" else MICROBATCHES
    if wrapper == "hooks":
        for parameter in nn.Sequential(*stages).parameters():
            parameter.register_post_accumulate_grad_hook(_ReducesLast())
    pipe = sl.Pipeline.from_stages(
        stages,
        num_microbatches=count,
        schedule=_one_rank(count),
        loss_fn=F.cross_entropy,
        wrap_stage=(lambda m, _: DistributedDataParallel(m)) if wrapper == "DDP" else None,
        transport="memory",
    )
    mine = slice(8 * rank, 8 * rank + 8)
    pipe.step(x[mine], target=y[mine])
    F.cross_entropy(plain(x), y).backward()
    wanted = dict(plain.named_parameters())
    wrong = []
    for name, parameter in pipe.named_parameters():
        got, want = parameter.grad, wanted[name].grad
        if got is None or want is None or (got - want).abs().max() > 1e-9 * want.abs().max():
            wrong.append(name)
    pipe.close()
    return wrong
