"""Messages between the processes of a job: a length, then JSON. No pickle; files may go along.

┌────────┬──────────────────────────────────┐
│ length │ {"kind": "done", "epoch": 7, …}  │  + open files, over a Unix socket
└────────┴──────────────────────────────────┘
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

Message = dict[str, Any]

_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 16
_MOST_FILES = 16
LONGEST = 1 << 30  # bytes of a message


_open: WeakSet[Connection] = WeakSet()


def _let_go() -> None:
    """Leave the connections to the process that has made them: only its end must end them."""
    for connection in list(_open):
        file = connection.sock.detach()
        if file >= 0:
            os.close(file)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class Unreadable(EOFError):
    """What came makes no sense; the other side may well be alive."""


class Connection:
    """A socket that carries messages; any thread may send, one thread receives.

    Attributes:
        sock: The socket.
        longest: The bytes of the longest message that is listened to.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.longest = LONGEST
        self._carries_files = sock.family == getattr(socket, "AF_UNIX", None)
        # A signal handler may say farewell in the middle of a send.
        self._sending = threading.RLock()
        self._bytes = bytearray()
        self._files: deque[int] = deque()
        self._waiting: list[tuple[Message, list[int]]] = []
        _open.add(self)

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Send a message, and files that the receiver may then use as its own.

        Raises:
            OSError: The other side is gone.
        """
        body = json.dumps({**message, "files": len(files)} if files else message).encode()
        data = _LENGTH.pack(len(body)) + body
        with self._sending:
            if files:
                sent = socket.send_fds(self.sock, [data], list(files))
                data = data[sent:]
            if data:  # to send nothing would fail if the other side has read all, and left
                self.sock.sendall(data)

    def receive_one(self) -> Message:
        """Wait for one message; what has come with it stays for ``receive``.

        Raises:
            EOFError: As ``receive``.
        """
        return self.receive_one_with_files()[0]

    def receive_one_with_files(self) -> tuple[Message, list[int]]:
        """Wait for one message and its files, as ``receive_one``."""
        while True:
            messages = self.receive()
            if messages:
                self._waiting = messages[1:]
                return messages[0]

    def receive(self) -> list[tuple[Message, list[int]]]:
        """Wait for something to come, and return the messages that are complete.

        Raises:
            EOFError: The other side has closed the connection, or its process has ended.
            Unreadable: What came is no message, or did not come whole; it is an EOFError too.
        """
        if self._waiting:
            messages, self._waiting = self._waiting, []
            return messages
        try:
            chunk = self._read()
        except TimeoutError:
            raise
        except OSError as cause:
            raise EOFError(str(cause)) from cause
        if not chunk:
            raise EOFError("the connection was closed")
        self._bytes += chunk
        return self._complete()

    def _read(self) -> bytes:
        if not self._carries_files:
            return self.sock.recv(_CHUNK)
        chunk, files, _, _ = socket.recv_fds(self.sock, _CHUNK, _MOST_FILES)
        self._files.extend(files)
        return chunk

    def _complete(self) -> list[tuple[Message, list[int]]]:
        messages = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > self.longest:
                raise Unreadable(f"a message of {length} bytes was announced: this is no peer")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                break
            message, num_files = _read_message(self._bytes[_LENGTH.size : end])
            if not 0 <= num_files <= len(self._files):
                raise Unreadable(
                    f"{num_files} files were announced, {len(self._files)} came: this process may "
                    "have too many open files"
                )
            del self._bytes[:end]
            messages.append((message, [self._files.popleft() for _ in range(num_files)]))
        return messages

    @property
    def has_more(self) -> bool:
        """Whether ``receive`` would return at once with what has come before."""
        return bool(self._waiting)

    def close(self) -> None:
        """End the connection, for the other side too; files that nobody took are closed."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        while self._waiting:
            self._files.extend(self._waiting.pop()[1])
        while self._files:
            os.close(self._files.popleft())


def _read_message(body: bytearray) -> tuple[Message, int]:
    """Return a message and how many files belong to it."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as cause:
        raise Unreadable("a message could not be read") from cause
    if not isinstance(message, dict):
        raise Unreadable(f"a message was a {type(message).__name__}: this is no peer")
    num_files = message.pop("files", 0)
    if not isinstance(num_files, int):
        raise Unreadable(f"{num_files!r} files were announced: this is no peer")
    return message, num_files
