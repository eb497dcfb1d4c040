"""Unroll a loop over ranks: a network that calls one block several times, with PiPPy's names.

    torchrun --nproc-per-node 4 examples/pippy_unroll.py      a stage per process
    python examples/pippy_unroll.py                           the same as threads of one process

Each call of the block is a stage, and so is what follows the loop. All calls use one weight: every
rank that holds it gets its whole gradient, so that the unrolled network trains like the plain one.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
from torch import nn

import stageline as sl
from stageline.compat.pippy import (
    Pipe,
    PipelineStage,
    PipeSplitWrapper,
    ScheduleGPipe,
    annotate_split_points,
)


class IterationBlock(nn.Module):
    def __init__(self, d_hid: int) -> None:
        super().__init__()
        self.lin = nn.Linear(d_hid, d_hid)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        return torch.relu(x)


class IterativeNetwork(nn.Module):
    def __init__(self, d_hid: int, num_iters: int) -> None:
        super().__init__()
        self.num_iters = num_iters
        self.iter_block = IterationBlock(d_hid)
        self.output_proj = nn.Linear(d_hid, 10)  # 10 classes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.num_iters):
            x = self.iter_block(x)
        output: torch.Tensor = self.output_proj(x)
        return output


parser = argparse.ArgumentParser(description="Unroll a loop over the ranks of a pipeline.")
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--steps", type=int, default=5, help="training steps")
args = parser.parse_args()

rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
num_stages = world_size if world_size > 1 else 4
here = [rank] if world_size > 1 else range(num_stages)
is_first, is_last = 0 in here, num_stages - 1 in here

torch.manual_seed(0)
model = IterativeNetwork(args.width, num_iters=num_stages - 1)
plain = copy.deepcopy(model)
rows = 8 * num_stages  # microbatches of one size: the mean of their losses is that of the batch
x, labels = torch.randn(rows, args.width), torch.randint(10, (rows,))

annotate_split_points(model, {"iter_block": PipeSplitWrapper.SplitPoint.END})
pipe = Pipe.from_tracing(model, num_stages, example_args=(x,))
if is_first:
    print(" pipe ".center(80, "*"))
    print(pipe)
    print(" submod0 ".center(80, "*"))
    print(pipe.split_gm.submod_0)

stages = [PipelineStage(pipe, index, torch.device("cpu")) for index in here]
loss_fn = nn.functional.cross_entropy
schedule = ScheduleGPipe(stages, num_stages, loss_fn=loss_fn, scale_grads=True)
inputs = (x,) if is_first else ()
target = labels if is_last else None

# Inference: the output is that of the plain model.
output = schedule.eval(*inputs, target=target)
if is_last:
    torch.testing.assert_close(output, plain(x))
    print(" Pipeline parallel model ran successfully! ".center(80, "*"))

# Training, which a loop that is unrolled over ranks could not do: here the plain model trains too.
parameters = {id(p): p for stage in stages for p in stage.submod.parameters()}
optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
for step in range(args.steps):
    losses: list[torch.Tensor] = []
    schedule.step(*inputs, target=target, losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    wanted = loss_fn(plain(x), labels)
    wanted.backward()
    plain_optimizer.step()
    plain_optimizer.zero_grad()
    if is_last:
        loss = torch.stack(losses).mean()
        torch.testing.assert_close(loss, wanted.detach())
        print(f"step {step + 1}: loss {loss:.4f}, plain model {wanted:.4f}")

# Why: with one sample per microbatch, every slot works on as many samples as there are ranks.
if is_last:
    iterations = sl.schedules.forward_only(num_stages=num_stages, num_microbatches=64)
    slots = sl.simulate(iterations, sl.Costs(forward=1, latency=0)).T
    print(f"64 samples, {num_stages} iterations each: {64 * num_stages} slots on one device,")
    print(f"{slots} on {num_stages}: {64 * num_stages / slots:.2f} times the throughput")
