"""Files in two generations: kills at any moment, damage, locks, full disks, order of operations, and bytes held."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_texts import raises

from jaxpar.errors import DiskError
from jaxpar.parallel.offload.disk_io import Staging
from jaxpar.parallel.offload.disk_store import RECORD, Entry, Store

ENTRIES = (Entry("opt_state/mu/up", 3, 192, {"dtype": "float32", "shape": [3, 48]}), Entry("opt_state/mu/last", 1, 64))
ABOUT = {"mesh": {"data": 8}, "process": "0 of 1"}
# For every n, a child kills itself in the middle of its n-th call that changes the disk (halfway through a write),
# until one child completes. After each, ``look`` opens the folder, checks it and continues the run.
RUN = """
import itertools, os, pathlib, signal, sys
sys.path[:0] = [{tests!r}, {shared!r}]
from test_disk_store import ABOUT, ENTRIES, advance, look
from jaxpar.parallel.offload.disk_store import Store

def run(folder, when, told):
    count, write = itertools.count(1), os.pwrite
    def dying(f, half):
        def call(*arguments):
            if next(count) == when:
                half(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)
            return f(*arguments)
        return call
    store = Store(folder, ENTRIES, ABOUT)
    store.create()
    store.commit(0)
    os.pwrite = dying(write, lambda f, view, at: write(f, view[: len(view) // 2], at))
    for name in ("fsync", "replace", "unlink", "posix_fallocate"):
        setattr(os, name, dying(getattr(os, name), lambda *_: None))
    for step in range(1, 5):
        advance(store, step)
        write(told, bytes([step]), step)

for when in itertools.count(1):
    told = os.open(f"{{sys.argv[1]}}.told", os.O_CREAT | os.O_TRUNC | os.O_RDWR)
    os.write(told, bytes([0]))
    folder = pathlib.Path(sys.argv[1]) / str(when)
    child = os.fork()
    if not child:
        run(folder, when, told)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    look(folder, os.pread(told, 100, 0)[-1])
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
print(when)
"""


def content(number: int, row: int, step: int) -> np.ndarray:
    """A row's bytes after a step; a skipped step (every third) changes nothing."""
    step -= step % 3 == 0 and step > 0
    size = ENTRIES[number].row_bytes
    return np.zeros(size, np.uint8) if step == 0 else np.full(size, 16 * step + 4 * number + row, np.uint8)


def advance(store: Store, step: int) -> None:
    """Read and write every row, as a step does; every third step is skipped."""
    for number, entry in enumerate(ENTRIES):
        for row in range(entry.rows):
            assert np.array_equal(store.read(number, row), content(number, row, step - 1))
    if step % 3 == 0:
        store.skip(step)
        return
    store.begin()
    for number, entry in enumerate(ENTRIES):
        for row in range(entry.rows):
            store.write(number, row, content(number, row, step))
    store.commit(step)


def holds(store: Store, step: int) -> bool:
    rows = [(number, row) for number, entry in enumerate(ENTRIES) for row in range(entry.rows)]
    return all(np.array_equal(store.read(*at), content(*at, step)) for at in rows)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Store]:
    """A store after two steps, closed when the test ends."""
    store = Store(tmp_path / "disk", ENTRIES, ABOUT)
    store.create()
    store.commit(0)
    for step in (1, 2):
        advance(store, step)
    yield store
    store.close()


def reopened(store: Store, step: int, entries: Any = ENTRIES, about: Any = ABOUT) -> Store:
    store.close()
    again = Store(store.path, entries, about)
    try:
        again.open(step)
    except BaseException:
        again.close()
        raise
    return again


def look(folder: Path, done: int) -> None:
    """After a kill with ``done`` steps reported, the folder holds that step's complete state or the next one's.

    The run continues from it.
    """
    found = []
    for step in (done, done + 1):
        store = Store(folder, ENTRIES, ABOUT)
        try:
            store.open(step)
            assert holds(store, step), step
            found.append(step)
        except DiskError as error:
            assert "but the training state is at step" in str(error), error
        finally:
            store.close()
    assert found
    store = Store(folder, ENTRIES, ABOUT)
    store.open(found[0])
    for step in range(found[0] + 1, 6):
        advance(store, step)
    assert holds(store, 5)
    store.close()


def test_a_kill_at_any_moment_leaves_a_whole_generation_from_which_the_run_goes_on() -> None:
    # A kill does not depend on the disk, so the test uses an in-memory file system where there is one.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        run = [
            sys.executable,
            "-c",
            RUN.format(tests=str(Path(__file__).parent), shared=str(Path(__file__).parents[2])),
            f"{folder}/disk",
        ]
        kills = subprocess.run(run, capture_output=True, text=True, check=False)
    assert kills.returncode == 0, kills.stderr
    assert int(kills.stdout) > 40


def test_the_generation_of_the_states_step_is_taken_and_a_skipped_one_serves_two(made: Store) -> None:
    assert holds(made, 2)
    older = reopened(made, 1)
    assert holds(older, 1)
    newer = reopened(older, 2)
    advance(newer, 3)
    advance(newer, 4)
    skipped = reopened(newer, 3)
    assert holds(skipped, 3) and np.array_equal(content(0, 0, 3), content(0, 0, 2))
    advance(skipped, 4)
    assert holds(skipped, 4)
    skipped.close()


def test_skipping_from_an_older_generation_drops_the_other_future(made: Store) -> None:
    older = reopened(made, 1)
    older.skip(2)  # in this run, the second step is not finite
    again = reopened(older, 2)
    assert holds(again, 1) and not holds(again, 2)
    again.close()


def test_folders_and_files_are_the_owners_alone(made: Store) -> None:
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in made.path.iterdir()} == {0o600}
    assert made.bytes == 3 * 192 + 64


def damaged(store: Store, what: str) -> Path:
    """The file of the newest generation's first tensor, or the record, after damaging it."""
    name = "b" if json.loads((store.path / RECORD).read_text())["record"]["generations"]["b"]["last"] == 2 else "a"
    file = store.path / (RECORD if what.startswith("record") else f"0000.opt_state.mu.up.{name}")
    if what == "missing":
        file.unlink()
    elif what == "short":
        os.truncate(file, 500)
    elif what == "record garbled":
        file.write_text("{")
    else:
        data = bytearray(file.read_bytes())
        at = data.index(b'"last"') + 8 if what == "record" else 200
        data[at] ^= 1
        file.write_bytes(data)
    return file


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("missing", "opt_state/mu/up"),
        ("short", "500"),
        ("bit", "row 1"),
        ("record", "checksum"),
        ("record garbled", "read"),
    ],
)
def test_damage_is_named(made: Store, what: str, name: str) -> None:
    file = damaged(made, what)
    with raises(DiskError, str(file), name):
        again = reopened(made, 2)
        try:
            holds(again, 2)
        finally:
            again.close()


def test_wrong_steps_runs_and_shapes_are_named(made: Store) -> None:
    other = (Entry("opt_state/mu/up", 3, 192, {"dtype": "bfloat16", "shape": [3, 96]}), ENTRIES[1])
    cases: list[tuple[int, Any, Any, str]] = [
        (7, ENTRIES, ABOUT, "7"),
        (2, ENTRIES, {**ABOUT, "mesh": {"data": 4, "model": 2}}, "2"),
        (2, other, ABOUT, "opt_state/mu/up"),
        (2, ENTRIES[:1], ABOUT, "opt_state/mu/last"),
    ]
    for step, entries, about, text in cases:
        with raises(DiskError, text):
            reopened(made, step, entries, about)
    empty = Store(made.path.parent / "empty", ENTRIES, ABOUT)
    with raises(DiskError, "/empty"):
        empty.open(3)
    empty.close()


def test_two_runs_cannot_share_a_folder(made: Store) -> None:
    with raises(DiskError, "/disk", "process"):
        Store(made.path, ENTRIES, ABOUT)
    made.close()
    Store(made.path, ENTRIES, ABOUT).close()


@pytest.mark.parametrize("call", ["pwrite", "fsync", "posix_fallocate"])
def test_a_full_disk_loses_nothing_and_the_step_can_be_tried_again(
    made: Store, monkeypatch: pytest.MonkeyPatch, call: str, tmp_path: Path
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    if call == "posix_fallocate":
        made.snapshot(tmp_path / "one")  # keeps the files, so the step after the next needs new ones
        advance(made, 3)
    step = 4 if call == "posix_fallocate" else 3
    made.begin()
    made.write(0, 0, content(0, 0, 4))
    if call == "posix_fallocate":
        for at in [(0, 1), (0, 2), (1, 0)]:
            made.write(*at, content(*at, 4))
        made.commit(4)
        step = 5
    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with raises(DiskError, str(made.path), f"step {step - 1}"):
            made.begin()
            for at in [(0, 0), (0, 1), (0, 2), (1, 0)]:
                made.write(*at, content(*at, step))
            made.commit(step)
    before = 4 if step == 5 else 2
    again = reopened(made, before)
    assert holds(again, before)
    again.close()


def test_a_row_that_was_forgotten_is_no_generation(made: Store) -> None:
    made.begin()
    made.write(0, 0, content(0, 0, 4))
    with raises(DiskError, "opt_state/mu/up", "in step 4"):
        made.commit(4)
    assert holds(made, 2)


def test_a_snapshot_stays_as_it_was_and_a_run_goes_on_from_it(made: Store, tmp_path: Path) -> None:
    made.snapshot(tmp_path / "two")
    with raises(DiskError, "/two"):
        made.snapshot(tmp_path / "two")
    for step in (3, 4, 5):
        advance(made, step)
    made.restore(tmp_path / "two")
    made.open(2)
    for step in (3, 4, 5):
        advance(made, step)
    made.restore(tmp_path / "two")  # a second time: later writes of the run did not reach the snapshot
    made.open(2)
    assert holds(made, 2)


def test_a_snapshot_on_another_file_system_is_a_copy(
    made: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", elsewhere)
    made.snapshot(tmp_path / "two")
    assert all(file.stat().st_nlink == 1 for file in (tmp_path / "two").iterdir())
    advance(made, 3)
    advance(made, 4)
    made.restore(tmp_path / "two")
    made.open(2)
    assert holds(made, 2)


@pytest.mark.parametrize("planted", ["disk", "two"])
def test_no_link_is_followed_out_of_the_folder(made: Store, tmp_path: Path, planted: str) -> None:
    made.snapshot(tmp_path / "two")
    file = next((tmp_path / "two").glob("0000.*"))
    outside, link = tmp_path / "outside", tmp_path / planted / file.name
    link.rename(outside)
    link.symlink_to(outside)
    before = outside.read_bytes()
    made.close()
    again = Store(made.path, ENTRIES, ABOUT)
    if planted == "two":
        again.restore(tmp_path / "two")
    again.open(2)
    with raises(DiskError, "opt_state/mu/up", "reading"):
        again.read(0, 0)
    again.close()
    assert outside.read_bytes() == before


def test_pieces_are_read_ahead_while_the_first_is_written_and_no_further() -> None:
    events: list[tuple[str, int]] = []
    two_read, room = threading.Event(), threading.Event()

    def note(what: str, piece: int) -> None:
        events.append((what, piece))
        if (what, piece) == ("read", 2):
            two_read.set()
        if (what, piece) == ("reading", 3):
            room.set()

    def write(piece: int, made: int) -> None:
        assert made == 10 * piece
        if piece == 0:
            assert two_read.wait(30)  # hangs unless two more pieces are read meanwhile
            assert not room.wait(0.05)  # there are only three slots

    with Staging([5, 7, 7, 7, 5], lambda piece: piece, write, slots=3, note=note) as staging:
        for piece in range(5):
            staging.put(piece, 10 * staging.get(piece))
        staging.finish()
    assert 5 + 7 + 7 <= staging.peak <= 7 + 7 + 7
    assert events.index(("read", 2)) < events.index(("written", 0)) < events.index(("reading", 3))
    assert [piece for what, piece in events if what == "written"] == [0, 1, 2, 3, 4]


def test_with_one_slot_nothing_is_read_ahead() -> None:
    events: list[tuple[str, int]] = []
    with Staging([1] * 3, lambda piece: piece, lambda *_: None, slots=1, note=lambda *e: events.append(e)) as staging:
        for piece in range(3):
            staging.put(piece, staging.get(piece))
        staging.finish()
    assert staging.peak == 1
    assert events == [(what, piece) for piece in range(3) for what in ("reading", "read", "written")]


@pytest.mark.parametrize("failing", ["read", "write"])
def test_a_failure_ends_everything_and_is_raised(failing: str) -> None:
    written: list[int] = []

    def read(piece: int) -> int:
        if failing == "read" and piece == 1:
            raise DiskError("read")
        return piece

    def write(piece: int, made: int) -> None:
        if failing == "write" and piece == 1:
            raise DiskError("write")
        written.append(piece)

    with (
        pytest.raises(DiskError, match="read|write") as error,
        Staging([1] * 50, read, write, slots=3) as staging,
    ):
        for piece in range(50):
            staging.put(piece, staging.get(piece))
        staging.finish()
    assert error.value.args == (failing,)
    assert written == [0]
    assert not any(thread.name.startswith("jaxpar-") for thread in threading.enumerate())


def test_what_is_asked_for_after_a_failed_write_raises_it() -> None:
    def write(piece: int, made: int) -> None:
        raise DiskError("write")

    # With one slot, the second piece begins only after the first one's write has failed.
    with pytest.raises(DiskError, match="^write$"), Staging([1] * 2, lambda piece: piece, write, slots=1) as staging:
        staging.put(0, staging.get(0))
        staging.get(1)
