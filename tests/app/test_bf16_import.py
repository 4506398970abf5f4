"""Fine-tuning from files in bf16: weights are trained in fp32, and a run whose updates round away says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import yaml
from error_texts import raises
from one_step import drawn

import jaxpar as jp
from jaxpar.app.cli import main
from jaxpar.app.config import load_run
from jaxpar.app.generate.generate import as_saved
from jaxpar.app.huggingface import spread
from jaxpar.app.job import make_job
from jaxpar.app.train.lost_updates import LostUpdates
from jaxpar.app.train.programs import StepPrograms
from jaxpar.errors import CheckpointError
from jaxpar.interop import huggingface
from jaxpar.models import make_decoder
from jaxpar.models.llama import LlamaConfig

CONFIG = LlamaConfig(
    vocab=256, embed=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, dtype="bfloat16", param_dtype="bfloat16"
)
STEPS = 30


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``jaxpar import`` makes of a Hugging Face checkpoint in bf16."""
    folder = tmp_path_factory.mktemp("imported")
    state = drawn(jp.abstract_state(spread(CONFIG), make_decoder(CONFIG), optax.identity()), scale=0.2)
    huggingface.export(folder / "source", state.params, CONFIG)
    assert main(["import", str(folder / "source"), str(folder / "out")]) == 0
    return folder / "out"


def trained(imported: Path, *settings: str) -> tuple[float, list[float]]:
    """The share of the weights that 30 steps changed, and the metric of each step."""
    overrides = ["data.source=synthetic", "optimizer.warmup=0", f"train.steps={STEPS}", *settings]
    job = make_job(load_run(imported / "run.yaml", overrides))
    layout = job.layout(jax.devices()[:1])
    with StepPrograms(job, layout) as programs:
        state = programs.first_state()
    before = [np.asarray(x, np.float32) for x in jax.tree.leaves(state.params)]
    tokens, shares = np.random.default_rng(0).integers(0, 256, (STEPS, 8, 33)).astype(np.int32), []
    batches = [{"tokens": rows[:, :-1], "targets": rows[:, 1:]} for rows in tokens]
    lowered = jp.train_step(layout, job.loss_fn, **job.step_options()).lower(state, batches[0])
    step = lowered.compile({"xla_backend_optimization_level": 0})
    for batch in batches:
        state, metrics = step(state, batch)
        shares += [float(metrics["weights_changed"])] if "weights_changed" in metrics else []
    after = [np.asarray(x, np.float32) for x in jax.tree.leaves(state.params)]
    changed = sum((a != b).sum() for a, b in zip(before, after, strict=True))
    return changed / sum(a.size for a in before), shares


def test_the_weights_of_an_import_are_trained_in_fp32(imported: Path) -> None:
    model = yaml.safe_load((imported / "run.yaml").read_text())["model"]
    assert (model["dtype"], model["param_dtype"]) == ("bfloat16", "float32")


@pytest.mark.slow
def test_thirty_steps_of_an_import_move_most_weights(imported: Path) -> None:
    share, metrics = trained(imported)
    assert share > 0.95 and metrics == []


@pytest.mark.slow  # tests/training/test_weight_changes.py has the metric
def test_weights_in_bf16_hardly_move_and_the_step_says_so(imported: Path) -> None:
    share, metrics = trained(imported, "model.param_dtype=bfloat16")
    assert share < 0.1
    assert len(metrics) == STEPS and max(metrics) < 0.1


def test_a_cast_on_loading_keeps_every_value(imported: Path) -> None:
    job = make_job(load_run(imported / "run.yaml"))
    params = StepPrograms(job, job.layout()).first_state().params
    stored = jp.abstract_state(spread(CONFIG), make_decoder(CONFIG), optax.identity()).params
    exact = jp.restore(imported / "checkpoint", {"params": stored}, only=["params"])["params"]
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(exact), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b, np.float32))


def test_weights_are_generated_from_as_they_are_saved(imported: Path, tmp_path: Path) -> None:
    job = make_job(load_run(imported / "run.yaml"), training=False)
    held = as_saved(job, imported / "checkpoint")
    assert (job.llama.param_dtype, held.llama.param_dtype) == ("float32", "bfloat16")
    wide = {"w": jax.numpy.ones(3)}
    jp.save(tmp_path / "fp32", {"params": wide})
    assert as_saved(job, tmp_path / "fp32") is job and as_saved(job, None) is job


def test_a_cast_that_loses_bits_is_named_and_one_that_overflows_refused(tmp_path: Path) -> None:
    values = {"third": np.float32([1 / 3, 2]), "two": np.float32([1, 2]), "large": np.float32([1e9])}
    jp.save(tmp_path / "one", jax.tree.map(jax.numpy.asarray, values))
    like = lambda dtype, names: {name: jax.ShapeDtypeStruct(values[name].shape, dtype) for name in names}
    with raises(CheckpointError, "large"):
        jp.restore(tmp_path / "one", like("bfloat16", values))
    with pytest.warns(UserWarning) as caught:
        restored = jp.restore(tmp_path / "one", like("bfloat16", values), cast=True)
    assert [x.dtype.name for x in jax.tree.leaves(restored)] == ["bfloat16"] * 3
    assert restored["two"].tolist() == [1, 2]
    assert [str(one.message) for one in caught] == [
        (
            f"{tmp_path / 'one'}: casts lose bits of values:\n"
            "- rounded: large, from float32 to bfloat16\n"
            "- rounded: third, from float32 to bfloat16\n"
            "Remedy: a wider dtype in the state (in a run, model.param_dtype: float32), if the lost bits matter."
        )
    ]
    with raises(CheckpointError, "/one", "1e+09"):
        jp.restore(tmp_path / "one", like("float16", values), cast=True)
    integers: Any = {**like("bfloat16", ["third", "two"]), "large": jax.ShapeDtypeStruct((1,), "int32")}
    with raises(CheckpointError, "large"):
        jp.restore(tmp_path / "one", integers, cast=True)


def test_a_run_is_judged_once_at_its_full_learning_rate(imported: Path) -> None:
    settings = ["model.param_dtype=bfloat16", "optimizer.warmup=3"]
    job, told = make_job(load_run(imported / "run.yaml", settings)), list[str]()

    def run(shares: list[float], skipped: int = 0) -> list[str]:
        told.clear()
        watch = LostUpdates(job, told.append)
        for number, share in enumerate(shares, 1):
            watch.see(number, share, skipped=number == skipped)
        watch.end()
        return [text[: text.index(".")] for text in told]

    start = "[bold]updates round away[/]: a step changed at most 10"
    assert run([0, 0, 0, *[0.1] * 20]) == [start]
    assert run([0, 0, 0, 0.1]) == [start]
    assert run([0, 0, 0, 0.1, 0.9, 0, 0, 0, 0, 0, 0, 0, 0]) == []
    assert run([0, 0, 0, 0.0, 0.9], skipped=4) == []
    assert run([0, 0, 0]) == []


@pytest.mark.slow
def test_a_run_whose_updates_round_away_says_so_once(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["data.source=synthetic", "train.steps=8", "optimizer.warmup=1", f"output={tmp_path}"]
    run = ["train", str(imported / "run.yaml"), *(word for one in settings for word in ("--set", one))]
    assert main([*run, "--set", "model.param_dtype=bfloat16"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("updates round away: a step changed at most ") == 1
    assert (
        "of the weights in bfloat16, in 5 steps at the full learning rate. An update below half of the spacing of "
        "bfloat16 changes nothing. Remedy: model.param_dtype: float32, with model.dtype: bfloat16 for the compute; "
        "train.init_from casts the weights of a checkpoint."
    ) in out
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    shares = [record["weights_changed"] for record in records if "weights_changed" in record]
    assert len(shares) == 8 and max(shares) < 0.25
