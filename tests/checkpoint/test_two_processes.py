"""Two real processes recover a step that a kill left without its name, and restore the same step."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from interpreters import outputs_of, two_processes

import jaxpar as jp


@pytest.mark.slow
def test_both_processes_restore_the_same_step(tmp_path: Path) -> None:
    with two_processes(__file__, tmp_path, flags="--xla_force_host_platform_device_count=2") as workers:
        outputs_of(workers, timeout=240)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    run = tmp_path / "run"
    assert results[0]["found"] == results[1]["found"] == [[2, 2.0], [2, 2.0], [1, 1.0]]
    assert results[0]["told"][0] == (
        f"checkpoint: {run}/2 is recovered from 2.unfinished, a complete save that was killed; every byte of it is "
        "intact."
    )
    held = f"{run} is in use by another run (process "
    assert all(one["held"].startswith(f"process 0 of 2: {held}") for one in results)
    for told in (results[0]["told"][1:], results[1]["told"]):
        assert len(told) == 2 and "3.unfinished is incomplete: its save was killed or has not ended." in told[0]
        assert "falling back to step 1" in told[1] and "arrays/w/0, which holds w, was changed after" in told[1]


def work(address: str, rank: str, folder: str) -> None:
    jax.distributed.initialize(address, 2, int(rank), coordinator_bind_address=address)
    run, first = Path(folder) / "run", rank == "0"
    spread = jax.sharding.NamedSharding(jp.MeshSpec(data=-1).build(), jax.sharding.PartitionSpec("data"))
    like = {"w": jax.ShapeDtypeStruct((8,), "float32", sharding=spread)}
    told, found, held = list[str](), [], ""

    def restore() -> None:
        if first:
            time.sleep(1)  # the other process would otherwise list the folder first
        with jp.CheckpointManager(run, tell=told.append) as manager:
            one = manager.restore_latest(like)
            assert one is not None
            found.append([one.step, float(np.asarray(one.state["w"].addressable_shards[0].data)[0])])

    with jp.CheckpointManager(run) as manager:
        for step in (1, 2):
            values = np.full(8, step, np.float32)
            state = {"w": jax.make_array_from_callback((8,), spread, lambda index, values=values: values[index])}
            assert manager.save(step, state) and manager.wait()
        try:
            jp.CheckpointManager(run)
        except jp.errors.CheckpointError as error:
            held = str(error)
    if first:
        os.rename(run / "2", run / "2.unfinished")
    restore()
    if first:
        (run / "3.unfinished").mkdir()
    restore()
    if first:
        (run / "3.unfinished").rmdir()
        (run / "2/arrays/w/0").write_bytes(b"x" * (run / "2/arrays/w/0").stat().st_size)
    restore()
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"found": found, "told": told, "held": held}))


if __name__ == "__main__":
    work(*sys.argv[1:])
