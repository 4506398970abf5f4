"""Initial rows of a sparse table: normal numbers that depend on the seed, the row and the column only."""

from __future__ import annotations

import numpy as np

from jaxpar.parameter_server.pieces import SparseTable

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def initial_rows(table: SparseTable, ids: np.ndarray, features: int) -> np.ndarray:
    """Returns the rows ``ids`` [n] of a table before any update, fp32 [n, features].

    The uniform numbers are SplitMix64 (Steele et al. 2014) of the element's number, made normal by Box and Muller
    (1958).

    >>> table = SparseTable("t", 10**9, ids=("x",))
    >>> bool((initial_rows(table, np.array([7, 8]), 4)[1] == initial_rows(table, np.array([8]), 4)[0]).all())
    True
    """
    with np.errstate(over="ignore"):
        base = _mix(np.uint64(table.seed & (2**64 - 1)) + _GOLDEN)
        numbers = ids.astype(np.uint64)[:, None] * np.uint64(features) + np.arange(features, dtype=np.uint64)
        first = _mix(base ^ (numbers * np.uint64(2) * _GOLDEN))
        second = _mix(base ^ ((numbers * np.uint64(2) + np.uint64(1)) * _GOLDEN))
    radius = np.sqrt(-2 * np.log(_uniform(first)))
    return (table.stddev * radius * np.cos(2 * np.pi * _uniform(second))).astype(np.float32)


def _uniform(bits: np.ndarray) -> np.ndarray:
    """Numbers above 0, at most 1, from 53 of 64 bits."""
    return ((bits >> np.uint64(11)).astype(np.float64) + 1) / 2**53


def _mix(x: np.ndarray | np.uint64) -> np.ndarray:
    z = np.asarray(x, np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
