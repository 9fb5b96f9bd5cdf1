"""What the tests share: data whose float32 sums are exact, and an outer limit on every test."""

from __future__ import annotations

import faulthandler
import sys

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("flashoverlap", deadline=None, max_examples=25, derandomize=True, print_blob=True)
settings.load_profile("flashoverlap")

_LIMIT_S = 400


@pytest.fixture(autouse=True)
def _no_hang():
    """A test that hangs ends the run with all threads' stacks."""
    faulthandler.dump_traceback_later(_LIMIT_S, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def d1_a(rank: int, m: int, k: int) -> np.ndarray:
    """A of rank `rank`, data D1 of the list of known faults: small integers."""
    i, j = np.meshgrid(np.arange(m, dtype=np.int64), np.arange(k, dtype=np.int64), indexing="ij")
    return ((40503 * i + 30011 * j + 1009 * rank) % 65521 % 9 - 4).astype(np.float32)


def d1_b(rank: int, n: int, k: int) -> np.ndarray:
    """B of rank `rank` as [n, k]."""
    j, i = np.meshgrid(np.arange(n, dtype=np.int64), np.arange(k, dtype=np.int64), indexing="ij")
    return ((27644 * i + 14699 * j + 4177 * rank) % 65521 % 7 - 3).astype(np.float32)


def d1_sum(ranks: int, m: int, n: int, k: int) -> np.ndarray:
    """The sum over ranks in 64-bit integers: independent of this library and of floating point."""
    total = np.zeros((m, n), np.int64)
    for rank in range(ranks):
        total += d1_a(rank, m, k).astype(np.int64) @ d1_b(rank, n, k).astype(np.int64).T
    return total


def poisoned(shape: tuple[int, ...], dtype: object = np.float32) -> np.ndarray:
    return np.full(shape, np.nan, dtype=dtype)
