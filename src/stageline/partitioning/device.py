"""A device in figures: what estimates go by where nothing can be run, read from a TOML file.

name = "A100 80GB"
memory = "80GiB"
bandwidth = 2.04e12             # bytes per second, of its memory
overhead = 5e-6                 # seconds to start one operation
efficiency = 0.5                # the share of the figures below that products reach
ranks_per_host = 8
agreement = 1e-3                # seconds of a step until all know that it begins, and is over

[flops]                         # operations per second
float32 = 19.5e12
bfloat16 = 312e12

[link]                          # between ranks of one host
latency = 10e-6
bandwidth = 300e9

[network]                       # between hosts
latency = 20e-6
bandwidth = 25e9
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from stageline.errors import ConfigError
from stageline.partitioning.amounts import read_bytes, show_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NANOSECONDS = 1e9


@dataclass(frozen=True)
class Link:
    """What values travel over between ranks.

    Attributes:
        latency: Seconds until the first byte arrives.
        bandwidth: Bytes per second.
        handling: Seconds for which each of the two ranks is busy with one value; 0 where an
            accelerator copies by itself.
    """

    latency: float = 0.0
    bandwidth: float = 10e9
    handling: float = 0.0

    def time(self, num_bytes: int) -> int:
        """Return the nanoseconds of one value.

        Example:
            >>> Link(latency=1e-6, bandwidth=1e9).time(500)
            1500
        """
        return round(_NANOSECONDS * (self.latency + num_bytes / self.bandwidth))

    @property
    def handled(self) -> int:
        """The nanoseconds for which each of the two ranks is busy with one value."""
        return round(_NANOSECONDS * self.handling)


@dataclass(frozen=True)
class Device:
    """What a rank computes on.

    Example:
        >>> print(Device.named("A100"))
        A100 80GB: 80.0 GiB, float32 19.5, bfloat16 312, float16 312 TFLOPS

    Attributes:
        name: For people.
        memory: Bytes; None if it does not matter.
        flops: Operations per second of matrix products, by dtype: ``{"float32": 19.5e12}``.
        bandwidth: Bytes per second of its memory.
        overhead: Seconds to start one operation.
        efficiency: The share of ``flops`` that products reach.
        link: Between ranks of one host.
        network: Between hosts; as the link if None.
        ranks_per_host: How many ranks a host has; None for all.
        agreement: Seconds of a step in which ranks agree that it begins, and that it is over.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    bandwidth: float
    memory: int | None = None
    overhead: float = 0.0
    efficiency: float = 1.0
    link: Link = Link()
    network: Link | None = None
    ranks_per_host: int | None = None
    agreement: float = 0.0

    def __str__(self) -> str:
        speeds = ", ".join(f"{dtype} {speed / 1e12:.3g}" for dtype, speed in self.flops.items())
        memory = "" if self.memory is None else f"{show_bytes(self.memory)}, "
        return f"{self.name}: {memory}{speeds} TFLOPS"

    def speed(self, dtype: str) -> float:
        """Return the operations per second that products of a dtype reach.

        One that is not given is taken to be as fast as float32, or as the slowest that is.
        """
        slowest = self.flops.get("float32", min(self.flops.values()))
        return self.efficiency * self.flops.get(dtype, slowest)

    def between(self, rank: int, other: int) -> Link:
        """Return what two ranks are connected by.

        Example:
            >>> device = Device("", {"float32": 1}, 1, network=Link(bandwidth=5), ranks_per_host=4)
            >>> device.between(2, 3).bandwidth, device.between(3, 4).bandwidth
            (10000000000.0, 5)
        """
        if self.network is None or self.ranks_per_host is None:
            return self.link
        apart = rank // self.ranks_per_host != other // self.ranks_per_host
        return self.network if apart else self.link

    @classmethod
    def load(cls, path: str | Path) -> Device:
        """Read a description from a TOML file; everything that is wrong is said at once."""
        what = f"the device in {path}"
        try:
            entries = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as cause:
            raise ConfigError(what, [f"it cannot be read: {cause}"]) from cause
        faults = _faults(entries)
        if faults:
            raise ConfigError(what, faults)
        entries.setdefault("name", Path(path).stem)
        entries["memory"] = read_bytes(entries.get("memory"))
        entries.update({name: Link(**entries[name]) for name in _LINKS if name in entries})
        return cls(**entries)

    @classmethod
    def named(cls, name: str) -> Device:
        """Return a description that stageline brings: cpu, V100, A100 or H100.

        The figures of GPUs are their maker's own; products reach about half of them.
        """
        known = {known.lower(): device for known, device in _KNOWN.items()}
        if name.lower() in known:
            return known[name.lower()]
        near = difflib.get_close_matches(name, list(_KNOWN), n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        choices = ", ".join(map(repr, _KNOWN))
        raise ConfigError(
            "this device",
            [f"device={name!r}: wanted one of {choices}, or a Device: Device.load(path).{guess}"],
        )


_LINKS = ("link", "network")
_POSITIVE = ("bandwidth", "efficiency")
_AT_LEAST_ZERO = ("overhead", "latency", "handling", "agreement")


def _faults(entries: Mapping[str, Any]) -> list[str]:
    known = [each.name for each in fields(Device)]
    faults = [_unknown(name, known) for name in entries if name not in known]
    faults += [f"{name}: is missing" for name in ("flops", "bandwidth") if name not in entries]
    faults += _number_faults(entries, "")
    if "name" in entries and not isinstance(entries["name"], str):
        faults.append(f"name = {entries['name']!r}: wanted text")
    if "memory" in entries and read_bytes(entries["memory"]) is None:
        faults.append(f"memory = {entries['memory']!r}: wanted bytes, or text like '80GiB'")
    ranks = entries.get("ranks_per_host", 1)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        faults.append(f"ranks_per_host = {ranks!r}: wanted a whole number of at least 1")
    return faults + _table_faults(entries)


def _table_faults(entries: Mapping[str, Any]) -> list[str]:
    faults = []
    for table in ("flops", *_LINKS):
        inside = entries.get(table)
        if inside is None:
            continue
        if not isinstance(inside, Mapping) or not inside:
            faults.append(f"{table} = {inside!r}: wanted a table, [{table}]")
        elif table == "flops":
            faults += [
                f"flops.{dtype} = {speed!r}: wanted a number above 0"
                for dtype, speed in inside.items()
                if not _is_number(speed) or speed <= 0
            ]
        else:
            known = [each.name for each in fields(Link)]
            faults += [f"{table}.{_unknown(name, known)}" for name in inside if name not in known]
            faults += _number_faults(inside, f"{table}.")
    return faults


def _number_faults(entries: Mapping[str, Any], prefix: str) -> list[str]:
    faults = [
        f"{prefix}{name} = {entries[name]!r}: wanted a number above 0"
        for name in _POSITIVE
        if name in entries and not (_is_number(entries[name]) and entries[name] > 0)
    ]
    return faults + [
        f"{prefix}{name} = {entries[name]!r}: wanted a number of at least 0"
        for name in _AT_LEAST_ZERO
        if name in entries and not (_is_number(entries[name]) and entries[name] >= 0)
    ]


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"{name}: is not known" + (f", did you mean {near[0]}?" if near else "")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _gpu(name: str, memory: int, bandwidth: float, link: float, **flops: float) -> Device:
    return Device(
        name=name,
        flops={dtype: speed * 1e12 for dtype, speed in flops.items()},
        bandwidth=bandwidth * 1e9,
        memory=memory << 30,
        overhead=5e-6,
        efficiency=0.5,
        link=Link(10e-6, link * 1e9),
        network=Link(20e-6, 25e9),
        ranks_per_host=8,
    )


_KNOWN = {
    # What balance goes by where nothing else is said: one core, and a hop through shared memory to
    # a process that sleeps until then.
    "cpu": Device(
        name="a nominal CPU core",
        flops={"float32": 50e9},
        bandwidth=10e9,
        link=Link(latency=60e-6, bandwidth=10e9, handling=80e-6),
        agreement=0.8e-3,
    ),
    "V100": _gpu("V100 32GB", 32, 900, 150, float32=15.7, float16=125),
    "A100": _gpu("A100 80GB", 80, 2039, 300, float32=19.5, bfloat16=312, float16=312),
    "H100": _gpu("H100 80GB", 80, 3350, 450, float32=67, bfloat16=989, float16=989),
}
