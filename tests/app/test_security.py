"""Tests malicious files: no code in them runs, no path leaves its folder, and none hangs or fills the memory."""

from __future__ import annotations

import ast
import json
import os
import pickle
import stat
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import jaxpar as jp
from jaxpar.analysis.compile.ahead_of_time import cache_folder
from jaxpar.app.config import RunConfig, load_run
from jaxpar.checkpoint.manifest import NAME, Manifest, read
from jaxpar.checkpoint.manifest import write as write_manifest
from jaxpar.checkpoint.verify import problems_of
from jaxpar.errors import CheckpointError, ConfigError, DamagedError, DiskError
from jaxpar.parallel.offload.disk_store import RECORD, Store
from jaxpar.utils.yaml_config import build, load_yaml, override, parse_yaml

SOURCES = sorted((Path(__file__).parents[2] / "jaxpar").rglob("*.py"))
LIKE = {"w": jax.ShapeDtypeStruct((4,), "float32")}
LOADERS = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "dbm"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "tempfile.mktemp"}
LAST_OF_CALLS = {name.rpartition(".")[2] for name in CALLS}
YAML = {"load", "load_all", "full_load", "unsafe_load", "Loader", "FullLoader", "UnsafeLoader", "CLoader"}


def runs_data(node: ast.AST) -> Iterator[str]:
    """Yields what a node of a source file names that may run the data that it reads."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = {a.name for a in node.names} | {getattr(node, "module", None) or ""}
        yield from (name for name in names if name.split(".")[0] in LOADERS)
    elif isinstance(node, ast.Attribute) and node.attr in YAML and ast.unparse(node.value) == "yaml":
        yield f"yaml.{node.attr}"
    elif isinstance(node, ast.Call):
        # Writing a node as text takes most of the time, so only what may be asked about is written.
        words = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg in ("shell", "allow_pickle")}
        last = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if last in LAST_OF_CALLS and (called := ast.unparse(node.func)) in CALLS:
            yield called
        if words.get("shell", "False") != "False":
            yield "shell"
        if last in ("load", "fromfile", "memmap") and words.get("allow_pickle", "False") != "False":
            yield last


LISTENING_CALLS = {"listen", "create_server", "start_server", "serve_forever", "add_insecure_port", "add_secure_port"}
LISTENING_MODULES = {"socketserver", "http.server", "xmlrpc.server"}


def listens(node: ast.AST) -> bool:
    """Returns whether a node of a source file may listen for connections."""
    names = {a.name for a in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
    called = {node.attr} if isinstance(node, ast.Attribute) else set()
    return bool(called & LISTENING_CALLS or (names | {getattr(node, "module", None)}) & LISTENING_MODULES)


def nodes(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def test_no_source_runs_what_it_reads_or_listens() -> None:
    """Every listening socket of a run is JAX's or Ray's; see docs/reference/ports.md."""
    running, listening = {}, []
    for file in SOURCES:
        every = nodes(file.read_text(encoding="utf-8"))
        if names := [name for node in every for name in runs_data(node)]:
            running[str(file)] = names
        if any(map(listens, every)):
            listening.append(str(file))
    assert (running, listening) == ({}, [])


@pytest.mark.parametrize("line", ["s.listen(5)", "import socketserver", "from http.server import HTTPServer as Server"])
def test_what_would_listen_is_found(line: str) -> None:
    assert any(map(listens, nodes(line)))


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from marshal import loads",
        "import shelve as s",
        "np.load(f, allow_pickle=True)",
        "yaml.load(x)",
        "yaml.load(x, Loader=yaml.Loader)",
        "yaml.unsafe_load(x)",
        "eval(x)",
        "exec(x)",
        "os.system(x)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_what_would_run_data_is_found(line: str) -> None:
    assert [name for node in nodes(line) for name in runs_data(node)]


# Checkpoints


class Bomb:
    """An object whose unpickling creates a folder."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


@pytest.fixture
def one(tmp_path: Path) -> Path:
    jp.save(tmp_path / "one", {"w": jnp.arange(4.0)})
    return tmp_path / "one"


def signed(folder: Path, name: str, data: bytes) -> None:
    """Replaces a piece and writes a manifest with the matching checksum."""
    (folder / name).write_bytes(data)
    true, total = read(folder), zlib.crc32(data)
    tensor = replace(true.tensors["w"], sums=(total,))
    write_manifest(folder, replace(true, tensors={"w": tensor}, files={**true.files, name: (len(data), total)}))


def test_pickles_in_the_place_of_arrays_are_numbers_at_most(one: Path, tmp_path: Path) -> None:
    piece, mark = one / "arrays/w/0", tmp_path / "mark"
    pickled = pickle.dumps(Bomb(mark))
    piece.write_bytes(pickled)
    with raises(DamagedError, "arrays/w/0"):
        jp.restore(one, LIKE)
    np.save(piece.with_suffix(".npy"), np.array([Bomb(mark)], object), allow_pickle=True)
    os.replace(piece.with_suffix(".npy"), piece)
    assert len(problems_of(one)) == 1
    signed(one, "arrays/w/0", pickled[:16])
    assert jp.restore(one, LIKE)["w"].tobytes() == pickled[:16]
    for name in (".zarray", ".zattrs"):  # jaxpar reads files of orbax for their checksums only.
        (one / "arrays/w" / name).write_bytes(pickled)
    with raises(DamagedError, "/.zarray", "one/arrays/w"):
        jp.restore(one, LIKE)
    (one / NAME).write_bytes(pickled)
    with raises(DamagedError, "manifest.json", "UTF"):
        jp.restore(one, LIKE)
    assert not mark.exists()
    pickle.loads(pickled)
    assert mark.is_dir()  # The pickle does run code when it is loaded.


def test_nothing_leads_out_of_a_checkpoint(one: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (one / "arrays").rename(outside)
    (one / "arrays").symlink_to(outside, target_is_directory=True)
    with raises(DamagedError, "/arrays", "/_CHECKPOINT_METADATA"):
        jp.restore(one, LIKE)
    assert all(f"{one}/arrays is a symbolic link" in text for text in problems_of(one))
    true = read(one)
    for folder in ("../outside/w", "/etc", "arrays/../../outside/w", "arrays//w", "arrays/./w", "a\\..\\w", "w" * 4097):
        made = replace(true, tensors={"w": replace(true.tensors["w"], folder=folder)})
        with raises(DamagedError, "tensor w", "outside"):
            Manifest.from_json(made.to_json(), "m")
    made = replace(true, tensors={"w": replace(true.tensors["w"], folder="a\0b")})
    with raises(DamagedError, "tensor w", "printable"):
        Manifest.from_json(made.to_json(), "m")


def test_a_run_deletes_no_folder_that_a_link_names(tmp_path: Path) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    (outside / "dear").write_text("")
    run.mkdir()
    for name in ("1", "2.unfinished", "3.deleted", "4.replaced"):
        (run / name).symlink_to(outside, target_is_directory=True)
    with jp.CheckpointManager(run, keep=1, tell=lambda text: None) as manager:
        for step in (5, 6):
            assert manager.save(step, {"w": jnp.arange(4.0)}) and manager.wait()
        assert manager.steps() == [6]
    assert (outside / "dear").exists()


def test_pipes_devices_and_size_bombs_end_no_restore(one: Path) -> None:
    piece, true = one / "arrays/w/0", read(one)
    piece.unlink()
    os.mkfifo(piece)  # A reader that opens it would wait for a writer.
    with raises(DamagedError, "arrays/w/0", "cannot"):
        jp.restore(one, LIKE)
    assert problems_of(one) == [f"{piece}, which holds w, cannot be read: it is not a regular file."]
    for size in (2**31, 2**44):  # a sparse file, and memory of the same size
        huge = replace(true.tensors["w"], shape=(size // 4,), chunk=(size // 4,))
        made = replace(true, tensors={"w": huge}, files={**true.files, "arrays/w/0": (size, 0)})
        with raises(DamagedError, "tensor w", "piece"):
            Manifest.from_json(made.to_json(), "m")
    (one / NAME).unlink()
    (one / NAME).symlink_to("/dev/zero")  # It has size 0 and no end.
    with raises(DamagedError, "/dev/zero"):
        read(one)
    (one / NAME).unlink()
    with (one / NAME).open("wb") as f:
        f.truncate(2**26 + 1)
    with raises(DamagedError, "manifest.json", "bytes"):
        read(one)
    (one / NAME).write_text("[" * 100_000)
    with raises(DamagedError, "JSON", "one/manifest.json"):
        read(one)


def test_a_record_of_a_state_on_disk_is_read_as_strictly(tmp_path: Path) -> None:
    store = Store.__new__(Store)
    for text in ("[" * 100_000, "{}", "[]", '{"record": 3, "checksum": ""}', "\x80"):
        (tmp_path / RECORD).write_text(text)
        with raises(DiskError, "record.json", "cannot"):
            store._read_record(tmp_path / RECORD)


@examples(60)
@given(data=st.data())
def test_bytes_changed_anywhere_in_a_manifest_are_found(data: st.DataObject) -> None:
    tensor = {"dtype": "float32", "itemsize": 4, "shape": [4], "chunk": [2], "folder": "a/w", "sums": [1, 2]}
    whole = {"w": {**tensor, "dims": ["embed"], "spec": "P('data')", "key": None}}
    files = {"a/w/0": [8, 1], "a/w/1": [8, 2]}
    made = Manifest.from_data(
        {"tensors": whole, "files": files, "step": 3, "versions": {}, "layout": {}, "metadata": {}}, "m"
    ).to_json()
    assert Manifest.from_json(made, "m").step == 3
    at, end = sorted(data.draw(st.tuples(*[st.integers(0, len(made))] * 2)))
    changed = made[:at] + data.draw(st.text(max_size=9)) + made[end:]
    if changed != made:
        with pytest.raises(DamagedError, match=r"^m "):
            Manifest.from_json(changed, "m")


# YAML

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{n}: &{n} {{<<: [{', '.join([f'*{o}'] * 9)}]}}\n" for o, n in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "20,000 values"),
        (MERGES, "20,000 values"),
        ("a: [" + "1," * 20_001 + "]", "20,000 values"),
        ("a: " + "[" * 5000, "line 1: values"),
        ("a: " + "{b: " * 5000, "line 1: values"),
        ("- " * 5000, "line 1: values"),
        (
            "a: &a1 [x]\n" + "".join(f"b{i}: &a{i} [*a{i - 1}]\n" for i in range(2, 60)),
            "31"
        ),
        ("a: &a [1, *a]", "'a'"),
        ("a: &a {b: {<<: *a}}", "'a'"),
        ("a: " + "1" * 4000, "4,000"),
        ("a: 1" + ":59" * 60_000, "180,001"),
        ("a: " + "x" * (2**18 + 1), "262,144"),
        ("a: !!python/object/apply:os.mkdir [x]",
         "python/object/apply"),
        ("!!python/object/new:os.system [x]", "python/object/new"),
        ("a: !!python/tuple [x]", "python/tuple"),
        ("a: !!int ''", "c.yaml"),
        ("a: !!bool x", "c.yaml"),
        ('a: "\\0"', "1: a text"),
        ('a: "\\ud800"', "1: a text"),
    ],
    ids=lambda text: text[:24],
)  # fmt: skip
def test_poisoned_yaml_is_refused_by_name_and_at_once(text: str, words: str) -> None:
    with raises(ConfigError, words):
        parse_yaml(text, "c.yaml")
    if "\n" not in text:
        with pytest.raises(ConfigError, match=r"^--set key: "):
            override({}, [f"key={text.removeprefix('a: ')}"])


def test_a_configuration_that_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero"), tmp_path):
        with raises(ConfigError, str(path)):
            load_yaml(path)
    with raises(ConfigError, "xxx", "cannot"):
        load_yaml(tmp_path / ("x" * 5000))
    (tmp_path / "long.yaml").write_text(f"model: {{family: llama, preset: tiny}}\nlayout: {'x' * 5000}\n")
    with raises(ConfigError, "xxx", "cannot"):
        load_run(tmp_path / "long.yaml")
    with raises(ConfigError, "xxx", "configuration"):
        load_run(Path("x" * 5000))
    (tmp_path / "large.yaml").write_bytes(b"a: 1\n" * 100_000)
    with raises(ConfigError, "large.yaml"):
        load_yaml(tmp_path / "large.yaml")


WORDS = [
    "a",
    "*a",
    "&a",
    "<<",
    ": ",
    "- ",
    "[",
    "]",
    "{",
    "}",
    ", ",
    "!!int",
    "!!python/name:x",
    "|",
    "'",
    "1e9",
    "\n",
    "  ",
    "? ",
]
KEYS = ["model", "layout", "mesh", "rules", "train", "steps", "data", "checkpoint", "best", "parallel", "optimizer"]


@examples(50)
@given(
    st.lists(st.sampled_from(WORDS + [f"{key}: " for key in KEYS]), max_size=40).map("".join)
    | st.text(max_size=60)
    | st.binary(max_size=60)
)
def test_whatever_a_configuration_holds_the_error_is_ours(text: str | bytes) -> None:
    try:
        build(RunConfig, parse_yaml(text, "c.yaml"), "c.yaml")
    except ConfigError as error:
        assert str(error).startswith(("c.yaml", "mesh"))


# Folders


def test_a_cache_is_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXPAR_CACHE", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        folder = cache_folder()
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]
    folder.chmod(0o755)
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700


def test_what_a_checkpoint_writes_is_for_its_user_alone(tmp_path: Path) -> None:
    with jp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.save(1, {"w": jnp.arange(4.0)}) and manager.wait()
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("run", "run/1")] == [0o700, 0o700]
    assert json.loads((tmp_path / "run/1" / NAME).read_text())["step"] == 1
    with raises(CheckpointError, "/run", "manifest.json"):
        read(tmp_path / "run")
