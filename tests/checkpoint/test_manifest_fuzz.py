"""Mutated manifests, most of them with a valid checksum: whatever reads one ends, soon, and with an error of jaxpar."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.app.doctor.checkpoints import examine
from jaxpar.app.train.checkpointing import config_changes, naming, resume
from jaxpar.app.train.spikes import LossWatch, SkippedBatches
from jaxpar.app.train_config import SpikeConfig
from jaxpar.checkpoint.manifest import NAME, read
from jaxpar.checkpoint.verify import problems_of
from jaxpar.data import Batches, batches
from jaxpar.errors import DamagedError, JaxparError

SECONDS, WALL, MEMORY = 5.0, 60.0, 1 << 30
"""Limits of one manifest: CPU seconds, seconds on a busy machine, bytes of the full process."""
CONFIG = {"train": {"steps": 6}, "model": {"embed": 16}}


def nested(depth: int, end: Any = 0) -> Any:
    """A value within ``depth`` lists and objects in turn."""
    for level in range(depth):
        end = [end] if level % 2 else {"a": end}
    return end


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 255, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 48, (1 << 48) + 1, 1 << 63, 1 << 64),
    *(10**400, -(10**400), 0.0, -0.0, 0.5, 1e308, 5e-324, -1.5),
    *("", "x", "x" * 5000, ".", "..", "../x", "/etc/passwd", "a/../b", "a//b", "a\\b", "a\0b", "\n", "\x1b[31m"),
    *("\ud800", "\udfff\ud800", "\u202e", "\ufeff", "é", "日本", "💥" * 50, "１２", "float32", "bfloat16", "int4", "O"),
    *("arrays", "arrays/params.w", "params/w", "params/w/0", "0", "threefry2x32", "nan", "%s", "[bold]", "{}"),
    *([], {}, [[]], [{}], [None], ["x"], [0], [-1], [0, 0], [1 << 48] * 32, [1] * 33, [0] * 5000, list(range(40))),
    *({"": {}}, {"a": 1}, {"\ud800": 0}, {"..": [1, 1]}, {str(i): [1, 1] for i in range(2000)}),
    *(nested(8), nested(63), nested(64), nested(65), nested(400)),
]


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every container below ``data`` with every key of it."""
    pending = [data]
    while pending:
        here = pending.pop()
        keys = list(here) if isinstance(here, dict) else range(len(here))
        for key in keys:
            yield here, key
            if isinstance(here[key], dict | list):
                pending.append(here[key])


def mutate(data: dict[str, Any], dice: random.Random) -> None:
    """Change parsed JSON in one place."""
    top = dice.choice(sorted(data))  # otherwise nearly every change is in the longest table
    below = list(places(data[top])) if isinstance(data[top], dict | list) else []
    here, key = dice.choice(below) if below and dice.random() < 0.9 else (data, top)
    value = copy.deepcopy(dice.choice(VALUES))
    match dice.randrange(10):
        case 0:
            del here[key]
        case 1:
            here[key] = nested(dice.choice([1, 2, 5, 70]), here[key])
        case 2 if isinstance(here, dict):
            here[dice.choice([x for x in VALUES if isinstance(x, str)])] = here.pop(key)
        case 3 if isinstance(here, dict):
            here[dice.choice([x for x in VALUES if isinstance(x, str)])] = value
        case 3:
            here.insert(dice.randint(0, len(here)), value)
        case 4:
            other, source = dice.choice(list(places(data)))
            here[key] = copy.deepcopy(other[source])
        case 5 | 6 if isinstance(here[key], int | float):
            number = here[key]
            here[key] = dice.choice(
                [number + 1, number - 1, -number, number * 2, number * 1000, number // 2, str(number)]
            )
        case 5 if isinstance(here[key], list):
            here[key] = here[key] * dice.choice([0, 2, 3])
        case 6 if isinstance(here[key], str):
            text = here[key]
            here[key] = dice.choice([text + "x", text[1:], text.upper(), text * 100, f"{text}/{text}", text[::-1]])
        case _:
            here[key] = value


def signed(data: Any) -> bytes:
    """The canonical text with its digest, as somebody writes it who knows the format."""
    data = {key: value for key, value in data.items() if key != "checksum"} if isinstance(data, dict) else data
    digest = hashlib.blake2b(_dump(data).encode(), digest_size=16).hexdigest()
    return _dump({**data, "checksum": digest} if isinstance(data, dict) else data).encode()


def _dump(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":")) + "\n"


def disturb(content: bytes, dice: random.Random) -> bytes:
    """Change the text itself."""
    at, end = sorted(dice.randint(0, len(content)) for _ in range(2))
    match dice.randrange(8):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + dice.randbytes(dice.randint(1, 9)) + content[at:]
        case 2:
            return content[:at] + content[end:]
        case 3:
            return content[:at] + bytes([content[at] ^ 1 << dice.randrange(8)]) + content[at + 1 :]
        case 4:
            depth = dice.choice([100, 990, 1010, 5000, 100_000])
            return dice.choice([b"[", b'{"a":', b'[{"a":']) * depth + content
        case 5:
            odd = [
                b"NaN",
                b"-Infinity",
                b"1e999",
                b"9" * 5000,
                b"0x1",
                b"1_0",
                b"\xff",
                b"\xed\xa0\x80",
                b"\0" * 9,
                b"//",
            ]
            return content.replace(dice.choice([b"1", b"4", b'"', b":", b"null", b"["]), dice.choice(odd), 1)
        case 6:
            return dice.choice(
                [content.decode().encode("utf-16"), b"\xef\xbb\xbf" + content, content * 2, b"", b"null"]
            )
        case _:
            return content.replace(b'"schema":1', b'"schema":1,"schema":' + dice.choice([b"1", b"2", b"[]"]))


@dataclass
class Readers:
    """Everything that reads a manifest of a run's folder, as functions, and what became of each call."""

    run: Path
    like: Any
    stream: Batches
    results: Counter[str] = field(default_factory=Counter)

    def __call__(self) -> None:
        for name, work in (
            ("read", self._read),
            ("problems", lambda: problems_of(self.run / "1", step=1)),
            ("doctor", lambda: examine(self.run)),
            ("restore", lambda: jp.restore(self.run / "1", self.like)),
            ("restore a part", lambda: jp.restore(self.run / "1", {"params": self.like["params"]}, only=["params"])),
            ("manager", self._manager),
        ):
            try:
                work()
                self.results[f"{name}: accepted"] += 1
            except JaxparError as error:
                self.results[f"{name}: {type(error).__name__}"] += 1
                assert str(error).isprintable() or "\n" in str(error), repr(str(error))

    def _read(self) -> None:
        """Read it, and resume from its metadata as a run does."""
        metadata = read(self.run / "1").metadata
        list(config_changes(metadata.get("config"), CONFIG))
        with naming(self.run / "1" / NAME):
            resume(metadata, self.stream, LossWatch(3, SpikeConfig(window=4)))
            SkippedBatches([[2, 3], [7, 7]]).roll_back(9, 6, metadata)
        next(self.stream)

    def _manager(self) -> None:
        with jp.CheckpointManager(self.run, best="min", tell=lambda text: None) as manager:
            manager.best()
            manager.restore_latest(self.like)


@pytest.fixture
def readers(tmp_path: Path) -> Iterator[Readers]:
    """A run's folder with one checkpoint that has every kind of entry, and what reads it."""
    w = np.arange(12, dtype=np.float32).reshape(4, 3)
    params = {"w": jnp.asarray(w), "blocks": {"0": jnp.ones(3, "bfloat16"), "1": jnp.zeros(3, "bfloat16")}}
    state = {"params": params, "step": jnp.int32(1), "key": jax.random.key(0), "empty": jnp.zeros((0, 2))}
    stream = batches(range(400), batch=2, seq=8, seed=1)
    next(stream)
    metadata = {
        "position": stream.get_state(),
        "config": CONFIG,
        **LossWatch(3, SpikeConfig(window=4)).state(),
        **SkippedBatches([[2, 3], [7, 7]], 2).state(),
        "recent": [2.5, 3.0],
    }
    with jp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.save(1, state, metric=2.0, metadata=metadata) and manager.wait()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    yield Readers(tmp_path / "run", like, stream)
    stream.close()


def resident(peak: str) -> int:
    """A number of ``/proc/self/status``, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{peak}:"))


class Limits:
    """The largest CPU time, wall time and memory of the calls so far; one that exceeds a limit is a failure."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds, self.cpu, self.wall = seconds, 0.0, 0.0
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
        self.before = resident("VmRSS")

    def __call__(self, work: Callable[[], Any], what: str) -> None:
        cpu, wall = time.process_time(), time.monotonic()
        work()
        cpu, wall = time.process_time() - cpu, time.monotonic() - wall
        self.cpu, self.wall = max(self.cpu, cpu), max(self.wall, wall)
        assert cpu < self.seconds and wall < WALL, f"{what} took {cpu:.1f} s of CPU, {wall:.1f} s"
        assert self.memory - self.before < MEMORY, f"{what}: {self.memory - self.before >> 20} MiB"

    @property
    def memory(self) -> int:
        """The peak memory of this process."""
        return resident("VmHWM")


def mutated(true: dict[str, Any], number: int) -> bytes:
    """The text of the mutated manifest with this number."""
    dice, data = random.Random(number), copy.deepcopy(true)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        mutate(data, dice)
    try:
        content = signed(data)
    except (ValueError, RecursionError):  # too deep to be written
        content = signed(true)
    return disturb(content, dice) if dice.random() < 0.3 else content


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux to measure memory")
@pytest.mark.parametrize("count", [60, pytest.param(4_000, marks=pytest.mark.slow)])
def test_whatever_a_manifest_holds_the_errors_are_ours(readers: Readers, count: int) -> None:
    file, began = readers.run / "1" / NAME, time.monotonic()
    true = json.loads(file.read_text())
    assert signed(true) == file.read_bytes()
    readers()
    assert set(readers.results.values()) == {1} and all(name.endswith(": accepted") for name in readers.results)
    readers.results.clear()
    within = Limits()
    for number in range(count):
        file.write_bytes(mutated(true, number))
        within(readers, f"manifest {number}")
    refused = sum(n for name, n in readers.results.items() if name.startswith("read: ") and "accepted" not in name)
    assert refused > count / 3
    print(
        f"\n{count:,} manifests, {refused:,} of them refused when read, in {time.monotonic() - began:.0f} s. One took "
        f"at most {within.cpu:.2f} s of CPU and {within.wall:.2f} s; peak {within.memory >> 20} MiB, "
        f"{(within.memory - within.before) >> 20} MiB more than before.\n{dict(sorted(readers.results.items()))}"
    )


# Sizes


def body(**changes: Any) -> dict[str, Any]:
    return {"tensors": {}, "files": {}, "step": 1, "versions": {}, "layout": {}, "metadata": {}, "schema": 1, **changes}


def pieces(count: int) -> dict[str, Any]:
    """A tensor of many pieces, which agrees with its files."""
    names = {"dims": None, "spec": "", "key": None}
    tensor = {"dtype": "float32", "itemsize": 4, "shape": [count], "chunk": [1], "folder": "a", "sums": [1] * count}
    return body(tensors={"w": tensor | names}, files={f"a/{i}": [4, 1] for i in range(count)})


TEXT, MOST = 1 << 26, 4_000_000
LARGE: dict[str, Callable[[], bytes]] = {
    "brackets": lambda: b"[" * TEXT,
    "spaces": lambda: b" " * TEXT,
    "zeros": lambda: bytes(TEXT),
    "a number": lambda: b'{"a":' + b"9" * (TEXT - 9) + b"}",
    "numbers": lambda: b"[" + b"9" * 4000 + b",9" * (TEXT // 2 - 4001) + b"]",
    "a text": lambda: signed(body(metadata={"a": "x" * (TEXT - 1000)})),
    "a wide text": lambda: signed(body(metadata={"a": "💥" + "x" * (TEXT - 1000)})),
    "objects": lambda: signed(body(metadata={"a": [{f"a{i}": 0} for i in range(MOST // 2 - 99)]})),
    "lists": lambda: signed(body(metadata={"a": [[[]]] * (MOST // 3 - 99)})),
    "fractions": lambda: signed(body(metadata={"a": [i + 0.5 for i in range(MOST - 99)]})),
    "pieces": lambda: signed(pieces(700_000)),
    "files": lambda: signed(body(files={f"a/{i}": [4, 1] for i in range(MOST // 3 - 99)})),
}


def test_a_sparse_manifest_is_refused_by_its_size(tmp_path: Path) -> None:
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(1 << 30)
    within = Limits()
    text = f"{tmp_path / NAME} has more than 67,108,864 bytes, the limit for a manifest. Remedy: "
    with raises(DamagedError, "manifest.json", "bytes"):
        within(lambda: read(tmp_path), "1 GiB")
    assert problems_of(tmp_path)[0].startswith(text)
    assert within.memory - within.before < 16 << 20


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_the_largest_manifests_stay_within_the_limits(tmp_path: Path, name: str) -> None:
    """Their text has the greatest size that is read at all; a process of its own reads it."""
    (tmp_path / NAME).write_bytes(LARGE[name]())
    command = [sys.executable, __file__, str(tmp_path), name]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    print(found.stdout)
    assert found.returncode == 0, found.stderr


if __name__ == "__main__":
    limits = Limits(2 * SECONDS)  # none took longer than SECONDS where the limits of a manifest were chosen
    limits(lambda: problems_of(sys.argv[1]), sys.argv[2])
    print(f"{sys.argv[2]}: {limits.cpu:.1f} s of CPU, {limits.wall:.1f} s, {limits.memory >> 20} MiB")
