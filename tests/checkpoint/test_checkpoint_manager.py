"""The folder of a run: which steps it keeps, when a save is due, and failures of the disk that it survives."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.checkpoint import manager as manager_module
from jaxpar.checkpoint import save as writing
from jaxpar.checkpoint.verify import health, steps_in
from jaxpar.errors import CheckpointError, ConfigError, DamagedError


def three(folder: Path, **options: Any) -> tuple[list[str], jp.CheckpointManager]:
    """Save steps 10, 20 and 30 of a tiny state; returns the list that collects messages, and the manager."""
    told: list[str] = []
    manager = jp.CheckpointManager(folder, tell=told.append, **options)
    for step in (10, 20, 30):
        assert manager.save(step, {"w": jnp.ones(4) * step}, metric=float(abs(step - 15)))
    manager.wait()
    return told, manager


LIKE = {"w": jax.ShapeDtypeStruct((4,), "float32")}


def test_a_damaged_newest_step_falls_back_and_says_so(tmp_path: Path) -> None:
    told, manager = three(tmp_path)
    with manager:
        (tmp_path / "30/arrays/w/0").write_bytes(b"x" * 16)
        for stray in ("40", "notes", "50.unfinished", "007"):
            (tmp_path / stray).mkdir()
        (tmp_path / "60").write_text("no folder")
        assert manager.latest() == 30 and manager.steps() == [10, 20, 30]
        found = manager.restore_latest(LIKE)
        assert found is not None and found.step == 20 and found.state["w"].tolist() == [20.0] * 4
        assert len(told) == 1 and told[0].startswith("checkpoint: falling back to step 20, the newest intact step: ")
        assert (
            f"{tmp_path}/40 is incomplete: manifest.json is missing." in told[0]
            and f"{tmp_path}/50.unfinished is incomplete: its save was killed or has not ended." in told[0]
            and f"{tmp_path}/60 is a file, not a folder." in told[0]
            and "30/arrays/w/0, which holds w, was changed after it was written" in told[0]
        )
        report = {h.step: h.good for h in health(tmp_path)}
        assert report == {10: True, 20: True, 30: False}
        assert manager.save(30, {"w": jnp.zeros(4)}) and manager.wait()
        assert manager.restore_latest(LIKE).state["w"].tolist() == [0.0] * 4  # type: ignore[union-attr]
        shutil.rmtree(tmp_path / "20")
        shutil.copytree(tmp_path / "10", tmp_path / "20")
        with raises(DamagedError, "manifest.json", "step 10"):
            manager.restore(20, LIKE)
        with raises(CheckpointError, "/30", "params"):
            manager.restore_latest({"v": LIKE["w"]})
        for step in (10, 30):
            os.truncate(tmp_path / str(step) / "manifest.json", 40)
        with raises(CheckpointError, "60]"):
            manager.restore_latest(LIKE)


def test_retention_the_best_steps_and_what_killed_saves_left(tmp_path: Path) -> None:
    (tmp_path / "5.unfinished").mkdir()
    _, manager = three(tmp_path, keep=1, best="min")
    with manager:
        assert manager.steps() == [10, 30] and manager.best() == 10 and manager.saved == 30
        assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "30", "lock"]
        assert (tmp_path / "30").stat().st_mode & 0o77 == 0
    with jp.CheckpointManager(tmp_path, keep=1, best="min", keep_best=2) as again:  # the metrics are 5 and 15
        for step, metric in ((40, 7.0), (50, None), (60, 5.0)):
            assert again.save(step, {"w": jnp.ones(4)}, metric=metric) and again.wait()
        assert again.steps() == [10, 60] and again.best() == 10
        assert again.save(70, {"w": jnp.ones(4)}, metric=9.0) and again.wait() and again.steps() == [10, 60, 70]


def test_when_a_save_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(manager_module.time, "monotonic", lambda: clock[0])
    with jp.CheckpointManager(tmp_path, save_interval_steps=3) as manager:
        assert [step for step in range(1, 8) if manager.due(step)] == [3, 6] and manager.restore_latest(LIKE) is None
    with jp.CheckpointManager(tmp_path, save_interval_minutes=2) as manager:
        clock[0] = 119.0
        assert not manager.due(1)
        clock[0] = 120.0
        assert manager.due(1)
    for options, name in (
        ({"keep": 0}, "keep"),
        ({"save_interval_steps": 1, "save_interval_minutes": 1}, "save_interval_minutes"),
        ({"keep_best": 0}, "keep_best"),
        ({"best": "loss"}, "max"),
    ):
        with raises(ConfigError, name):
            jp.CheckpointManager(tmp_path, **options)  # type: ignore[arg-type]


def test_two_runs_cannot_write_one_folder(tmp_path: Path) -> None:
    with (
        jp.CheckpointManager(tmp_path),
        raises(CheckpointError, "in use"),
    ):
        jp.CheckpointManager(tmp_path)
    jp.CheckpointManager(tmp_path).close()


def test_a_full_disk_or_a_folder_that_cannot_be_written_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, told, full = [0.0], list[str](), [False]
    monkeypatch.setattr(manager_module.time, "monotonic", lambda: clock[0])
    write = writing.write_arrays

    def failing(*args: Any) -> Any:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    monkeypatch.setattr(writing, "write_arrays", failing)
    lock, broken = manager_module.Lock, [True]

    def locked(*args: Any) -> Any:
        if broken[0]:
            raise OSError(errno.EROFS, "Read-only file system")
        return lock(*args)

    monkeypatch.setattr(manager_module, "Lock", locked)
    with jp.CheckpointManager(tmp_path / "file" / "run", save_interval_steps=10, tell=told.append) as manager:
        assert told[0].startswith(f"checkpoint: {tmp_path}/file/run cannot be written: Read-only file system.")
        assert not manager.save(1, {"w": jnp.ones(4)}) and len(told) == 2
        broken[0] = False
        assert not manager.due(2)
        clock[0] = 31.0
        assert manager.due(2) and manager.save(2, {"w": jnp.ones(4)}) and manager.wait() and manager.steps() == [2]
        full[0] = True
        assert manager.save(3, {"w": jnp.zeros(4)}) and not manager.wait()
        assert re.fullmatch(
            rf"checkpoint of step 3 not saved: {tmp_path}/file/run/3: cannot write: No space left on device\. [\d,]+ "
            r"bytes are free\. Remedy: free some space\. Step 2 is kept; the next attempt is in 30 s\.",
            told[2],
        )
        assert manager.steps() == steps_in(tmp_path / "file" / "run") == [2] and not manager.due(4)
        assert manager.restore_latest(LIKE).step == 2  # type: ignore[union-attr]
