"""Locks, atomic replacement and deletion never follow a symbolic link out of a folder."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from error_texts import raises

from jaxpar.errors import CheckpointError, DamagedError, DiskError
from jaxpar.utils.durable import LOCK, Lock, read_input, remove, write_atomically


@pytest.fixture
def dear(tmp_path: Path) -> Path:
    """A file outside of the folder ``tmp_path / "run"``."""
    (tmp_path / "run").mkdir()
    (tmp_path / "dear").write_text("dear")
    return tmp_path / "dear"


PLANTED: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "a link": (lambda lock, dear: lock.symlink_to(dear), "/dear'"),
    "a link to nothing": (lambda lock, _: lock.symlink_to("../a\nb"), r"'../a\nb'"),
    "a pipe": (lambda lock, _: os.mkfifo(lock), "regular file"),
    "a folder": (lambda lock, _: lock.mkdir(), "regular file"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_lock_that_is_not_a_regular_file_is_an_error(dear: Path, name: str) -> None:
    plant, what = PLANTED[name]
    lock = dear.with_name("run") / LOCK
    plant(lock, dear)
    for error in (DamagedError, DiskError):
        with raises(error, "run/lock", what):
            Lock(lock.parent, CheckpointError, error)
    assert dear.read_text() == "dear" and sorted(p.name for p in dear.parent.iterdir()) == ["dear", "run"]


def test_a_lock_that_another_run_holds_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("the text of a longer process of the past, which is replaced\n")
    one = Lock(tmp_path, CheckpointError, DamagedError)
    text = (tmp_path / LOCK).read_text()
    assert re.fullmatch(rf"process {os.getpid()} on \S+\n", text)
    with raises(CheckpointError, "in use"):
        Lock(tmp_path, CheckpointError, DamagedError)
    assert (tmp_path / LOCK).read_text() == text
    one.release()
    one.release()
    Lock(tmp_path, CheckpointError, DamagedError).release()


def test_a_file_is_replaced_and_no_link_is_followed(dear: Path) -> None:
    file = dear.with_name("run") / "record"
    for name in ("record", "record.new"):
        (file.parent / name).symlink_to(dear)
    write_atomically(file, "one")
    (file.parent / "record.new").write_text("what a killed process wrote")
    write_atomically(file, "two")
    assert file.read_text() == "two" and not file.is_symlink() and dear.read_text() == "dear"
    assert os.listdir(file.parent) == ["record"]


def test_a_file_is_replaced_by_any_content_and_keeps_its_mode(tmp_path: Path) -> None:
    """A long name has no room for a suffix, and a folder may be writable and not listable."""
    file = tmp_path / ("é" * 127)
    file.write_bytes(b"old")
    file.chmod(0o640)
    tmp_path.chmod(0o300)
    try:
        write_atomically(file, b"\xff\n", mode=None, new=".one.new")
    finally:
        tmp_path.chmod(0o700)
    assert file.read_bytes() == b"\xff\n" and file.stat().st_mode & 0o777 == 0o640
    with pytest.raises(OSError, match="too long"):
        write_atomically(file, "text")
    assert os.listdir(tmp_path) == [file.name] and file.read_bytes() == b"\xff\n"


def test_what_fails_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "record"
    write_atomically(file, "old")

    def full(f: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, "new")
    assert os.listdir(tmp_path) == ["record"] and file.read_text() == "old"


def test_what_is_removed_is_the_link(dear: Path) -> None:
    run = dear.with_name("run")
    (run / "link").symlink_to(dear.parent, target_is_directory=True)
    (run / "folder").mkdir()
    (run / "folder" / "link").symlink_to(dear.parent, target_is_directory=True)
    (run / "file").write_text("")
    for name in ("link", "folder", "file", "nothing"):
        remove(run / name)
    assert os.listdir(run) == [] and dear.read_text() == "dear"


def test_only_a_pipe_that_the_shell_has_opened_is_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"two\nlines")
    os.close(writing)
    assert read_input(f"/dev/fd/{reading}", 99) == b"two\nlines"
    os.close(reading)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="regular file"):
        read_input(tmp_path / "pipe", 99)
