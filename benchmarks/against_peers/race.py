"""The race: contestants that live side by side and run one after the other, heat after heat.

Every contestant is a group of processes that sleep on a pipe while it is not their turn. A heat is
a few laps of the yardsticks, a short turn for each of them in random order, and then a longer turn
for some of the others; in a round of heats each of the others has one turn. What is compared are
times of one lap, or of one heat: they lie close together, so that load which comes and goes hits
both alike.
"""

from __future__ import annotations

import json
import math
import os
import random
import select
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.tools.world import free_port, world
from environments import python_of
from limits import replayed as replay
from limits import with_means
from lineup import Entry
from models import Case
from nursery import Child, Nursery
from plain import reference
from results import LOGS, Outcome

TOLERANCE = 1e-4  # of a loss, relative
PATIENCE = 300.0  # seconds for an answer
OTHERS = 4  # contestants of a heat that are no yardsticks
Answer = dict[str, Any]


class Failed(Exception):
    """A contestant cannot take part; the message says why."""


class Group:
    """The processes of one contestant."""

    def __init__(self, entry: Entry, case: Case, nursery: Nursery, log: Path) -> None:
        self.entry, self.case = entry, case
        port = free_port()
        self._children: list[Child] = []
        for rank in range(entry.processes):
            request = {
                "kind": entry.kind,
                "case": case.letter,
                "options": dict(entry.options),
                "environment": world(rank, entry.processes, port),
            }
            try:
                child = nursery.start(request, log / f"{entry.kind}-{rank}.txt")
            except OSError as error:
                raise Failed(str(error)) from error
            self._children.append(child)

    def said(self) -> list[Answer]:
        """Return the next answer of every process."""
        answers: list[Answer] = []
        deadline = time.monotonic() + PATIENCE
        for child in self._children:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([child.answers], [], [], left)[0]:
                raise Failed(f"no answer within {PATIENCE:.0f} s")
            line = child.answers.readline()
            if not line:
                raise Failed("a process of it has died: see its log")
            answers.append(json.loads(line))
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise Failed(errors[0].splitlines()[0])
        return answers

    def turn(self, steps: int) -> tuple[dict[str, float], float]:
        """Let it run some steps; return the seconds of one by name, and its CPU time."""
        self._let(Child.go_on)
        for child in self._children:
            child.commands.write(json.dumps({"steps": steps}) + "\n")
        answers = self.said()
        self.rest()
        cpu = sum(answer["cpu"] for answer in answers)
        if self.entry.is_limit:
            ranks = [rank for answer in answers for rank in answer["ranks"]]
            limits = [limit(self.case, ranks) for limit in (with_means, replay)]
            return dict(zip(self.entry.names, limits, strict=False)), cpu
        # Ranks begin and end at different times; how long a step takes is the same for all.
        return {self.entry.name: statistics.fmean(answer["seconds"] for answer in answers)}, cpu

    def rest(self) -> None:
        """Stop it until its next turn.

        gloo has a thread that wakes up a hundred times a second, in every process, also while
        others race. Ours sleep, and would take a process that was stopped for a dead one.
        """
        if not self.entry.is_ours:
            self._let(Child.stop)

    def _let(self, do: Callable[[Child], None]) -> None:
        for child in self._children:
            with suppress(ProcessLookupError):  # it has died, as its answer will show
                do(child)

    def close(self) -> None:
        self._let(Child.go_on)
        for child in self._children:
            child.close()


Start = tuple[Group, int]
"""Who runs next, and how many steps."""


class Nurseries:
    """The processes that contestants are forked from, each made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str | None, int], Nursery] = {}

    def __enter__(self) -> Nurseries:
        return self

    def __exit__(self, *_: object) -> None:
        for nursery in self._known.values():
            nursery.close()

    def of(self, entry: Entry) -> Nursery:
        key = (entry.environment, entry.threads)
        if key not in self._known:
            python = python_of(entry.environment, self._folder)
            if not python.exists():
                raise Failed("not installed: run.py --install")
            imports = ["torch", "torch.distributed", entry.environment or "stageline"]
            self._known[key] = Nursery(python, _environment(entry, python), imports)
        return self._known[key]


def _environment(entry: Entry, python: Path) -> dict[str, str]:
    environment = dict(os.environ)
    environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(entry.threads)
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment.get('PATH', '')}"
    if entry.environment is not None:
        environment.pop("PYTHONPATH", None)
        environment["TORCH_EXTENSIONS_DIR"] = str(python.parents[1] / "extensions")
        environment["DS_ACCELERATOR"] = "cpu"
    return environment


def race(case: Case, entries: Iterable[Entry], rounds: int, nurseries: Nurseries) -> Outcome:
    """Run a case; a heat of all contestants comes first, warms up and is not counted."""
    entries = list(entries)
    order = [name for entry in entries for name in entry.names]
    outcome, shuffle = Outcome(case, order), random.Random(0)
    with ExitStack() as stack:
        groups = _started(case, entries, nurseries, outcome, stack)
        heats = [[(group, case.steps) for group in groups]]
        heats += [heat for _ in range(rounds) for heat in _round(case, groups, shuffle)]
        for number, heat in enumerate(heats):
            for group, steps in heat:
                _run(group, steps, number, outcome)
            outcome.load.append(os.getloadavg()[0])
    return outcome


def _round(case: Case, groups: Sequence[Group], shuffle: random.Random) -> Iterator[list[Start]]:
    """Yield the heats of one round: who runs, in which order, and how many steps."""
    yardsticks = [group for group in groups if group.entry.is_yardstick]
    others = [group for group in groups if not group.entry.is_yardstick]
    shuffle.shuffle(others)
    for first in range(0, max(1, len(others)), OTHERS):
        laps = [shuffle.sample(yardsticks, len(yardsticks)) for _ in range(case.laps)]
        yield [
            *((group, case.steps // case.laps) for lap in laps for group in lap),
            *((group, case.steps) for group in others[first : first + OTHERS]),
        ]


def _run(group: Group, steps: int, heat: int, outcome: Outcome) -> None:
    """Give a contestant its turn, and note its times unless it warms up."""
    name = group.entry.name
    if name in outcome.failures:
        return
    try:
        seconds, cpu = group.turn(steps)
    except Failed as failure:
        outcome.failures[name] = str(failure)
        for shown in group.entry.names:
            outcome.seconds.pop(shown, None)
        return
    for shown, each in seconds.items() if heat else ():
        for kept, value in ((outcome.seconds, each), (outcome.cpu, cpu)):
            kept.setdefault(shown, {}).setdefault(heat, []).append(value)


def _started(
    case: Case,
    entries: Iterable[Entry],
    nurseries: Nurseries,
    outcome: Outcome,
    stack: ExitStack,
) -> list[Group]:
    """Start one contestant after the other, and keep those that compute what the plain model does.

    What they print goes to files below build/.
    """
    log = LOGS / case.letter
    log.mkdir(parents=True, exist_ok=True)
    expected = {tied: reference(case, tied=tied) for tied in ({True, case.each is None})}
    groups = []
    for entry in entries:
        try:
            group = Group(entry, case, nurseries.of(entry), log)
            stack.callback(group.close)
            answers = group.said()
            _note(entry, answers, expected, outcome)
            group.rest()
        except Failed as failure:
            outcome.failures[entry.name] = str(failure)
            print(f"  {entry.name}: {failure}", file=sys.stderr, flush=True)
            continue
        groups.append(group)
    return groups


def _note(
    entry: Entry, answers: list[Answer], expected: Mapping[bool, list[float]], outcome: Outcome
) -> None:
    """Compare the losses of the first steps with the plain model's, and remember the rest."""
    for answer in answers:
        outcome.versions |= answer["versions"]
    if entry.is_limit:
        return
    tied = answers[0]["tied"]
    if not tied:
        outcome.untied.append(entry.name)
    losses = next((a["losses"] for a in answers if None not in a["losses"]), None)
    if losses is None:
        raise Failed("it showed no loss")
    wanted = expected[tied]
    if not all(
        math.isclose(loss, want, rel_tol=TOLERANCE)
        for loss, want in zip(losses, wanted, strict=True)
    ):
        shown, right = (" ".join(f"{x:.5f}" for x in xs) for xs in (losses, wanted))
        raise Failed(f"wrong: losses {shown}, the plain model's are {right}")
