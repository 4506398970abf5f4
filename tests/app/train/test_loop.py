"""Tests ``jaxpar train`` end to end on a small model: files, numbers, Ctrl-C, and errors."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import small_model
import yaml

import jaxpar as jp
from jaxpar.app.cli import main
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.app.launch.exit_codes import ExitCode
from jaxpar.app.train.metrics import MetricsWriter, peak_flops
from jaxpar.app.train.programs import step_of
from jaxpar.checkpoint.verify import steps_in
from jaxpar.parallel.experts.balance import load_balance_loss
from jaxpar.parallel.experts.metrics import routing_metrics
from jaxpar.parallel.experts.routing import Router

LAYOUTS = Path(__file__).parents[3] / "configs" / "layouts"
RUN = {
    "model": {"family": "llama", "preset": "tiny", "layers": 1, "embed": 32, "heads": 2, "head_dim": 16, "mlp": 48},
    "layout": str(LAYOUTS / "fsdp_tp.yaml"),
    "cpu_devices": 8,
    "data": {"source": "synthetic", "batch": 16, "seq": 32},
    "optimizer": {"learning_rate": 1e-2, "warmup": 2},
    "train": {"steps": 12, "eval_every": 5, "eval_batches": 2},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration of a short run that writes below ``tmp_path / "out"``."""
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**RUN, "output": str(tmp_path / "out")}))
    return file


def records(config: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (config.parent / "out" / "metrics.jsonl").read_text().splitlines()]


BIGRAMS = ["--set=model={factory: small_model:make_words, loss: small_model:bigrams}", "--set=optimizer.name=adam"]
BIGRAMS += ["--set=optimizer.learning_rate=0.3"]


@pytest.mark.parametrize("model", ["bigrams", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_run_learns_writes_its_metrics_and_draws_its_curve(
    model: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), *(BIGRAMS if model == "bigrams" else ())]) == 0
    screen, lines = capsys.readouterr().out, records(config)
    steps = [line for line in lines if "loss" in line]
    evals = [(line["step"], line["heldout_loss"]) for line in lines if "heldout_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [step for step, _ in evals] == [0, 5, 10, 12]
    assert steps[-1]["loss"] < steps[0]["loss"] - 1 and evals[-1][1] < evals[0][1] - 1
    assert all(math.isfinite(line["grad_norm"]) and line["tokens_per_second"] > 0 for line in steps)
    assert "mesh: data 4 × model 2 = 8 devices" in screen and "step 12/12" in screen and "ETA" in screen
    assert f"held-out loss     {evals[-1][1]:.4f}" in screen and "held-out bigrams  2.2230" in screen
    out = config.parent / "out"
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG") and list((out / "tensorboard").glob("events.*"))


WRONG = "exit 2: the configuration or the command line is wrong\n"


@pytest.mark.slow
def test_ctrl_c_ends_the_run_after_its_step_with_everything_written(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = MetricsWriter.write

    def interrupt_at_three(self: MetricsWriter, step: int, **values: float) -> None:
        write(self, step, **values)
        if step == 3 and "loss" in values:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(MetricsWriter, "write", interrupt_at_three)
    before = signal.getsignal(signal.SIGINT)
    assert main(["train", str(config), "--set", "checkpoint.keep=2"]) == ExitCode.INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is before and steps_in(config.parent / "out/checkpoints") == [3]
    assert max(line["step"] for line in records(config)) == 3 and "heldout_loss" in records(config)[-2]
    screen = capsys.readouterr().out
    assert "stopped by Ctrl-C" in screen and screen.endswith("\nexit 130: stopped by Ctrl-C, and saved\n")
    assert (config.parent / "out" / "loss.png").is_file()


@pytest.mark.slow
def test_a_run_that_diverges_skips_says_where_and_stops(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_model.use(monkeypatch)
    settings = ["optimizer.learning_rate=1e38", "optimizer.warmup=0", "train.max_consecutive_nonfinite=2"]
    assert main(["train", str(config), *(f"--set={setting}" for setting in settings)]) == ExitCode.GAVE_UP
    captured = capsys.readouterr()
    skipped = [line for line in captured.out.splitlines() if "skipped" in line]
    assert len(skipped) == 2
    assert skipped[0] == (
        "step 2 skipped: not finite, first in the gradient of words; every activation and the loss are finite"
    )
    assert "2 steps in a row, up to step 3, were not finite, first in" in captured.err
    assert (
        "Remedy: a smaller optimizer.learning_rate, or a clip_norm; train.max_consecutive_nonfinite=2 allows more"
        in captured.err
    )


@pytest.mark.slow
def test_the_same_run_twice_is_the_same_run(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_model.use(monkeypatch)
    losses = []
    for _ in range(2):
        assert main(["train", str(config), "--set", "train.steps=3"]) == 0
        losses.append([line["loss"] for line in records(config) if "loss" in line])
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_metrics_of_the_loss_are_recorded_and_shown(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small_model.loss

    def routed(model: Any, batch: Any) -> Any:
        routing = Router(experts=8, k=2)(10 * small_model.up(model, jax.nn.one_hot(batch["tokens"] % 8, 8)))
        metrics = {**routing_metrics(routing, dropped=0.125), "elapsed": 7.0, "weight": 2.0}
        return plain(model, batch) + load_balance_loss(routing) / 100, metrics

    monkeypatch.setattr(small_model, "loss", routed)
    small_model.use(monkeypatch)
    assert main(["train", str(config), "--set", "train.steps=2"]) == 0
    screen, steps = capsys.readouterr().out, [line for line in records(config) if "loss" in line]
    assert len(steps) == 2
    for line in steps:
        assert 1 <= line["expert_load_max"] <= 4 and 0 < line["router_entropy"] < math.log(8)
        assert line["router_nonfinite"] == 0 and line["dropped_fraction"] == 0.125
        assert line["loss/elapsed"] == 7 and line["elapsed"] != 7 and "weight" not in line
        assert f"  expert_load_max {line['expert_load_max']:.4g}  router_entropy {line['router_entropy']:.4g}" in screen


def test_the_loop_steps_with_the_moments_on_disk_and_verify_refuses(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moments = config.parent / "moments"
    setting = f"parallel.offload={{optimizer: disk, path: {moments}, min_bytes: 0}}"
    job = make_job(load_run(config, [setting]))
    # The model of the configuration would take half a minute to compile.
    small = lambda key: {"w": jp.tag(jax.random.normal(key, (16, 8)), "embed", "mlp")}
    job = replace(job, make_model=small, loss_fn=lambda model, x: ((x @ model["w"]) ** 2).mean())
    layout, x = job.layout(), jp.shard_array(job.layout(), np.ones((8, 16), np.float32), "batch", "embed")
    state = jp.init(layout, job.make_model, job.tx)
    with step_of(job, layout, state, x) as step:
        state, metrics = step(state, x)
    assert int(state.step) == 1 and metrics.keys() == {"loss", "grad_norm", "skipped"}
    assert {file.name for file in (moments / "process0").iterdir()} == {"lock", "record.json"} | {
        f"{number:04}.opt_state.0.{moment}.w.{generation}"
        for number, moment in enumerate(("mu", "nu"))
        for generation in ("a", "b")
    }
    assert main(["verify", str(config), "--set", setting]) == ExitCode.CONFIGURATION
    assert capsys.readouterr().err == (
        "ConfigError: verify: the optimizer state is on disk, but verify runs the step in two layouts at the same "
        "time. Remedy: --set parallel.offload.optimizer=null --set parallel.offload.path=null; the results are the "
        "same.\n"
    )


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (
            "model.vocab=100",
            (
                "ConfigError: model: vocab must be at least 256, the number of tokens of the text, got "
                "100. Remedy: model: {vocab: 256}."
            ),
        ),
        (
            "optimizer.name=adamww",
            "ConfigError: optimizer: unknown name 'adamww'. Did you mean 'adamw'? Supported optimizers (any optax",
        ),
        (
            "optimizer.options.weight_decy=0.1",
            (
                "ConfigError: optimizer: adamw has no option 'weight_decy'. Did you mean 'weight_decay'? Options: "
                "b1, b2, eps, "
            ),
        ),
        (
            "model.family=lama",
            (
                "ConfigError: model: unknown family 'lama'. Did you mean 'llama'? Families: llama, mixtral, qwen3_moe, "
                "deepseek_v3. Remedy: for a model of your own, model: {factory: my_module:make_model, loss: "
                "my_module:loss}."
            ),
        ),
        ("model.preset=8b", "ConfigError: llama: unknown preset '8b'. Presets: tiny, 1b, llama3_1_8b, llama3_1_70b."),
        ("model.embd=8", "ConfigError: model: unknown key 'embd'. Did you mean 'embed'? The keys are: vocab, embed, "),
        (
            "model.kv_heads=3",
            "ConfigError: llama: heads=2 is not a multiple of kv_heads=3, so query heads cannot share key/value heads",
        ),
        (
            "model.head_dim=5",
            (
                "ConfigError: llama: head_dim must be even, because rotary embeddings rotate pairs of numbers, got 5. "
                "Remedy: an even head_dim."
            ),
        ),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(
    config: Path, setting: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), "--set", setting]) == ExitCode.CONFIGURATION
    said = capsys.readouterr().err
    assert said.startswith(text) and said.endswith(f"\n{WRONG}")


def test_a_size_below_one_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config), "--set", "train.steps=0"]) == ExitCode.CONFIGURATION
    assert capsys.readouterr().err == (
        f"ConfigError: {config}: train: steps must be from 1 to 2,147,483,647, got 0. Remedy: use a number in this "
        f"range, or leave the key out.\n{WRONG}"
    )


def test_a_non_finite_value_keeps_the_metrics_file_json(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, loss=math.nan)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": "nan"}


def test_the_longest_matching_device_name_gives_the_peak() -> None:
    assert peak_flops("TPU v5 lite") == 197e12 and peak_flops("TPU v5") == 459e12 and peak_flops("cpu") is None
