"""``jaxpar generate``: text from the newest good checkpoint of a run, on another mesh than the run's."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from rich.console import Console

import jaxpar as jp
from jaxpar.cli import main
from jaxpar.errors import CheckpointError
from jaxpar.train.config import load_run
from jaxpar.train.generate import _parameters, restored
from jaxpar.train.job import Job, make_job

LAYOUTS = Path(__file__).parents[2] / "configs" / "layouts"
RUN: dict[str, Any] = {
    "model": {"family": "llama", "preset": "tiny", "layers": 1, "embed": 64, "heads": 2, "head_dim": 8, "mlp": 24},
    "layout": str(LAYOUTS / "fsdp_tp.yaml"),
    "simulate": 8,
    "data": {"source": "synthetic", "batch": 8, "seq": 16},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(RUN), encoding="utf-8")
    return file


def job_of(config: Path, *settings: str) -> Job:
    return make_job(load_run(config, settings))


def saying(shapes: Any, after: int) -> Any:
    """Parameters that say the byte that comes so many after the last: layers add nothing, and the head looks for an earlier byte's embedding."""
    words = np.random.default_rng(0).normal(size=shapes["embedding"].shape).astype(np.float32)
    blocks = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes["blocks"])
    whole = {
        "embedding": words,
        "blocks": blocks,
        "head": np.roll(words, after, 0).T,
        "norm": {"scale": np.ones(64, "f4")},
    }
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), whole, shapes)


def test_the_newest_good_step_goes_on_on_another_mesh(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, folder = job_of(config), tmp_path / "checkpoints"
    layout = job.layout()
    shapes = jp.abstract_state(layout, job.make_model, optax.identity()).params
    with jp.CheckpointManager(folder) as manager:
        for step in (1, 2):
            manager.save(step, {"params": saying(shapes, step), "opt_state": jnp.ones(3)}, layout=layout)
    piece = max((folder / "2").rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    asked = ["--prompt", "abc", "--prompt", "uv", "--max-new", "5", "--checkpoint", str(folder)]
    mesh = ["--set", f"layout={LAYOUTS / 'fsdp.yaml'}"]
    assert main(["generate", str(config), *asked, *mesh]) == 0
    out, told = capsys.readouterr()
    assert out == "[0] abcdefgh\n[1] uvwxyz{\n"
    assert f"passed over: {folder / '2'}" in told and f"parameters of {folder / '1'} on data 8" in told

    wide = job_of(config, "model.mlp=32")
    model = jp.abstract_state(wide.layout(), wide.make_model, optax.identity())
    with pytest.raises(
        CheckpointError, match=r"blocks/mlp/up is float32\[1, 64, 24\] there, but float32\[1, 64, 32\] here"
    ):
        restored(folder / "1", model.params, print)


def test_what_keeps_it_from_it(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        assert main(["generate", str(config), *arguments]) == 1
        return capsys.readouterr().err

    assert said("--prompt", "abc", "--checkpoint", str(tmp_path)) == (
        f"CheckpointError: {tmp_path}: no checkpoint. Remedy: the folder of a run's checkpoints, as runs/one/checkpoints, or of one of its steps.\n"
    )
    assert said("--prompt", "abcd", "--cache", "16", "--max-new", "20") == (
        "ConfigError: generate: request 0 has 4 tokens and asks for 20 more, 24 in all, but the cache has 16 slots. Remedy: slots=24 or more, a "
        "shorter prompt, or most=12.\n"
    )
    assert said("--prompt", "abc", "--set", "model.vocab=208") == (
        "ConfigError: model: vocab is 208, but text is bytes, 256 different tokens. Remedy: the model.vocab of the training, 256 or more.\n"
    )
    assert "the dim 'cache_seq' has size 18, which is no multiple of context=4" in said(
        "--prompt", "abc", "--cache", "18", "--max-new", "8", "--set", f"layout={LAYOUTS / 'ring.yaml'}"
    )


def test_initial_parameters_are_said_loudly(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, screen = job_of(config, "train.seed=7"), io.StringIO()
    layout = job.layout()
    monkeypatch.setattr(jp, "init", lambda *asked, seed: SimpleNamespace(params=(*asked[:2], seed)))
    params = _parameters(job, layout, None, None, Console(file=screen, width=200))  # type: ignore[arg-type]
    assert params == (layout, job.make_model, 7)
    text = "INITIAL parameters, never trained, on data 4, model 2: what follows is noise. Remedy: --checkpoint DIR\n"
    assert re.fullmatch(re.escape(text), screen.getvalue())
