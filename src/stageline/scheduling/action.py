"""One thing that one rank does, and its text form.

2F0      forward of microbatch 0 through stage 2
2B0      its full backward
2I0 2W0  the same backward in two halves: input gradient, then weight gradient
2R0      forward again, because the activations were not kept
0F3>1    send what 0F3 made to stage 1          1F3<0   receive it, before 1F3
1B3>0    send the gradient that 1B3 (or 1I3)    0B3<1   receive it, before 0B3 (or 0I3)
         made for the output of stage 0
2REDUCE  sum the gradients of stage 2 with its other holders
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from stageline.errors import ScheduleError

LARGEST = 2**31 - 1
"""The largest stage, microbatch or peer number: rows store them in 32 bits."""

WANTED = "an action such as 2F0 (letters F B I W R), a transfer 0F3>1 or 1F3<0, or 2REDUCE"


class Kind(IntEnum):
    """What an action does; the value is what rows store.

    >>> Kind.INPUT_GRADIENT.letter, Kind.SEND_FORWARD.is_transfer
    ('I', True)
    """

    FORWARD = 0
    BACKWARD = 1
    INPUT_GRADIENT = 2
    WEIGHT_GRADIENT = 3
    RECOMPUTE = 4
    SEND_FORWARD = 5
    RECEIVE_FORWARD = 6
    SEND_BACKWARD = 7
    RECEIVE_BACKWARD = 8
    REDUCE = 9

    @property
    def letter(self) -> str:
        """The letter in the text form; a transfer has that of the value it carries."""
        return LETTERS[self]

    @property
    def is_compute(self) -> bool:
        """Whether the rank computes: F, B, I, W or R."""
        return self <= Kind.RECOMPUTE

    @property
    def is_transfer(self) -> bool:
        """Whether a value leaves or enters the rank."""
        return Kind.SEND_FORWARD <= self <= Kind.RECEIVE_BACKWARD

    @property
    def is_send(self) -> bool:
        """Whether a value leaves the rank."""
        return self in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)

    @property
    def is_receive(self) -> bool:
        """Whether a value enters the rank."""
        return self in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)


LETTERS = ("F", "B", "I", "W", "R", "F", "F", "B", "B", "REDUCE")
"""Letter of each kind, by its value."""

ARROWS = ("", "", "", "", "", ">", "<", ">", "<", "")
"""Arrow of each kind, by its value: away from the stage, or towards it."""

_KINDS = {(LETTERS[kind], ARROWS[kind]): kind for kind in Kind}

_TOKEN = re.compile(r"([0-9]+)(?:(REDUCE)|([FBIWR])([0-9]+)(?:([<>])([0-9]+))?)")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing one rank does: ``2F0`` is stage 2, forward, microbatch 0.

    >>> str(Action(2, Kind.FORWARD, 0))
    '2F0'
    >>> Action.parse("0F3>1")
    Action(stage=0, kind=<Kind.SEND_FORWARD: 5>, microbatch=3, peer=1)

    Attributes:
        stage: The stage that acts; of a transfer, the stage at this end.
        kind: What it does.
        microbatch: On which slice of the batch; 0 for a reduction, which concerns the whole stage.
        peer: The stage at the other end of a transfer, None for all else.
    """

    stage: int
    kind: Kind
    microbatch: int
    peer: int | None = None

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault:
            raise ScheduleError(f"{Action.__repr__(self)}: {fault}")

    def _fault(self) -> str | None:
        for number in (self.stage, self.microbatch, self.peer or 0):
            if not 0 <= number <= LARGEST:
                return f"numbers of an action lie between 0 and {LARGEST}"
        if (self.peer is not None) != self.kind.is_transfer:
            return "a transfer names its peer stage, and nothing else does"
        if self.kind is Kind.REDUCE and self.microbatch != 0:
            return "a reduction concerns the whole stage: give it microbatch 0"
        return None

    def __str__(self) -> str:
        return action_text(self.kind, self.stage, self.microbatch, self.peer)

    @classmethod
    def parse(cls, token: str) -> Action:
        """Read one action back from its text form.

        Raises:
            ScheduleError: The token is no action.
        """
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise ScheduleError(f"{token!r} is not {WANTED}")
        stage, reduce, letter, microbatch, arrow, peer = match.groups()
        kind = _KINDS.get((reduce or letter, arrow or ""))
        if kind is None:
            raise ScheduleError(f"{token!r}: a transfer carries F or B, not {letter}")
        numbers = [int(number) if number else 0 for number in (stage, microbatch, peer)]
        if max(numbers) > LARGEST:
            raise ScheduleError(f"{token!r}: numbers may not exceed {LARGEST}")
        return cls(numbers[0], kind, numbers[1], numbers[2] if peer else None)


def action_text(kind: int, stage: int, microbatch: int, peer: int | None = None) -> str:
    """Return the text form of an action given by its numbers.

    >>> action_text(Kind.RECEIVE_BACKWARD, 0, 3, 1)
    '0B3<1'
    """
    if kind == Kind.REDUCE:
        return f"{stage}REDUCE"
    if ARROWS[kind]:
        return f"{stage}{LETTERS[kind]}{microbatch}{ARROWS[kind]}{peer}"
    return f"{stage}{LETTERS[kind]}{microbatch}"
