"""``ringattention`` 0.1.2, forward and backward on 8 simulated devices: the peer of ``cpu_time.py``.

``cpu_time.py`` runs it in an environment that has ``ringattention``. It prints temporary bytes, and the largest errors
of the output and of each gradient against those in the file. For each line on standard input it runs once more and
prints the CPU seconds.
"""

from __future__ import annotations

import json
import sys
import time
import types
from functools import partial

import jax
import numpy as np
from jax.extend import backend
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# ringattention looks up the backend where old versions of jax had it.
jax.lib.xla_bridge = types.SimpleNamespace(get_backend=backend.get_backend)  # type: ignore[attr-defined]
from ringattention import ringattention_jax  # type: ignore[import-not-found, unused-ignore]


def main(file: str, block: int) -> None:
    given = np.load(file)
    mesh = Mesh(np.array(jax.devices()), ("context",))
    place = NamedSharding(mesh, P(None, "context"))
    blocks = {
        "causal_block_size": 1,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "query_chunk_size": block,
        "key_chunk_size": block,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "dtype": np.float32,
        "precision": None,
        "prevent_cse": True,
    }
    ring = partial(
        ringattention_jax,
        attn_bias=None,
        segment_ids=None,
        cache_idx=None,
        axis_name="context",
        float32_logits=True,
        blockwise_kwargs=blocks,
    )
    spec = P(None, "context")
    mapped = jax.shard_map(lambda q, k, v: ring(q, k, v), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        o, back = jax.vjp(mapped, q, k, v)
        return (o, *back(g))

    x = [jax.device_put(given[name], place) for name in "qkvg"]
    compiled = jax.jit(both).lower(*x).compile()
    found = jax.block_until_ready(compiled(*x))
    errors = [
        float(np.abs(np.asarray(a) - b).max() / np.abs(b).max()) for a, b in zip(found, given["want"], strict=True)
    ]
    memory = compiled.memory_analysis()
    assert memory is not None
    temp = memory.temp_size_in_bytes
    print(json.dumps({"temp": temp, "errors": errors}), flush=True)
    for _ in sys.stdin:
        start = time.process_time()
        jax.block_until_ready(compiled(*x))
        print(json.dumps({"seconds": time.process_time() - start}), flush=True)


main(sys.argv[1], int(sys.argv[2]))
