"""A sparse table that is larger than the memory that a worker may still allocate: every row is stored and trained."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from server_cases import one_device

from jaxpar.parameter_server import ServerConfig, ServerRun, SparseTable, TrainingProgram
from jaxpar.parameter_server.ray_start import connect
from jaxpar.parameter_server.row_values import initial_rows

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits anonymous mappings on Linux"),
]

FEATURES, TOUCHED, STEPS, WORKERS = 1024, 1024, 80, 2
ROWS = TOUCHED * STEPS * WORKERS
TABLE_BYTES = 4 * FEATURES * ROWS
HEADROOM = TABLE_BYTES * 4 // 5
TABLE = SparseTable("params/items", ROWS, ids=("items",), stddev=0.1, pieces=4, seed=5)


def _limited_layout() -> Any:
    """The worker's layout, in a process that may allocate four fifths of the table's bytes more than it has."""
    limit = _status(os.getpid(), "VmData") + HEADROOM
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        np.empty(TABLE_BYTES, np.uint8)
    except MemoryError:
        return one_device()()
    raise AssertionError("the limit does not keep the worker from allocating the table")


def _loss(model: Any, batch: Any) -> jax.Array:
    rows = jnp.take(model["items"], batch["items"], axis=0)
    return (rows * rows).sum() / 2 + 0 * model["bias"]


def _batches(worker: int, workers: int) -> Callable[[int], Any]:
    return lambda step: {"items": np.arange(TOUCHED) * STEPS * workers + workers * step + worker}


def _program() -> TrainingProgram:
    def make_model(key: jax.Array) -> Any:
        return {"items": jnp.zeros((TOUCHED, FEATURES)), "bias": jnp.zeros(())}

    # A row's gradient is the row; half of it is the mean over two workers. Each row is touched once, and is then half.
    return TrainingProgram(_limited_layout, make_model, _loss, optax.sgd(1.0), _batches, tables=(TABLE,))


@pytest.fixture
def cluster() -> Iterator[None]:
    import server_cases

    here = sys.modules[__name__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_memory_usage_threshold", "1.0")
        patch.setenv("JAX_PLATFORMS", "cpu")
        connect(None, WORKERS, object_store_bytes=200 * 2**20)
        for module in (here, server_cases):
            ray.cloudpickle.register_pickle_by_value(module)
        yield
        for module in (here, server_cases):
            ray.cloudpickle.unregister_pickle_by_value(module)
        ray.shutdown()


def test_a_table_that_no_worker_could_hold(cluster: None, tmp_path: Path) -> None:
    config = ServerConfig(servers=2, workers=WORKERS, snapshot_every=10**6)
    with ServerRun(_program, config, steps=STEPS, folder=tmp_path, worker_resources={"CPU": 0.5}) as going:
        actors: Any = going.cluster
        result = going.wait()
        used = [_status(actors.pid(f"worker-{n}"), "RssAnon") for n in range(WORKERS)]
        ids = np.unique(np.random.default_rng(0).integers(0, ROWS, 500))
        trained = going.rows(TABLE.path, ids)
    assert np.array_equal(trained, initial_rows(TABLE, ids, FEATURES) / 2)
    assert result.reports[1].traffic.pushed >= TABLE_BYTES // WORKERS
    logs = sum(file.stat().st_size for file in (tmp_path / "servers").rglob("*") if file.is_file())
    print(f"table {TABLE_BYTES >> 20} MiB, logs {logs >> 20} MiB, workers at the end {[x >> 20 for x in used]} MiB")
    assert logs > TABLE_BYTES > max(used)


def _status(pid: int, name: str) -> int:
    """Bytes of a process: ``VmData``, which may be limited, or ``RssAnon``, what it has in memory beside files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
