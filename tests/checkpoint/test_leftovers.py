"""What a restore passes over is reported with its reason, and a kill while a save is renamed loses no step."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.app.doctor.checkpoints import examine
from jaxpar.app.launch.exit_codes import ExitCode, exit_code
from jaxpar.checkpoint import manager as manager_module
from jaxpar.checkpoint import save as writing
from jaxpar.checkpoint.leftovers import leftovers_in, recover
from jaxpar.checkpoint.verify import problems_of, steps_in
from jaxpar.errors import CheckpointError, DamagedError

LIKE = {"w": jax.ShapeDtypeStruct((4,), "float32")}


def state(value: float) -> dict[str, jax.Array]:
    return {"w": jnp.full(4, value, "float32")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with the steps 10, 20 and 30."""
    run = tmp_path_factory.mktemp("saved") / "run"
    with jp.CheckpointManager(run) as manager:
        for step in (10, 20, 30):
            assert manager.save(step, state(step)) and manager.wait()
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return shutil.copytree(saved, tmp_path / "run")


def spoil(folder: Path) -> None:
    """Change the values of a checkpoint."""
    (folder / "arrays/w/0").write_bytes(b"x" * 16)


def opened(run: Path) -> tuple[int | None, float, list[str]]:
    """Open a run's folder and restore; returns the step, its value, and the messages without the folder's path."""
    told: list[str] = []
    with jp.CheckpointManager(run, tell=told.append) as manager:
        found = manager.restore_latest(LIKE)
    step, value = (None, 0.0) if found is None else (found.step, float(found.state["w"][0]))
    return step, value, [text.replace(f"{run}/", "") for text in told]


MANIFEST = "30/manifest.json"
AWAY: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "no manifest": (lambda run, _: (run / MANIFEST).unlink(), "30 is incomplete: manifest.json is missing."),
    "a folder": (lambda run, _: (run / MANIFEST).mkdir(), f"{MANIFEST} is a folder, not a regular file."),
    "a pipe": (lambda run, _: os.mkfifo(run / MANIFEST), f"{MANIFEST} is a pipe, not a regular file."),
    "a link": (
        lambda run, away: (run / MANIFEST).symlink_to(away / "30/manifest.json"),
        f"{MANIFEST} is a symbolic link to '{{away}}/30/manifest.json', not a regular file.",
    ),
    "a linked step": (
        lambda run, away: (shutil.rmtree(run / "30"), (run / "30").symlink_to(away / "30")),
        "30 is a symbolic link to '{away}/30', not a folder.",
    ),
    "a file": (
        lambda run, _: (shutil.rmtree(run / "30"), (run / "30").write_text("")),
        "30 is a file, not a folder.",
    ),
}


@pytest.mark.parametrize("name", AWAY)
def test_a_step_that_is_passed_over_is_reported(saved: Path, run: Path, name: str) -> None:
    act, reason = AWAY[name]
    if name in ("a folder", "a pipe", "a link"):
        (run / MANIFEST).unlink()
    act(run, saved)
    reason = reason.format(away=saved)
    assert opened(run) == (20, 20.0, [f"checkpoint: falling back to step 20, the newest intact step: {reason}"])
    assert steps_in(run) == [10, 20]
    with jp.CheckpointManager(run) as manager, raises(CheckpointError, "/30"):
        manager.restore(30, LIKE)
    checks = {check.name: (check.status, check.finding, check.remedy) for check in examine(run)}
    assert checks["step 30"] == ("bad", f"{run}/{reason}", "delete it; a restart resumes from step 20")


@pytest.mark.parametrize("name", [".zarray", "../_CHECKPOINT_METADATA", "../_METADATA", ".zarray of only"])
def test_damage_in_a_file_without_values_is_found_by_a_restore(run: Path, name: str) -> None:
    file = Path(os.path.normpath(run / "30/arrays/w" / name.split(maxsplit=1)[0]))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with raises(DamagedError, str(file)) as error:
        jp.restore(run / "30", LIKE, only=["w"] if name.endswith("only") else [])
    assert [*error.value.args] == problems_of(run / "30")
    assert opened(run)[:2] == (20, 20.0)


def test_a_part_does_not_read_the_files_of_other_tensors(tmp_path: Path) -> None:
    jp.save(tmp_path / "one", {"w": jnp.ones(4), "other": jnp.ones(3)})
    for file in (tmp_path / "one/arrays/other").iterdir():
        file.unlink()
    assert jp.restore(tmp_path / "one", LIKE, only=["w"])["w"].tolist() == [1.0] * 4
    with pytest.raises(DamagedError, match=r"arrays/other/.zarray is missing\.$"):
        jp.restore(tmp_path / "one", {**LIKE, "other": jax.ShapeDtypeStruct((3,), "float32")})


def between_renames(run: Path) -> None:
    """Leave the folder as a kill of a second save of step 30 does, after the first of its two renames."""
    shutil.copytree(run / "30", run / "30.replaced")
    os.rename(run / "30", run / "30.unfinished")


def test_a_kill_between_two_renames_loses_nothing(run: Path) -> None:
    between_renames(run)
    told = (
        "checkpoint: 30 is recovered from 30.unfinished, a complete save that was killed; every byte of it is intact."
    )
    assert opened(run) == (30, 30.0, [told]) and problems_of(run / "30", step=30) == []
    assert [one.name for one in leftovers_in(run)] == ["30.replaced"]
    assert opened(run) == (30, 30.0, [])  # an older version of the restored step was not passed over
    with jp.CheckpointManager(run) as manager:
        assert manager.save(40, state(40)) and manager.wait()
    assert leftovers_in(run) == []


def test_the_previous_checkpoint_is_recovered_where_the_new_one_is_damaged(run: Path) -> None:
    between_renames(run)
    spoil(run / "30.unfinished")
    step, _, told = opened(run)
    assert step == 30 and told[0] == (
        "checkpoint: 30 is recovered from 30.replaced, the previous checkpoint; every byte of it is intact."
    )
    assert len(told) == 2 and told[1].startswith(
        "checkpoint: falling back to step 30, the newest intact step: 30.unfinished is "
    )
    between = {check.finding: check.remedy for check in examine(run) if check.status == "warn"}
    assert [(" is damaged: " in text, remedy) for text, remedy in between.items()] == [(True, "delete it")]


def test_damaged_leftovers_are_reported_and_left(run: Path) -> None:
    between_renames(run)
    spoil(run / "30.unfinished")
    spoil(run / "30.replaced")
    (run / "40.unfinished").mkdir()
    step, _, told = opened(run)
    assert step == 20 and len(told) == 1
    assert told[0].startswith(
        "checkpoint: falling back to step 20, the newest intact step: 40.unfinished is incomplete: its save was killed "
        "or has not ended. 30.unfinished is damaged: 30.unfinished/arrays/w/0, which holds w, was changed after"
    )
    assert " 30.replaced is damaged: 30.replaced/arrays/w/0, which holds w, was changed" in told[0]
    with jp.CheckpointManager(run, keep=None) as manager:
        assert manager.save(25, state(25)) and manager.wait()
        assert [one.name for one in leftovers_in(run)] == ["30.unfinished", "30.replaced"]
        manager.forget(25)
    assert leftovers_in(run) == []


def test_a_folder_that_cannot_be_locked_is_read_as_it_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    between_renames(run)

    def refuse(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(manager_module, "Lock", refuse)
    step, _, told = opened(run)
    text = (
        "checkpoint: falling back to step 20, the newest intact step: 30.unfinished is complete, but its save was "
        "killed before it was renamed to 30. 30.replaced is the previous checkpoint of step 30; the save that was "
        "replacing it was killed."
    )
    assert step == 20 and told[1:] == [text]
    assert [one.name for one in leftovers_in(run)] == ["30.unfinished", "30.replaced"]
    found = [(check.name, check.status, check.remedy) for check in examine(run)[3 - 1 :]]
    assert found == [("leftover", "warn", "the next start of the run recovers it")] * 2


def test_a_folder_without_a_step_says_why_and_one_with_damaged_steps_only_does_not_start_anew(tmp_path: Path) -> None:
    (tmp_path / "5.unfinished").mkdir()
    (tmp_path / "notes").mkdir()
    reason = "5.unfinished is incomplete: its save was killed or has not ended."
    assert opened(tmp_path) == (None, 0.0, [f"checkpoint: {tmp_path} has no step to restore: {reason}"])
    assert [(check.status, check.finding) for check in examine(tmp_path)] == [("warn", f"{tmp_path}/{reason}")]
    (tmp_path / "4").mkdir()
    with jp.CheckpointManager(tmp_path) as manager, raises(DamagedError, "[4]") as error:
        manager.restore_latest(LIKE)
    assert exit_code(error.value) is ExitCode.FAILED  # a scheduler must not start it again


def test_the_only_copy_of_a_checkpoint_outlives_a_save_that_fails(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.rename(run / "30", run / "30.unfinished")
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_: Any) -> Any:
        raise full

    monkeypatch.setattr(writing, "write_arrays", fail)
    with raises(CheckpointError, "/30", "cannot"):
        jp.save(run / "30", state(31))
    assert problems_of(run / "30", step=30) == [] and leftovers_in(run) == []
    monkeypatch.undo()
    renamed, rename = list[tuple[str, str]](), os.rename

    def fail_second(old: Path, new: Path) -> None:
        if "30" in (names := (Path(old).name, Path(new).name)):
            renamed.append(names)
        if len(renamed) == 2:
            raise full
        rename(old, new)

    monkeypatch.setattr(os, "rename", fail_second)
    with raises(CheckpointError, "/30", "cannot"):
        jp.save(run / "30", state(31))
    assert renamed == [("30", "30.replaced"), ("30.unfinished", "30"), ("30.replaced", "30")]
    assert problems_of(run / "30", step=30) == [] and leftovers_in(run) == []


def test_all_data_reach_the_disk_before_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tensorstore syncs the pieces and ``.zarray`` of a tensor, and its folder."""
    synced, sync = list[str](), os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    jp.save(tmp_path / "1", {"w": jnp.ones(4)})
    before = synced[: synced.index("1.unfinished/manifest.json.new")]
    names = ["/arrays", "/arrays/_METADATA", "/arrays/_CHECKPOINT_METADATA", "/arrays/commit_success.txt"]
    assert {f"1.unfinished{name}" for name in names} <= set(before)
    assert synced[-4:] == ["1.unfinished/manifest.json.new", "1.unfinished", "1.unfinished", "."]


def test_what_is_not_a_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("dear")
    with raises(CheckpointError, "/notes"):
        jp.save(tmp_path / "notes", state(1))
    assert (tmp_path / "notes").read_text() == "dear"


# Links out of the folder


def test_a_save_and_a_deletion_remove_links_and_never_what_they_lead_to(run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    os.rename(run / "10", outside)
    content = sorted(outside.rglob("*"))
    for name in ("10", "40", "41.unfinished", "42.replaced", "20.deleted"):
        (run / name).symlink_to(outside, target_is_directory=True)
    (run / "42").symlink_to(tmp_path / "nothing")
    with jp.CheckpointManager(run, keep=1, tell=lambda text: None) as manager:
        for step in (40, 41, 42):
            assert manager.save(step, state(step)) and manager.wait()
        assert float(manager.restore_latest(LIKE).state["w"][0]) == 42  # type: ignore[union-attr]
        manager.forget(41)
    assert sorted(outside.rglob("*")) == content and problems_of(outside) == []
    assert sorted(os.listdir(run)) == ["10", "lock"]


def test_a_lock_that_is_a_link_is_an_error_before_the_run_begins(run: Path, tmp_path: Path) -> None:
    (tmp_path / "dear").write_text("dear")
    (run / "lock").unlink()
    (run / "lock").symlink_to(tmp_path / "dear")
    with raises(DamagedError, "run/lock") as error:
        jp.CheckpointManager(run)
    assert exit_code(error.value) is ExitCode.FAILED and (tmp_path / "dear").read_text() == "dear"


def test_the_folder_of_a_run_may_be_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run, target_is_directory=True)
    os.rename(run / "30", run / "30.unfinished")
    assert opened(tmp_path / "link")[:2] == (30, 30.0)
    with jp.CheckpointManager(tmp_path / "link") as manager:
        assert manager.save(40, state(40)) and manager.wait()
    assert steps_in(run)[-1] == 40 and recover(run) == [] and len(examine(tmp_path / "link")) == 3
