"""Runs with servers and workers in one process, held against one device: modes, kills, tables, members."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from server_cases import batches, linen_program, mortal, named, nnx_program, one_process, run, same, table_program

import jaxpar as jp
from jaxpar.parameter_server import ServerConfig, ServerRun
from jaxpar.parameter_server.cluster import ThreadCluster
from jaxpar.parameter_server.transport import ServerCall, ThreadTransport

ADAMW, MOMENTUM = optax.adamw(1e-2), optax.sgd(optax.cosine_decay_schedule(0.3, 10), momentum=0.9)


def test_synchronous_is_bitwise_one_device(tmp_path: Path) -> None:
    program, config = nnx_program(ADAMW), ServerConfig(servers=3, workers=2, piece_bytes=40)
    assert len(program.pieces(config)) > 6  # matrices are cut by rows
    result = run(program, config, 12, tmp_path)
    assert same(result.params, one_process(program, 12, lambda step: [0, 1]))
    assert result.reports[1].traffic.pushed == 12 * sum(x.nbytes for x in result.params.values())
    assert result.staleness.keys() == {0}


@pytest.mark.slow
def test_a_linen_model_and_workers_on_meshes_of_two_devices(tmp_path: Path) -> None:
    for name, program in (("linen", linen_program(MOMENTUM)), ("mesh", nnx_program(MOMENTUM, devices=2))):
        result = run(program, ServerConfig(servers=2), 6, tmp_path / name)
        assert same(result.params, one_process(program, 6, lambda step: [0, 1]))


@pytest.mark.slow
def test_servers_that_are_killed_lose_nothing(tmp_path: Path) -> None:
    """Servers are killed at random times; some start from a snapshot and a log, others from a log alone."""
    program = nnx_program(ADAMW)
    draw = random.Random(4)
    config = ServerConfig(servers=2, workers=2, snapshot_every=7)
    with ServerRun(program, config, steps=30, folder=tmp_path, cluster="threads") as going:
        transport, start = mortal(going)
        kills, at = 0, 0.0
        while going.poll(0.01):
            if kills < 12 and time.monotonic() > at:
                server = draw.randrange(2)
                transport.kill(server)
                start(server)
                kills, at = kills + 1, time.monotonic() + draw.uniform(0, 0.1)
        result = going.wait()
    assert kills >= 5
    assert same(result.params, one_process(program, 30, lambda step: [0, 1]))


class _Lossy(ThreadTransport):
    """Loses a worker in the middle of a push, when one server has its part; or after the push, in an odd step."""

    def ask(self, calls: Mapping[int, ServerCall]) -> dict[int, Any]:
        name, arguments = next(iter(calls.values()))
        victim = name == "push" and arguments[0].worker == 1 and arguments[0].step in self.deadly
        if victim:
            self.deadly.discard(arguments[0].step)
            part = calls if arguments[0].step % 2 else dict([next(iter(sorted(calls.items())))])
            while any(answer.status != "done" for answer in super().ask(part).values()) and part is calls:
                pass
            raise SystemExit
        return super().ask(calls)

    deadly: set[int]


@pytest.mark.parametrize(
    ("mode", "compression"),
    [
        pytest.param("synchronous", None, marks=pytest.mark.slow),
        ("local_sgd", "int8"),
    ],
)
def test_a_worker_that_is_killed_computes_the_same_again(mode: Any, compression: Any, tmp_path: Path) -> None:
    """The restarted worker reads what it had read before, although one server is a round ahead, and its own state."""
    every = 3 if mode == "local_sgd" else 1
    program = dataclasses.replace(table_program(12, 12, sparse=False), tx=ADAMW)
    config = ServerConfig(mode, servers=2, workers=2, sync_every=every, compression=compression)
    results = []
    for deadly in (set(), {2, 3}):
        folder = tmp_path / str(len(deadly))
        with ServerRun(program, config, steps=6 * every, folder=folder, cluster="threads") as going:
            cluster = going.cluster
            assert isinstance(cluster, ThreadCluster)
            cluster.transport.__class__ = _Lossy
            cluster.transport.deadly = set(deadly)  # type: ignore[attr-defined]
            while True:
                try:
                    results.append(going.wait())
                    break
                except SystemExit:
                    going._launch_worker(1)
    assert same(results[0].params, results[1].params)


@pytest.mark.slow
def test_the_bound_of_stale_workers_holds_and_is_used(tmp_path: Path) -> None:
    def slow(worker: int, workers: int) -> Any:
        read = batches(worker, workers)
        return lambda step: (time.sleep(0.05 if worker else 0.0), read(step))[1]

    program = nnx_program(optax.sgd(0.05), batches=slow)
    for bound in (0, 2):
        config = ServerConfig("stale_synchronous", servers=2, workers=2, staleness=bound)
        result = run(program, config, 8, tmp_path / str(bound))
        assert max(result.staleness) == bound == result.reports[0].traffic.staleness
        assert sum(result.staleness.values()) == 2 * 2 * 8  # each pull of each worker on each server
    free = run(program, ServerConfig("asynchronous", workers=2), 8, tmp_path / "free")
    assert max(free.staleness) > 2 and free.reports[0].losses[7] < free.reports[0].losses[0]


def _diloco(program: Any, rounds: int, every: int, rate: float = 0.7, momentum: float = 0.9) -> dict[str, np.ndarray]:
    """Local SGD of two workers with a Nesterov outer step, by hand (Douillard et al. 2023, algorithm 1)."""
    layout = program.layout()
    states = [jp.init(layout, program.make_model, program.tx, seed=program.seed) for _ in range(2)]
    step = jp.train_step(layout, program.loss_fn, donate=False)
    read = [program.batches(worker, 2) for worker in range(2)]
    outer = named(states[0].params)
    velocity = {name: np.zeros_like(x) for name, x in outer.items()}
    for round_ in range(rounds):
        for n in range(every):
            states = [step(state, read[w](round_ * every + n))[0] for w, state in enumerate(states)]
        ends = [named(state.params) for state in states]
        for name, start in outer.items():
            change = ((start - ends[0][name]) + (start - ends[1][name])) / 2
            velocity[name] = momentum * velocity[name] + change
            outer[name] = start - rate * (change + momentum * velocity[name])
        leaves, structure = jax.tree.flatten(states[0].params)
        assert [x.shape for x in leaves] == [x.shape for x in outer.values()]
        params = jax.tree.unflatten(structure, [jnp.asarray(x) for x in outer.values()])
        states = [dataclasses.replace(state, params=params) for state in states]
    return outer


@pytest.mark.slow
def test_local_sgd_after_each_step_averages_the_updates(tmp_path: Path) -> None:
    """With an outer rate of 1 and no momentum: bitwise the mean of the workers' updates, and data parallel SGD."""
    program = nnx_program(optax.sgd(0.1))
    config = ServerConfig("local_sgd", servers=2, workers=2, outer_learning_rate=1.0, outer_momentum=0.0)
    result = run(program, config, 6, tmp_path / "local")
    assert same(result.params, _diloco(program, 6, 1, rate=1.0, momentum=0.0))
    together = run(program, ServerConfig(workers=2), 6, tmp_path / "together").params
    for name, value in result.params.items():
        np.testing.assert_allclose(value, together[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_local_sgd_is_diloco_and_sends_a_fraction_of_the_bytes(tmp_path: Path) -> None:
    program = nnx_program(ADAMW)
    config = ServerConfig("local_sgd", servers=2, workers=2, sync_every=5)
    result = run(program, config, 15, tmp_path / "fp32")
    by_hand = _diloco(program, 3, 5)
    for name, value in result.params.items():
        np.testing.assert_allclose(value, by_hand[name], rtol=1e-5, atol=1e-6)
    size = sum(x.nbytes for x in result.params.values())
    assert result.reports[0].traffic.pushed == 3 * size
    small = run(program, dataclasses.replace(config, compression="int8"), 15, tmp_path / "int8")
    assert small.reports[0].traffic.pushed < 3 * size * 0.4
    for name, value in small.params.items():
        np.testing.assert_allclose(value, result.params[name], atol=2e-3)


def test_a_sparse_table_trains_like_a_dense_one(tmp_path: Path) -> None:
    """Only touched rows travel; the table has 40 rows, and no worker's model more than 6."""
    sparse, dense = table_program(40, 6, sparse=True), table_program(40, 40, sparse=False)
    config = ServerConfig(servers=2, workers=3)
    with ServerRun(sparse, config, steps=10, folder=tmp_path / "sparse", cluster="threads") as going:
        result = going.wait()
        rows = going.rows("params/items", np.arange(40))
    expected = one_process(dense, 10, lambda step: [0, 1, 2])
    assert np.array_equal(rows, expected["params/items"])
    assert np.array_equal(result.params["params/w"], expected["params/w"])
    assert result.reports[0].traffic.pulled < 10 * (16 + 6 * 16) + 1


def with_heldout(program: Any) -> Any:
    """The program with three weighed batches of a worker that does not train."""
    read = program.batches(7, 8)
    heldout = lambda: [{**read(step), "weight": np.float32(step)} for step in (1, 2, 3)]
    loss = lambda model, batch: (program.loss_fn(model, batch), {"weight": batch["weight"]})
    return dataclasses.replace(program, heldout=heldout, eval_loss_fn=loss, eval_every=2)


def test_a_sparse_table_is_evaluated_like_a_dense_one(tmp_path: Path) -> None:
    """Held-out batches have other rows than those that are trained, some of which no worker has touched."""
    losses = []
    for program in (table_program(400, 6, sparse=True), table_program(400, 400, sparse=False)):
        result = run(with_heldout(program), ServerConfig(servers=2), 6, tmp_path / str(len(losses)))
        losses.append(result.reports[0].heldout | {6: result.finished["heldout_loss"]})
    assert losses[0].keys() == {2, 4, 6} and losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][6] < losses[0][2]


@pytest.mark.slow
def test_rows_have_optimizer_state_of_their_own_and_survive_a_restart(tmp_path: Path) -> None:
    program = dataclasses.replace(table_program(10**9, 6, sparse=True), tx=optax.adam(0.1))
    with ServerRun(program, ServerConfig(servers=2), steps=6, folder=tmp_path, cluster="threads") as going:
        transport, start = mortal(going)
        going.wait()
        touched = np.unique(np.concatenate([program.batches(w, 2)(s)["items"] for w in range(2) for s in range(6)]))
        before = going.rows("params/items", touched)
        states = [s for service in transport.services.values() for s in service._shard._states.values()]
        assert sum(len(state.slots) for state in states if state.piece.spec.sparse) == len(touched)
        for server in (0, 1):
            transport.kill(server)
            start(server)
        assert np.array_equal(going.rows("params/items", touched), before)


@pytest.mark.slow
def test_workers_and_servers_join_and_leave(tmp_path: Path) -> None:
    """Synchronous, so the result is that of the workers that took part in each step."""
    program = nnx_program(ADAMW)

    def paced(worker: int, workers: int) -> Any:
        read = program.batches(worker, workers)
        return lambda step: (time.sleep(0.02), read(step))[1]

    config = ServerConfig(servers=2, workers=2, piece_bytes=40)
    paced_program = dataclasses.replace(program, batches=paced)
    with ServerRun(paced_program, config, steps=40, folder=tmp_path, cluster="threads") as going:
        reached = lambda step: any(worker_step >= step for worker_step in seen.values())
        seen: dict[int, int] = {}
        going._on_report = lambda worker, step, figures: seen.update({worker: step})
        while not reached(3):
            going.poll(0.01)
        assert going.add_worker() == 2
        assert going.add_server() == 2
        going.remove_server(0)
        going.remove_worker(1)
        spans = {span.worker: (span.first, span.last) for span in going.controller.members.spans}
        result = going.wait()
        owners = going.controller.members
    assert spans[0] == (0, None) and spans[2][0] >= 3 and spans[1][1] is not None and spans[1][1] < 40
    assert owners.servers == (1, 2) and set(owners.owners.values()) == {1, 2}
    present = lambda step: [w for w, (a, b) in spans.items() if a <= step and (b is None or step < b)]
    assert same(result.params, one_process(program, 40, present))


@pytest.mark.slow
def test_a_run_goes_on_from_its_folder(tmp_path: Path) -> None:
    program, config = nnx_program(ADAMW), ServerConfig(servers=2, workers=2)
    run(program, config, 4, tmp_path)
    assert same(run(program, config, 9, tmp_path).params, one_process(program, 9, lambda step: [0, 1]))


@pytest.mark.slow
def test_a_step_that_is_not_finite_counts_for_nothing(tmp_path: Path) -> None:
    program = nnx_program(ADAMW)
    bad = lambda worker, workers: lambda step: _spoil(program.batches(worker, workers)(step), worker == 1 and step == 2)
    result = run(dataclasses.replace(program, batches=bad), ServerConfig(workers=2), 6, tmp_path)
    assert same(result.params, one_process(program, 6, lambda step: [0] if step == 2 else [0, 1]))


def _spoil(batch: Any, yes: bool) -> Any:
    return {**batch, "x": batch["x"] * np.float32(np.nan)} if yes else batch
