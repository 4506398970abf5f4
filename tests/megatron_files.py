"""Megatron's indexed datasets, written byte by byte by their published layout."""

from __future__ import annotations

import struct
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_megatron(
    prefix: Path, documents: list[list[int]], dtype: str = "uint16", split: int = 100, **changes: Any
) -> Path:
    """Write a dataset; a document is cut into sequences of at most ``split`` tokens."""
    sequences = [one[at : at + split] for one in documents for at in range(0, len(one), split)]
    counts = [-(-len(one) // split) for one in documents]
    lengths = [len(one) for one in sequences]
    size = np.dtype(dtype).itemsize
    fields: dict[str, Any] = {
        "magic": b"MMIDIDX\x00\x00",
        "version": 1,
        "code": CODES[dtype],
        "lengths": lengths,
        "pointers": [sum(lengths[:i]) * size for i in range(len(lengths))],
        "boundaries": [0, *np.cumsum(counts).tolist()],
        **changes,
    }
    index = fields["magic"] + struct.pack("<Q", fields["version"]) + struct.pack("<B", fields["code"])
    index += struct.pack("<QQ", len(sequences), len(fields["boundaries"]))
    index += np.array(fields["lengths"], "<i4").tobytes() + np.array(fields["pointers"], "<i8").tobytes()
    index += np.array(fields["boundaries"], "<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(np.array([*chain(*sequences)], np.dtype(dtype).newbyteorder("<")).tobytes())
    return prefix
