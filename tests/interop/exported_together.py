"""One of two processes that load a Hugging Face checkpoint, export it together, and load what they exported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np

import jaxpar as jp
from jaxpar.errors import CheckpointError
from jaxpar.interop import huggingface

DIMS = ("norm", "head_dim", "vocab", "layers", "experts", "expert_mlp", "latent", "dense_layers", "kv_heads", "mlp")


def work(address: str, rank: str, source: str, folder: str) -> None:
    """Write the bytes that this process read, and an error that only process 1 has, to a file in ``folder``."""
    jax.distributed.initialize(address, 2, int(rank), coordinator_bind_address=address)
    # `data` is along the processes: each has half of embed, or of the dim whose rotary numbers change their order.
    halved = "head_dim" if "deepseek" in source else "embed"
    rules = jp.Rules(**{**dict.fromkeys((*DIMS, "embed")), "heads": "model", halved: "data"})
    layout = jp.Layout(jp.MeshSpec(data=2, model=2).build(), rules)
    reports: list[huggingface.LoadReport] = []
    config = huggingface.read_config(source)
    params = huggingface.load(layout, source, report=reports.append)
    huggingface.export(f"{folder}/out", params, config, file_bytes=6000)
    again = huggingface.load(layout, f"{folder}/out")
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        for one, other in zip(x.addressable_shards, y.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(one.data), np.asarray(other.data))
    error = ""
    try:
        huggingface.load(layout, f"{folder}/out" if rank == "0" else f"{folder}/none")
    except CheckpointError as caught:
        error = str(caught)
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"read": reports[0].bytes_read, "error": error}))


if __name__ == "__main__":
    work(*sys.argv[1:])
