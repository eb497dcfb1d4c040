"""How does a step grow with microbatches, stages and messages? See README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.scaling import messages, microbatches, stages
from benchmarks.tools.pages import Setting, write

HERE = Path(__file__).resolve().parent
PARTS = ("microbatches", "stages", "messages")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--part", choices=PARTS, help="this one only")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    return parser.parse_args()


def measured(part: str, *, short: bool) -> str:
    setting = Setting()
    if part == "microbatches":
        found = microbatches.run((8, 64) if short else microbatches.COUNTS, 3 if short else 9)
        said = microbatches.text(found)
    elif part == "stages":
        steps = stages.run((4,) if short else stages.COUNTS, 10.0, 1 if short else 5)
        said = stages.text(steps)
    else:
        sizes = ("1 KiB", "1 MiB") if short else tuple(messages.SIZES)
        said = messages.text(messages.run(sizes, 3 if short else 9))
    return f"{setting}\n\n{said}"


def main() -> None:
    asked = arguments()
    if asked.write and asked.short:
        sys.exit("--write takes a whole run: leave --short out")
    torch.set_num_threads(1)
    for part in [asked.part] if asked.part else PARTS:
        said = measured(part, short=asked.short)
        print(f"**{part.capitalize()}.**\n\n{said}\n", flush=True)
        if asked.write:
            write(HERE / "README.md", part, said)


if __name__ == "__main__":
    main()
