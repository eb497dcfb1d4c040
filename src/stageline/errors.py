"""Every exception that stageline raises on purpose.

    StagelineError
    ├── ConfigError     (ValueError)    a pipeline was described wrongly; every finding at once
    ├── ScheduleError   (ValueError)    a schedule is impossible or its text cannot be read
    ├── BatchError      (ValueError)    a batch cannot be cut into microbatches
    ├── CaptureError    (RuntimeError)  a model cannot be recorded, or does what was not recorded
    │   └── GuardError                  it decides otherwise than when it was recorded
    ├── StateError      (RuntimeError)  a state_dict does not fit; every finding at once
    └── PipeError       (RuntimeError)  something went wrong during a run
        ├── StepError                   an action raised: rank, stage, microbatch, action, cause
        ├── EdgeError                   a value cannot cross between two stages, or another one came
        └── PeerError                   another rank of the job is gone, silent or out of step
    RemoteCause         (Exception)     the __cause__ of these: what another process raised, as text

The class says who must act: a ``ValueError`` is the caller's argument, a ``PipeError`` is what
happened while the pipeline ran. Wrong arithmetic of our own is an ``assert``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class StagelineError(Exception):
    """The root of all exceptions of this library.

    Attributes:
        failure: What happened on another rank, where that is the reason.
    """

    failure: object | None = None


class ConfigError(StagelineError, ValueError):
    """A pipeline was described wrongly.

    Example:
        >>> print(ConfigError("sl.Pipeline", ["split=0: wanted a number of stages, at least 1"]))
        sl.Pipeline is not possible:
          - split=0: wanted a number of stages, at least 1
    """

    def __init__(self, what: str, findings: Sequence[str]) -> None:
        self.what = what
        self.findings = tuple(findings)
        bullets = "".join(f"\n  - {finding}" for finding in findings)
        super().__init__(f"{what} is not possible:{bullets}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.what, self.findings))


class ScheduleError(StagelineError, ValueError):
    """A schedule is impossible, or its text cannot be read."""


class BatchError(StagelineError, ValueError):
    """A batch cannot be cut into microbatches, or its parts do not fit together."""


class CaptureError(StagelineError, RuntimeError):
    """A model cannot be recorded as it is, or does something else than was recorded."""


class GuardError(CaptureError):
    """The code of the model would decide otherwise than when it was recorded."""


class StateError(StagelineError, RuntimeError):
    """A state_dict does not fit the model; nothing was loaded."""


class PipeError(StagelineError, RuntimeError):
    """Something went wrong while the pipeline ran."""


class StepError(PipeError):
    """An action of a step raised; the original exception is ``__cause__``, with its traceback.

    Attributes:
        rank: The pipeline rank that failed.
        stage: The stage it was running.
        microbatch: The microbatch it was working on.
        action: The action in text form, ``2F0``.
    """

    def __init__(
        self, *, rank: int, stage: int, microbatch: int, action: str, hint: str = ""
    ) -> None:
        self.rank = rank
        self.stage = stage
        self.microbatch = microbatch
        self.action = action
        self.hint = hint
        super().__init__(rank, stage, microbatch, action)

    def __str__(self) -> str:
        where = f"rank {self.rank}, stage {self.stage}, microbatch {self.microbatch}"
        cause = self.__cause__
        why = "" if cause is None else f": {told(cause)}"
        return f"{where}: action {self.action} failed{why}{self.hint and ' ' + self.hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        # The cause stays behind, as it does with every exception that is pickled.
        return (_step_error, (self.rank, self.stage, self.microbatch, self.action, self.hint))


def told(cause: BaseException) -> str:
    """Return an exception as the last line of a traceback shows it."""
    if isinstance(cause, RemoteCause):
        return cause.summary
    kind, message = type(cause).__name__, words(cause)
    return f"{kind}: {message}" if message else kind


def words(error: BaseException) -> str:
    """Return what an exception says; one that raises when it is asked keeps nobody from hearing."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"  # as in a traceback


class RemoteCause(Exception):
    """What another process raised, as text; the ``__cause__`` of what is raised here.

    Attributes:
        rank: Where it was raised.
        kind: The name of its type.
        message: What it said.
        trace: Its traceback.
    """

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        self.rank = rank
        self.kind = kind
        self.message = message
        self.trace = trace
        super().__init__(rank, kind, message, trace)

    @property
    def summary(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind

    def __str__(self) -> str:
        return f"on rank {self.rank}:\n\n{self.trace}"


def _step_error(rank: int, stage: int, microbatch: int, action: str, hint: str) -> StepError:
    return StepError(rank=rank, stage=stage, microbatch=microbatch, action=action, hint=hint)


class EdgeError(PipeError):
    """A value cannot cross between two stages, or another value came than was announced."""


class PeerError(PipeError):
    """Another rank of the job is gone, silent or out of step."""


@contextmanager
def original_errors() -> Iterator[None]:
    """Raise what the user's own code raised, instead of the StepError that names the place.

    From Python 3.11 on, the place is a note of the exception.
    """
    try:
        yield
    except StepError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, (StagelineError, RemoteCause)):
            raise
        if hasattr(cause, "add_note"):
            cause.add_note(str(error))
        raise cause from None
