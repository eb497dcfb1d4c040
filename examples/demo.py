"""`make demo`: a small convolutional network learns handwritten digits, pipelined over four stages.

All stages run as threads of this process. The same network is then trained for one epoch without a
pipeline, so that the speed can be judged.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import stageline as sl
from digits import Digits, load_digits


def conv_net(channels: int = 32) -> nn.Sequential:
    """Return a network whose work is spread evenly: four equal convolutions on 14x14 pixels."""
    layers: list[nn.Module] = [nn.Conv2d(1, channels, 3, stride=2, padding=1), nn.ReLU()]
    for _ in range(4):
        layers += [
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        ]
    layers += [nn.AvgPool2d(7), nn.Flatten(), nn.Linear(channels * 4, 10)]
    return nn.Sequential(*layers)


def batches(digits: Digits, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the training set once, shuffled."""
    for rows in torch.randperm(len(digits.train_labels)).split(batch_size):
        yield digits.train_images[rows], digits.train_labels[rows]


def train_epoch(
    train_step: Callable[[Tensor, Tensor], Tensor], digits: Digits, batch_size: int, title: str
) -> tuple[float, float]:
    """Train once over the digits; return the mean loss and the samples per second."""
    num_samples = len(digits.train_labels)
    losses = []
    start = time.perf_counter()
    # Where nobody watches (a log, CI) the bar stays away and the line per epoch is enough.
    with tqdm(total=num_samples, desc=title, unit="digit", leave=False, disable=None) as bar:
        for images, labels in batches(digits, batch_size):
            losses.append(float(train_step(images, labels)))
            bar.update(len(labels))
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return sum(losses) / len(losses), num_samples / (time.perf_counter() - start)


def train_pipelined(
    pipe: sl.Pipeline, digits: Digits, args: argparse.Namespace
) -> tuple[float, float]:
    """Train for all epochs; return the accuracy on the test digits and the samples per second."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=args.learning_rate)

    def train_step(images: Tensor, labels: Tensor) -> Tensor:
        result = pipe.step(images, target=labels)
        optimizer.step()
        optimizer.zero_grad()
        return result.loss

    speeds = []
    for epoch in range(1, args.epochs + 1):
        title = f"epoch {epoch}/{args.epochs}"
        loss, speed = train_epoch(train_step, digits, args.batch_size, title)
        print(f"{title}   loss {loss:.4f}   {speed:,.0f} samples/s", flush=True)
        speeds.append(speed)

    pipe.eval()
    hits = pipe(digits.test_images).argmax(dim=1) == digits.test_labels
    return hits.float().mean().item(), args.epochs / sum(1 / speed for speed in speeds)


def train_plain(
    model: nn.Module, digits: Digits, args: argparse.Namespace, threads: int, title: str
) -> float:
    """Train the plain model for one epoch on so many threads; return the samples per second."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)

    def train_step(images: Tensor, labels: Tensor) -> Tensor:
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return train_epoch(train_step, digits, args.batch_size, title)[1]
    finally:
        torch.set_num_threads(before)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn handwritten digits in a pipeline.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b", help="1f1b, gpipe, sequential or its text")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--limit", type=int, default=4000, help="how many digits to train on")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    everything = load_digits()
    digits = everything._replace(
        train_images=everything.train_images[: args.limit],
        train_labels=everything.train_labels[: args.limit],
    )
    model = conv_net()
    plain = [(threads, copy.deepcopy(model)) for threads in sorted({1, torch.get_num_threads()})]

    pipe = sl.Pipeline(
        model,
        split=args.stages,
        num_microbatches=args.microbatches,
        schedule=args.schedule,
        loss_fn=cross_entropy,
    )
    print(pipe)
    print()
    print(pipe.schedule.picture(color=sys.stdout.isatty()))
    print()

    accuracy, speed = train_pipelined(pipe, digits, args)
    print(f"\ntest accuracy {accuracy:.1%} on {len(digits.test_labels):,} digits never seen before")
    print_speed(f"pipeline of {args.stages} stages", speed)
    for threads, copied in plain:
        title = f"plain model, {threads} thread{'s' if threads > 1 else ''}"
        print_speed(title, train_plain(copied, digits, args, threads, title))


def print_speed(title: str, speed: float) -> None:
    print(f"{title:<24}{speed:>8,.0f} samples/s", flush=True)


if __name__ == "__main__":
    main()
