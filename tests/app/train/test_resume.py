"""A run that stops and resumes ends byte for byte as an uninterrupted one; errors name what prevents a resume."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import re
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import yaml
from error_texts import raises
from profiles import few
from rich.console import Console

import jaxpar as jp
from jaxpar.app.cli import main
from jaxpar.app.config import load_run
from jaxpar.app.job import Job, make_job
from jaxpar.app.launch.exit_codes import ExitCode
from jaxpar.app.train.checkpointing import Saver, config_changes, config_values, for_this_process
from jaxpar.app.train.loop import train
from jaxpar.app.train.programs import StepPrograms
from jaxpar.checkpoint import manager
from jaxpar.checkpoint.manifest import read
from jaxpar.checkpoint.manifest import write as write_manifest
from jaxpar.checkpoint.save import begin
from jaxpar.checkpoint.verify import check, steps_in
from jaxpar.data import batches
from jaxpar.errors import CheckpointError, ConfigError, DataError

LAYOUTS = Path(__file__).parents[3] / "configs" / "layouts"
RUN: dict[str, Any] = {
    "model": {"factory": "small_model:make_words", "loss": "small_model:bigrams"},
    "layout": str(LAYOUTS / "fsdp_tp.yaml"),
    "cpu_devices": 8,
    "precision": {"compute": "bfloat16", "scale": {"initial": 65536, "interval": 2}},
    "data": {"source": "synthetic", "batch": 8, "seq": 16},
    "optimizer": {"learning_rate": 1e-2, "warmup": 2},
    "train": {"steps": 6, "eval_every": 4, "eval_batches": 1, "grad_accum_steps": 2},
    "checkpoint": {"save_interval_steps": 2, "best": {"metric": "heldout_loss", "keep": 2}},
}


def write(folder: Path, name: str, **changes: Any) -> Path:
    """Writes the configuration of a run that keeps its checkpoints below ``folder / name``."""
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**RUN, "output": str(folder / name), **changes}))
    return file


def sums(folder: Path, step: int) -> dict[str, Any]:
    """Returns the checksums of all values of a step, after a check of every byte."""
    return {
        path: (tensor.dtype, tensor.shape, tensor.sums) for path, tensor in check(folder / str(step)).tensors.items()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(["train", str(write(folder, "whole"))]) == 0
    assert steps_in(folder / "whole/checkpoints") == [2, 4, 6]
    return folder / "whole/checkpoints"


def job_of(file: Path, *changes: str) -> Job:
    return make_job(load_run(file, changes))


def saver(file: Path, *changes: str) -> Saver:
    """Returns the object through which a run saves and restores."""
    job = job_of(file, *changes)
    return Saver(job, job.layout(), Console(file=io.StringIO()))


def test_a_run_that_was_stopped_goes_on_byte_for_byte(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = write(tmp_path, "run"), tmp_path / "run/checkpoints"
    shutil.copytree(whole / "2", folder / "2")
    shutil.copytree(whole / "4", folder / "4")
    (folder / "4/manifest.json").unlink()  # as a kill leaves it
    lines = (whole.parent / "metrics.jsonl").read_text()
    (tmp_path / "run/metrics.jsonl").write_text(lines[: len(lines) * 4 // 5])
    assert main(["train", str(config)]) == 0
    screen = capsys.readouterr().out
    assert f"resumed from step 2 of {folder}" in screen and " was " not in screen
    assert f"checkpoints       2 in {folder}; longest pause " in screen
    assert sums(folder, 4) == sums(whole, 4) and sums(folder, 6) == sums(whole, 6)
    one, other = (check(at / "6").metadata for at in (folder, whole))
    assert (
        "loss_scale/scale" in sums(folder, 6)
        and one["position"] == other["position"]
        and one["config"] == other["config"]
    )
    records, never = (
        [json.loads(line) for line in (at.parent / "metrics.jsonl").read_text().splitlines()] for at in (folder, whole)
    )
    for name in ("loss", "heldout_loss"):
        assert [(r["step"], r[name]) for r in records if name in r] == [
            (r["step"], r[name]) for r in never if name in r
        ]


def test_a_rollback_deletes_the_steps_after_the_one_that_it_restores(whole: Path, tmp_path: Path) -> None:
    config, folder = write(tmp_path, "run"), tmp_path / "run/checkpoints"
    shutil.copytree(whole, folder)
    with saver(config) as checkpoints:
        restored = checkpoints.roll_back(None, 6)
        assert restored is not None and restored.step == 4 and steps_in(folder) == [2, 4]
        assert checkpoints.roll_back(None, 2) is None and steps_in(folder) == [2, 4]


def test_a_signal_in_the_compile_ends_the_run_at_once(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For two processes, see tests/app/test_preemption.py."""
    config, folder, over, screen = write(tmp_path, "run"), tmp_path / "run", threading.Event(), io.StringIO()
    shutil.copytree(whole, folder / "checkpoints")
    shutil.copy(whole.parent / "metrics.jsonl", folder)
    before = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(folder / "checkpoints/6")

    def compile_for_long(self: StepPrograms, *arguments: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        assert over.wait(60)

    monkeypatch.setattr(StepPrograms, "compile", compile_for_long)
    summary = train(job_of(config), Console(file=screen, width=300))
    over.set()
    assert (summary.left, summary.signal, summary.steps) == (True, signal.SIGTERM, 4)
    assert screen.getvalue().endswith(
        f"stopped by SIGTERM during the compile: step 4 is saved in {folder}/checkpoints\n"
    )
    assert steps_in(folder / "checkpoints") == [2, 4]
    after = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert after == [record for record in before if record["step"] <= 4]


@pytest.mark.slow
def test_a_run_whose_last_step_cannot_be_saved_fails_and_can_be_resumed(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, kept = write(tmp_path, "run"), tmp_path / "run/checkpoints"
    shutil.copytree(whole, kept)
    shutil.rmtree(kept / "6")
    failures: list[int] = []

    def fail(folder: Path, *_: Any, step: int, **__: Any) -> Any:
        if failures:
            raise OSError(errno.ENOSPC, f"{folder}: no space, for {failures.pop()} more saves")
        return begin(folder, *_, step=step, **__)

    monkeypatch.setattr(manager, "begin", fail)
    (tmp_path / "run/metrics.jsonl").write_bytes(b'{"step": 1, "loss": 5.5}\n\xff\n')
    failures += [0, 1]
    assert main(["train", str(file), "--set", "checkpoint.resume=auto"]) == ExitCode.NOT_SAVED
    screen = capsys.readouterr()
    assert f"{tmp_path}/run/metrics.jsonl: 1 of its 2 lines are damaged, and the others are kept." in screen.out
    assert "done, but the last step is not saved" in screen.out and screen.out.count("of step 6 not saved") == 2
    assert screen.err == (
        f"UnsavedError: checkpoint: step 6, the last of this run, could not be saved in {kept}; the newest saved "
        "step is 4, so 2 steps are missing. Remedy: correct the cause above, then start the run again with "
        "checkpoint: {resume: auto}.\n"
        "exit 74: ended, and its last steps are not saved\n"
    )
    failures += [0]
    assert main(["train", str(file), "--set", "checkpoint.resume=auto"]) == 0
    assert capsys.readouterr().out.count("of step 6 not saved") == 1 and sums(kept, 6) == sums(whole, 6)


def test_a_step_keeps_the_metric_that_the_best_are_known_by(whole: Path, tmp_path: Path) -> None:
    """tests/checkpoint/test_checkpoint_manager.py tests which steps the folder keeps."""
    lines = [json.loads(line) for line in (whole.parent / "metrics.jsonl").read_text().splitlines()]
    known = {line["step"]: line["heldout_loss"] for line in lines if "heldout_loss" in line}
    assert [check(whole / str(step)).metadata.get("metric") for step in (2, 4, 6)] == [None, known[4], known[6]]
    config = write(tmp_path, "run")
    for change, name in (
        ("checkpoint.save_interval_steps=5", "heldout_loss"),
        ("checkpoint.best.keep=0", "checkpoint: best: keep"),
    ):
        with raises(ConfigError, name):
            saver(config, change)
    with raises(ConfigError, "heldout_loss", "accuracy"):
        saver(config, "checkpoint.best.metric=accuracy")
    with saver(
        config,
        "checkpoint.save_interval_steps=null",
        "checkpoint.save_interval_minutes=1",
        "checkpoint.best.metric=loss",
    ):
        pass


def test_another_layout_gets_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    file, tp = write(tmp_path, "other"), f"layout={LAYOUTS / 'tp.yaml'}"
    job = job_of(file, tp, "mesh.model=2")
    likes = [
        jp.abstract_state(job.layout(d), job.make_model, job.tx, job.precision)
        for d in (jax.devices(), jax.devices()[:2])
    ]
    first = jp.restore(whole / "4", likes[0])
    jp.save(tmp_path / "again", first)
    second = jp.restore(tmp_path / "again", likes[1])
    assert first.loss_scale["scale"].dtype == "float32" and int(second.step) == 4
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second), strict=True):
        one, two = ((jax.random.key_data(x) if path[0].name == "key" else x) for x in (a, b))
        assert jax.device_get(one).tobytes() == jax.device_get(two).tobytes(), path


def test_what_keeps_a_run_from_going_on_is_said(whole: Path, tmp_path: Path) -> None:
    file, copy = write(tmp_path, "run"), tmp_path / "copy"
    shutil.copytree(whole, copy)
    at = f"checkpoint.directory={copy}"

    def refused(kind: type[Exception], *changes: str, name: str) -> None:
        with raises(kind, name), saver(file, *changes) as one:
            one.restore()

    refused(CheckpointError, "checkpoint.resume=required", name="checkpoint: resume")
    refused(ConfigError, at, "checkpoint.resume=never", name="checkpoint: resume")
    refused(CheckpointError, at, "train.steps=5", name="train.steps")
    refused(ConfigError, "checkpoint.save_interval_minutes=1", name="checkpoint.save_interval_minutes=1")
    refused(ConfigError, "checkpoint.keep=0", name="keep")
    refused(CheckpointError, at, "model.args={width: 16}", name="params/words")
    with jp.CheckpointManager(copy):
        refused(CheckpointError, at, name=f"process {os.getpid()}")
    with saver(file, at, "train.steps=9") as one:
        found = one.restore()
        assert found is not None and found.step == 6 and one.disk(found) is None
        assert list(
            config_changes(found.manifest.metadata["config"], config_values(job_of(file, "train.steps=9")))
        ) == ["train.steps was 6, is now 9"]
    stream = batches(range(400), batch=8, seq=16, seed=1)
    position = for_this_process({**found.manifest.metadata["position"]}, stream)
    position["fingerprint"]["process_count"] = 4
    with raises(DataError, "content was", "400"):
        stream.set_state(for_this_process(position, stream))
    stream.close()


@pytest.mark.parametrize(
    ("key", "value", "status", "text"),
    few(
        [
            (
                "position",
                "x",
                ExitCode.CONFIGURATION,
                "DataError: MANIFEST: metadata: position: this is not a saved data",
            ),
            ("skipped", -1, ExitCode.FAILED, "DamagedError: MANIFEST: metadata: skipped must be an integer from 0 to"),
            (
                "data",
                {"held-out content": "x"},
                ExitCode.CONFIGURATION,
                "DataError: MANIFEST: metadata: data: this run has other data than the one that saved it: held-out",
            ),
        ],
        1,
        names=4,
    ),
    ids=["position", "skipped", "data"],
)
def test_a_forged_manifest_ends_a_run_before_its_first_step(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any, status: int, text: str
) -> None:
    config, folder = write(tmp_path, "run"), tmp_path / "run/checkpoints"
    shutil.copytree(whole / "4", folder / "4")
    true = read(folder / "4")
    write_manifest(folder / "4", dataclasses.replace(true, metadata={**true.metadata, key: value}))
    assert main(["train", str(config)]) == status
    assert text.replace("MANIFEST", f"{folder}/4/manifest.json") in capsys.readouterr().err
    assert steps_in(folder) == [4] and read(folder / "4").metadata[key] == value


def test_every_step_and_checkpoint_can_be_looked_at(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--checkpoint", str(whole)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["ok", "step"]] * 3 and lines[-1] == "3 checks: all ok"
    assert main(["verify-checkpoint", str(whole / "4")]) == 0
    assert re.fullmatch(
        rf"{whole}/4: step 4, \d+ tensors, [\d.]+ [KM]iB, all bytes match the manifest\n", capsys.readouterr().out
    )
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    file = copy / "4/arrays/key/0"
    file.write_bytes(file.read_bytes()[::-1])
    assert main(["doctor", "--checkpoint", str(copy)]) == 1
    assert f"{file}, which holds key, was changed after it was written" in capsys.readouterr().out
    assert main(["verify-checkpoint", str(copy / "4")]) == 1
    assert capsys.readouterr().err.startswith(f"DamagedError: {file}, which holds key, was changed")
    assert main(["verify-checkpoint", str(tmp_path)]) == ExitCode.CONFIGURATION
    assert "holds no complete checkpoint: manifest.json is missing." in capsys.readouterr().err


@pytest.mark.slow
def test_on_other_devices_a_run_sees_the_same_batches_and_loses_the_same(mlp: Any, tmp_path: Path) -> None:
    """Fifty steps after a checkpoint.

    ``benchmarks/checkpoint/elastic_resume.py`` tests a Llama in processes with that many devices.
    """

    def go(layout: jp.Layout, state: Any, stream: Any, steps: int) -> tuple[Any, list[float], list[bytes]]:
        step, losses, seen = jp.train_step(layout, mlp.loss), list[Any](), list[bytes]()
        for _ in range(steps):
            tokens = next(stream)["tokens"]
            state, metrics = step(
                state, jp.shard_array(layout, np.asarray(tokens, np.float32) / 64 - 1, "batch", "embed")
            )
            losses.append(metrics["loss"])
            seen.append(tokens.tobytes())
        return state, [float(loss) for loss in losses], seen

    def text() -> Any:
        return batches(np.random.default_rng(0).integers(0, 128, 5000), batch=24, seq=16, seed=3)

    tx, layout, stream = optax.adam(1e-2), mlp.layout(), text()
    state, _, _ = go(layout, jp.init(layout, mlp.make, tx), stream, 5)
    jp.save(tmp_path / "5", state, layout=layout, metadata={"position": stream.get_state()})
    _, losses, seen = go(layout, state, stream, 50)
    stream.close()
    assert len(set(seen)) == 50 and losses[-1] < losses[0] / 2
    rules = jp.Rules(batch="data", embed=None, mlp="model", params={"embed": "data"})
    mesh = jp.MeshSpec(data=2, model=2).build(jax.devices()[:4])
    other, again = mlp.layout(rules, mesh), text()
    again.set_state(read(tmp_path / "5").metadata["position"])
    found = jp.restore(tmp_path / "5", jp.abstract_state(other, mlp.make, tx))
    _, theirs, also = go(other, found, again, 50)
    again.close()
    assert also == seen
    np.testing.assert_allclose(theirs, losses, rtol=1e-5)
