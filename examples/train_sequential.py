"""Train a network on handwritten digits as a pipeline of four stages.

    python examples/train_sequential.py                                  threads of one process
    torchrun --nproc-per-node 4 examples/train_sequential.py             four processes

Both print the same losses: nothing in the script knows which way it was started.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn

import stageline as sl
from digits import load_digits

parser = argparse.ArgumentParser(description="Train on handwritten digits as a pipeline.")
parser.add_argument("--stages", type=int, default=4)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--limit", type=int, default=4000, help="how many digits to train on")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(
    nn.Flatten(),
    nn.Linear(28 * 28, 256),
    nn.ReLU(),
    nn.Linear(256, 256),
    nn.ReLU(),
    nn.Linear(256, 256),
    nn.ReLU(),
    nn.Linear(256, 256),
    nn.ReLU(),
    nn.Linear(256, 10),
)
pipe = sl.Pipeline(
    model,
    split=args.stages,
    num_microbatches=8,
    schedule="1f1b",
    loss_fn=nn.functional.cross_entropy,
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)

digits = load_digits()
images, labels = digits.train_images[: args.limit], digits.train_labels[: args.limit]
speaks = os.environ.get("RANK", "0") == "0"  # one rank prints; torchrun sets RANK

for epoch in range(args.epochs):
    losses = []
    for rows in torch.randperm(len(labels)).split(64):
        result = pipe.step(images[rows], target=labels[rows])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(result.loss))
    if speaks:
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.6f}")

pipe.eval()
hits = pipe(digits.test_images).argmax(dim=1) == digits.test_labels
if speaks:
    print(f"test accuracy {hits.float().mean():.1%}")
