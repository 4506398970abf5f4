"""Tests the embedding lookup under a pipeline: each stage looks up its own columns of the table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar as jp
from jaxpar.models.embedding import lookup

RULES = jp.Rules(
    batch="data",
    seq=None,
    residual_seq="model",
    embed=None,
    vocab=("pipeline", "model"),
    params={"embed": "data"},
)


def test_rows_by_columns_and_the_gradients_of_their_table() -> None:
    layout = jp.Layout(jp.MeshSpec(pipeline=2, data=2, model=2).build(), RULES)
    table, weight = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(16, 8), (4, 12, 8)]))
    tokens = jax.random.randint(jax.random.key(2), (4, 12), 0, 16)
    stored = jax.device_put(table, layout.sharding(("vocab", "embed"), table.shape, role="params"))

    def loss(table: jax.Array) -> Any:
        x = lookup(table, tokens, jnp.float32)
        return jnp.sum(x * weight), x

    with layout:
        compiled = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(stored).compile()
        (_, x), grad = compiled(stored)
    assert "all-to-all" in compiled.as_text() and x.addressable_shards[0].data.shape == (2, 6, 4)
    np.testing.assert_array_equal(x, table[tokens])
    np.testing.assert_allclose(grad, jnp.zeros_like(table).at[tokens].add(weight), rtol=1e-6, atol=1e-6)
