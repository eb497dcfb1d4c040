"""A process that has imported what its children need: by fork a contestant starts in a moment.

There is one per environment and number of intra-op threads, which torch reads when it is imported.
This file and worker.py run in it; ``Nursery`` is the side that asks for children.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
GRACE = 5.0  # seconds in which a child ends by itself


@dataclass(frozen=True)
class Child:
    """A process of a contestant, and how to talk to it."""

    commands: IO[str]
    answers: IO[str]
    handle: int  # of the process: a number could pass to another one

    def stop(self) -> None:
        """Let none of its threads run."""
        signal.pidfd_send_signal(self.handle, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them run again."""
        signal.pidfd_send_signal(self.handle, signal.SIGCONT)

    def close(self) -> None:
        """Let it end, or end it."""
        self.commands.close()
        self.answers.close()
        if not select.select([self.handle], [], [], GRACE)[0]:
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        os.close(self.handle)


class Nursery:
    """Starts children in one environment.

    Args:
        python: The interpreter of that environment.
        environment: Environment variables of all children.
        imports: What they need.
    """

    def __init__(self, python: Path, environment: Mapping[str, str], imports: list[str]) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [str(python), str(HERE / "nursery.py"), str(theirs.fileno()), *imports],
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    def start(self, request: dict[str, Any], log: Path) -> Child:
        """Start a child; what it prints goes to a file.

        Raises:
            OSError: The nursery is gone, or could not import what it should.
        """
        command_read, command_write = os.pipe()
        answer_read, answer_write = os.pipe()
        with log.open("ab") as output:
            files = [command_read, answer_write, output.fileno()]
            try:
                socket.send_fds(self._link, [json.dumps(request).encode()], files)
                number = self._link.recv(64)
            finally:
                os.close(command_read)
                os.close(answer_write)
        commands = os.fdopen(command_write, "w", buffering=1)
        answers = os.fdopen(answer_read, "r")
        if not number:
            raise ConnectionResetError("its environment cannot import what it needs")
        return Child(commands, answers, os.pidfd_open(int(number)))

    def close(self) -> None:
        self._link.close()
        self._process.wait()


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here asks how children ended
    while True:
        data, files, _, _ = socket.recv_fds(link, 1 << 16, 3)
        if not data:
            return
        number = os.fork()
        if number == 0:
            link.close()
            _become(json.loads(data), *files)
        for file in files:
            os.close(file)
        link.send(str(number).encode())


def _become(request: dict[str, Any], commands: int, answers: int, output: int) -> None:
    from worker import serve

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(request["environment"])
    serve(commands, answers, request)


if __name__ == "__main__":
    main()
