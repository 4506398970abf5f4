"""Megatron's indexed datasets, written here byte by byte by their published layout."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_texts import raises
from megatron_files import CODES, write_megatron

from jaxpar.data import DocumentRows, load_text
from jaxpar.data.megatron import check_largest, read_megatron
from jaxpar.errors import DataError

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9, 10, 11, 12, 13, 0], [14, 15, 0], [16, 17, 18, 0], [19, 20, 0]]


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("split", [2, 100])
def test_tokens_and_documents_are_what_was_written(dtype: str, split: int, tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "corpus_text_document", DOCUMENTS, dtype, split)
    found = read_megatron(prefix)
    assert isinstance(found.tokens, np.memmap) and found.tokens.dtype == np.dtype(dtype)
    documents = [found.tokens[a:b].tolist() for a, b in zip(found.starts, found.starts[1:], strict=False)]
    assert documents == DOCUMENTS


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_text_holds_out_the_last_documents(suffix: str, tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "corpus_text_document", DOCUMENTS)
    text = load_text(f"{prefix}{suffix}", heldout_fraction=0.34)
    assert text.train.tolist() == [*chain(*DOCUMENTS[:4])] and text.heldout.tolist() == [*chain(*DOCUMENTS[4:])]
    assert (text.name, text.vocab, text.eos, text.unit) == ("corpus_text_document", 21, None, "documents")
    assert (text.documents, text.heldout_documents) == (6, 2)
    rows = DocumentRows(text.heldout, text.heldout_starts, 8)
    assert rows.read(np.array([0]))["tokens"].tolist() == [[16, 17, 18, 19, 20, 0, 0, 0]]
    assert load_text(prefix, heldout_fraction=0.01).heldout_documents == 1


def test_the_checksum_follows_index_and_tokens(tmp_path: Path) -> None:
    sums = {
        read_megatron(write_megatron(tmp_path / "a", documents, split=split)).checksum
        for documents, split in ((DOCUMENTS, 100), (DOCUMENTS, 2), (DOCUMENTS[::-1], 100), ([[1, 2, 3]], 3))
    }
    assert len(sums) == 4


def test_a_last_boundary_may_be_missing_and_a_document_empty(tmp_path: Path) -> None:
    found = read_megatron(write_megatron(tmp_path / "a", DOCUMENTS, boundaries=[0]))
    assert found.starts.tolist() == [0, 22]
    found = read_megatron(write_megatron(tmp_path / "b", DOCUMENTS, boundaries=[0, 1, 1, 6]))
    assert found.starts.tolist() == [0, 4, 4, 22]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"magic": b"TNTIDX\0\0\0"}, "Megatron"),
        ({"version": 2}, "version 2"),
        ({"code": 7}, "code 7"),
        ({"pointers": [0, 8, 12, 24, 30, 36]}, ".idx"),
        ({"lengths": [4, 2, 6, 3, 8, -1]}, ".idx"),
        ({"boundaries": [0, 2, 1, 6]}, ".idx"),
        ({"boundaries": [0, 7]}, ".idx"),
        ({"code": 1}, ".idx"),
    ],
)
def test_files_that_contradict_themselves(changes: dict[str, Any], name: str, tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "a", DOCUMENTS, **changes)
    with raises(DataError, name):
        read_megatron(prefix)


def test_truncated_files(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "a", DOCUMENTS)
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with raises(DataError, "a.bin"):
        read_megatron(prefix)
    index.write_bytes(index.read_bytes()[:-1])
    with raises(DataError, "a.idx", "162"):
        read_megatron(prefix)
    with raises(DataError, "/none", "source"):
        load_text(tmp_path / "none")


def test_the_vocabulary_is_the_tokenizers_or_the_largest_token(tmp_path: Path) -> None:
    found = read_megatron(write_megatron(tmp_path / "a", DOCUMENTS))
    assert check_largest(found, 300) == 300 and check_largest(found, None) == 21
    wide = read_megatron(write_megatron(tmp_path / "b", [[2**31, 0]], "int64"))
    with raises(DataError, "b.bin"):
        check_largest(wide, None)
