"""Tests the metrics of a run on a disk that fails, and what a resumed run makes of a damaged metrics file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from error_texts import raises

from jaxpar.app.train.goodput import Goodput
from jaxpar.app.train.metrics import MetricsWriter
from jaxpar.app.train.records import read_records
from jaxpar.errors import MissingExtraError

GOOD: list[dict[str, Any]] = [
    {"step": 1, "loss": 2.0, "step_seconds": 1.0, "data_seconds": 0.5, "elapsed": 3.0},
    {"step": 2, "loss": "nan", "step_seconds": 1, "elapsed": 5.0},
    {"step": 2, "goodput": 0.5, "wall_seconds": 6.0, "spent": {"steps": 2.0}, "began": 100.0},
    {"step": 2, "rollback_to": 1, "why": "a spike"},
]
BAD = [
    b"\xff",
    b"not json",
    b"[" * 100_000,
    b"[]",
    b'{"loss": 1.0}',
    b'{"step": true}',
    b'{"step": -1, "loss": 1.0}',
    b'{"step": "1"}',
    b'{"step": 3, "loss": []}',
    b'{"step": 3, "loss": "high"}',
    b'{"step": 3, "loss": 1%s}' % (b"0" * 400),
    b'{"step": 3, "elapsed": 5.0}',
    b'{"step": 3, "elapsed": null, "step_seconds": 1.0}',
    b'{"step": 3, "spent": {"steps": 1.0}}',
    b'{"step": 3, "spent": {"steps": "x"}, "began": 1.0, "wall_seconds": 1.0}',
    b'{"step": 3, "spent": [], "began": 1.0, "wall_seconds": 1.0}',
    b'{"step": 3, "rollback_to": null}',
]


@pytest.mark.parametrize("bad", BAD, ids=lambda line: repr(line[:40]))
def test_a_damaged_line_is_reported_and_the_others_are_kept(tmp_path: Path, bad: bytes) -> None:
    file, told = tmp_path / "metrics.jsonl", list[str]()
    lines = [json.dumps(record).encode() for record in GOOD]
    content = b"\n".join([lines[0], bad, *lines[1:], b'{"step": 3, "lo'])  # a kill cut the last line short
    file.write_bytes(content)
    found = read_records(file, told.append)
    assert found == GOOD
    Goodput().resume(found, 1)  # can compute with them
    assert told == [
        f"metrics: {file}: 1 of its 5 lines are damaged, and the others are kept. The file is now {file}.damaged1."
    ]
    assert (tmp_path / "metrics.jsonl.damaged1").read_bytes() == content and not file.exists()


def test_a_file_that_is_none_is_set_aside(tmp_path: Path) -> None:
    file, told = tmp_path / "metrics.jsonl", list[str]()
    (tmp_path / "metrics.jsonl.damaged1").touch()
    os.mkfifo(file)
    assert read_records(file, told.append) == []
    text = f"metrics: {file}: it cannot be read: it is not a regular file, so this run starts without earlier metrics. "
    assert told == [f"{text}The file is now {file}.damaged2."]
    assert read_records(file, told.append) == [] and len(told) == 1  # a missing file needs no word


def test_an_output_that_cannot_be_written_at_the_start_keeps_records_in_memory(tmp_path: Path) -> None:
    folder, told = tmp_path / "output", list[str]()
    folder.touch()  # a file, where the folder should be
    with MetricsWriter(folder, tell=told.append) as writer:
        writer.write(1, loss=2.0)
        text = f"metrics: {folder}/metrics.jsonl cannot be written: File exists. Records are kept in memory until it "
        assert told == [f"{text}can be written."]
        folder.unlink()
        writer.write(2, loss=1.0)
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert len(told) == 1


def test_records_that_could_never_be_written_are_counted(tmp_path: Path) -> None:
    folder, told = tmp_path / "output", list[str]()
    folder.symlink_to("/proc/self")  # a folder in which nobody can create a file
    with MetricsWriter(folder, tell=told.append) as writer:
        writer.write(1, loss=2.0)
        writer.note(1, goodput=0.5)
    assert told[1:] == [
        f"metrics: 2 records are lost, because {folder}/metrics.jsonl could not be written before the run ended."
    ]


def test_metrics_are_not_written_through_a_link(tmp_path: Path) -> None:
    folder, precious = tmp_path / "output", tmp_path / "precious"
    folder.mkdir()
    precious.write_text('{"step": 1, "loss": 1.0}\n')
    (folder / "metrics.jsonl").symlink_to(precious)
    with MetricsWriter(folder, after=None) as writer:
        writer.write(1, loss=2.0)
    assert precious.read_text() == '{"step": 1, "loss": 1.0}\n'
    assert not (folder / "metrics.jsonl").is_symlink()


def test_a_resumed_run_sets_a_link_aside_and_reports_where_it_leads(tmp_path: Path) -> None:
    folder, outside, told = tmp_path / "output", tmp_path / "outside", list[str]()
    folder.mkdir()
    outside.mkdir()
    (outside / "precious").write_text('{"step": 1, "loss": 1.0}\n')
    (folder / "metrics.jsonl").symlink_to(outside / "precious")
    (folder / "tensorboard").symlink_to(outside, target_is_directory=True)
    with MetricsWriter(folder, after=1, tell=told.append) as writer:
        writer.write(2, loss=2.0)
        assert writer.found == []
    file, link = folder / "metrics.jsonl", f"a symbolic link to '{outside}"
    board = f"metrics: {folder}/tensorboard is {link}', so nothing is written to it. Remedy: delete the link, or set "
    aside = f"metrics: {file}: it cannot be read: it is {link}/precious', so this run starts without earlier metrics. "
    assert told == [f"{board}output to a folder on the other disk.", f"{aside}The file is now {file}.damaged1."]
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [2]
    assert os.listdir(outside) == ["precious"]
    assert (outside / "precious").read_text() == '{"step": 1, "loss": 1.0}\n'


def test_a_tensorboardx_without_its_writer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("tensorboardX.event_file_writer.EventsWriter")
    with raises(MissingExtraError, "tensorboardX.event_file_writer.EventsWriter"):
        MetricsWriter(tmp_path)
