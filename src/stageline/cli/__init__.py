"""The command line: ``stageline plan``, ``stageline simulate``, ``stageline schedules``.

Each command is a module here with two functions: ``add_to`` declares its arguments, ``run`` does
the work and returns the exit status. Wrong input ends with a message on stderr and status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from stageline.cli import plan, schedules, simulate
from stageline.errors import StagelineError

__all__ = ["main"]

COMMANDS = (plan, simulate, schedules)

WRONG_INPUT = 2
"""The exit status for arguments or files that make no sense, as in argparse."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_INPUT, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    >>> main(["simulate", "--schedule", "gpipe", "--ranks", "2", "--microbatches", "2"])
    gpipe: 2 stages on 2 ranks, 2 microbatches
    rank 0 │F0 F1 ·  ·  ·  B0═══ B1═══
    rank 1 │·  F0 F1 B0═══ B1═══
    F forward   B backward   · wait   F3: microbatch 3
    T 9   span 9   bubble 33.3%   peak 2 2
    <BLANKLINE>
    rank  busy  idle  wait  peak activations
       0     6     3     3                 2
       1     6     3     0                 2
    <BLANKLINE>
    makespan 9, bubble 33.33%
    span 9, bubble 33.33%
    0
    """
    parser = _Parser(prog="stageline", description="Pipeline-parallel training for PyTorch.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse leaves this way, with --help as with an error
        return stop.code if isinstance(stop.code, int) else WRONG_INPUT
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough: `stageline schedules | head -3`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (StagelineError, OSError, UnicodeDecodeError) as fault:
        print(f"stageline: {fault}", file=sys.stderr)
        return WRONG_INPUT
    return status
