"""Coverage-guided fuzzing of the configuration and manifest parsers.

    uv run --with atheris python benchmarks/reliability/fuzz_parsers.py config [--cpu-seconds 600]
    uv run --with atheris python benchmarks/reliability/fuzz_parsers.py manifest

Atheris (libFuzzer for Python) mutates inputs to reach new lines. It starts from the repository's configurations and
from a valid manifest. ``config`` parses inputs as the YAML of a run, up to the dataclasses. ``manifest`` parses them as
the text of a manifest, and as its JSON with a correct checksum, up to every piece; accepted manifests must be written
as they were read.

Goal: no crash. Any exception other than jaxpar's own is a crash, and so is an input that takes two CPU seconds or 1
GiB. Exit status 1 on a crash; the input is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

with atheris.instrument_imports(include=["jaxpar", "yaml"]):
    import yaml  # noqa: F401

    from benchmarks.shared.paths import CONFIGS
    from jaxpar.app.config import RunConfig
    from jaxpar.checkpoint import manifest, validate
    from jaxpar.checkpoint.manifest import Manifest
    from jaxpar.errors import JaxparError
    from jaxpar.utils.yaml_config import build, parse_yaml

SLOW = 2.0
TENSOR = {"dtype": "float32", "itemsize": 4, "shape": [4, 6], "chunk": [2, 6], "folder": "arrays/w", "sums": [1, 2]}
WHOLE = {
    "tensors": {"w": {**TENSOR, "dims": ["embed", None], "spec": "P('data')", "key": None}},
    "files": {"arrays/w/0.0": [48, 1], "arrays/w/1.0": [48, 2], "arrays/w/.zarray": [9, 3]},
    "step": 7,
    "versions": {"jax": "0"},
    "layout": {"mesh": {"data": 2}},
    "metadata": {"config": {"a": [1, 2.5, "x", None, True]}},
}


def config(data: bytes) -> None:
    """Parse the YAML of a run."""
    build(RunConfig, parse_yaml(data, "c.yaml"), "c.yaml")


def altered(data: bytes) -> bytes:
    """Return the valid manifest's JSON with some values replaced, moved or removed, as ``data`` directs."""
    dice, whole = atheris.FuzzedDataProvider(data), json.loads(json.dumps(WHOLE))
    for _ in range(dice.ConsumeIntInRange(1, 4)):
        at: Any = whole
        while isinstance(at, dict | list) and at:
            key = dice.PickValueInList(list(at) if isinstance(at, dict) else list(range(len(at))))
            if not isinstance(at[key], dict | list) or not at[key] or dice.ConsumeIntInRange(0, 3) == 0:
                break
            at = at[key]
        ways: list[Callable[[], Any]] = [
            lambda: dice.ConsumeIntInRange(-1, 9),
            lambda: 1 << dice.ConsumeIntInRange(0, 70),
            lambda: dice.ConsumeUnicodeNoSurrogates(8),
            lambda: dice.PickValueInList(
                ["../a", "arrays/w", "/a", "", None, True, 1.5, [], {}, [0], [2, 3], {"a": 1}]
            ),
        ]
        made = dice.PickValueInList(ways)()
        where = dice.ConsumeIntInRange(0, 5)
        if where == 0:
            del at[key]
        elif where == 1 and isinstance(at, dict):
            at[dice.ConsumeUnicodeNoSurrogates(6)] = made
        elif where == 1:
            at.append(made)
        else:
            at[key] = made
    return json.dumps(whole).encode()


def as_manifest(data: bytes) -> None:
    """Parse the text of a manifest, or its JSON without the checksum."""
    data = altered(data[1:]) if data[:1] == b"\0" else data
    text = data.decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and "checksum" not in found:
        made = Manifest.from_data(found, "m")
        assert Manifest.from_json(made.to_json(), "m") == made
        for tensor in made.tensors.values():
            assert validate.inside(tensor.folder)
            assert all(made.files[name][0] == tensor.piece_bytes <= 1 << 30 for name, _, _ in tensor.pieces())
        return
    Manifest.from_json(text, "m")


def seeds(kind: str, folder: Path) -> Path:
    """Write a seed corpus, and a dictionary of tokens that random bytes seldom form; return the dictionary's path."""
    if kind == "config":
        for file in CONFIGS.rglob("*.yaml"):
            (folder / file.name).write_bytes(file.read_bytes())
        words = [
            "&a",
            "*a",
            "<<: *a",
            "!!int",
            "!!float",
            "!!binary",
            "!!timestamp",
            "!!set",
            "!!omap",
            "!!python/name:x",
            "? ",
            "|",
            ">-",
            "%YAML",
        ]
        words += list(RunConfig.__dataclass_fields__)
    else:
        (folder / "data").write_text(json.dumps(WHOLE))
        (folder / "text").write_text(Manifest.from_data(WHOLE, "m").to_json())
        (folder / "altered").write_bytes(bytes(64))
        words = [
            "null",
            "true",
            "[]",
            "{}",
            "-1",
            "1e400",
            "NaN",
            "../",
            "281474976710656",
            *manifest._KEYS,
            *manifest._TENSOR,
        ]
    file = folder.parent / "words"
    file.write_text("".join(f'"{word}"\n' for word in words))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("config", "manifest"), help="parser")
    parser.add_argument("--cpu-seconds", type=float, default=600, help="CPU seconds (default: %(default)s)")
    options = parser.parse_args()
    target: Callable[[bytes], Any] = config if options.kind == "config" else as_manifest
    runs, taken, slowest = 0, 0, 0.0

    def once(data: bytes) -> None:
        nonlocal runs, taken, slowest
        began = time.process_time()
        try:
            target(data)
            taken += 1
        except JaxparError:
            pass
        ended = time.process_time()
        slowest, runs = max(slowest, ended - began), runs + 1
        if ended - began > SLOW:
            raise TimeoutError(f"{ended - began:.1f} CPU seconds for {len(data)} bytes")
        if ended > options.cpu_seconds:
            print(
                f"{options.kind}: {runs:,} inputs in {ended:.0f} CPU seconds, {taken:,} accepted, the others rejected "
                f"with an error of jaxpar; the slowest took {slowest:.2f} s",
                flush=True,
            )
            os._exit(0)

    with tempfile.TemporaryDirectory() as root:
        corpus = Path(root) / "corpus"
        corpus.mkdir()
        words = seeds(options.kind, corpus)
        atheris.Setup(
            [
                sys.argv[0],
                str(corpus),
                f"-dict={words}",
                "-max_len=4096",
                "-timeout=120",
                "-rss_limit_mb=1024",
                "-print_final_stats=1",
            ],
            once,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
