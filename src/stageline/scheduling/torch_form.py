"""Schedules as ``torch.distributed.pipelining`` writes them: CSV, one line per rank.

    0F0,0F1,,,0B0,0B1                    an empty cell is a wait; it says nothing that counts
    1F0,1B0,1F1,1B1

    here       there                       here       there
    2F0 2I0    2F0 2I0 2W0 2B0             2F3>3      2SEND_F3        2F3<1   2RECV_F3
    0F7&7B3    (0F7;7B3)OVERLAP_F_B        2B3>1      2SEND_B3        2B3<3   2RECV_B3
    2REDUCE    2REDUCE_GRAD                -          2UNSHARD 2RESHARD (read, and left out)

``parse`` reads both forms, also mixed. What torch has no word for is written as here: ``2R0``.
"""

from __future__ import annotations

import re

from stageline.errors import ScheduleError
from stageline.scheduling.action import Action, Kind, action_text
from stageline.scheduling.schedule import Schedule

_PAIR = re.compile(r"\((.+);(.+)\)OVERLAP_F_B")
_TRANSFER = re.compile(r"([0-9]+)(SEND|RECV)_([FB])([0-9]+)")
_WHOLE_STAGE = re.compile(r"([0-9]+)(REDUCE_GRAD|UNSHARD|RESHARD)")

_TRANSFERS = {
    ("SEND", "F"): (Kind.SEND_FORWARD, 1),
    ("RECV", "F"): (Kind.RECEIVE_FORWARD, -1),
    ("SEND", "B"): (Kind.SEND_BACKWARD, -1),
    ("RECV", "B"): (Kind.RECEIVE_BACKWARD, 1),
}
"""The kind of each transfer, and how far away the stage at its other end is."""

_WORDS = {kind: f"{verb}_{letter}" for (verb, letter), (kind, _) in _TRANSFERS.items()}


def translate(word: str) -> str:
    """Return one word of torch in the form used here; any other word as it is.

    >>> translate("(0F7;7B3)OVERLAP_F_B"), translate("2RECV_B3"), translate("2UNSHARD")
    ('0F7&7B3', '2B3<3', '')
    """
    if pair := _PAIR.fullmatch(word):
        return f"{pair[1].strip()}&{pair[2].strip()}"
    if transfer := _TRANSFER.fullmatch(word):
        kind, distance = _TRANSFERS[transfer[2], transfer[3]]
        stage = int(transfer[1])
        if stage + distance < 0:
            raise ScheduleError(f"{word!r}: there is no stage before stage 0")
        return action_text(kind, stage, int(transfer[4]), stage + distance)
    if whole := _WHOLE_STAGE.fullmatch(word):
        # Unsharding is how a stage gets its weights, not when it runs.
        return f"{whole[1]}REDUCE" if whole[2] == "REDUCE_GRAD" else ""
    return word


def format_csv(schedule: Schedule) -> str:
    """Write a schedule in the words of torch, one line per rank.

    >>> from stageline.scheduling.text import parse
    >>> print(format_csv(parse("0F0 0F0>1 0F1&0B0 0REDUCE")))
    0F0,0SEND_F0,(0F1;0B0)OVERLAP_F_B,0REDUCE_GRAD

    Raises:
        ScheduleError: There are several copies of the model, which the form cannot say.
    """
    if schedule.replicas > 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.replicas} copies of the model, for which "
            f"CSV has no word: use text()"
        )
    return "\n".join(_format_row(schedule, rank) for rank in range(schedule.num_ranks))


def _format_row(schedule: Schedule, rank: int) -> str:
    words = [_word(action) for action in schedule.row(rank)]
    if schedule.pairs:
        for at in reversed(schedule.pairs[rank].tolist()):
            words[at : at + 2] = [f"({words[at]};{words[at + 1]})OVERLAP_F_B"]
    return ",".join(words) or ","  # a blank line would be no row at all


def _word(action: Action) -> str:
    if action.kind is Kind.REDUCE:
        return f"{action.stage}REDUCE_GRAD"
    if action.kind in _WORDS:
        return f"{action.stage}{_WORDS[action.kind]}{action.microbatch}"
    return str(action)
