"""Text sources: which files are read, a split by file that is stable, and the messages of errors."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_texts import raises
from interpreters import python

from jaxpar.data import ReadOptions, Text, bigram_entropy, load_text, unigram_entropy
from jaxpar.data.documents import NAMED_SOURCES
from jaxpar.errors import DataError


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def numbered(count: int) -> dict[str, bytes]:
    return {f"part{i % 3}/{i}.txt": f"text number {i}".encode() for i in range(count)}


def parts(text: Text) -> tuple[set[bytes], set[bytes]]:
    return set(text.train.tobytes().split(b"\0")), set(text.heldout.tobytes().split(b"\0"))


@pytest.fixture(scope="module")
def stdlib() -> Text:
    return load_text("stdlib")


def test_a_folder_is_read_whole_in_sorted_order_with_a_separator(tmp_path: Path) -> None:
    files = numbered(40)
    text = load_text(write(tmp_path / "corpus", files), heldout_fraction=0.3)
    in_order = [files[name] for name in sorted(files)]
    train, heldout = parts(text)
    assert text.train.tobytes() == b"\0".join(c for c in in_order if c in train)
    assert text.heldout.tobytes() == b"\0".join(c for c in in_order if c in heldout)
    assert train | heldout == set(in_order)
    assert not train & heldout
    assert (text.name, text.vocab, text.documents, text.heldout_documents) == ("corpus", 256, 40, len(heldout))
    assert text.train.dtype == text.heldout.dtype == np.uint8


def test_the_split_is_the_documented_hash_of_the_path(tmp_path: Path) -> None:
    files = numbered(60)
    _, heldout = parts(load_text(write(tmp_path, files), heldout_fraction=0.25, seed=3))
    below = {
        content
        for name, content in files.items()
        if int(hashlib.sha256(f"3:{name}".encode()).hexdigest()[:16], 16) / 2**64 < 0.25
    }
    assert heldout == below


def test_adding_files_moves_no_other_file(tmp_path: Path) -> None:
    before = parts(load_text(write(tmp_path, numbered(40)), heldout_fraction=0.3))
    after = parts(load_text(write(tmp_path, numbered(90)), heldout_fraction=0.3))
    assert before[0] < after[0]
    assert before[1] < after[1]


def test_the_seed_chooses_the_heldout_files(tmp_path: Path) -> None:
    write(tmp_path, numbered(60))
    assert parts(load_text(tmp_path, seed=1))[1] != parts(load_text(tmp_path, seed=2))[1]


def test_hidden_cached_installed_and_empty_files_are_left_out(tmp_path: Path) -> None:
    left_out = {
        ".git/a.txt": b"hidden",
        ".hidden.txt": b"hidden",
        "__pycache__/b.txt": b"cache",
        "lib/site-packages/c.txt": b"installed",
        "empty.txt": b"",
        "other.bin": b"no match",
    }
    text = load_text(write(tmp_path, numbered(40) | left_out), heldout_fraction=0.3)
    assert text.documents == 40
    assert not set().union(*parts(text)) & set(left_out.values())


def test_patterns_choose_the_files(tmp_path: Path) -> None:
    write(tmp_path, {f"{i}.log": f"log {i}".encode() for i in range(40)} | numbered(5))
    assert load_text(tmp_path, options=ReadOptions(patterns=("*.log",)), heldout_fraction=0.3).documents == 40


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "corpus", numbered(40))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert load_text("~/corpus", heldout_fraction=0.3).documents == 40


def test_bytes_that_are_no_text_encoding_are_kept(tmp_path: Path) -> None:
    files = {f"{i}.txt": bytes([255, 254, 128 + i]) for i in range(40)}
    assert set().union(*parts(load_text(write(tmp_path, files), heldout_fraction=0.3))) == set(files.values())


def test_a_folder_that_cannot_be_listed_is_an_error_not_a_smaller_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, numbered(40))
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if os.path.basename(path) == "part1":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="part1"):
        load_text(tmp_path, heldout_fraction=0.3)


def test_the_stdlib_is_the_interpreters_own_source(stdlib: Text) -> None:
    train, heldout = parts(stdlib)
    assert Path(os.__file__).read_bytes() in train | heldout
    assert stdlib.name == "stdlib"
    assert stdlib.train.size > 5_000_000
    assert 0.02 < stdlib.heldout_documents / stdlib.documents < 0.08


def test_the_stdlib_has_structure_to_learn(stdlib: Text) -> None:
    assert bigram_entropy(stdlib.heldout) < 0.85 * unigram_entropy(stdlib.heldout)


def test_the_synthetic_text_is_the_same_on_every_machine() -> None:
    text = load_text("synthetic")
    digest = hashlib.sha256(text.train.tobytes() + text.heldout.tobytes()).hexdigest()
    assert digest == "70ef054d1d8b5af4f7b16e9e68313b159067034d8049b4781c14e9b8e0a7380e"
    assert (text.name, text.documents) == ("synthetic", 256)
    assert 2**20 <= text.train.size + text.heldout.size < 2**20 + 256


def test_the_synthetic_text_follows_its_seed_even_a_negative_one() -> None:
    first, second = load_text("synthetic", seed=1), load_text("synthetic", seed=-1)
    assert first.train[:4096].tobytes() != second.train[:4096].tobytes()


def test_the_synthetic_text_rewards_context_beyond_one_token() -> None:
    # A model that remembers whole words can reach about 0.2 nats; one token of context leaves ten times that.
    text = load_text("synthetic")
    assert 1.5 < bigram_entropy(text.train) < 0.9 * unigram_entropy(text.train)
    words = text.train.tobytes().replace(b"\0", b" ").split()
    ids = np.unique(words, return_inverse=True)[1]
    assert bigram_entropy(ids, int(ids.max()) + 1) / (text.train.size / len(words)) < 0.35


def test_texts_are_read_only() -> None:
    text = load_text("synthetic")
    with pytest.raises(ValueError, match="read-only"):
        text.train[0] = 0


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("stdlb", "stdlb"),
        ("sinthetic", "mean 'synthetic'"),
        ("", "''"),
        ("no/such/folder", "no/such/folder"),
    ],
)
def test_an_unknown_source_is_named(source: str, words: str) -> None:
    with raises(DataError, words):
        load_text(source)


def test_a_single_file_of_text_is_cut_in_two_at_the_end_of_a_line(tmp_path: Path) -> None:
    lines = b"".join(b"line %d\n" % i for i in range(100))
    text = load_text(write(tmp_path, {"a.txt": lines}) / "a.txt", heldout_fraction=0.25)
    train, heldout = text.train.tobytes(), text.heldout.tobytes()
    assert train + heldout == lines and train.endswith(b"\n") and abs(len(heldout) / len(lines) - 0.25) < 0.02
    assert (text.name, text.documents, text.heldout_documents) == ("a.txt", 2, 1)


def test_no_matching_file_names_the_patterns(tmp_path: Path) -> None:
    write(tmp_path, {"a.bin": b"a"})
    with raises(DataError, "*.txt", "matches"):
        load_text(tmp_path)
    write(tmp_path, {"a.txt": b""})
    with raises(DataError, "*.txt", "every"):
        load_text(tmp_path)


def test_a_split_with_an_empty_part_says_which_and_how_to_fix_it(tmp_path: Path) -> None:
    write(tmp_path, numbered(3))
    with raises(DataError, "heldout_fraction", "left 3"):
        load_text(tmp_path, heldout_fraction=1e-9)
    with raises(DataError, "heldout_fraction", "left 0"):
        load_text(tmp_path, heldout_fraction=1 - 1e-9)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_the_fraction_must_leave_something_on_both_sides(fraction: float) -> None:
    with pytest.raises(DataError, match="heldout_fraction"):
        load_text("synthetic", heldout_fraction=fraction)


def test_importing_the_package_brings_in_neither_grain_nor_jax() -> None:
    program = (
        "import sys, jaxpar; before = set(sys.modules); import jaxpar.data;"
        "print(sorted({'grain', 'jax'} & (set(sys.modules) - before)))"
    )
    assert python(program) == "[]\n"


def test_every_named_source_loads() -> None:
    assert [load_text(name).name for name in NAMED_SOURCES] == list(NAMED_SOURCES)
