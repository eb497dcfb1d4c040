"""What tensors hold, to the byte: torch's allocator tells every block it gives out or takes back.

Blocks that were there before the trace do not count. Only what the calling thread allocates is
seen, so a rank has to be a process here.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

MARK = "mark: "
SMALLEST = 1 << 14  # bytes: less than any activation, more than a loss or a generator's state


@dataclass(frozen=True)
class Moment:
    """What is alive when a mark is set.

    Attributes:
        mark: Its text.
        held: Bytes.
        highest: The most bytes since the mark before.
        since: Bytes of all but small blocks, by the mark that was set next after they were made.
    """

    mark: str
    held: int
    highest: int
    since: Mapping[int, int]


class Trace:
    """Follows the allocator while it is active; ``moments`` are known afterwards."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.moments: list[Moment] = []

    def __enter__(self) -> Trace:
        self._profile.__enter__()
        return self

    def mark(self, text: str) -> None:
        with record_function(MARK + text):
            pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._profile.__exit__(kind, error, trace)
        if error is None:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "trace.json")
                self._profile.export_chrome_trace(str(file))
                self.moments = moments(json.loads(file.read_text())["traceEvents"])


def moments(events: Sequence[Mapping[str, Any]]) -> list[Moment]:
    """Read the marks and blocks of a trace.

    Example:
        >>> def block(ts, address, size):
        ...     return {"name": "[memory]", "ts": ts, "args": {"Addr": address, "Bytes": size}}
        >>> mark = {"name": "mark: 0F0", "ts": 3}
        >>> moments([block(0, 7, 90_000), block(1, 8, 50_000), block(2, 8, -50_000), mark])
        [Moment(mark='0F0', held=90000, highest=140000, since=Counter({0: 90000}))]
    """
    found: list[Moment] = []
    blocks: dict[int, tuple[int, int]] = {}  # by address: bytes, number of the mark to come
    held = highest = 0
    for event in sorted(events, key=lambda event: float(event.get("ts", 0))):
        name = str(event.get("name", ""))
        if name == "[memory]":
            address, size = event["args"]["Addr"], event["args"]["Bytes"]
            if size > 0:
                blocks[address] = (size, len(found))
            else:
                size = -blocks.pop(address, (0, 0))[0]
            held += size
            highest = max(highest, held)
        elif name.startswith(MARK):
            since: Counter[int] = Counter()
            for size, number in blocks.values():
                since[number] += size if size >= SMALLEST else 0
            found.append(Moment(name.removeprefix(MARK), held, highest, +since))
            highest = held
    return found
