"""How long does it take to import stageline, and to capture a model? See README.md."""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "against_peers"))

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import stageline as sl
from benchmarks.tools.pages import Setting, table, write
from models import Embedding, Layer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
IMPORTS = {
    "torch": "import torch",
    "torch, then stageline": "import torch, stageline",
}
TIMED = """
import time
wall, cpu = time.perf_counter(), time.process_time()
{}
print(time.perf_counter() - wall, time.process_time() - cpu)
"""
ROWS, TOKENS, WORDS = 2, 32, 50257


def imports(rounds: int) -> str:
    """Time imports in fresh interpreters, in random order; what counts is the difference."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in IMPORTS}
    shuffle = random.Random(0)
    with tempfile.TemporaryDirectory() as compiled:
        for number in range(rounds + 1):  # the first round compiles
            for name in shuffle.sample(list(IMPORTS), len(IMPORTS)):
                seconds = _import(IMPORTS[name], compiled)
                if number:
                    found[name].append(seconds)
    alone, both = (found[name] for name in IMPORTS)
    beyond = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(alone, both, strict=True)]
    rows = [
        [name, *(f"{1000 * statistics.median(column):.0f}" for column in zip(*times, strict=True))]
        for name, times in {**found, "stageline beyond torch": beyond}.items()
    ]
    return table(["import", "ms", "CPU ms"], rows)


def _import(statement: str, compiled: str) -> tuple[float, float]:
    """Return wall and CPU seconds; modules are compiled, as installing them does."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPYCACHEPREFIX"] = compiled
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", TIMED.format(statement)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    wall, cpu = map(float, done.stdout.split())
    return wall, cpu


def of_transformers(layers: int, width: int) -> nn.Module:
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=WORDS)
    return GPT2LMHeadModel(config)


def own(layers: int, width: int) -> nn.Module:
    """Return the GPT of benchmarks/against_peers."""
    blocks = [Layer(width, width // 64, 0.1) for _ in range(layers)]
    head = nn.Linear(width, WORDS, bias=False)
    return nn.Sequential(Embedding(WORDS, TOKENS, width, 0.1), *blocks, nn.LayerNorm(width), head)


MODELS: list[tuple[str, Callable[[int, int], nn.Module], int, int]] = [
    ("GPT-2 small (transformers)", of_transformers, 12, 768),
    ("GPT-2, narrow (transformers)", of_transformers, 12, 128),
    ("GPT-2, narrow (transformers)", of_transformers, 24, 128),
    ("GPT-2, narrow (transformers)", of_transformers, 48, 128),
    ("GPT of against_peers, as wide as GPT-2", own, 12, 768),
    ("GPT of against_peers, narrow", own, 24, 128),
    ("GPT of against_peers, narrow", own, 48, 128),
]


def captures(rounds: int, *, short: bool) -> Iterator[list[str]]:
    tokens = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
    for name, make, layers, width in MODELS[:2] if short else MODELS:
        torch.manual_seed(0)
        model = make(layers, width)
        plain, capture = timed(model, tokens, rounds)
        count = sum(parameter.numel() for parameter in model.parameters())
        times = [f"{1000 * seconds:.0f}" for seconds in (*plain, *capture)]
        forwards = f"{capture[1] / plain[1]:.1f}"
        yield [name, str(layers), f"{count / 1e6:.0f} M", *times, forwards]


def timed(model: nn.Module, tokens: Tensor, rounds: int) -> list[list[float]]:
    """Return wall and CPU seconds of a forward of the plain model, and of a capture; medians."""
    calls: list[Callable[[], object]] = [
        lambda: model(tokens),
        lambda: sl.capture(model, (tokens,)),
    ]
    found: list[list[tuple[float, float]]] = [[], []]
    for number in range(rounds + 1):
        for call, times in zip(calls, found, strict=True):
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            spent = (time.perf_counter() - wall, time.process_time() - cpu)
            if number:  # the first one warms up
                times.append(spent)
    return [[statistics.median(column) for column in zip(*times, strict=True)] for times in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer rounds, two models")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    asked = parser.parse_args()
    setting = Setting(f"{torch.get_num_threads()} intra-op threads")
    parts = {"imports": imports(3 if asked.short else 15)}
    print(parts["imports"], flush=True)
    rows = list(captures(3 if asked.short else 9, short=asked.short))
    head = ["model", "layers", "parameters", "forward ms", "CPU ms", "capture ms", "CPU ms"]
    parts["captures"] = table([*head, "in forwards"], rows)
    print(f"\n{parts['captures']}\n\n{setting}")
    if asked.write:
        for section, text in {**parts, "setting": str(setting)}.items():
            write(HERE / "README.md", section, text)


if __name__ == "__main__":
    main()
