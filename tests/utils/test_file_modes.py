"""Files that a user may share have the mode that the umask leaves, as those of every other program."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from one_step import drawn

import jaxpar as jp
from jaxpar.app.train.metrics import MetricsWriter
from jaxpar.data.tokenize import write_tokens
from jaxpar.interop import huggingface, peft
from jaxpar.lora import LoraConfig, adapt
from jaxpar.models import make_decoder
from jaxpar.models.llama import LlamaConfig
from jaxpar.parameter_server.update_log import LogRecord, UpdateLog

CONFIG = LlamaConfig(vocab=16, embed=8, layers=1, heads=2, kv_heads=2, head_dim=4, mlp=8)


def state_of(make_model: Any) -> Any:
    dims = ("embed", "norm", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers")
    mesh = jp.MeshSpec(data=1).build(jax.devices()[:1])
    return drawn(
        jp.abstract_state(jp.Layout(mesh, jp.Rules(batch="data", **dict.fromkeys(dims))), make_model, optax.identity())
    )


def write_model(folder: Path) -> None:
    huggingface.export(folder, state_of(make_decoder(CONFIG)).params, CONFIG, file_bytes=1000)


def write_adapter(folder: Path) -> None:
    peft.export(folder, state_of(adapt(make_decoder(CONFIG), LoraConfig(2, 4, ("attention/q",)))), CONFIG)


def write_token_file(folder: Path) -> None:
    folder.mkdir()
    (folder / "text.txt").write_text("one\n\ntwo\n\nthree\n")
    write_tokens(str(folder / "text.txt"), folder / "text.tokens", heldout_fraction=0.5)


def write_metrics(folder: Path) -> None:
    with MetricsWriter(folder) as metrics:
        metrics.write(1, loss=1.0)


def write_log(folder: Path) -> None:
    log = UpdateLog(folder)
    assert list(log.records()) == []
    log.append(LogRecord("update", {}, {"a": np.ones(2)}))
    log.replace([LogRecord("update", {}, {"a": np.ones(2)})])
    log.close()


WRITERS: dict[str, tuple[Callable[[Path], None], int]] = {
    "a checkpoint for transformers": (write_model, 4),
    "an adapter for PEFT": (write_adapter, 2),
    "a token file": (write_token_file, 2),
    "metrics": (write_metrics, 2),
    "the log of a parameter server": (write_log, 1),
}
"""Functions that write a folder, and the least number of files that they write."""


@pytest.mark.parametrize("what", WRITERS)
def test_files_have_the_mode_that_the_umask_leaves(what: str, tmp_path: Path) -> None:
    write, least = WRITERS[what]
    before = os.umask(0o002)  # of groups that share their files
    try:
        write(tmp_path / "out")
    finally:
        os.umask(before)
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert len(files) >= least
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in files} == {file.name: "0o664" for file in files}
