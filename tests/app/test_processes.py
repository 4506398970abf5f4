"""Tests two real processes of four devices each: local data, global arrays, and the losses of one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import small_model
from interpreters import outputs_of, two_processes
from profiles import few
from run_processes import TrainProcess

import jaxpar as jp
from jaxpar.app.cli import main
from jaxpar.data import batches
from jaxpar.models.llama import make_llama, preset
from jaxpar.models.losses import next_token_loss

TOKENS = np.random.default_rng(0).integers(0, 64, 4096).astype(np.uint8)
CONFIG = preset("tiny", layers=1, embed=32, heads=2, kv_heads=2, head_dim=16, mlp=48, vocab=64)
MODELS = {
    "three matrices": (small_model.make_model, small_model.loss),
    "llama": (make_llama(CONFIG), next_token_loss),
}
LAYOUT = Path(__file__).parents[2] / "configs" / "layouts" / "fsdp_tp.yaml"


def losses(model: str) -> list[float]:
    """Returns the losses of three steps on this process's share of the data."""
    layout = jp.Layout.from_yaml(LAYOUT)
    make_model, loss = MODELS[model]
    state = jp.init(layout, make_model, optax.adamw(1e-3))
    step = jp.train_step(layout, loss)
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


@pytest.mark.parametrize("model", few(MODELS, 1))
def test_two_processes_train_as_one(model: str, tmp_path: Path) -> None:
    with two_processes(__file__, tmp_path, model, flags="--xla_force_host_platform_device_count=4") as workers:
        outputs_of(workers, timeout=240)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    # The network is the slowest link, so only the outermost axis larger than 1 may cross hosts.
    assert results[0]["hosts_along_model"] == 1 and results[0]["hosts_along_data"] == 2
    assert results[0]["losses"] == results[1]["losses"]
    np.testing.assert_allclose(results[0]["losses"], losses(model), rtol=1e-5)


SPLITS = {"model": {"model": 8}, "batch and seq": {"data": 4, "context": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_a_run_in_two_processes_has_the_losses_of_one(split: str, tmp_path: Path) -> None:
    """The devices of both processes hold parts of the same rows, unless the batch is sharded over them."""
    config = {
        "model": {"family": "llama", "preset": "tiny", "layers": 1, "embed": 32, "heads": 8, "kv_heads": 8}
        | {"head_dim": 8, "mlp": 64},
        "layout": str(LAYOUT.parent / "4d.yaml"),
        "mesh": {"data": 1, "context": 1, "model": 1, "pipeline": 1, **SPLITS[split]},
        "cpu_devices": 8,
        "data": {"source": "synthetic", "batch": 4, "seq": 32},
        "train": {"steps": 2, "eval_every": 2, "eval_batches": 1},
    }
    run = TrainProcess(tmp_path / "two", config, "--processes", "2")
    assert main(["train", str(run.config), f"--set=output={tmp_path}/one"]) == 0
    assert run.process.wait(timeout=240) == 0, run.screen()
    records = [json.loads(line) for line in (tmp_path / "one/metrics.jsonl").read_text().splitlines()]
    alone = {record["step"]: record["loss"] for record in records if "loss" in record}
    assert run.losses().keys() == alone.keys() == {1, 2}
    np.testing.assert_allclose(list(run.losses().values()), list(alone.values()), rtol=1e-5)


def work(address: str, rank: str, folder: str, model: str) -> None:
    jax.distributed.initialize(address, 2, int(rank), coordinator_bind_address=address)
    hosts = np.vectorize(lambda device: device.process_index)(jp.Layout.from_yaml(LAYOUT).mesh.devices)
    along = {axis: len(set(_line(hosts, i))) for axis, i in (("data", 2), ("model", 6))}
    (Path(folder) / f"{rank}.json").write_text(
        json.dumps({"losses": losses(model), **{f"hosts_along_{axis}": count for axis, count in along.items()}})
    )


def _line(hosts: np.ndarray, axis: int) -> list[int]:
    """Returns the hosts along one mesh axis, from the first device."""
    return list(hosts[tuple(slice(None) if i == axis else 0 for i in range(hosts.ndim))])


if __name__ == "__main__":
    work(*sys.argv[1:])
