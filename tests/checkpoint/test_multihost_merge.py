"""Processes exchange the checksums of a save through files; no symbolic link leads them elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from error_texts import raises

from jaxpar.checkpoint import multihost_merge
from jaxpar.checkpoint.manifest import TensorRecord
from jaxpar.checkpoint.multihost_merge import gather
from jaxpar.errors import CheckpointError

TENSOR = {"w": TensorRecord("float32", 4, (4,), (2,), "arrays/w", (1, -1))}


def test_a_part_that_is_a_link_is_neither_written_nor_read_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, dear = tmp_path / "1.unfinished", tmp_path / "dear"
    here.mkdir()
    dear.write_text("dear")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(multihost_merge, "_wait", lambda ready, what: None)
    (here / "part.1.new").symlink_to(dear)
    gather(here, TENSOR, {"arrays/w/0": (8, 1)})
    assert dear.read_text() == "dear" and json.loads((here / "part.1").read_text())["sums"] == {"w": [1, -1]}
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    (here / "part.1").rename(dear)
    (here / "part.1").symlink_to(dear)
    with pytest.raises(OSError, match="symbolic link"):
        gather(here, TENSOR, {})
    (here / "part.1").unlink()
    dear.rename(here / "part.1")
    tensors, files = gather(here, {"w": TensorRecord("float32", 4, (4,), (2,), "arrays/w", (-1, 2))}, {})
    assert tensors["w"].sums == (1, 2) and files == {"arrays/w/0": (8, 1)}


@pytest.mark.parametrize(("rank", "text"), [(0, "process 1"), (1, "process 0")])
def test_a_process_that_does_not_finish_is_named(
    rank: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: rank)
    monkeypatch.setattr(multihost_merge, "_TIMEOUT", 0.03)
    with raises(CheckpointError, text):
        gather(tmp_path, TENSOR, {})
