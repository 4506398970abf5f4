"""A run's folder that cannot be written and a disk that fills up, with real errors of the operating system."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.checkpoint import manager as manager_module
from jaxpar.errors import CheckpointError

LIKE = {"w": jax.ShapeDtypeStruct((4096,), "float32")}
NOBODY = 65534


def state(value: float) -> dict[str, jax.Array]:
    return {"w": jnp.full(4096, value, "float32")}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the checkpoint manager; a test sets it by writing to it."""
    now = [0.0]
    monkeypatch.setattr(manager_module.time, "monotonic", lambda: now[0])
    return now


@contextmanager
def as_a_user() -> Iterator[None]:
    """Enforce file permissions, which root would bypass, by running as another user."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@contextmanager
def _chmod(path: Path, mode: int) -> Iterator[None]:
    """Set the mode of a path temporarily, as its owner."""
    user = os.geteuid()
    before = path.stat().st_mode
    os.seteuid(os.getuid())
    path.chmod(mode)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(os.getuid())
        path.chmod(before)
        os.seteuid(user)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Imitate a full disk: each file may hold at most ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_that_becomes_read_only_ends_no_run_and_is_tried_again(clock: list[float]) -> None:
    told = list[str]()
    with tempfile.TemporaryDirectory() as top:  # no other user can enter pytest's own folders
        run = Path(top) / "run"
        os.chmod(top, 0o755)
        with jp.CheckpointManager(run, save_interval_steps=1, tell=told.append) as manager:
            assert manager.save(1, state(1)) and manager.wait()
            for path in (run, *run.rglob("*")):
                path.chmod(0o555 if path.is_dir() else 0o444)
            with as_a_user():
                assert not manager.save(2, state(2))
                assert told == [
                    (
                        f"checkpoint of step 2 not saved: {run}/2: cannot create the folder: Permission denied. "
                        "Step 1 is kept; the next attempt is in 30 s."
                    )
                ]
                assert manager.steps() == [1] and manager.restore_latest(LIKE).step == 1  # type: ignore[union-attr]
            run.chmod(0o755)
            clock[0] = 31.0
            assert manager.due(3) and manager.save(3, state(3)) and manager.wait() and manager.steps() == [1, 3]
        for path in (run, run / "lock", *(run / "3").rglob("*"), run / "3"):
            path.chmod(0o555 if path.is_dir() else 0o444)
        with as_a_user(), jp.CheckpointManager(run, tell=told.append) as reader:  # a reader needs no lock
            assert told[1:] == [
                (
                    f"checkpoint: {run} cannot be written: Permission denied. Earlier checkpoints are kept; the "
                    "next attempt is in 30 s."
                )
            ]
            assert float(reader.restore_latest(LIKE).state["w"][0]) == 3  # type: ignore[union-attr]
            for path in (run / "3", run):  # an unreadable folder must not look like a new run
                with _chmod(path, 0), raises(CheckpointError, str(run)):
                    reader.restore_latest(LIKE)
        run.chmod(0o755)


def test_a_disk_that_takes_no_more_in_the_midst_of_a_save(tmp_path: Path, clock: list[float]) -> None:
    told = list[str]()
    with jp.CheckpointManager(tmp_path, save_interval_steps=1, tell=told.append) as manager:
        assert manager.save(1, state(1)) and manager.wait()
        with files_of_at_most(8192):
            assert manager.save(2, state(2)) and not manager.wait()
        assert re.fullmatch(
            (
                rf"checkpoint of step 2 not saved: {tmp_path}/2: cannot write: (?s:.*)File too large(?s:.*)"
                r"Step 1 is kept; the next attempt is in 30 s\."
            ),
            told[0],
        )
        assert manager.steps() == [1] and manager.saved == 1
        assert float(manager.restore_latest(LIKE).state["w"][0]) == 1  # type: ignore[union-attr]
        clock[0] = 31.0
        assert manager.due(3) and manager.save(3, state(3)) and manager.wait() and manager.steps() == [1, 3]
    assert len(told) == 1 and not list(tmp_path.glob("*.unfinished"))


MOUNTED = ("unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=2m none "$0" && exec "$@"')
"""Runs a command in its own mount namespace, where a folder is a disk of 2 MiB. Any user may run it where the system
allows user namespaces."""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("a full disk needs a file system of its own: there is no command 'unshare' here")
    refused = subprocess.run([*MOUNTED, disk, "true"], capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(
            f"a full disk needs a file system of its own, and this system grants none: {refused.stderr.strip()}"
        )
    command = [*MOUNTED, disk, sys.executable, __file__, disk]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not list(disk.iterdir())  # the files existed only in that namespace
    # The number of free bytes in the middle of a save depends on timing.
    assert re.sub(r"device\. [\d,]+ bytes", "device. 0 bytes", result.stdout).splitlines() == [
        *(
            (
                f"checkpoint of step {step} not saved: {disk}/{step}: {why} bytes are free. Remedy: free some "
                "space. Step 1 is kept; the next attempt is in 30 s."
            )
            for step, why in (
                (2, "cannot write: No space left on device. 0"),
                (3, "cannot create the folder: No space left on device for 16,384 bytes. 8,192"),
            )
        ),
        "[1, 4] 4.0",
    ]


def fill(disk: Path) -> None:
    """Save twice on a full disk (the first save runs out of space halfway), then once more with room again, and print
    the messages."""
    now, told, rest = [0.0], list[str](), disk / "rest"
    manager_module.time.monotonic = lambda: now[0]
    with jp.CheckpointManager(disk, save_interval_steps=1, keep=2, tell=told.append) as manager:
        assert manager.save(1, state(1)) and manager.wait()
        free = shutil.disk_usage(disk).free
        for step, left in ((2, 16384), (3, 8192)):
            rest.write_bytes(bytes(free - left))
            assert shutil.disk_usage(disk).free == left
            assert not (manager.save(step, state(step)) and manager.wait())
            assert not manager.overdue and manager.steps() == [1]
            assert shutil.disk_usage(disk).free == left  # the failed save leaves no files
            assert manager.restore_latest(LIKE).step == 1  # type: ignore[union-attr]
            rest.unlink()
            now[0] += 31.0
        assert manager.overdue and manager.save(4, state(4)) and manager.wait()
        found = manager.restore_latest(LIKE)
        assert found is not None
        print(*(" ".join(text.split()) for text in told), f"{manager.steps()} {found.state['w'][0]}", sep="\n")


if __name__ == "__main__":
    fill(Path(sys.argv[1]))


def test_steps_that_cannot_be_deleted_are_told_and_end_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with jp.CheckpointManager(tmp_path, keep=1, tell=told.append) as manager:
        assert manager.save(1, state(1.0)) and manager.wait()
        with monkeypatch.context() as patch:
            patch.setattr(manager_module.os, "rename", refused)
            manager._delete(tmp_path / "1")
        assert told == [f"checkpoint: {tmp_path / '1'} cannot be deleted: Permission denied."]
        with monkeypatch.context() as patch:
            patch.setattr(manager, "_clear", lambda step: (_ for _ in ()).throw(CheckpointError("x cannot be read.")))
            assert manager.save(2, state(2.0)) and manager.wait()
        assert told[1:] == ["checkpoint: x cannot be read."] and manager.saved == 2 and manager.steps() == [1, 2]
        with raises(CheckpointError, r"a\tb"):
            manager.save(3, {"a\tb": jnp.ones(1)})
        manager.save(4, state(4.0))
        saving = manager._saving
        assert saving is not None
        saving[1].wait()
        assert not manager.due(4) and manager._saving is None and manager.steps() == [4]
