"""Token files: the same tokens as the text, whole or not there at all, and damage that is noticed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from error_texts import raises
from small_tokenizer import save_tokenizer, sentences, write_jsonl

from jaxpar.data import ReadOptions, TokenFile, load_text, load_tokenizer, write_tokens
from jaxpar.data.token_file import HEADER_BYTES, MAGIC, TokenFileWriter
from jaxpar.data.tokenize import TokenizeProgress
from jaxpar.errors import DataError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    return write_jsonl(tmp_path / "corpus/rows.jsonl", sentences(300)).parent


def error(call: object, *args: object, name: str) -> None:
    with raises(DataError, name):
        call(*args)  # type: ignore[operator]


def write_header(path: Path, change: dict[str, object], *, digest: bool = True) -> None:
    """Change the header of a file."""
    raw, end = path.read_bytes(), HEADER_BYTES - 64
    header = (MAGIC + json.dumps({**json.loads(raw[len(MAGIC) : end]), **change}).encode()).ljust(end)
    last = hashlib.sha256(header).hexdigest().encode() if digest else b" " * 64
    path.write_bytes(header + last + raw[HEADER_BYTES:])


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_a_token_file_holds_what_the_text_is(kind: str, corpus: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(None if kind == "bytes" else tmp_path / "tokenizer.json")
    seen: list[TokenizeProgress] = []
    file = write_tokens(corpus, tmp_path / "a.tokens", tokenizer=tokenizer, progress=seen.append)
    file.verify()
    text, mapped = load_text(corpus, tokenizer=tokenizer), load_text(tmp_path / "a.tokens", tokenizer=tokenizer)
    for part in ("train", "heldout", "train_starts", "heldout_starts"):
        ours, other = getattr(mapped, part), getattr(text, part)
        assert isinstance(ours, np.memmap)
        assert ours.tolist() == other.tolist()
    assert mapped.train.dtype == text.train.dtype
    for name in ("name", "vocab", "documents", "heldout_documents", "unit", "eos", "bad"):
        assert getattr(mapped, name) == getattr(text, name)
    for starts, ids in ((mapped.train_starts, mapped.train), (mapped.heldout_starts, mapped.heldout)):
        assert starts[0] == 0 and starts[-1] == ids.size and (ids[starts[1:-1] - 1] == text.eos).all()
    last = seen[-1]
    assert last.bytes == last.of_bytes > 0 and last.documents == 300
    assert last.tokens == mapped.train.size + mapped.heldout.size + 2  # the last document of each part also ends
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tokens", "corpus", "tokenizer.json"]


def test_a_damaged_or_truncated_file_is_an_error(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    write_tokens(corpus, path)
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES + 3] ^= 1
    path.write_bytes(raw)
    error(TokenFile(path).verify, name="checksum")
    path.write_bytes(raw[:-1])
    error(TokenFile, path, name="bytes")
    path.write_bytes(MAGIC)
    error(TokenFile, path, name="token file")
    error(TokenFile, tmp_path / "b", name="/b")


@pytest.mark.parametrize(
    "change",
    [
        {"version": 3},
        {"dtype": "float32"},
        {"vocab": -1},
        {"vocab": 0},
        {"name": 3},
        {"train": {"tokens": 2**60, "documents": 3}},
        {"heldout": {"tokens": True, "documents": 3}},
        {"more": 3},
    ],
)
def test_a_header_that_cannot_be_is_an_error(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    write_tokens("synthetic", path)
    write_header(path, change)
    error(TokenFile, path, name=next(iter(change)))


def test_an_error_leaves_nothing_and_an_existing_file_stays(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    with (corpus / "rows.jsonl").open("a") as file:
        file.write("{}\n")
    error(write_tokens, corpus, path, name="corpus/rows.jsonl")
    assert [one.name for one in tmp_path.glob("a.*")] == []
    found = write_tokens(corpus, path, options=ReadOptions(bad_rows="skip"))
    assert found.header.bad == (f"1 bad row skipped: {corpus / 'rows.jsonl'} row 301: it has no field 'text', but none")
    error(write_tokens, corpus, path, name="a.tokens")


def test_a_killed_writer_leaves_no_file_and_the_next_one_writes_it(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    code = (
        "import os, signal, sys\nfrom jaxpar.data import write_tokens\n"
        "write_tokens(sys.argv[1], sys.argv[2], progress=lambda at: os.kill(os.getpid(), signal.SIGKILL))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(corpus), str(path)], check=False)
    assert done.returncode == -signal.SIGKILL and not path.exists()
    assert {one.name for one in tmp_path.glob("a.*")} == {"a.tokens.new", "a.tokens.heldout"}
    write_tokens(corpus, path).verify()
    assert [one.name for one in tmp_path.glob("a.*")] == ["a.tokens"]


def test_two_writers_and_a_full_disk(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tokens"
    with (tmp_path / "a.tokens.new").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        error(write_tokens, corpus, path, name="a.tokens")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    error(write_tokens, corpus, path, name="a.tokens")
    assert not path.exists() and not list(tmp_path.glob("a.tokens*"))
    none = tmp_path / "none" / "a.tokens"
    error(write_tokens, corpus, none, name="none/a.tokens")


def test_another_tokenizer_than_the_files_is_an_error(corpus: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    path = tmp_path / "a.tokens"
    write_tokens(corpus, path, tokenizer=tokenizer)
    assert load_text(path).vocab == tokenizer.vocab  # the header knows all that training needs
    (tmp_path / "other").mkdir()
    other = load_tokenizer(save_tokenizer(tmp_path / "other", vocab=310))
    with raises(DataError, "a.tokens", "tokenizer.json"):
        load_text(path, tokenizer=other)


def test_the_writer_keeps_the_lengths_small(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "a.tokens", np.dtype("uint8")) as writer:
        for n in range(10):
            writer.add(np.zeros(n + 1, "uint8"), heldout=n == 9)
        assert (writer.documents(heldout=False), writer.documents(heldout=True)) == (9, 1)
        header = write_tokens("synthetic", tmp_path / "b.tokens").header
        made = writer.finish(lambda train, heldout, sum_: replace(header, train=train, heldout=heldout, checksum=sum_))
    assert made.train_starts.tolist() == [*np.cumsum([0, *range(1, 9)]).tolist(), 44]


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_noticed(step: int, tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    text = tmp_path / "text.txt"
    text.write_text("one line\nanother line\n" * 9)
    write_tokens(text, path, heldout_fraction=0.5)
    raw = bytearray(path.read_bytes())
    header = len(bytes(raw[: HEADER_BYTES - 64]).rstrip())
    padding = range(header, HEADER_BYTES - 64, 501)
    for bit in [8 * byte + bit for byte in (*range(header), *padding, *range(HEADER_BYTES - 64, len(raw)))
                for bit in range(8)][::step]:  # fmt: skip
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        with pytest.raises(DataError):
            load_text(path)
            TokenFile(path).verify()
        raw[bit // 8] ^= 1 << bit % 8


def test_a_file_of_version_1_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    write_tokens("synthetic", path)
    write_header(path, {"version": 1}, digest=False)
    TokenFile(path).verify()
    assert load_text(path).train.size == 1007861
    write_header(path, {"version": 2}, digest=False)
    error(TokenFile, path, name="a.tokens")


def test_a_text_without_tokens_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    with raises(DataError, "a.tokens", "documents"), TokenFileWriter(path, np.dtype("uint8")) as writer:
        for heldout in (False, True):
            writer.add(np.zeros(1, "uint8"), heldout=heldout)
        writer.finish(lambda *_: pytest.fail("it has no header"))
    assert not path.exists()
