"""Tests two real processes of four devices each: local data, global arrays, and the losses of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import jaxpar as jp
from jaxpar.data import batches
from jaxpar.models.llama import make_llama, preset
from jaxpar.models.losses import next_token_loss

TOKENS = np.random.default_rng(0).integers(0, 64, 4096).astype(np.uint8)
CONFIG = preset("tiny", layers=1, embed=32, heads=2, kv_heads=2, head_dim=16, mlp=48, vocab=64)
LAYOUT = Path(__file__).parents[2] / "configs" / "layouts" / "fsdp_tp.yaml"


def losses() -> list[float]:
    """Returns the losses of three steps on this process's share of the data."""
    layout = jp.Layout.from_yaml(LAYOUT)
    state = jp.init(layout, make_llama(CONFIG), optax.adamw(1e-3))
    step = jp.train_step(layout, next_token_loss)
    stream = batches(TOKENS, batch=8, seq=16, process_index=jax.process_index(), process_count=jax.process_count())
    found = []
    for _ in range(3):
        batch = {
            name: jp.shard_array(layout, x, "batch", "seq", path=f"batch/{name}") for name, x in next(stream).items()
        }
        assert batch["tokens"].shape == (8, 16)
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    stream.close()
    return found


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, str(port), str(rank), str(tmp_path / f"{rank}.json")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    # The network is the slowest link, so only the outermost axis larger than 1 may cross hosts.
    assert results[0]["hosts_along_model"] == 1 and results[0]["hosts_along_data"] == 2
    assert results[0]["losses"] == results[1]["losses"]
    np.testing.assert_allclose(results[0]["losses"], losses(), rtol=1e-5)


def work(port: str, rank: str, result: str) -> None:
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, 2, int(rank), coordinator_bind_address=address)
    hosts = np.vectorize(lambda device: device.process_index)(jp.Layout.from_yaml(LAYOUT).mesh.devices)
    along = {axis: len(set(_line(hosts, i))) for axis, i in (("data", 2), ("model", 6))}
    Path(result).write_text(
        json.dumps({"losses": losses(), **{f"hosts_along_{axis}": count for axis, count in along.items()}})
    )


def _line(hosts: np.ndarray, axis: int) -> list[int]:
    """Returns the hosts along one mesh axis, from the first device."""
    return list(hosts[tuple(slice(None) if i == axis else 0 for i in range(hosts.ndim))])


if __name__ == "__main__":
    work(*sys.argv[1:])
