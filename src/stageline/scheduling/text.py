"""The text form of a schedule: one line per rank, actions in order.

    # comments and blank lines are free, and so is the name of the rank
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

    0F7&7B3        a forward and a backward that overlap
    replicas: 2    in front of the rows: there are two copies of the model

What is written with ``format`` is read back exactly by ``parse``. Commas part actions as blanks do,
and torch's own words are understood, so a CSV file of torch can be read: see torch_form.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from stageline.errors import ScheduleError
from stageline.scheduling.action import Action, Kind, action_text
from stageline.scheduling.schedule import Schedule
from stageline.scheduling.torch_form import translate

_PREFIX = re.compile(r"\s*rank\s+([0-9]+)\s*:")
_REPLICAS = re.compile(r"\s*replicas\s*:\s*([0-9]+)\s*")
_WORD = re.compile(r"\([^)\n]*\)[^\s,]*|[^\s,]+")
_PAIR = [Kind.FORWARD, Kind.BACKWARD]


@dataclass
class _Rows:
    """What has been read so far."""

    actions: list[list[Action]] = field(default_factory=list)
    pairs: list[list[int]] = field(default_factory=list)
    replicas: int = 1

    def read(self, line: str, number: int) -> None:
        replicas = _REPLICAS.fullmatch(line)
        if replicas and not self.actions:
            self.replicas = int(replicas[1])
            return
        begin = _begin(line, number, rank=len(self.actions))
        self.actions.append([])
        self.pairs.append([])
        for word in _WORD.finditer(line, begin):
            actions = _actions(word, number)
            if len(actions) > 1:
                self.pairs[-1].append(len(self.actions[-1]))
            self.actions[-1] += actions


def parse(text: str, name: str = "custom") -> Schedule:
    """Read a schedule from its text form, or from a CSV file of torch.

    >>> schedule = parse('''
    ...     0F0 0F1 0B0 0B1
    ...     1F0 1B0 1F1 1B1''')
    >>> schedule.num_ranks, schedule.num_microbatches
    (2, 2)
    >>> schedule == parse("0F0,0F1,,,0B0,,0B1 \\n ,1F0,1B0,1F1,1B1")
    True

    The rows need not make sense together: call ``check()`` for that.

    Raises:
        ScheduleError: A word is no action; the message gives line and column.
    """
    rows = _Rows()
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0]
        if line.strip():
            rows.read(line, number)
    if not rows.actions:
        raise ScheduleError("the text holds no actions: write one line per rank, as in '0F0 0B0'")
    arrays = Schedule.from_rows(rows.actions).arrays
    pairs = tuple(np.array(positions, dtype=np.int64) for positions in rows.pairs)
    return Schedule(arrays, name, pairs, rows.replicas)


def _begin(line: str, number: int, *, rank: int) -> int:
    """Return where the actions of a line begin: behind the name of the rank, if it has one."""
    prefix = _PREFIX.match(line)
    if prefix and int(prefix[1]) != rank:
        raise ScheduleError(
            f"line {number}, column {prefix.start(1) + 1}: this is the row of rank {rank}, "
            f"got {prefix[1]!r}: write the ranks in ascending order, each once"
        )
    return prefix.end() if prefix else 0


def _actions(word: re.Match[str], number: int) -> list[Action]:
    """Return what a word says: one action, a pair of them, or none."""
    try:
        ours = translate(word[0])
        actions = [Action.parse(part) for part in ours.split("&")] if ours else []
        if len(actions) > 1 and [action.kind for action in actions] != _PAIR:
            raise ScheduleError(f"{word[0]!r}: a pair is a forward and a backward, as in 0F7&7B3")
    except ScheduleError as fault:
        raise ScheduleError(f"line {number}, column {word.start() + 1}: {fault}") from None
    return actions


def format(schedule: Schedule) -> str:
    """Write a schedule as text.

    >>> print(format(parse("rank 0: 0F0   0B0  # one rank")))
    0F0 0B0
    """
    rows = [_format_row(schedule, rank) for rank in range(schedule.num_ranks)]
    head = [f"replicas: {schedule.replicas}"] if schedule.replicas > 1 else []
    return "\n".join([*head, *rows])


def _format_row(schedule: Schedule, rank: int) -> str:
    words = [
        action_text(kind, stage, microbatch, peer)
        for kind, stage, microbatch, peer in schedule.arrays[rank].tolist()
    ]
    if not words:
        # A blank line would be skipped by the parser, and the ranks below would move up.
        return f"rank {rank}:"
    if schedule.pairs:
        for at in reversed(schedule.pairs[rank].tolist()):
            words[at : at + 2] = [f"{words[at]}&{words[at + 1]}"]
    return " ".join(words)
