"""A process of a contestant: it builds, shows its losses, then sleeps until it is its turn.

It is told what to do over one pipe and answers over another, a line of JSON each way; standard
output is left to the peers' own messages. When the race is over, or its starter gone, it ends.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from models import CASES, CHECKED

Answer = dict[str, Any]
Turn = Callable[[int], Answer]
PACKAGES = ("torch", "fairscale", "torchgpipe", "deepspeed")


def prepare(kind: str, letter: str, options: dict[str, Any]) -> tuple[Answer, Turn]:
    """Build a contestant; return what it says of itself, and its turn."""
    build = importlib.import_module(kind).build
    case = CASES[letter]
    if kind == "stage_times":
        return {}, build(case, **options)
    contestant = build(case, 0.0, **options)
    losses = [contestant.step() for _ in range(CHECKED)]
    said = {
        "losses": [None if loss is None else float(loss) for loss in losses],
        "tied": contestant.tied or case.each is None,
    }
    if case.dropout:
        contestant.close()
        contestant = build(case, case.dropout, **options)

    def turn(steps: int) -> Answer:
        contestant.step()  # what the others left in the caches is no matter of ours
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            contestant.step()
        spent = (time.perf_counter() - start, time.process_time() - cpu)
        return dict(zip(("seconds", "cpu"), (each / steps for each in spent), strict=True))

    return said, turn


def versions() -> dict[str, str]:
    """Return the versions of those packages that are in this environment."""
    here = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {name: here[name] for name in PACKAGES if name in here}


def serve(commands: int, answers: int, request: Answer) -> None:
    """Answer until the commands end."""
    with os.fdopen(commands, "r") as incoming, os.fdopen(answers, "w", buffering=1) as outgoing:

        def answer(value: Answer) -> None:
            outgoing.write(json.dumps(value) + "\n")

        try:
            said, turn = prepare(request["kind"], request["case"], request["options"])
            answer({"versions": versions(), **said})
            for line in incoming:
                answer(turn(json.loads(line)["steps"]))
        except BaseException as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an exit in the usual way waits for ever for fairscale's threads
