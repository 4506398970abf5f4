"""Programs with their calls written out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar as jp
from jaxpar.utils.jaxprs import inlined

CALLS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "in_shardings": {"in_shardings": PartitionSpec("data")},
    "out_shardings": {"out_shardings": PartitionSpec("data")},
}


@pytest.mark.parametrize("inside", ["the program", "a scan"])
@pytest.mark.parametrize("words", CALLS)
def test_a_call_that_means_more_than_its_equations_stays(words: str, inside: str) -> None:
    mesh = jp.MeshSpec(data=-1).build()
    placed = lambda x: NamedSharding(mesh, x) if isinstance(x, PartitionSpec) else x
    call = jax.jit(jnp.sin, **{key: placed(value) for key, value in CALLS[words].items()})
    scan = lambda x: jax.lax.scan(lambda carry, _: (call(carry), None), x, None, length=2)[0]
    jaxpr = inlined(jax.make_jaxpr(call if inside == "the program" else scan)(jnp.ones(8)).jaxpr)
    (eqn,) = jaxpr.eqns
    if inside == "a scan":
        (eqn,) = eqn.params["jaxpr"].eqns
    assert eqn.primitive.name == ("sin" if words == "nothing" else "jit")
