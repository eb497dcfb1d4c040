"""Fixtures for all tests: pools of processes that stay alive, and one intra-op thread.

A pool lives as long as a file of tests: where a test has let ranks fail, gloo's threads go on
turning in the processes that are left, and would slow down all that comes after.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from stageline.testing import RankPool


def _pool(world_size: int) -> Iterator[RankPool]:
    pool = RankPool(world_size, env={"OMP_NUM_THREADS": "1"})
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    yield from _pool(2)


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    yield from _pool(4)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Results are compared to the last bit, which the number of intra-op threads may change."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
