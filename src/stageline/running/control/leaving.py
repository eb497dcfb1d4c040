"""Last words: the other ranks, and torchrun, learn why a process ends.

    the script ends          "rank 1 has left: ..."
    an exception, uncaught   "rank 1 ended with ValueError: ..."     and torchrun's error file
    SIGTERM                  "rank 1 was ended by SIGTERM"
    kill -9, a crash         nothing can be said: the hub notices the end of the connection

torchrun prints one error as the root cause: the one with the earliest time in its error file. The
rank that failed first writes its own time and traceback there, the others a later time and one
line. They also give torchrun a moment to end them before they print what the first has printed.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any
from weakref import WeakSet

from stageline.running.control.failures import Failure
from stageline.running.control.member import Member

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_MOMENT = 2.0  # seconds in which torchrun notices the first failure and ends the others

_members: WeakSet[Member] = WeakSet()
_is_installed = False


def remember(member: Member) -> None:
    """Let a member say farewell when this process ends, however that comes about."""
    global _is_installed  # hooks belong to the process
    _members.add(member)
    if _is_installed:
        return
    _is_installed = True
    atexit.register(_leave_all)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _before_printing(error)
        previous(kind, error, trace)

    sys.excepthook = hook
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def farewell(member: Member) -> None:
    """Leave the job; say why, if it is because of an exception."""
    error = getattr(sys, "last_value", None)
    rank = member.rank
    if error is None or isinstance(error, SystemExit):
        member.leave(
            f"rank {rank} has left: its script has ended, or has closed or dropped the pipeline, "
            "while this rank went on. Every rank must make the same calls"
        )
        return
    failure = getattr(error, "failure", None)
    if isinstance(failure, Failure):
        member.leave(failure.text)
        return
    kind, trace = type(error).__name__, "".join(traceback.format_exception(error))
    member.leave(f"rank {rank} ended with {kind}: {error}", (kind, str(error), trace))


def _leave_all() -> None:
    for member in list(_members):
        farewell(member)


def _terminated(number: int, frame: Any) -> None:
    for member in list(_members):
        member.leave(f"rank {member.rank} was ended by SIGTERM")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _before_printing(error: BaseException) -> None:
    members = list(_members)
    if not members or _ERROR_FILE not in os.environ:
        return
    failure = getattr(error, "failure", None)
    is_remote = isinstance(failure, Failure) and failure.rank != members[0].rank
    if not is_remote:
        when = failure.time if isinstance(failure, Failure) else time.time()
        _write_error_file(error, "".join(traceback.format_exception(error)), when)
        return
    assert isinstance(failure, Failure)
    _write_error_file(error, f"{failure.text} (told by rank {failure.rank})", failure.time + 1)
    time.sleep(_MOMENT)


def _write_error_file(error: BaseException, text: str, when: float) -> None:
    """Write what torchrun reads, in the form of its own ``record`` decorator."""
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(when))},
    }
    with suppress(OSError), open(os.environ[_ERROR_FILE], "w") as file:
        json.dump({"message": message}, file)
