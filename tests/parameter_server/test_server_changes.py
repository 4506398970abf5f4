"""Members that join and leave at a known step, evaluation, steps that are skipped or clipped, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from server_cases import (
    CLASSES,
    FEATURES,
    batches,
    cross_entropy,
    nnx_program,
    one_device,
    one_process,
    run,
    same,
    table_program,
)

import jaxpar as jp
from jaxpar.errors import ConfigError, DataError, JaxparError, LaunchError, ModelError
from jaxpar.parameter_server import ServerConfig, ServerRun, TrainingProgram
from jaxpar.parameter_server.client import ServerClient
from jaxpar.parameter_server.controller import Controller
from jaxpar.parameter_server.membership import Membership, WorkerSpan
from jaxpar.parameter_server.pieces import ParamSpec, SparseTable, cut
from jaxpar.parameter_server.service import Coordinator
from jaxpar.parameter_server.transport import ThreadTransport
from jaxpar.parameter_server.worker import look_up

DENSE = table_program(12, 12, sparse=False)
OTHER: Any = "slurm"
STEPS = 6


class _Gate:
    """Stops two workers before step 3 until it is opened."""

    def __init__(self) -> None:
        self._arrived, self._opened = threading.Barrier(3), threading.Event()

    def batches(self, worker: int, workers: int) -> Callable[[int], Any]:
        read = DENSE.batches(worker, workers)

        def batch(step: int) -> Any:
            if step == 3 and worker < 2:
                self._arrived.wait(60)
                assert self._opened.wait(60)
            return read(step)

        return batch

    def wait(self) -> None:
        self._arrived.wait(60)

    def open(self) -> None:
        self._opened.set()


@pytest.mark.parametrize("mode", ["synchronous", "local_sgd"])
def test_workers_report_the_share_of_the_weights_that_changed(mode: Any, tmp_path: Path) -> None:
    """In rounds a worker counts what its own steps change, otherwise what the servers changed since its last pull."""
    weights = jax.random.normal(jax.random.key(0), (FEATURES, CLASSES), jnp.bfloat16)
    loss_fn = lambda model, batch: cross_entropy(batch["x"] @ model["w"].astype(jnp.float32), batch["y"])
    program = TrainingProgram(one_device(), lambda key: {"w": weights}, loss_fn, optax.sgd(1e-2), batches)
    reported: dict[int, Any] = {}
    on_report = lambda worker, step, figures: reported.update({step: figures.get("weights_changed")})
    rounds = {"sync_every": 3} if mode == "local_sgd" else {}
    run(program, ServerConfig(mode, workers=1, **rounds), 3, tmp_path, on_report=on_report)

    state = jp.init(one_device()(), program.make_model, program.tx)
    step, params = jp.train_step(one_device()(), loss_fn, donate=False), [np.asarray(weights)]
    for number in range(3):
        state, _ = step(state, batches(0, 1)(number))
        params.append(np.asarray(state.params["w"]))
    shares = [float(np.mean(old != new)) for old, new in itertools.pairwise(params)]
    assert all(0 < share < 1 for share in shares)
    expected = {3: np.mean(shares)} if mode == "local_sgd" else {1: None, 2: shares[0], 3: shares[1]}
    assert reported == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_members_join_and_leave_between_two_steps(mode: Any, tmp_path: Path) -> None:
    """Worker 2 joins before step 3, worker 1 leaves after it; each push counts once, whichever server has the piece."""
    gate, config = _Gate(), ServerConfig(mode, servers=2, workers=2, piece_bytes=50)
    program = dataclasses.replace(DENSE, batches=gate.batches)
    with ServerRun(program, config, steps=STEPS, folder=tmp_path, cluster="threads") as going:
        gate.wait()
        assert (going.add_worker(), going.add_server()) == (2, 2)
        going.remove_server(0)
        going.cluster.transport.coordinator("dismiss", 1)  # so that it ends after step 3
        gate.open()
        going.remove_worker(1)
        result, members = going.wait(), going.controller.members
        for change, name in (
            (lambda: going.remove_server(0), "server 0"),
            (lambda: going.controller.remove_worker(1), "worker 1"),
        ):
            with raises(ConfigError, name):
                change()
        progress = going.controller._progress(members)
    assert members.spans == (WorkerSpan(0), WorkerSpan(1, 0, 4), WorkerSpan(2, 3))
    assert members.servers == (1, 2) and set(members.owners.values()) == {1, 2}
    assert {worker: list(report.losses) for worker, report in result.reports.items()} == {
        0: list(range(STEPS)),
        1: list(range(4)),
        2: list(range(3, STEPS)),
    }
    versions = {version for version, _ in progress.values()}
    if mode == "asynchronous":
        assert versions == {STEPS + 4 + STEPS - 3}  # every push of every worker
    else:
        assert versions == {STEPS}
        present = lambda step: [span.worker for span in members.spans if step in span]
        assert same(result.params, one_process(DENSE, STEPS, present))


def _by_hand(batches: list[Any], rate: float, clip: float) -> dict[str, np.ndarray]:
    """SGD of the table and its weights in NumPy, where a gradient is cut to a norm, and one that is not finite left."""
    items, w = (np.asarray(x, np.float64) for x in DENSE.make_model(None).values())  # type: ignore[arg-type]
    for batch in batches:
        rows = items[batch["items"]]
        slope = 2 * (rows @ w - batch["y"]) / len(rows)
        grad_w, grad_items = slope @ rows, np.zeros_like(items)
        np.add.at(grad_items, batch["items"], slope[:, None] * w)
        norm = np.sqrt((grad_w**2).sum() + (grad_items**2).sum())
        if np.isfinite(norm):
            scale = rate * min(1.0, clip / norm)
            items, w = items - scale * grad_items, w - scale * grad_w
    return {"params/items": items, "params/w": w}


def _loss(params: Any, batch: Any) -> float:
    return float(((params["params/items"][batch["items"]] @ params["params/w"] - batch["y"]) ** 2).mean())


def test_a_worker_clips_skips_and_evaluates(tmp_path: Path) -> None:
    """Step 2 is not finite. The first worker evaluates after 2 and 4 steps, and hands out the end."""
    read, finished = DENSE.batches(0, 1), []
    used = [read(step) for step in range(5)]
    used[2]["y"] = used[2]["y"] * np.float32(np.nan)
    heldout = [read(100), read(101)]
    program = dataclasses.replace(
        DENSE,
        batches=lambda worker, workers: used.__getitem__,
        step_options={"clip_norm": 0.3},
        heldout=lambda: heldout,
        eval_every=2,
        finish=finished.append,
    )
    figures: dict[int, Any] = {}
    report = lambda worker, step, values: figures.update({step: values})
    result = run(program, ServerConfig(servers=1, workers=1), 5, tmp_path, on_report=report)
    for name, value in result.params.items():
        np.testing.assert_allclose(value, _by_hand(used, 0.1, 0.3)[name], rtol=1e-5, atol=1e-6)
    expected = {
        step: np.mean([_loss(_by_hand(used[:step], 0.1, 0.3), batch) for batch in heldout]) for step in (2, 4, 5)
    }
    assert result.reports[0].heldout == pytest.approx(expected, rel=1e-5)
    assert result.finished == {"heldout_loss": result.reports[0].heldout[5]}
    assert figures[3].keys() == {"loss", "skipped"} and figures[2]["heldout_loss"] == result.reports[0].heldout[2]
    assert {step for step, values in figures.items() if "skipped" in values} == {3}
    assert figures[1]["grad_norm"] > 0.3  # it was clipped
    (state,) = finished
    assert int(state.step) == 5 and np.array_equal(state.params["w"], result.params["params/w"])


def test_a_run_goes_on_from_its_folder_or_begins_anew(tmp_path: Path) -> None:
    config = ServerConfig(servers=2, workers=1)
    run(DENSE, config, 2, tmp_path)
    result = run(DENSE, config, 5, tmp_path)
    assert list(result.reports[0].losses) == [2, 3, 4]
    assert same(result.params, one_process(DENSE, 5, lambda step: [0]))
    other = table_program(13, 13, sparse=False)
    with raises(ModelError, "the run"):
        run(other, config, 5, tmp_path)
    assert list(run(other, config, 1, tmp_path, resume=False).reports[0].losses) == [0]


def test_an_error_of_a_worker_is_raised_by_the_run(tmp_path: Path) -> None:
    """The batches touch more rows than the worker's model has."""
    with raises(DataError, "params/items"):
        run(table_program(1000, 2, sparse=True), ServerConfig(workers=1), 1, tmp_path)


TABLE = SparseTable("params/t", 1000, ids=("user",))


@pytest.mark.parametrize(
    ("call", "kind", "name"),
    [
        (
            lambda folder: run(table_program(9, 9, sparse=True), ServerConfig("local_sgd", sync_every=3), 3, folder),
            ConfigError,
            "params/items",
        ),
        (lambda folder: ServerRun(DENSE, ServerConfig(), steps=1, folder=folder, cluster=OTHER), ConfigError, "slurm"),
        (lambda folder: look_up({"item": np.arange(3), "y": np.ones(3)}, (TABLE,)), DataError, "user"),
        (lambda folder: look_up({"user": np.array([[5, 1000], [-2, 7]])}, (TABLE,)), DataError, "-2"),
    ],
)
def test_runs_and_batches_that_are_refused(
    call: Callable[[Path], Any], kind: type[JaxparError], name: str, tmp_path: Path
) -> None:
    with raises(kind, name):
        call(tmp_path)


def test_batches_are_looked_up_by_the_rows_that_they_touch() -> None:
    batch = {"user": np.array([[70, 5], [5, 999]]), "y": np.ones(2)}
    rows, numbered = look_up(batch, (TABLE,))
    assert rows["params/t"].tolist() == [5, 70, 999]
    assert numbered["user"].tolist() == [[1, 0], [0, 2]] and numbered["y"] is batch["y"]
    assert look_up(batch, ()) == ({}, batch)


def test_members_and_servers_that_do_not_answer(tmp_path: Path) -> None:
    """A run without members, and one whose servers are gone for longer than its patience."""
    transport, config = ThreadTransport(Coordinator(str(tmp_path / "members"))), ServerConfig(workers=1, patience=0.05)
    model = {"params/w": ParamSpec((3,), "float32")}
    controller, pieces = Controller(transport, config), tuple(cut(model, 100))
    connect = lambda: ServerClient(transport, 0, model, patience=0.05)
    for call, name in (
        (lambda: controller.members, "this run"),
        (connect, "no servers"),
    ):
        with raises(LaunchError, name):
            call()
    transport.coordinator("publish", Membership(0, (0,), (WorkerSpan(0),), pieces, {"params/w[0:3]": 0}).to_json())
    for call in (lambda: connect().pull(None), lambda: controller.add_worker(1)):
        with raises(LaunchError, "server 0"):
            call()
    with raises(ConfigError, "worker 0"):
        controller.remove_worker(0)


@pytest.mark.slow
def test_a_model_of_an_optimizer_with_state_changes_members(tmp_path: Path) -> None:
    """Pieces that move take the optimizer's state along."""
    program = nnx_program(optax.adamw(1e-2))
    config = ServerConfig(servers=2, workers=1, piece_bytes=40)
    with ServerRun(program, config, steps=3, folder=tmp_path, cluster="threads") as going:
        going.wait()
        going.add_server()
        going.remove_server(1)
    assert same(run(program, config, 6, tmp_path).params, one_process(program, 6, lambda step: [0]))
