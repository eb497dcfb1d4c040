"""What torchrun would tell its processes, for benchmarks that start them by themselves."""

from __future__ import annotations

import socket


def world(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set; without it, nobody looks after processes."""
    if size == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
