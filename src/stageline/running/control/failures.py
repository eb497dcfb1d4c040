"""What went wrong on one rank, as text that travels, and as the error that every other rank raises.

an action raised            StepError, with the rank, stage, microbatch and action, on every rank
the description was wrong   ConfigError with the findings, on every rank
anything else in a call     PeerError: "rank 1 could not ...: BatchError: ..."
a process ended, is silent  PeerError: "rank 1 is gone: ..."; the pipeline is over
"""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

from stageline.errors import (
    ConfigError,
    PeerError,
    RemoteCause,
    StagelineError,
    StepError,
    told,
    words,
)

# Characters of a message, and of a traceback. What is told must fit into the buffer of a socket:
# the hub may not wait for a process that is stopped and reads nothing.
_LONGEST_MESSAGE, _LONGEST_TRACE = 4000, 16000


class Aborted(BaseException):
    """Another rank failed, so this one stops; never seen by a user.

    Attributes:
        hint: What the error that the user sees should add.
    """

    hint: str = ""


def described(error: BaseException) -> tuple[str, str, str]:
    """Return type, message and traceback of an exception, short enough to travel."""
    trace = "".join(traceback.format_exception(error))
    return type(error).__name__, _shortened(words(error)), _shortened(trace, _LONGEST_TRACE)


def _shortened(text: str, longest: int = _LONGEST_MESSAGE) -> str:
    """Leave out the middle of what is too long: both ends of a traceback say what happened."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} ... ({len(text) - longest} characters left out) ... {text[-half:]}"


@dataclass(frozen=True)
class Failure:
    """One failure, told to all ranks.

    Attributes:
        rank: Where it happened.
        epoch: The call in which it happened.
        text: One sentence; what a PeerError says.
        is_final: Whether no later call can work: a process is gone.
        action: Of a failed action: stage, microbatch and text form.
        findings: Of a wrong description: what was described, and all findings.
        cause: Type, message and traceback of the exception behind it.
        time: When, in seconds since the epoch of the clock.
    """

    rank: int
    epoch: int
    text: str
    is_final: bool = False
    action: tuple[int, int, str] | None = None
    findings: tuple[str, tuple[str, ...]] | None = None
    cause: tuple[str, str, str] | None = None
    time: float = field(default_factory=time.time)

    @classmethod
    def of(cls, error: BaseException, *, rank: int, epoch: int, doing: str) -> Failure:
        """Describe what a rank raised; ``doing`` ends the sentence "rank 1 failed ..."."""
        known = getattr(error, "failure", None)
        if isinstance(known, Failure):  # another rank's, that came here some other way
            return known
        if isinstance(error, StepError):
            action = (error.stage, error.microbatch, error.action)
            cause = described(error.__cause__ or error)
            return cls(rank, epoch, _shortened(str(error)), action=action, cause=cause)
        if isinstance(error, ConfigError):
            return cls(rank, epoch, str(error), findings=(error.what, error.findings))
        if isinstance(error, PeerError):
            return cls(rank, epoch, str(error))
        said = str(error) if isinstance(error, StagelineError) else told(error)
        text = f"rank {rank} failed {doing}: {_shortened(said)}"
        return cls(rank, epoch, text, cause=described(error))

    def error(self) -> StagelineError:
        """Return what the other ranks raise."""
        made: StagelineError
        if self.action is not None:
            stage, microbatch, action = self.action
            made = StepError(rank=self.rank, stage=stage, microbatch=microbatch, action=action)
        elif self.findings is not None:
            made = ConfigError(*self.findings)
        else:
            made = PeerError(self.text)
        if self.cause is not None:
            made.__cause__ = RemoteCause(self.rank, *self.cause)
        made.failure = self  # found again by whoever tells or prints it
        return made

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Failure:
        action, findings, cause = fields["action"], fields["findings"], fields["cause"]
        return cls(
            **{
                **fields,
                "action": action and tuple(action),
                "findings": findings and (findings[0], tuple(findings[1])),
                "cause": cause and tuple(cause),
            }
        )
