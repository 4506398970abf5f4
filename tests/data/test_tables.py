"""Rows of parquet and Arrow files: the same texts from each format, and bad rows and files."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from error_texts import raises
from small_tokenizer import sentences

from jaxpar.data import ReadOptions, load_text
from jaxpar.data.bad_rows import BadRows
from jaxpar.data.documents import find_documents
from jaxpar.errors import DataError, MissingExtraError

KINDS = ("a.parquet", "a.arrow", "a.stream.arrow", "a.feather")


def write(file: Path, values: list[object], kind: pa.DataType | None = None) -> Path:
    table = pa.table({"id": list(range(len(values))), "text": pa.array(values, kind)})
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(table, file, row_group_size=7)
    elif ".stream" in file.name:
        with pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table, max_chunksize=7)
    else:
        with pa.ipc.new_file(file, table.schema) as out:
            out.write_table(table, max_chunksize=7)
    return file


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
@pytest.mark.parametrize("name", KINDS)
def test_every_row_is_a_document(name: str, kind: pa.DataType, tmp_path: Path) -> None:
    texts = sentences(40)
    write(tmp_path / "more" / name, texts[:25], kind)
    write(tmp_path / f"more/z{name}", texts[25:], kind)
    positions: list[int] = []
    found = find_documents(tmp_path, ReadOptions())
    documents = list(found.read(BadRows(), positions.append))
    assert [one.content.decode() for one in documents] == texts
    assert (documents[0].key, documents[-1].key) == (f"more/{name}:1", f"more/z{name}:15")
    assert positions == sorted(positions) and found.bytes * 0.9 < positions[-1] <= found.bytes
    assert load_text(tmp_path, heldout_fraction=0.3).documents == 40


@pytest.mark.parametrize("name", KINDS)
def test_bad_rows(name: str, tmp_path: Path) -> None:
    file = write(tmp_path / name, ["a", None, "", "b"])
    with raises(DataError, "row 2", "field 'text'"):
        list(find_documents(file, ReadOptions()).read(BadRows()))
    bad = BadRows("skip")
    assert [one.key for one in find_documents(file, ReadOptions()).read(bad)] == [f"{name}:1", f"{name}:4"]
    assert bad.describe() == (
        f"2 bad rows skipped: {file} row 2: its field 'text' is not text, but None; {file} row 3: its field 'text' is "
        "empty"
    )
    numbers = BadRows("skip")
    assert not list(find_documents(file, ReadOptions(text_field="id")).read(numbers)) and numbers.count == 4
    with raises(DataError, "txt", "'id'"):
        list(find_documents(file, ReadOptions(text_field="txt")).read(bad))


@pytest.mark.parametrize("name", KINDS)
def test_text_that_is_no_utf8_is_a_bad_row(name: str, tmp_path: Path) -> None:
    raw = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    write(tmp_path / name, text)
    bad = BadRows("skip")
    found = [one.content for one in find_documents(tmp_path / name, ReadOptions()).read(bad)]
    assert found == [b"good", b"fine"] and "row 2: its field 'text' cannot be decoded: " in bad.describe()


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_an_error(name: str, tmp_path: Path) -> None:
    file, kind = write(tmp_path / name, sentences(40)), "parquet" if "parquet" in name else "arrow"
    for content in (b"no table", file.read_bytes()[: file.stat().st_size // 2]):
        file.write_bytes(content)
        with raises(DataError, f"as {kind} after"):
            list(find_documents(file, ReadOptions()).read(BadRows()))


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.parquet", ["a"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with raises(MissingExtraError, "a.parquet"):
        list(find_documents(file, ReadOptions()).read(BadRows()))


def test_two_formats_in_a_folder_are_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", ["a"])
    write(tmp_path / "b.arrow", ["a"])
    with raises(DataError, "arrow", "parquet"):
        find_documents(tmp_path, ReadOptions())
    assert find_documents(tmp_path, ReadOptions("parquet")).files[0][0] == "a.parquet"
