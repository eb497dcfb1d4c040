"""The text form of a schedule: one line per rank, actions in order.

    # comments and blank lines are free, and so is the name of the rank
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

What is written with ``format`` is read back exactly by ``parse``.
"""

from __future__ import annotations

import re

from stageline.errors import ScheduleError
from stageline.scheduling.action import Action, action_text
from stageline.scheduling.schedule import Schedule

_PREFIX = re.compile(r"\s*rank\s+([0-9]+)\s*:")
_WORD = re.compile(r"\S+")


def parse(text: str, name: str = "custom") -> Schedule:
    """Read a schedule from its text form.

    >>> schedule = parse('''
    ...     0F0 0F1 0B0 0B1
    ...     1F0 1B0 1F1 1B1''')
    >>> schedule.num_ranks, schedule.num_microbatches
    (2, 2)

    The rows need not make sense together: call ``check()`` for that.

    Raises:
        ScheduleError: A word is no action; the message gives line and column.
    """
    rows: list[list[Action]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0]
        if line.strip():
            rows.append(_parse_line(line, number, rank=len(rows)))
    if not rows:
        raise ScheduleError("the text holds no actions: write one line per rank, as in '0F0 0B0'")
    return Schedule.from_rows(rows, name)


def _parse_line(line: str, number: int, *, rank: int) -> list[Action]:
    begin = 0
    prefix = _PREFIX.match(line)
    if prefix:
        begin = prefix.end()
        if int(prefix[1]) != rank:
            raise ScheduleError(
                f"line {number}, column {prefix.start(1) + 1}: this is the row of rank {rank}, "
                f"got {prefix[1]!r}: write the ranks in ascending order, each once"
            )
    return [_parse_word(word, number) for word in _WORD.finditer(line, begin)]


def _parse_word(word: re.Match[str], number: int) -> Action:
    try:
        return Action.parse(word[0])
    except ScheduleError as fault:
        raise ScheduleError(f"line {number}, column {word.start() + 1}: {fault}") from None


def format(schedule: Schedule) -> str:
    """Write a schedule as text.

    >>> print(format(parse("rank 0: 0F0   0B0  # one rank")))
    0F0 0B0
    """
    return "\n".join(_format_row(schedule, rank) for rank in range(schedule.num_ranks))


def _format_row(schedule: Schedule, rank: int) -> str:
    numbers = schedule.arrays[rank].tolist()
    if not numbers:
        # A blank line would be skipped by the parser, and the ranks below would move up.
        return f"rank {rank}:"
    return " ".join(
        action_text(kind, stage, microbatch, peer) for kind, stage, microbatch, peer in numbers
    )
