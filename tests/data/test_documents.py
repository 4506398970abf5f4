"""Rows of files: which are read, which are bad and why, and how a text is split."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from error_texts import raises
from small_tokenizer import save_tokenizer, sentences, write_jsonl

from jaxpar.data import ReadOptions, load_text, load_tokenizer, rows
from jaxpar.data.bad_rows import BadRows
from jaxpar.data.documents import find_documents
from jaxpar.errors import DataError

BAD = {
    b"{": "it is not JSON: Expecting property name enclosed in double quotes, at character 2",
    b'["text"]': "it is not an object, but ['text']",
    b'{"id": 1}': "it has no field 'text', but 'id'",
    b"{}": "it has no field 'text', but none",
    b'{"text": 3}': "its field 'text' is not text, but 3",
    b'{"text": ""}': "its field 'text' is empty",
    b'{"text": "\\ud800"}': "its field 'text' has half a character at position 0",
    b'{"text": "\xff"}': "byte 10 of the line is not valid UTF-8",
    b"[" * 200_000: "it is nested too deeply",
    b'{"text": ' + b"9" * 5000 + b"}": (
        "it cannot be read: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits; use "
        "sys.set_int_max_str_digits() to increase the limit"
    ),
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_row_is_an_error_or_counted(line: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}')
    with raises(DataError, "a.jsonl", "row 3"):
        list(find_documents(file, ReadOptions()).read(BadRows()))
    reason = BAD[line]
    bad = BadRows("skip")
    found = list(find_documents(file, ReadOptions()).read(bad))
    assert [(one.key, one.content) for one in found] == [("a.jsonl:1", b"one"), ("a.jsonl:4", b"two")]
    assert bad.describe() == f"1 bad row skipped: {file} row 3: {reason}"


def test_many_bad_rows_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"{}\n" * 10 + b'{"text": "x"}\n')
    bad = BadRows("skip")
    assert len(list(find_documents(file, ReadOptions()).read(bad))) == 1
    assert (
        bad.describe()
        == "10 bad rows skipped: "
        + "; ".join(f"{file} row {n}: it has no field 'text', but none" for n in (1, 2, 3))
        + "; and 7 more"
    )


def test_a_line_that_is_too_long_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST_BYTES", 40)
    file = write_jsonl(tmp_path / "a.jsonl", ["x", "y" * 100, "z"])
    bad = BadRows("skip")
    assert [one.content for one in find_documents(file, ReadOptions()).read(bad)] == [b"x", b"z"]
    assert bad.describe() == f"1 bad row skipped: {file} row 2: the line is longer than 40 bytes"


def test_a_folder_of_rows_with_a_readme(tmp_path: Path) -> None:
    texts = sentences(30)
    write_jsonl(tmp_path / "b" / "1.jsonl", texts[10:])
    packed = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    (tmp_path / "README.md").write_text("about the data")
    found = find_documents(tmp_path, ReadOptions())
    assert [one.content.decode() for one in found.read(BadRows())] == texts[10:] and found.unit == "rows"
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "2.jsonl.gz").write_bytes(gzip.compress(packed.encode()))
    options = ReadOptions(text_field="body", patterns=("*.gz",))
    positions: list[int] = []
    found = find_documents(tmp_path, options)
    assert [one.content.decode() for one in found.read(BadRows(), positions.append)] == texts
    assert positions == sorted(positions) and positions[-1] == found.bytes
    assert [one.key for one in find_documents(tmp_path, ReadOptions("text")).read(BadRows())] == ["README.md"]


def test_a_damaged_archive_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-12])
    with raises(DataError, "a.jsonl.gz"):
        list(find_documents(file, ReadOptions()).read(BadRows()))


def test_rows_are_split_by_a_tokenizer_and_end_with_its_eos(tmp_path: Path) -> None:
    tokenizer, texts = load_tokenizer(save_tokenizer(tmp_path)), sentences(200)
    file = write_jsonl(tmp_path / "rows.jsonl", texts)
    text = load_text(file, tokenizer=tokenizer, heldout_fraction=0.2)
    assert (text.documents, text.unit, text.vocab, text.eos) == (200, "rows", tokenizer.vocab, tokenizer.eos)
    assert 20 < text.heldout_documents < 60
    decoder, found = tokenizer.decoder(), []
    for part in (text.train, text.heldout):
        ids = [*part.tolist(), text.eos]
        ends = [i for i, token in enumerate(ids) if token == text.eos]
        for start, end in zip([0, *(i + 1 for i in ends)], ends, strict=False):
            decoder = tokenizer.decoder()
            found.append("".join(map(decoder.add, ids[start:end])) + decoder.end())
    assert sorted(found) == sorted(texts) and found != texts
    before = load_text(write_jsonl(file, texts[:150]), tokenizer=tokenizer, heldout_fraction=0.2).heldout
    assert text.heldout[: before.size].tolist() == before.tolist()  # rows that are added move no other


def test_a_file_that_is_not_utf8_is_bad_for_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    for i in range(40):
        (tmp_path / f"{i}.txt").write_bytes(b"\xffabc" if i == 7 else b"text")
    with raises(DataError, "UTF", "/7.txt"):
        load_text(tmp_path, tokenizer=tokenizer, heldout_fraction=0.3)
    text = load_text(tmp_path, tokenizer=tokenizer, heldout_fraction=0.3, options=ReadOptions(bad_rows="skip"))
    assert text.documents == 39 and text.bad == f"1 bad row skipped: {tmp_path / '7.txt'}: byte 0 is not valid UTF-8"


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("a.txt", {"text_field": "body"}, "text_field 'body'"),
        ("folder", {"text_field": "body"}, "text_field 'body'"),
        ("synthetic", {"text_field": "body"}, "text_field 'body'"),
        ("a.txt", {"patterns": ("*.txt",)}, "patterns"),
        ("stdlib", {"patterns": ("*.txt",)}, "patterns"),
        ("stdlib", {"format": "jsonl"}, "format 'jsonl'"),
    ],
)
def test_an_option_without_effect_on_the_source_is_refused(
    name: str, options: dict[str, Any], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for file in ("a.txt", "folder/b.txt"):
        Path(file).write_text("words")
    with raises(DataError, repr(name), key):
        find_documents(name, ReadOptions(**options))
