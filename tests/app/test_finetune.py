"""A pretrained checkpoint, tuned with adapters on jsonl through a tokenizer, killed, resumed, exported, loaded.

``tests/llama_numpy.py`` loads the export: it shares no code with jaxpar, and has the logits of transformers on the
golden checkpoints (``tests/interop/test_llama_numpy.py``). ``benchmarks/interop/check_export.py`` loads an export in
transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import yaml
from llama_numpy import logits_of
from one_step import drawn
from run_processes import TrainProcess
from small_tokenizer import save_tokenizer, sentences, write_jsonl

import jaxpar as jp
from jaxpar.app.cli import main
from jaxpar.app.config import load_run
from jaxpar.app.huggingface import spread
from jaxpar.app.job import make_job
from jaxpar.app.train.run_data import open_data
from jaxpar.interop import huggingface
from jaxpar.models import make_decoder
from jaxpar.models.llama import LlamaConfig

RECIPE = Path(__file__).parents[2] / "configs" / "recipes" / "lora_llama.yaml"
SIZES = {"layers": 2, "embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 48, "vocab": 304}
CONFIG = LlamaConfig(**SIZES)
STEPS, SAVED = 30, 10
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab, (2, 16))


def pretrained(folder: Path) -> None:
    """Write ``source``, a random Hugging Face checkpoint with a tokenizer, and ``out``, its import."""
    state = drawn(jp.abstract_state(spread(CONFIG), make_decoder(CONFIG), optax.identity()), scale=0.2)
    huggingface.export(folder / "source", state.params, CONFIG, family="llama")
    save_tokenizer(folder / "source")
    assert main(["import", str(folder / "source"), str(folder / "out")]) == 0


def config_of(folder: Path) -> dict[str, Any]:
    write_jsonl(folder / "text" / "rows.jsonl", sentences(400))
    return {
        "extends": str(RECIPE),
        "model": SIZES,
        "data": {
            "source": str(folder / "text" / "rows.jsonl"),
            "tokenizer": str(folder / "source" / "tokenizer.json"),
            "batch": 8,
            "seq": 16,
        },
        "train": {"steps": STEPS, "eval_every": STEPS, "init_from": str(folder / "out" / "checkpoint")},
        "checkpoint": {"save_interval_steps": SAVED},
    }


def logits(folder: Path) -> np.ndarray:
    """Those of a Hugging Face checkpoint on one device, read without the run's configuration."""
    config = huggingface.read_config(folder)
    layout = jp.Layout.from_yaml(RECIPE.parents[1] / "layouts" / "dp.yaml").on_one_device()
    abstract = jp.abstract_state(layout, make_decoder(config), optax.identity())
    with layout:
        model = abstract.metadata.kind.merge(huggingface.load(layout, folder), {})
        return np.asarray(jax.jit(lambda tokens: model(tokens))(TOKENS))


@pytest.mark.slow
def test_a_killed_run_is_resumed_exported_and_loaded_again(tmp_path: Path) -> None:
    """Its weights are those of a run that was never killed."""
    pretrained(tmp_path)
    config = config_of(tmp_path)
    run = TrainProcess(tmp_path / "killed", config)
    run.wait_for(lambda: run.reached(SAVED + 3))
    run.process.kill()
    assert run.process.wait() == -9
    assert main(["train", str(tmp_path / "killed" / "run.yaml")]) == 0

    assert main(["export", str(tmp_path / "killed" / "run" / "checkpoints"), str(tmp_path / "tuned_killed")]) == 0
    whole = tmp_path / "whole.yaml"
    whole.write_text(yaml.safe_dump({**config, "output": str(tmp_path / "whole")}))
    assert main(["train", str(whole)]) == 0
    assert main(["export", str(tmp_path / "whole" / "checkpoints"), str(tmp_path / "tuned_whole")]) == 0
    exports = [sorted((tmp_path / name).glob("*.safetensors")) for name in ("tuned_killed", "tuned_whole")]
    killed, never = ([file.read_bytes() for file in files] for files in exports)
    assert killed == never
    before, after = logits(tmp_path / "source"), logits(tmp_path / "tuned_killed")
    assert np.abs(after - before).max() > 1e-2, "the adapters changed nothing"
    np.testing.assert_allclose(after, logits_of(tmp_path / "tuned_killed", TOKENS), rtol=0, atol=1e-5)
    np.testing.assert_allclose(before, logits_of(tmp_path / "source", TOKENS), rtol=0, atol=1e-5)
    check_loss(tmp_path / "killed", tmp_path / "tuned_killed")


def check_loss(run: Path, exported: Path) -> None:
    """The last evaluation of the run, by its sharded model with adapters, is that of the exported weights in NumPy."""
    job = make_job(load_run(run / "run.yaml"))
    losses, count = 0.0, 0
    for batch in open_data(job, job.layout()).heldout:
        log_probs = logits_of(exported, batch["tokens"])
        log_probs -= np.log(np.exp(log_probs).sum(-1, keepdims=True))
        losses -= np.take_along_axis(log_probs, batch["targets"][..., None], -1).mean()
        count += 1
    records = [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]
    (recorded,) = [record["heldout_loss"] for record in records if record["step"] == STEPS and "heldout_loss" in record]
    assert count > 0
    np.testing.assert_allclose(recorded, losses / count, rtol=1e-5)
