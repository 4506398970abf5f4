"""A server's shard: each push once and in order, sums in worker order, bounds of staleness, its log, and bad input."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.errors import ConfigError, ModelError, StateError
from jaxpar.parameter_server import ServerConfig
from jaxpar.parameter_server.client import check_model
from jaxpar.parameter_server.membership import Membership, WorkerSpan
from jaxpar.parameter_server.messages import PullRequest, PushRequest, QuantizedDelta, RowGrads
from jaxpar.parameter_server.piece_optimizer import PieceOptimizer
from jaxpar.parameter_server.piece_state import DenseState
from jaxpar.parameter_server.pieces import ParamSpec, SparseTable, cut, server_params
from jaxpar.parameter_server.quantized_deltas import add, dequantize, quantize
from jaxpar.parameter_server.row_values import initial_rows
from jaxpar.parameter_server.server_shard import ServerShard
from jaxpar.parameter_server.sums import mean

OPTIMIZER, ADAM = PieceOptimizer(optax.sgd(1.0)), PieceOptimizer(optax.adam(0.1))
PIECES = tuple(cut({"w": ParamSpec((2,), "float32")}, 100))
TABLE = SparseTable("t", 100, ("x",), pieces=1)
MEMBERS = Membership(0, (0,), (WorkerSpan(0), WorkerSpan(1)), PIECES, {"w[0:2]": 0})


def _shard(folder: Path, mode: Any = "synchronous", **config: Any) -> ServerShard:
    shard = ServerShard(0, folder, ServerConfig(mode, **config), OPTIMIZER)
    if shard.epoch < 0:
        shard.activate(MEMBERS.to_json())
        shard.offer(0, {"w[0:2]": np.zeros(2, np.float32)})
    return shard


def _push(shard: ServerShard, worker: int, step: int, *grad: float, epoch: int = 0, weight: float = 1.0) -> str:
    grads = {"w[0:2]": np.float32(grad)}
    return shard.push(PushRequest(worker, step, epoch, weight, grads)).status


def _pull(shard: ServerShard, worker: int | None, step: int = 0) -> Any:
    answer = shard.pull(PullRequest(worker, step, 0, ("w[0:2]",)))
    return answer.values["w[0:2]"].tolist() if answer.status == "done" else answer.status


def test_a_round_waits_for_all_workers_and_is_applied_once(tmp_path: Path) -> None:
    shard = _shard(tmp_path)
    assert _pull(shard, 0) == [0, 0]
    assert _push(shard, 1, 0, 4, 0) == "waiting" and _pull(shard, None) == [0, 0]
    assert _push(shard, 1, 0, 4, 0) == "waiting"  # sent again
    assert _push(shard, 0, 0, 2, 2) == "done" and _pull(shard, None) == [-3, -1]
    assert _push(shard, 1, 0, 4, 0) == "done" and _push(shard, 0, 0, 9, 9) == "done"  # both sent again
    assert _pull(shard, None) == [-3, -1] == _pull(shard, 0, 1)
    assert _pull(shard, 1, 0) == [0, 0]  # a worker that was killed in round 0 reads what it had read
    assert _pull(shard, 1, 2) == "waiting"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.sampled_from([2, 100]))
def test_any_order_of_pushes_restarts_and_repeats_gives_one_result(actions: list[int], snapshot_every: int) -> None:
    """0 and 1: a worker pushes its next step; 2 and 3: its last one again; 4: the server is killed; 5: a pull."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        options = {"staleness": 3, "snapshot_every": snapshot_every}
        shard = _shard(Path(folder), "stale_synchronous", **options)
        clocks, total = [0, 0], np.zeros(2, np.float32)
        for action in actions:
            worker = action % 2
            if action < 2:
                grad = np.float32([clocks[worker] + 0.5, worker - 0.25])
                total = total - grad
                assert _push(shard, worker, clocks[worker], *grad.tolist()) == "done"
                clocks[worker] += 1
            elif action < 4 and clocks[worker]:
                assert _push(shard, worker, clocks[worker] - 1, 99, 99) == "done"
            elif action == 4:
                shard.close()
                shard = _shard(Path(folder), "stale_synchronous", **options)
            else:
                ready = min(clocks) >= clocks[worker] - 3
                assert _pull(shard, worker, clocks[worker]) == (total.tolist() if ready else "waiting")
        assert _pull(shard, None) == total.tolist()
        assert max(shard.staleness, default=0) <= 3
        shard.close()


def test_pushes_of_the_future_other_shapes_and_foreign_pieces_are_refused(tmp_path: Path) -> None:
    shard = _shard(tmp_path)
    for push, kind, name in (
        (lambda: _push(shard, 0, 2, 1, 1), StateError, "step 2"),
        (lambda: _push(shard, 0, 0, 1, 1, 1), StateError, "[3]"),
        (lambda: shard.push(PushRequest(0, 0, 0, 1.0, {"v[0:1]": None})), ModelError, "v[0:1]"),
        (
            lambda: shard.push(PushRequest(0, 0, 0, 1.0, {"w[0:2]": RowGrads(np.array([5]), np.zeros((1, 2)))})),
            StateError,
            "[5]",
        ),
    ):
        with raises(kind, name):
            push()
    assert _push(shard, 0, 0, 1, 1, epoch=1) == "stale"


def test_a_shard_that_is_held_stays_so_after_a_restart(tmp_path: Path) -> None:
    shard = _shard(tmp_path)
    shard.hold(1)
    shard.close()
    shard = _shard(tmp_path)
    assert _push(shard, 0, 0, 1, 1) == "stale"
    shard.activate(Membership(1, (0,), (WorkerSpan(0),), PIECES, {"w[0:2]": 0}).to_json())
    assert _push(shard, 0, 0, 1, 1, epoch=1) == "done"  # worker 1 has left
    shard.close()


def test_means_are_sums_in_worker_order() -> None:
    grads = [np.float32([1e8]), np.float32([1.0]), np.float32([-1e8])]
    sums = [mean([(1.0, g) for g in order]) for order in (grads, [grads[0], grads[2], grads[1]])]
    assert [float(x[0]) for x in sums] == [0.0, pytest.approx(1 / 3)]  # type: ignore[index]
    assert mean([(3.0, np.float32([2.0])), (1.0, np.float32([6.0]))]) == np.float32([3.0])
    assert mean([(0.0, np.float32([np.nan])), (0.0, None)]) is None
    rows = mean(
        [(1.0, RowGrads(np.array([1, 4]), np.float32([[1], [2]]))), (1.0, RowGrads(np.array([4]), np.float32([[6]])))]
    )
    assert isinstance(rows, RowGrads) and rows.ids.tolist() == [1, 4] and rows.values.tolist() == [[0.5], [4]]


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (3.0, 1.0, 0.5), (2.0, 0.0, 2.0)])
def test_the_mean_of_rows_is_that_of_whole_tables(weights: tuple[float, ...]) -> None:
    rng = np.random.default_rng(0)
    pushes = [RowGrads(np.sort(rng.choice(9, 5, False)), rng.normal(size=(5, 2)).astype(np.float32)) for _ in weights]
    tables = [np.zeros((9, 2), np.float32) for _ in weights]
    for table, push in zip(tables, pushes, strict=True):
        table[push.ids] = push.values
    rows, whole = (mean([*zip(weights, grads, strict=True)]) for grads in (pushes, tables))
    assert isinstance(rows, RowGrads) and isinstance(whole, np.ndarray)
    np.testing.assert_allclose(rows.values, whole[rows.ids], rtol=1e-6)
    assert not np.delete(whole, rows.ids, 0).any()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"servers": 0}, "servers"),
        ({"workers": -2}, "workers"),
        ({"mode": "stale_synchronous", "staleness": -1}, "-1"),
        ({"staleness": 2}, "is 2"),
        ({"mode": "local"}, "local_sgd"),
        ({"outer_momentum": 1.0}, "outer_momentum"),
        ({"patience": 0}, "patience"),
        ({"mode": "local_sgd", "compression": "int2"}, "int2"),
    ],
)
def test_bad_configurations(options: dict[str, Any], name: str) -> None:
    with raises(ConfigError, name):
        ServerConfig(**options)


def test_a_worker_with_another_model_is_refused() -> None:
    servers = {"params/a": ParamSpec((2, 3), "float32"), "params/b": ParamSpec((2,), "float32")}
    model = {"params/a": ParamSpec((2, 4), "float32"), "params/c": ParamSpec((), "float32")}
    with raises(ModelError, "params/b", "params/a"):
        check_model(model, servers, "worker 3")


def test_a_restart_keeps_changes_in_few_bits_and_what_they_left_out(tmp_path: Path) -> None:
    """A worker gets the change since the version that it holds, also from a shard that was opened again."""
    options: dict[str, Any] = {"workers": 1, "compression": "int8", "outer_learning_rate": 1.0, "outer_momentum": 0.0}
    members = Membership(0, (0,), (WorkerSpan(0),), PIECES, {"w[0:2]": 0}).to_json()
    shard = ServerShard(0, tmp_path, ServerConfig("local_sgd", **options), OPTIMIZER)
    shard.activate(members)
    shard.offer(0, {"w[0:2]": np.zeros(2, np.float32)})
    exact = np.zeros(2, np.float32)
    for step, change in enumerate(([1.0, -0.3], [0.5, 0.001], [0.2, 0.7])):
        sent = quantize(np.float32(change), 8)
        exact = exact - dequantize(sent)
        assert shard.push(PushRequest(0, step, 0, 1.0, {"w[0:2]": sent})).status == "done"
        if step == 1:
            shard.snapshot()
        shard.close()
        shard = ServerShard(0, tmp_path, ServerConfig("local_sgd", **options), OPTIMIZER)
        (state,) = shard._states.values()
        assert isinstance(state, DenseState) and state.delta is not None and state.error is not None
        np.testing.assert_allclose(state.value + state.error, exact, rtol=0, atol=1e-7)
        pulls = [PullRequest(0, step + 1, 0, ("w[0:2]",), held=held) for held in (step, None, step - 1)]
        delta, whole, far = (shard.pull(pull).values["w[0:2]"] for pull in pulls)
        assert isinstance(delta, QuantizedDelta) and isinstance(whole, np.ndarray)
        assert np.array_equal(add(np.asarray(state.previous), delta), whole)
        assert isinstance(far, np.ndarray)  # a worker that holds an older version gets everything
    shard.close()


def test_a_restart_keeps_the_rows_of_a_table_and_those_before_the_last_round(tmp_path: Path) -> None:
    specs = server_params({"t": ParamSpec((4, 2), "float32")}, [TABLE])
    (piece,) = cut(specs, 100, table_pieces={"t": 1})
    members = Membership(0, (0,), (WorkerSpan(0),), (piece,), {piece.key: 0})
    open_shard = lambda: ServerShard(0, tmp_path, ServerConfig(workers=1), ADAM, (TABLE,))
    shard = open_shard()
    shard.activate(members.to_json())
    assert shard.clocks(0, 0).status == "waiting"  # nobody has offered the piece
    shard.offer(0, {piece.key: None})
    read = lambda step, *ids: shard.pull(PullRequest(0, step, 0, (piece.key,), {piece.key: np.array(ids)})).values
    seen = [read(0, 3, 5, 70)[piece.key]]
    assert np.array_equal(seen[0], initial_rows(TABLE, np.array([3, 5, 70]), 2))
    for step, ids in enumerate(([5, 70], [3, 70], [])):
        rows = RowGrads(np.array(ids, np.int64), np.ones((len(ids), 2), np.float32))
        assert shard.push(PushRequest(0, step, 0, 1.0, {piece.key: rows})).status == "done"
        shard.snapshot()
        shard.close()
        shard = open_shard()
        seen.append(read(step + 1, 3, 5, 70)[piece.key])
        assert np.array_equal(read(step, 3, 5, 70)[piece.key], seen[step])  # for a worker that was killed
    assert [np.any(new != old, axis=1).tolist() for old, new in itertools.pairwise(seen)] == [
        [False, True, True],
        [True, False, True],
        [False, False, False],
    ]
    adam = optax.adam(0.1)
    state = adam.init(seen[0][2])
    value = seen[0][2]
    for _ in range(2):  # row 70 was in two rounds
        updates, state = adam.update(np.ones(2, np.float32), state)
        value = value + updates
    np.testing.assert_allclose(seen[3][2], value, rtol=1e-6)
    with raises(ValueError, piece.key):
        shard.pull(PullRequest(None, 0, 0, (piece.key,)))
    shard.close()


def test_requests_of_another_epoch_and_during_a_change_are_stale(tmp_path: Path) -> None:
    shard = _shard(tmp_path)
    new = Membership(1, (0,), (WorkerSpan(0),), PIECES, {"w[0:2]": 0}).to_json()
    ask = lambda epoch: [
        shard.pull(PullRequest(0, 0, epoch, ("w[0:2]",))).status,
        shard.offer(epoch, {}).status,
        shard.clocks(epoch, 0).status,
    ]
    assert ask(0) == ["done"] * 3 and ask(1) == ["stale"] * 3
    shard.hold(0)  # of the epoch that it is in already
    assert ask(0) == ["done"] * 3
    shard.hold(1)
    shard.snapshot()
    assert ask(0) == ["stale"] * 3
    shard.activate(new)
    shard.activate(MEMBERS.to_json())  # sent again, too late
    assert shard.epoch == 1 and ask(1) == ["done"] * 3
    shard.close()
