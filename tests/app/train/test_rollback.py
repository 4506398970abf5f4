"""A run that rolls back equals a run that never saw the skipped batches; SIGTERM ends a run after its step."""

from __future__ import annotations

import functools
import io
import json
import shutil
import signal
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import yaml
from error_texts import raises
from rich.console import Console

import jaxpar as jp
from jaxpar.app.config import load_run
from jaxpar.app.job import Job, make_job
from jaxpar.app.train import loop, run_data
from jaxpar.app.train.metrics import MetricsWriter
from jaxpar.app.train.programs import StepPrograms
from jaxpar.checkpoint.verify import check, steps_in
from jaxpar.errors import DivergedError

LAYOUTS = Path(__file__).parents[3] / "configs" / "layouts"
RUN: dict[str, Any] = {
    "model": {"family": "llama", "preset": "tiny", "layers": 2, "embed": 16, "heads": 2, "head_dim": 8, "mlp": 24},
    "layout": str(LAYOUTS / "fsdp_tp.yaml"),
    "data": {"source": "synthetic", "batch": 8, "seq": 16},
    "optimizer": {"learning_rate": 1e-2, "warmup": 0},
    "train": {"steps": 10, "eval_every": 5, "eval_batches": 1, "max_consecutive_nonfinite": 2},
    "checkpoint": {"save_interval_steps": 2},
}


class Kept(StepPrograms):
    """Programs that compile only once, because most tests run the same job twice."""

    def compile(self, *arguments: Any) -> None:
        if not hasattr(self, "step"):
            super().compile(*arguments)


REAL = run_data._stream


class Stream:
    """A run's batches, numbered from 1: batches in ``bad`` are marked, and batches in ``dropped`` never come."""

    def __init__(self, bad: Collection[int], dropped: Collection[int], *arguments: Any, **options: Any):
        fresh = REAL(*arguments, **options)
        self._numbers = {next(fresh)["tokens"].tobytes(): number for number in range(1, 30)}
        fresh.close()
        assert len(self._numbers) == 29
        self._inner, self._bad, self._dropped = REAL(*arguments, **options), bad, dropped

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._inner)
        number = self._numbers[batch["tokens"].tobytes()]
        if number in self._dropped:
            return next(self)
        return {**batch, "tokens": -batch["tokens"] - 1} if number in self._bad else batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def marked(batch: Any, bad: float) -> jax.Array:
    """Returns the factor of the loss."""
    return jnp.where(jnp.any(batch["tokens"] < 0), bad, 1.0)


def inputs(batch: Any) -> jax.Array:
    return jnp.abs(batch["tokens"]).astype(jnp.float32) / 128 - 1


def plain(job: Job, bad: float) -> Job:
    """Returns the job with a model of one matrix."""
    make = lambda key: {"w": jp.tag(jax.random.normal(key, (16, 8)), "embed", "mlp")}
    loss = lambda model, batch: jnp.mean((inputs(batch) @ model["w"] - 1) ** 2) * marked(batch, bad)
    return replace(job, make_model=make, loss_fn=loss)


def nan(job: Job) -> Job:
    return plain(job, jnp.nan)


def spiky(job: Job) -> Job:
    return plain(job, 50.0)


def staged(name: Any, job: Job) -> Job:
    """Returns the job with a model of two matrices and an asynchronous pipeline of two stages."""
    make = lambda key: {"blocks": jp.tag(jax.random.normal(key, (2, 16, 16)) / 4, "layers", "embed", "embed_out")}
    loss = jp.pipeline.PipelineLoss(
        "blocks",
        lambda model, batch: inputs(batch),
        lambda block, x, side: jnp.tanh(x @ block),
        lambda model, x, batch: jnp.mean((x - 0.5) ** 2) * marked(batch, jnp.nan),
    )
    rules = {"layers": "pipeline", "batch": "data", "seq": None, "embed": None, "embed_out": None}
    pipeline = jp.pipeline.Asynchronous(name, stages=2, microbatches=2)
    return replace(
        job,
        make_model=make,
        loss_fn=loss,
        pipeline=pipeline,
        layout_data={"mesh": {"pipeline": 2, "data": -1}, "rules": rules},
    )


STAGED = {name: functools.partial(staged, name) for name in ("pipedream_2bw", "pipedream")}


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a job with some bad and some dropped batches; returns the folder, the printed text and the summary."""
    jobs: dict[Any, Job] = {}
    engines: dict[Any, StepPrograms] = {}

    def run(
        name: str, make: Any, *settings: str, bad: Collection[int] = (), dropped: Collection[int] = ()
    ) -> tuple[Path, str, Any]:
        file, screen, key = tmp_path / "run.yaml", io.StringIO(), (make, settings)
        if key not in jobs:
            file.write_text(yaml.safe_dump(RUN))
            jobs[key] = make(make_job(load_run(file, settings)))
        job = replace(jobs[key], config=replace(jobs[key].config, output=str(tmp_path / name)))
        monkeypatch.setattr(run_data, "_stream", lambda *a, **o: Stream(bad, dropped, *a, **o))
        if not any("disk" in setting for setting in settings):
            monkeypatch.setattr(loop, "StepPrograms", lambda job, layout: engines.setdefault(key, Kept(job, layout)))
        summary = loop.train(job, Console(file=screen, width=300, highlight=False))
        return tmp_path / name, screen.getvalue(), summary

    return run


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def state(folder: Path, step: int) -> Any:
    """Returns the checksums of all values of a step, and its position in the data."""
    found = check(folder / "checkpoints" / str(step))
    return {path: (t.dtype, t.shape, t.sums) for path, t in found.tensors.items()}, found.metadata["position"]


def test_after_steps_that_were_not_finite_a_run_is_one_that_never_saw_the_batches(ran: Any) -> None:
    folder, screen, summary = ran("bad", nan, bad={6, 7})
    never, _, expected = ran("never", nan, dropped={5, 6, 7})
    assert summary.losses == expected.losses and len(summary.losses) == 10 and summary.evals == expected.evals
    assert steps_in(folder / "checkpoints") == steps_in(never / "checkpoints") == [6, 8, 10]
    for step in (6, 8, 10):
        assert state(folder, step) == state(never, step)
    what = "2 steps in a row, up to step 7, were not finite, first in the loss; the parameters are finite."
    assert f"rolled back from step 7 to 4: {what} Batches 5 to 7 are skipped." in screen
    assert "rollbacks         1; batches 5 to 7 were skipped" in screen
    (told,) = [record for record in records(folder) if "rollback_to" in record]
    assert told.pop("lost_seconds") > 0
    assert told == {"step": 7, "rollback_to": 4, "passed": [5, 7], "why": what}
    account = summary.goodput
    assert sum(account["spent"].values()) == pytest.approx(account["wall_seconds"], abs=1e-4)
    assert account["spent"]["lost"] > 0 and account["spent"]["restore"] > 0 and "goodput  " in screen


@pytest.mark.slow
def test_a_spike_under_a_loss_scale_is_undone_and_a_resume_is_the_same(ran: Any, tmp_path: Path) -> None:
    settings = (
        "train.spike={factor: 3, window: 3, patience: 1}",
        "precision={compute: bfloat16, scale: {initial: 1024, interval: 3}}",
    )
    folder, screen, summary = ran("spike", spiky, *settings, bad={6, 11})
    never, _, expected = ran("never", spiky, *settings, dropped={5, 6, 11})
    # Step 6 is due for a checkpoint, but it is bad. Batch 11 comes in step 9, right after the checkpoint of step 8.
    assert "step 6 is a spike: its loss is " in screen and "Batches 5 to 6 are skipped." in screen
    assert "step 9 is a spike: its loss is " in screen and "Batches 11 to 11 are skipped." in screen
    assert summary.rollbacks == 2 and summary.passed == [[5, 6], [11, 11]] and summary.losses == expected.losses
    assert state(folder, 10) == state(never, 10) and "loss_scale/scale" in state(folder, 10)[0]
    # The checkpoint after the rollback stores what was skipped, so a run that resumes from an older one skips it too.
    assert check(folder / "checkpoints/8").metadata["passed"] == [[5, 6], [11, 11]]
    for step in (8, 10):
        shutil.move(folder / f"checkpoints/{step}", tmp_path / f"{step}")
    _, screen, again = ran("spike", spiky, *settings, bad={6, 11})
    assert "resumed from step 6" in screen and again.rollbacks == 2 and again.passed == [[5, 6], [11, 11]]
    assert state(folder, 10) == state(never, 10) and again.losses == expected.losses
    assert check(folder / "checkpoints/10").metadata["rollbacks"] == 2
    spent = again.goodput["spent"]  # of both starts
    assert spent["compile"] > summary.goodput["spent"]["compile"] and spent["lost"] > summary.goodput["spent"]["lost"]
    assert again.goodput["began"] == summary.goodput["began"] and spent["restart"] > 0
    assert sum(spent.values()) == pytest.approx(again.goodput["wall_seconds"], abs=1e-4)


@pytest.mark.slow
def test_the_optimizer_on_disk_goes_back_too(ran: Any, tmp_path: Path) -> None:
    def run(name: str, **batches: set[int]) -> Any:
        disk = f"parallel.offload={{optimizer: disk, path: {tmp_path / name / 'moments'}, min_bytes: 0}}"
        folder, _, summary = ran(name, nan, disk, "train.max_consecutive_nonfinite=1", **batches)
        found = check(folder / "checkpoints/10")
        moments = {name: crc for name, (_, crc) in found.files.items() if name.startswith("disk/") and ".opt" in name}
        return summary.losses, state(folder, 10), sorted(moments.values())

    found, expected = run("bad", bad={6}), run("never", dropped={5, 6})
    assert found == expected and len(found[2]) == 2


# Under 2BW, the optimizer applies the gradients of batch 6 in step 7, so a checkpoint of step 6 has them in flight.
# Under PipeDream, the last stage updates with the first of its microbatches in step 6.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "seen"), [("pipedream", 6), ("pipedream_2bw", 7)])
def test_a_pipeline_that_is_not_emptied_goes_back_with_all_that_is_on_its_way(ran: Any, name: str, seen: int) -> None:
    settings = ("optimizer.clip_norm=null", "train.max_consecutive_nonfinite=1", "cpu_devices=8")
    folder, screen, summary = ran("bad", STAGED[name], *settings, bad={6})
    never, _, expected = ran("never", STAGED[name], *settings, dropped=range(5, seen + 1))
    assert f"rolled back from step {seen} to 4: step {seen} was not finite" in screen and summary.passed == [[5, seen]]
    assert summary.losses == expected.losses and state(folder, 10) == state(never, 10)
    on_its_way = {path for path in state(folder, 10)[0] if path.startswith("flight/")}
    assert any(
        path.startswith(f"flight/{'previous' if name == 'pipedream_2bw' else 'versions'}") for path in on_its_way
    )


@pytest.mark.slow
def test_a_run_that_went_back_too_often_or_has_nowhere_to_go_says_so(ran: Any, tmp_path: Path) -> None:
    with raises(DivergedError, "step 5", "train.max_rollbacks=1"):
        ran("often", nan, "train.max_consecutive_nonfinite=1", "train.max_rollbacks=1", bad={6, 7})
    with raises(DivergedError, "before step 1"):
        ran("early", nan, "train.max_consecutive_nonfinite=1", bad={1})
    assert steps_in(tmp_path / "early/checkpoints") == []


def test_sigterm_ends_a_run_after_its_step_and_says_that_nothing_is_saved(
    ran: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = MetricsWriter.write

    def terminate_at_three(self: MetricsWriter, step: int, **values: float) -> None:
        write(self, step, **values)
        if step == 3 and "loss" in values:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(MetricsWriter, "write", terminate_at_three)
    before = signal.getsignal(signal.SIGTERM)
    folder, screen, summary = ran("stopped", nan, "checkpoint=null")
    assert summary.steps == 3 and summary.signal == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is before
    assert (
        "stopped by SIGTERM\nnothing was saved, because the configuration has no checkpoint: key\nsteps             "
        "3 in"
    ) in screen
    # SIGTERM skips the final evaluation and the curve.
    assert [step for step, _ in summary.evals] == [0] and not (folder / "loss.png").exists()
    assert not (folder / "checkpoints").exists()


def test_a_manager_goes_back_before_a_step_and_takes_the_clock_of_the_first_process(tmp_path: Path) -> None:
    like = {"w": jax.ShapeDtypeStruct((4,), "float32")}
    with jp.CheckpointManager(tmp_path, save_interval_minutes=10, asynchronous=False) as manager:
        for step in (1, 2, 3):
            assert manager.save(step, {"w": jnp.full(4, step, jnp.float32)})
        found = manager.restore_latest(like, before=3)
        assert found is not None and found.step == 2 and found.state["w"].tolist() == [2] * 4
        manager.forget(2)
        assert manager.steps() == [1, 2] and manager.saved is None and manager.restore_latest(like, before=1) is None
        assert not manager.overdue and not manager.due(4) and manager.due(4, overdue=True)
        manager._last -= 601
        assert manager.overdue and manager.due(4) and not manager.due(4, overdue=False)
