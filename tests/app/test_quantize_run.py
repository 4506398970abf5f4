"""``model.quantize`` from the command line: trained with rounded weights, generated and exported as integers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.app.cli import main
from jaxpar.app.config import load_run
from jaxpar.app.export import ExportCommand
from jaxpar.app.job import make_job
from jaxpar.app.quantize_config import QuantizeSettings, quantize_config
from jaxpar.compression import QuantizeConfig
from jaxpar.errors import ConfigError
from jaxpar.interop import huggingface
from jaxpar.interop.quantized_tensors import FIELD
from jaxpar.models.llama import LlamaConfig

RECIPE = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SIZES = {"layers": 1, "embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 48}


def settings(output: Path, **changes: Any) -> list[str]:
    values: dict[str, Any] = {f"model.{name}": value for name, value in SIZES.items()}
    values |= {"data.source": "synthetic", "data.batch": 8, "data.seq": 16, "train.steps": 2, "output": output}
    values |= {"train.eval_every": 2, "train.eval_batches": 1, "checkpoint.save_interval_steps": 1}
    values |= {"model.quantize": "{bits: 4, group: 16}"}
    return [f"{key}={value}" for key, value in (values | changes).items()]


@pytest.mark.slow
def test_trained_generated_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [part for setting in settings(tmp_path / "run") for part in ("--set", setting)]
    assert main(["train", str(RECIPE), *given]) == 0
    saved = tmp_path / "run" / "checkpoints"
    assert main(["generate", str(RECIPE), *given, "--prompt", "a", "--max-new-tokens", "2", "--explain"]) == 0
    assert re.search(r"params/blocks/mlp/up/values .* int4 ", capsys.readouterr().out)
    assert main(["export", str(saved), str(tmp_path / "out")]) == 0
    fields = json.loads((tmp_path / "out" / "config.json").read_text())[FIELD]
    assert fields["config_groups"]["group_0"]["weights"]["group_size"] == 16
    # The file holds what the model computes with; without integers, the weights before rounding.
    job = make_job(load_run(RECIPE, settings(tmp_path / "run")))
    like = jp.abstract_state(job.layout(), job.make_model, job.tx)
    state = jp.restore(saved / "2", like)
    mine = jax.tree.leaves(state.metadata.kind.rounded(state.params, _round))
    theirs = jax.tree.leaves(huggingface.load(job.layout(), tmp_path / "out"))
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert main(["export", str(saved), str(tmp_path / "floats"), "--quantize", "no"]) == 0
    assert main(["export", str(saved), str(tmp_path / "eight"), "--quantize", "8"]) == 0
    floats, eight = (huggingface.load(job.layout(), tmp_path / name) for name in ("floats", "eight"))
    up = [np.asarray(tree["blocks"]["mlp"]["up"]) for tree in (floats, eight)]
    np.testing.assert_array_equal(up[0], np.asarray(state.params["blocks"]["mlp"]["up"]))
    assert 0 < np.abs(up[0] - up[1]).max() < np.abs(up[0]).max() / 250


def _round(path: Any, w: jax.Array, tile: Any, **how: Any) -> jax.Array:
    from jaxpar.parallel.precision.quantized_array import round_straight_through

    return jax.jit(lambda w: round_straight_through(w, tile, **how))(w)


def test_settings_that_do_not_fit_are_errors(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model.quantize": 4}, "4"),
        ({"model.lora": "{rank: 2}"}, "model.lora"),
        ({"model.quantize": "{group: -1}"}, "model.quantize: group"),
    ]
    for changes, name in cases:
        with raises(ConfigError, name):
            make_job(load_run(RECIPE, settings(tmp_path, **changes)))
    own = QuantizeSettings(4, 8, targets=("*/kernel",), skip=("head/*",))
    assert quantize_config(own, None, "weights") == QuantizeConfig(("*/kernel",), 4, 8, -2, ("head/*",), "float32")
    wrong = {
        "weights needs targets, because the model is one of your own. Remedy: targets: ['*/kernel'], patterns of the "
        "parameters' paths.": (QuantizeSettings(4), None),
        "weights: axis is found in a built-in model, got -1. Remedy: leave axis out.": (
            QuantizeSettings(4, axis=-1),
            LlamaConfig(**SIZES),
        ),
    }
    for name, (how, model) in wrong.items():
        with raises(ConfigError, "weights", "model"):
            quantize_config(how, model, "weights")
    chosen = ExportCommand(tmp_path, tmp_path / "x", quantize="4", group=16)._quantization({}, LlamaConfig(**SIZES))
    assert chosen is not None and (chosen.bits, chosen.group) == (4, 16)
