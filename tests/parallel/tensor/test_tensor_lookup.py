"""Embedding lookups in two, 2.5 and three dimensions: values and gradients of one device, and what they send."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar as jp
from jaxpar.models.embedding import lookup
from tests.profiles import few

RULES = jp.Rules(batch="data", seq=None, residual_seq=None, embed=None, vocab=None)
TABLE = ("vocab", "embed")
CASES = [
    # kind, mesh, words, tokens of a row, whether the tokens are exchanged
    ("2.5d", {"x": 2, "y": 2, "z": 2}, 44, 3, True),
    ("2.5d", {"x": 2, "y": 2, "z": 2}, 12, 5, False),
    ("2.5d", {"x": 4, "y": 2}, 60, 3, True),
    ("2.5d", {"x": 2, "y": 2, "data": 2}, 44, 3, True),
    ("2d", {"x": 2, "y": 4}, 40, 3, False),
    ("3d", {"x": 2, "y": 2, "z": 2}, 44, 3, False),
]


def results(layout: jp.Layout, table: np.ndarray, tokens: np.ndarray, weights: np.ndarray) -> tuple[Any, Any]:
    """The rows and the gradient of the table; and the compiled program."""

    def run(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(table: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows = lookup(table, tokens, jnp.float32)
            return jnp.sum(rows * weights), rows

        grad, rows = jax.grad(loss, has_aux=True)(table)
        return rows, jp.hint(grad, *TABLE, role="gradients")

    with layout:
        placed = jax.device_put(table, layout.sharding(TABLE, table.shape, role="params"))
        ids = jax.device_put(tokens, layout.sharding(("batch", "seq"), tokens.shape))
        program = jax.jit(run).lower(placed, ids).compile()
        return jax.device_get(program(placed, ids)), program


@pytest.mark.parametrize(("kind", "mesh", "words", "seq", "exchanged"), few(CASES, 1, names=5))
def test_rows_and_gradients_equal_one_device(
    kind: Any, mesh: dict[str, int], words: int, seq: int, exchanged: bool
) -> None:
    random = np.random.default_rng(0)
    table, weights = (random.normal(size=s).astype(np.float32) for s in ((words, 24), (16, seq, 24)))
    tokens = random.integers(0, words, (16, seq))
    tokens[:, 0] = 1  # many tokens of one word
    (want, want_grad), _ = results(jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), RULES), table, tokens, weights)
    layout = jp.Layout(jp.MeshSpec(**mesh).build(), jp.tensor.rules(kind, RULES))
    (rows, grad), program = results(layout, table, tokens, weights)
    assert np.array_equal(rows, want)
    assert np.abs(grad - want_grad).max() <= 1e-6 * np.abs(want_grad).max()
    sent = jp.audit(program, mesh=layout.mesh).wire_bytes(axis="x")
    if kind == "2.5d" and exchanged:
        devices = mesh["x"] * mesh.get("z", 1) * mesh.get("data", 1)
        # Ids, rows and their gradients of the other devices along x.
        assert sent == (mesh["x"] - 1) * 16 * seq // devices * (4 + 2 * 4 * 24 // mesh["y"])
    elif kind == "2.5d":
        assert sent == (mesh["x"] - 1) * 2 * 4 * words * 24 // (mesh["x"] * mesh["y"])  # the table and its gradient
