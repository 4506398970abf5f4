"""Numbers in the names of scopes are read as they were written."""

from __future__ import annotations

import re
from fractions import Fraction

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.utils.scope_facts import (
    expected_rows,
    expected_rows_in,
    matmul_flops_in,
    matmul_flops_scope,
    trip_count_in,
    trip_count_scope,
)

NUMBERS = st.integers(0, 2**80)
SCOPES = st.sampled_from(["jit(step)", "own_layers", "shard_map", "body", "tiles", "transpose(jvp())", "while"])
PATHS = st.lists(SCOPES, max_size=3)
LOOPS = st.tuples(NUMBERS, st.none() | st.integers(1, 2**80))


@given(PATHS, st.lists(LOOPS, min_size=1, max_size=3), PATHS)
def test_the_trip_count_of_the_innermost_loop_is_read(
    before: list[str], loops: list[tuple[int, int | None]], after: list[str]
) -> None:
    op_name = "/".join([*before, *(trip_count_scope(*loop) for loop in loops), *after, "while"])
    count, rounds = loops[-1]
    assert trip_count_in(op_name) == Fraction(count, rounds or 1)
    assert matmul_flops_in(op_name) is None


@given(PATHS, NUMBERS, st.none() | NUMBERS, PATHS)
def test_the_flops_of_a_kernel_are_read(
    before: list[str], forward: int, gradient: int | None, after: list[str]
) -> None:
    op_name = "/".join([*before, matmul_flops_scope(forward, gradient), *after, "pallas_call"])
    assert matmul_flops_in(op_name) == (forward, forward if gradient is None else gradient)
    assert trip_count_in(op_name) is None


@given(PATHS)
def test_other_names_state_nothing(path: list[str]) -> None:
    assert trip_count_in("/".join(path)) is None and matmul_flops_in("/".join(path)) is None
    assert expected_rows_in("/".join(path)) is None


def test_gradients_and_recomputed_layers_keep_the_expected_rows() -> None:
    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        with expected_rows(9), expected_rows(4):
            return jnp.tanh(jax.lax.ragged_dot(x, w, jnp.array([1, 3]))), None

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(layer, x, w)[0].sum()

    lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(jnp.ones((8, 16)), jnp.ones((3, 2, 16, 16)))
    names = re.findall(r'loc\("([^"]*ragged_dot[^"]*)"', lowered.as_text(debug_info=True))
    assert any("transpose(" in name for name in names) and any("rematted" in name for name in names), names
    assert {expected_rows_in(name) for name in names} == {4}
