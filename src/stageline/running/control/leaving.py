"""Last words: the other ranks, and torchrun, learn why a process ends.

    the script ends          "rank 1 has left: ..."
    an exception, uncaught   "rank 1 ended with ValueError: ..."     and torchrun's error file
    SIGTERM                  "rank 1 was ended by SIGTERM"
    kill -9, a crash         nothing can be said: the hub notices the end of the connection

torchrun prints one error as the root cause: the one with the earliest time in its error file. The
rank that failed first writes its own time and traceback there, the others a later time and one
line. They also give torchrun a moment to end them, and do not print what the first has printed.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from functools import partial
from io import StringIO
from types import TracebackType
from weakref import WeakSet

import torch.distributed as dist

from stageline.running.control import terminating
from stageline.running.control.failures import Failure, described
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
    os.register_at_fork(after_in_child=_in_child)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = _before_printing(error)
        if line is None:
            _print_with_rank(partial(previous, kind, error, trace))
        else:
            print(line, file=sys.stderr)

    sys.excepthook = hook
    if threading.current_thread() is threading.main_thread():
        terminating.watch(_terminated)


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
    cause = described(error)
    member.leave(f"rank {rank} ended with {cause[0]}: {cause[1]}", cause)


def _leave_all() -> None:
    for member in list(_members):
        farewell(member)


def _terminated() -> None:
    for member in list(_members):
        member.leave(f"rank {member.rank} was ended by SIGTERM")


def _in_child() -> None:
    """In a child process, say of a DataLoader: the job is the parent's."""
    _members.clear()


def _before_printing(error: BaseException) -> str | None:
    """Write torchrun's error file; return what to print instead of a traceback, if anything."""
    members = list(_members)
    if not members or _ERROR_FILE not in os.environ:
        return None
    failure = getattr(error, "failure", None)
    if not isinstance(failure, Failure) or failure.rank == members[0].rank:
        when = failure.time if isinstance(failure, Failure) else time.time()
        _write_error_file(error, "".join(traceback.format_exception(error)), when)
        return None
    # A process that was killed, or has left without an error, tells nothing by itself.
    tells_itself = failure.cause is not None or not failure.is_final
    if members[0].one_host and tells_itself:
        line = f"stopped, because rank {failure.rank} failed: see there"
        _write_error_file(error, line, failure.time + 1)
        time.sleep(_MOMENT)
        return f"rank {members[0].rank}: {line}"
    _write_error_file(error, f"{failure.text} (told by rank {failure.rank})", failure.time + 1)
    time.sleep(_MOMENT)
    return None


def _print_with_rank(print_error: Callable[[], object]) -> None:
    """Begin every line of an error with the rank, for torchrun mixes what all ranks print.

    torch does it where the script has made a world; pipelines do not need one.
    """
    members = list(_members)
    if not members or dist.is_initialized():
        print_error()
        return
    with redirect_stderr(StringIO()) as printed:
        print_error()
    name = f"[rank{members[0].rank}]: "
    lines = printed.getvalue().splitlines(keepends=True)
    sys.stderr.write("".join(line if line.startswith(name) else name + line for line in lines))
    sys.stderr.flush()


def _write_error_file(error: BaseException, text: str, when: float) -> None:
    """Write what torchrun reads, in the form of its own ``record`` decorator."""
    kind, message, _ = described(error)
    told = {
        "message": f"{kind}: {message}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(when))},
    }
    with suppress(OSError), open(os.environ[_ERROR_FILE], "w") as file:
        json.dump({"message": told}, file)
