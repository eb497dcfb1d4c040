"""What a process listens on, read from /proc."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"
_ACCEPTS = 0x10000


def listening(process: int | None = None) -> set[str]:
    """Return where a process takes connections: ``127.0.0.1:80``, ``unix:@name``."""
    who = os.getpid() if process is None else process
    mine = _socket_numbers(who)
    root = Path(f"/proc/{who}/net")
    found = {
        _readable(fields[1])
        for name in ("tcp", "tcp6")
        for fields in _table(root / name)
        if fields[3] == _LISTENS and int(fields[9]) in mine
    }
    for fields in _table(root / "unix"):
        if int(fields[3], 16) & _ACCEPTS and int(fields[6]) in mine:
            found.add("unix:" + (fields[7] if len(fields) > 7 else ""))
    return found


def _socket_numbers(process: int) -> set[int]:
    numbers = set()
    for file in os.listdir(f"/proc/{process}/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{process}/fd/{file}")
            if target.startswith("socket:["):
                numbers.add(int(target[8:-1]))
    return numbers


def _table(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []


def _readable(text: str) -> str:
    address, port = text.split(":")
    raw = bytes.fromhex(address)
    words = struct.unpack(f"={len(raw) // 4}I", raw)
    packed = struct.pack(f">{len(words)}I", *words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return f"{socket.inet_ntop(family, packed)}:{int(port, 16)}"
