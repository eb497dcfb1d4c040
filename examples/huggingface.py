"""Train a small GPT-2 of the transformers library as a pipeline, the model unchanged.

    python examples/huggingface.py                                threads of one process
    torchrun --nproc-per-node 2 examples/huggingface.py           two processes
    python examples/huggingface.py --check                        compare gradients first

Nothing is downloaded: the weights are random, and the text is made here. Every line counts up in
steps of its own, like 7 10 13 16 ..; to continue it, the model has to look back.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, logging

import stageline as sl
from stageline.testing import plain_step

NUM_WORDS = 48
NUM_MICROBATCHES = 4

parser = argparse.ArgumentParser(description="Train a small GPT-2 as a pipeline.")
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--check", action="store_true", help="compare the first gradients")
arguments = parser.parse_args()
speaks = os.environ.get("RANK", "0") == "0"  # one rank prints; torchrun sets RANK


def lines(rows: int = 32, length: int = 24) -> Tensor:
    """Return rows of words that count up from anywhere, each in steps of 1 to 6."""
    start, step = torch.randint(NUM_WORDS, (rows, 1)), torch.randint(1, 7, (rows, 1))
    return (start + step * torch.arange(length)) % NUM_WORDS


def check(pipe: sl.Pipeline, plain: GPT2LMHeadModel, batch: Tensor) -> None:
    """Compare the gradients of one step with those of the plain model over microbatches."""
    pipe.step(input_ids=batch, labels=batch)
    plain_step(
        plain,
        kwargs={"input_ids": batch, "labels": batch},
        num_microbatches=NUM_MICROBATCHES,
        num_threads=1,
    )
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    equal, others = 0, []
    for name, parameter in pipe.named_parameters():
        got, want = parameter.grad, wanted[name]
        assert got is not None, f"{name} has no gradient"
        assert want is not None
        if torch.equal(got, want):
            equal += 1
        else:
            others.append(f"{name} within {(got - want).abs().max() / want.abs().max():.0e}")
    pipe.zero_grad()
    if speaks:
        print(f"gradients equal to the plain model's: {equal}; others: {', '.join(others) or 0}")


logging.set_verbosity_error()  # it would tell that it chose the usual loss
torch.manual_seed(0)
torch.set_num_threads(1)  # one per stage; with another number torch may add in another order
config = GPT2Config(
    vocab_size=NUM_WORDS,
    n_positions=32,
    n_embd=64,
    n_layer=4,
    n_head=4,
    bos_token_id=0,
    eos_token_id=0,
    # Without dropout the losses are those of the plain model, digit by digit.
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
model = GPT2LMHeadModel(config)
plain = copy.deepcopy(model)
example = lines()
pipe = sl.Pipeline(
    model,
    example_kwargs={"input_ids": example, "labels": example},
    split=arguments.stages,
    num_microbatches=NUM_MICROBATCHES,
)
if speaks:
    print(pipe, end="\n\n")
if arguments.check:
    check(pipe, plain, example)

optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
losses = []
for step in range(1, arguments.steps + 1):
    batch = lines()
    losses.append(float(pipe.step(input_ids=batch, labels=batch).loss))
    optimizer.step()
    optimizer.zero_grad()
    if speaks and (step % 20 == 0 or step == 1):
        print(f"step {step:>3}: loss {losses[-1]:.6f}")
if speaks:
    assert losses[-1] < losses[0], "the model learned nothing"
    print(f"loss fell from {losses[0]:.4f} to {losses[-1]:.4f}")
pipe.close()
