"""The compiler's rematerialization warnings: real ones, in both spellings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from jaxpar.analysis.compile.ahead_of_time import warnings_in
from jaxpar.analysis.compile.warnings import rematerialised
from jaxpar.analysis.hlo.parser import parse

PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxpar as jp
from jaxpar.utils.simulate_devices import simulate_devices

simulate_devices(8)
mesh = jp.MeshSpec(replica=2, data=2, model=2).build()

def f(x):
    y = jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P("replica")))
    return jax.lax.with_sharding_constraint(jnp.cos(y), NamedSharding(mesh, P(None, ("data", "replica"))))

x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P("replica")))
print(jax.jit(f).lower(x).compile().as_text())
"""


def test_a_real_warning_names_tensor_annotations_and_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PROGRAM)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True, check=True)
    (warning,) = warnings_in(run.stderr)
    found = rematerialised(warning, parse(run.stdout))
    assert found is not None
    assert (found.tensor, found.bytes) == ("f32[64,32]", 4 * 64 * 32)
    assert (found.before, found.after) == ("replica, ·", "·, data+replica")
    line = PROGRAM.splitlines().index(next(text for text in PROGRAM.splitlines() if "jnp.sin" in text)) + 1
    assert found.source == f"f (mine.py:{line})" and found.op_name == "jit(f)/sharding_constraint"


OLD = (
    "2025-04-14 17:55:24.092274: E external/xla/xla/service/spmd/spmd_partitioner.cc:621] [spmd] Involuntary full "
    "rematerialization. The compiler was not able to go from sharding {devices=[2,1,4]<=[8] "
    "last_tile_dim_replicate} to {devices=[1,8]<=[8]} without doing a full rematerialization of the tensor for HLO "
    "operation: %pad = f64[96,8]{0} pad(%broadcast.690, %constant), padding=8_7. You probably want to enrich the "
    "sharding annotations."
)


def test_the_older_spelling_is_read_and_its_layouts_are_quoted() -> None:
    (warning,) = warnings_in(f"noise\n{OLD}\n{OLD}\nmore")
    found = rematerialised(warning)
    assert found is not None
    assert (found.tensor, found.bytes, found.source, found.op_name) == ("f64[192,8]", 8 * 192 * 8, "", "")
    assert found.before == "{devices=[2,1,4]<=[8] last_tile_dim_replicate}" and found.after == "{devices=[1,8]<=[8]}"


def test_parts_of_axes_and_tuples() -> None:
    words = (
        "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {} to {} efficiently "
        "for HLO operation {}"
    )
    part = words.format(
        "{mesh['a'=4,'b'=2], [{'a':(1)2}, {'b'}]}", "{mesh['a'=4,'b'=2], [{?}, {'a'}]}", "%x = bf16[8,8]{1,0} copy(%y)"
    )
    found = rematerialised(part)
    assert found is not None and (found.tensor, found.before, found.after) == ("bf16[16,16]", "a, b", "·, a")
    several = rematerialised(
        words.format("{maximal device=0}", "{replicated}", "%x = (f32[8], f32[8]) custom-call(%y)")
    )
    assert several is not None and (several.tensor, several.bytes, several.before) == (
        "a tensor",
        0,
        "{maximal device=0}",
    )
    assert rematerialised("Collective matmul V1 is enabled.") is None
