"""``model.lora`` from the command line: imported weights, adapters trained, saved alone, resumed, merged, exported."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
from error_texts import raises
from one_step import drawn

import jaxpar as jp
from jaxpar.app.adapted import DIGEST, check_digest, merged_params
from jaxpar.app.cli import main
from jaxpar.app.config import load_run
from jaxpar.app.huggingface import spread
from jaxpar.app.job import Job, make_job
from jaxpar.app.train.checkpointing import config_values
from jaxpar.app.train.programs import StepPrograms
from jaxpar.app.train.summary import describe_model
from jaxpar.errors import CheckpointError, ConfigError
from jaxpar.interop import huggingface
from jaxpar.interop.peft import read_header
from jaxpar.interop.safetensors import DTYPES, read_tensors
from jaxpar.models import make_decoder
from jaxpar.models.llama import LlamaConfig

RECIPE = Path(__file__).parents[2] / "configs" / "recipes" / "lora_llama.yaml"
SIZES = {"layers": 1, "embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 48}
CONFIG = LlamaConfig(**SIZES)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``source``, a random Hugging Face checkpoint, and ``out``, what ``jaxpar import`` made of it."""
    folder = tmp_path_factory.mktemp("base")
    state = drawn(jp.abstract_state(spread(CONFIG), make_decoder(CONFIG), optax.identity()), seed=7, scale=0.2)
    huggingface.export(folder / "source", state.params, CONFIG, family="llama", fields={"eos_token_id": 7})
    assert main(["import", str(folder / "source"), str(folder / "out")]) == 0
    return folder


def settings(base: Path, output: Path, **changes: Any) -> list[str]:
    values = {f"model.{name}": value for name, value in SIZES.items()}
    values |= {"data.source": "synthetic", "data.batch": 8, "data.seq": 16, "train.steps": 4}
    values |= {
        "train.eval_every": 4,
        "train.eval_batches": 1,
        "checkpoint.save_interval_steps": 2,
        "checkpoint.keep": 2,
    }
    values |= {"train.init_from": base / "out" / "checkpoint", "output": output}
    return [f"{key}={value}" for key, value in (values | changes).items()]


def job_of(base: Path, output: Path, **changes: Any) -> Job:
    return make_job(load_run(RECIPE, settings(base, output, **changes)))


def tensors(folder: Path) -> dict[str, np.ndarray]:
    one = folder / "adapter_model.safetensors"
    stored = read_header(one) if one.is_file() else read_tensors(folder)
    read = lambda t: t.file.read_bytes()[t.start : t.start + t.size]
    return {name: np.frombuffer(read(t), DTYPES[t.dtype]).reshape(t.shape) for name, t in stored.items()}


def check_exports(base: Path, merged: Path, adapter: Path) -> None:
    """The merged export is the imported weights plus alpha / rank * B A of the exported adapter."""
    before, after, parts = tensors(base / "source"), tensors(merged), tensors(adapter)
    assert len(parts) == 2 * 7
    for name, w in before.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (parts.get(f"{module}.lora_{x}.weight") for x in "AB")
        added = 0 if a is None or b is None else 16 / 8 * (b @ a)
        np.testing.assert_allclose(after[name], w + added, rtol=0, atol=1e-6)
        assert (a is None) or np.abs(added).max() > 1e-4
    fields = json.loads((merged / "config.json").read_text())
    assert fields["eos_token_id"] == 7 and fields["model_type"] == "llama"


@pytest.mark.slow
def test_adapters_of_imported_weights_are_merged_and_written(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(base, tmp_path / "run")
    layout = job.layout()
    engine = StepPrograms(job, layout)
    state = engine.first_state()
    assert describe_model(job, len(jax.tree.leaves(state.params))) == (
        "llama, 24,160 parameters, frozen, float32 compute; 3,712 parameters in adapters of 7 arrays of weights (rank "
        "8, alpha 16)"
    )
    assert {len(state.params["blocks"][part]) for part in ("attention", "mlp")} == {4, 3}
    frozen = jp.lora.frozen_params(state)
    wanted = huggingface.load(layout, base / "source")
    chex.assert_trees_all_equal(frozen, wanted)
    rng = np.random.default_rng(0)
    values = [
        jax.device_put(rng.normal(size=x.shape, scale=0.1).astype("float32"), x.sharding)
        for x in jax.tree.leaves(state.params)
    ]
    state = dataclasses.replace(state, params=jax.tree.unflatten(jax.tree.structure(state.params), values))
    saved, metadata = jp.lora.without_frozen(state), {"config": config_values(job), **engine.metadata}
    jp.save(tmp_path / "one", saved, layout=layout, metadata=metadata)
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "merged")]) == 0
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "adapter"), "--adapter"]) == 0
    check_exports(base, tmp_path / "merged", tmp_path / "adapter")
    assert "3,712 parameters of adapters; wrote" in capsys.readouterr().out
    like = jp.abstract_state(layout, make_decoder(CONFIG), optax.identity()).params
    summed = merged_params(job, layout, like, state.params, tmp_path / "one")
    gate = np.asarray(summed["blocks"]["mlp"]["gate"][0]).T
    np.testing.assert_allclose(gate, tensors(tmp_path / "merged")["model.layers.0.mlp.gate_proj.weight"], atol=1e-6)
    from_peft = job_of(base, tmp_path / "run", **{"model.lora.adapter": tmp_path / "adapter"})
    again = StepPrograms(from_peft, layout).first_state()
    chex.assert_trees_all_equal(again.params, state.params)

    other = drawn(jp.abstract_state(spread(CONFIG), make_decoder(CONFIG), optax.identity()), seed=8, scale=0.2).params
    jp.save(tmp_path / "other", {"params": other}, layout=spread(CONFIG))
    digest = jp.lora.digest_of(other)
    text = (
        f"{tmp_path / 'one'} has adapters of other weights: theirs have the digest {engine.metadata[DIGEST]}, those of "
        f"{tmp_path / 'other'} have {digest}. Remedy: the train.init_from with which the adapters were trained."
    )
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "no"), "--base", str(tmp_path / "other")]) == 2
    assert text in capsys.readouterr().err
    wrong = job_of(base, tmp_path / "run", **{"train.init_from": tmp_path / "other"})
    with raises(CheckpointError, "/one", "/other"):
        merged_params(wrong, layout, like, state.params, tmp_path / "one")


@pytest.mark.slow
def test_a_run_is_resumed_bitwise_generated_from_and_exported(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = lambda output: [word for one in settings(base, tmp_path / output) for word in ("--set", one)]
    assert main(["train", str(RECIPE), *run("one")]) == 0
    names = {path.name for path in (tmp_path / "one" / "checkpoints" / "4" / "arrays").iterdir()}
    assert "params.blocks.mlp.up.lora_a" in names and not any("frozen" in name for name in names)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "4")
    capsys.readouterr()
    assert main(["train", str(RECIPE), *run("two")]) == 0
    assert "resumed from step 2" in capsys.readouterr().out
    ends = [tmp_path / name / "checkpoints" / "4" for name in ("one", "two")]
    layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data"))
    job = job_of(base, tmp_path)
    like = jp.lora.without_frozen(jp.abstract_state(job.layout(), job.make_model, job.tx))
    one, two = (jax.tree.leaves(jp.restore(end, like)) for end in ends)
    plain = lambda x: np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    assert layout.sizes["data"] == 8 and len(one) == len(two) > 40
    assert all(np.array_equal(plain(a), plain(b)) for a, b in zip(one, two, strict=True))
    assert main(["export", str(tmp_path / "two" / "checkpoints"), str(tmp_path / "merged")]) == 0
    assert main(["export", str(tmp_path / "two" / "checkpoints"), str(tmp_path / "adapter"), "--adapter"]) == 0
    check_exports(base, tmp_path / "merged", tmp_path / "adapter")
    capsys.readouterr()
    words = ["--prompt", "a", "--max-new-tokens", "4", "--temperature", "0"]
    assert main(["generate", str(RECIPE), *run("two"), *words, "--checkpoint", str(tmp_path / "two/checkpoints")]) == 0
    with_adapters = capsys.readouterr().out
    assert main(["import", str(tmp_path / "merged"), str(tmp_path / "tuned")]) == 0
    capsys.readouterr()
    tuned = [*words, "--checkpoint", str(tmp_path / "tuned" / "checkpoint")]
    assert main(["generate", str(tmp_path / "tuned" / "run.yaml"), *tuned]) == 0
    assert capsys.readouterr().out == with_adapters


def test_settings_that_exclude_adapters_are_errors(base: Path, tmp_path: Path) -> None:
    cases = {
        "model.lora.rank=0": "model.lora: rank",
        "model.lora=8": "got 8",
        "parallel.pipeline={schedule: pipedream, microbatches: 2}": "parallel.pipeline.schedule: pipedream",
        "parallel.offload={optimizer: disk, path: moments}": "parallel.offload.path",
    }
    for change, name in cases.items():
        with raises(ConfigError, name):
            make_job(load_run(RECIPE, [*settings(base, tmp_path), change]))
    job = job_of(base, tmp_path, **{"model.lora.targets": "[attention/quary]"})
    with raises(ConfigError, "attention/quary", "blocks/attention/v"):
        jp.abstract_state(job.layout(8), job.make_model, job.tx)


def test_options_of_an_export_that_need_adapters_are_errors(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = str(base / "out" / "checkpoint")
    for option in (["--adapter"], ["--base", "x"]):
        assert main(["export", checkpoint, str(base / "no"), *option]) == 2
        text = f"export: {option[0]} is for adapters, but {checkpoint} has none. Remedy: leave it out."
        assert text in capsys.readouterr().err


def test_adapters_of_other_weights_are_an_error() -> None:
    check_digest({}, {DIGEST: "a" * 12}, "run/4", None)
    check_digest({DIGEST: "a" * 12}, {DIGEST: "a" * 12}, "run/4", None)
    for weights, named in (("base", "base"), (None, "this run")):
        with raises(CheckpointError, "run/4", named):
            check_digest({DIGEST: "a" * 12}, {DIGEST: "b" * 12}, "run/4", weights)


PLACES = {
    "stages": {
        "layout": RECIPE.parents[1] / "layouts" / "pp_tp.yaml",
        "parallel.pipeline": "{schedule: 1f1b, microbatches: 2}",
        "parallel.optimizer": "{stage: 1}",
    },
    "host": {"parallel.offload": "{parameters: host, optimizer: host, min_bytes: 0}"},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:offload. simulated CPU devices use host memory:UserWarning")
def test_a_run_in_stages_and_one_with_weights_on_the_host_train_the_same_adapters(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = dataclasses.replace(CONFIG, layers=2)
    weights = drawn(jp.abstract_state(spread(two), make_decoder(two), optax.identity()), seed=7, scale=0.2).params
    jp.save(tmp_path / "weights", {"params": weights}, layout=spread(two))
    shared = {"model.layers": 2, "train.init_from": tmp_path / "weights", "optimizer.learning_rate": 1e-3}
    found = {}
    for name, own in {"plain": {}, **PLACES}.items():
        run = settings(base, tmp_path / name, **shared, **own)
        assert main(["train", str(RECIPE), *(word for one in run for word in ("--set", one))]) == 0
        merged = tmp_path / f"{name}-merged"
        assert main(["export", str(tmp_path / name / "checkpoints"), str(merged)]) == 0
        saved = {path.name for path in (tmp_path / name / "checkpoints" / "4" / "arrays").iterdir()}
        assert "params.blocks.mlp.up.lora_a" in saved and not any("frozen" in one for one in saved)
        found[name] = tensors(merged)
    capsys.readouterr()
    for name in PLACES:
        for key, w in found["plain"].items():
            np.testing.assert_allclose(found[name][key], w, rtol=0, atol=2e-5)
