"""Byte counts of shards, and how a byte count is written."""

from __future__ import annotations

import math
from collections.abc import Sequence


def device_bytes(shape: Sequence[int], itemsize: int, ways: Sequence[int]) -> int:
    """Bytes of the largest shard: each dim divided by its ways, rounded up where a problem left it indivisible."""
    return itemsize * math.prod(-(-size // way) for size, way in zip(shape, ways, strict=True))


def show_bytes(n: int) -> str:
    """A byte count in binary units.

    >>> show_bytes(1536), show_bytes(3 * 2**30)
    ('1.50 KiB', '3.00 GiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(n) // 10), len(units) - 1) if n else 0
    return f"{n} B" if power == 0 else f"{n / 2 ** (10 * power):.2f} {units[power]}"
