"""What does a pipeline cost beyond its schedule and its stages? See README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.overhead import actions, devices
from benchmarks.tools.pages import Setting, write

HERE = Path(__file__).resolve().parent
PARTS = ("devices", "actions")
SHORT = ("1f1b", "zb-h1")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="two schedules, fewer rounds")
    parser.add_argument("--part", choices=PARTS, help="this one only")
    parser.add_argument("--sleep", type=float, default=50.0, help="milliseconds of F, I and W")
    parser.add_argument("--steps", type=int, default=0, help="of each schedule and transport")
    parser.add_argument("--schedules", default="", help="these only, a,b,...")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    return parser.parse_args()


def measured(part: str, asked: argparse.Namespace) -> str:
    setting = Setting()
    if part == "actions":
        said = actions.text(actions.run(3 if asked.short else 25))
    else:
        named = [name for name in asked.schedules.split(",") if name]
        names = named or (SHORT if asked.short else devices.RUNNABLE)
        steps = asked.steps or 1
        points = devices.run(names, tuple(devices.TRANSPORTS), asked.sleep, steps)
        said = devices.text(points, asked.sleep)
    return f"{setting}\n\n{said}"


def main() -> None:
    asked = arguments()
    if asked.write and (asked.short or asked.schedules):
        sys.exit("--write takes a whole run: leave --short and --schedules out")
    torch.set_num_threads(1)
    for part in [asked.part] if asked.part else PARTS:
        said = measured(part, asked)
        print(f"{said}\n", flush=True)
        if asked.write:
            write(HERE / "README.md", part, said)


if __name__ == "__main__":
    main()
