"""Processes that stay alive for many tests: one pool per world size, started when needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stageline.testing import RankPool


def _pool(world_size: int) -> Iterator[RankPool]:
    pool = RankPool(world_size, env={"OMP_NUM_THREADS": "1"})
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    yield from _pool(4)
