"""Megatron's indexed datasets: tokens in ``PREFIX.bin``, and where each document is in ``PREFIX.idx``.

The index is little-endian: 9 bytes of magic, the version (uint64), a code for the dtype of the tokens (uint8), the
numbers of sequences and of document boundaries (uint64), then the length of each sequence (int32), the byte where it
begins (int64), and for each document the number of its first sequence, with the number of sequences at the end (int64).
Datasets of several modalities add a byte for each sequence, and are not read.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxpar.errors import DataError
from jaxpar.utils.checks import INT32

MAGIC = b"MMIDIDX\0\0"
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Dtypes of tokens by code; 6 and 7 are floats."""
_HEAD = struct.Struct("<9sQBQQ")
_SAMPLE = 1 << 20


@dataclass(frozen=True, eq=False)
class MegatronDataset:
    """An indexed dataset, mapped into memory.

    Attributes:
      prefix: path of its files without ``.bin`` and ``.idx``.
      tokens: token ids [n], memory-mapped.
      starts: offset of each document, and the end of the last, [documents + 1].
      checksum: a hash of the index and of the first and last megabyte of the tokens.
    """

    prefix: Path
    tokens: np.ndarray
    starts: np.ndarray
    checksum: str


def megatron_prefix(source: str | os.PathLike[str]) -> Path | None:
    """Returns the prefix of an indexed dataset, of which ``source`` is the prefix or a file; ``None`` for others."""
    path = Path(source).expanduser()
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    files = (Path(f"{prefix}{suffix}") for suffix in (".idx", ".bin"))
    return prefix if all(map(os.path.isfile, files)) else None  # of a name that is too long, Path would raise


def read_megatron(prefix: Path) -> MegatronDataset:
    """Returns an indexed dataset.

    Raises:
      DataError: the index is not of Megatron's version 1, contradicts itself, or does not fit the tokens.
      OSError: a file cannot be read.
    """
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    with index.open("rb") as f:
        head = f.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise DataError(f"{index} is not an index of Megatron. Remedy: tools/preprocess_data.py of Megatron-LM.")
    _, version, code, sequences, boundaries = _HEAD.unpack(head)
    if version != 1 or code not in DTYPES:
        what = f"version {version}" if version != 1 else f"tokens of dtype code {code}"
        raise DataError(f"{index} has {what}, which cannot be read. Remedy: version 1, and integers.")
    size, expected = index.stat().st_size, _HEAD.size + 12 * sequences + 8 * boundaries
    if not 0 < sequences < 1 << 48 or not 0 < boundaries < 1 << 48 or size != expected:
        raise DataError(
            f"{index} must have {expected:,} bytes for {sequences:,} sequences and {boundaries:,} document boundaries, "
            f"got {size:,}. Remedy: copy it again, or preprocess the text again."
        )
    lengths = np.memmap(index, "<i4", "r", _HEAD.size, (sequences,))
    pointers = np.memmap(index, "<i8", "r", _HEAD.size + 4 * sequences, (sequences,))
    firsts = np.memmap(index, "<i8", "r", _HEAD.size + 12 * sequences, (boundaries,))
    dtype = np.dtype(DTYPES[code]).newbyteorder("<")
    ends = np.cumsum(lengths, dtype=np.int64)
    offsets = np.concatenate([[0], ends])
    if int(lengths.min()) < 0 or not np.array_equal(pointers, offsets[:-1] * dtype.itemsize):
        raise DataError(f"{index}: its sequences do not follow one another. Remedy: preprocess the text again.")
    if firsts[0] != 0 or (np.diff(firsts) < 0).any() or firsts[-1] > sequences:
        raise DataError(f"{index}: its document boundaries are not in order. Remedy: preprocess the text again.")
    if tokens.stat().st_size != offsets[-1] * dtype.itemsize or not offsets[-1]:
        raise DataError(
            f"{tokens} must have {offsets[-1] * dtype.itemsize:,} bytes, as its index says, got "
            f"{tokens.stat().st_size:,}. Remedy: copy it again, or preprocess the text again."
        )
    # Some writers leave out the last boundary.
    bounds = firsts if firsts[-1] == sequences else np.append(firsts, sequences)
    mapped = np.memmap(tokens, dtype, "r", 0, (int(offsets[-1]),))
    return MegatronDataset(prefix, mapped, offsets[bounds], _checksum(index, tokens))


def check_largest(dataset: MegatronDataset, vocab: int | None) -> int:
    """Returns the vocabulary: the tokenizer's, or without one the largest token plus one, which reads all tokens.

    Raises:
      DataError: a token does not fit int32.
    """
    if vocab is not None:
        return vocab
    largest = int(dataset.tokens.max())
    if largest >= INT32:
        raise DataError(f"{dataset.prefix}.bin: tokens must fit int32, got {largest}. Remedy: preprocess it again.")
    return largest + 1


def _checksum(index: Path, tokens: Path) -> str:
    with index.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256")
    with tokens.open("rb") as f:
        digest.update(f.read(_SAMPLE))
        f.seek(max(0, tokens.stat().st_size - _SAMPLE))
        digest.update(f.read(_SAMPLE))
    return f"megatron sha256:{digest.hexdigest()[:32]}"
