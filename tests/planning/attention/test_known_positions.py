"""Tests that what is known of positions and masks is what the program computes, and that nothing else is claimed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.parallel.attention.mask import Mask
from jaxpar.planning.attention.attention import Masks
from jaxpar.planning.attention.axes import axes_of, size
from jaxpar.planning.attention.find import find
from jaxpar.planning.attention.positions import constant
from jaxpar.planning.attention.values import Conditional, Linear, Value, View
from jaxpar.utils.jaxprs import inlined, opened

ROWS, COLUMNS = 5, 7
SEEN = jnp.array([False, True, True, False, True, True, False])
"""Which columns are seen: data, such as padding."""


def known(function: Callable[..., Any], *args: Any) -> tuple[Value, dict[Any, Any]]:
    """What is known of a function's result, and the arguments by their variables."""
    closed = jax.make_jaxpr(function)(*args)
    jaxpr = inlined(opened(closed))
    return find(jaxpr, lambda atom: False).value(jaxpr.outvars[0]), dict(zip(jaxpr.invars, args, strict=True))


def written_out(value: Value | None, inputs: dict[Any, Any] | None = None) -> np.ndarray:
    """A known value, computed for each element from the numbers of its row and column."""
    assert isinstance(value, Linear | Conditional)
    axes = axes_of(value.dims)
    shape = [axis.size for axis in axes]
    index = dict(zip(axes, np.indices(shape), strict=True))

    def read(x: Linear | View) -> np.ndarray:
        if isinstance(x, Linear):
            return np.broadcast_to(x.constant + sum(index[axis] * f for axis, f in x.factors.items()), shape)
        at = tuple(index[group[0]] if group else 0 for group in x.source_dims)
        return np.broadcast_to(np.asarray((inputs or {})[x.source])[at] != x.negated, shape)

    def holds(x: Linear | View) -> np.ndarray:
        return read(x) if isinstance(x, View) else read(x) >= 0

    seen = read(value) if isinstance(value, Linear) else np.all([holds(x) for x in value.condition], 0)
    result = seen if isinstance(value, Linear) else np.where(seen, value.yes, value.no)
    return result.reshape([size(group) for group in value.dims])


def rows() -> jax.Array:
    return jnp.arange(ROWS)[:, None]


def columns() -> jax.Array:
    return jnp.arange(COLUMNS)


def causal() -> jax.Array:
    return jnp.tril(jnp.ones((ROWS, COLUMNS), bool), 1)


def numbers(seen: Any) -> jax.Array:
    return jnp.where(seen, 0.0, -1e9)


KNOWN: dict[str, Callable[[Any], Any]] = {
    "multiples": lambda seen: 3 * rows() - columns() * 2 + 4,
    "no multiple": lambda seen: rows() * 0 + 2,
    "equal": lambda seen: rows() == columns() - 1,
    "not equal": lambda seen: rows() != columns(),
    "at most, more and less": lambda seen: (rows() <= columns()) & (columns() > 1) & (rows() < 4),
    "one position twice": lambda seen: columns()[:, None] >= columns(),
    "numbers": lambda seen: jnp.full((ROWS, 1), 2.0) ** -3 / jnp.sqrt(4.0) + jnp.exp(jnp.log(jnp.abs(-0.5))),
    "division by zero": lambda seen: jnp.full((ROWS,), -1.0) / jnp.zeros(ROWS),
    "a power of zero": lambda seen: jnp.zeros(ROWS) ** -1,
    "a mask's logarithm": lambda seen: jnp.log(causal().astype(float)),
    "less a mask": lambda seen: 1.0 - causal(),
    "a mask squared": lambda seen: (3.0 * causal()) ** 2,
    "opposite of a mask": lambda seen: ~causal(),
    "masks multiplied": lambda seen: causal().astype(float) * (rows() < columns() + 3),
    "smaller of masks": lambda seen: jnp.minimum(numbers(causal()), numbers(rows() < columns() + 3)),
    "masks of -inf added": lambda seen: jnp.where(causal(), 0, -jnp.inf) + jnp.where(columns() < 4, 0, -jnp.inf),
    "neither of two masks": lambda seen: ~causal() | ~(rows() < columns() + 3),
    "sliced": lambda seen: (rows() - 2 * columns())[1:4, 3:],
    "one row": lambda seen: (rows() - 2 * columns())[3:4, 2:6],
    "sliced mask": lambda seen: causal()[2:, 1:],
    "mask of data, sliced along the other dim": lambda seen: (causal() & seen)[1:3],
    "mask of data": lambda seen: causal() & seen,
    "mask in a mask": lambda seen: jnp.where(causal(), jnp.where(columns() > 1, 2.0, -1e9), -1e9),
    "chosen by a number": lambda seen: jnp.where(jnp.ones((ROWS, COLUMNS), bool), rows() - columns(), 0),
    "not chosen by a number": lambda seen: jnp.where(jnp.zeros((ROWS, COLUMNS), bool), 0, causal()),
    "distances that are no less than 0": lambda seen: jnp.abs(rows() + columns()).astype("uint8"),
}


@pytest.mark.parametrize("case", KNOWN)
def test_it_is_what_the_program_computes(case: str) -> None:
    value, inputs = known(KNOWN[case], SEEN)
    np.testing.assert_array_equal(written_out(value, inputs), np.asarray(KNOWN[case](SEEN)))


UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "distance in both directions": lambda seen: jnp.abs(rows() - columns()) < 3,
    "wraps around": lambda seen: (rows() - columns()).astype("uint8"),
    "rounded": lambda seen: (rows() * 0.5).astype(int),
    "squares": lambda seen: columns() ** 2,
    "halves compared": lambda seen: rows() * 0.5 <= columns(),
    "products of positions": lambda seen: rows() * columns(),
    "larger position": lambda seen: jnp.maximum(rows(), columns()),
    "smaller of numbers that hide": lambda seen: jnp.minimum(numbers(~causal()), numbers(rows() < columns())),
    "larger of numbers that hide": lambda seen: jnp.maximum(numbers(causal()), numbers(rows() < columns())),
    "masks added": lambda seen: numbers(causal()) + numbers(rows() < columns() + 3),
    "mask added to positions": lambda seen: numbers(causal()) + columns(),
    "either mask": lambda seen: causal() | (columns() > 4),
    "one position or another": lambda seen: jnp.where(causal(), rows(), columns()),
    "every second row": lambda seen: (rows() - columns())[::2],
    "part of the data": lambda seen: (causal() & seen)[:, 2:],
    "part of two dims in one": lambda seen: (rows() - columns()).reshape(-1)[3:],
    "two dims in one": lambda seen: (rows() - columns()).reshape(-1) + jnp.arange(ROWS * COLUMNS),
    "columns before rows": lambda seen: jax.lax.reshape(rows() - columns(), (ROWS * COLUMNS,), (1, 0)),
    "running sums": lambda seen: jnp.cumsum(columns()),
    "clamped": lambda seen: jax.lax.clamp(1, jnp.arange(COLUMNS), 3),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_nothing_is_claimed_of(case: str) -> None:
    value, _ = known(UNKNOWN[case], SEEN)
    assert isinstance(value, View)


@pytest.mark.parametrize(
    "x",
    [
        jnp.arange(ROWS) * 3 - 4,
        np.arange(ROWS)[:, None, None],
        jnp.float32(0.5),
        np.tri(ROWS, COLUMNS, 1, dtype=bool)[:, None],
        np.triu(np.tri(ROWS, COLUMNS, 1), -2),
    ],
)
def test_arrays_that_a_program_contains_are_known(x: Any) -> None:
    np.testing.assert_array_equal(written_out(constant(x)), np.asarray(x))


@pytest.mark.parametrize(
    "x",
    [
        jax.random.key(0),
        jnp.zeros((0, COLUMNS)),
        jnp.array([0, 1, 3]),
        jnp.ones(COLUMNS, bool),
        jnp.zeros((ROWS, COLUMNS), bool),
        2 * jnp.ones((ROWS, COLUMNS)),
        jnp.eye(ROWS, COLUMNS).at[0, 3].set(1),
    ],
)
def test_of_other_arrays_nothing_is_known(x: Any) -> None:
    assert constant(x) is None
    assert jax.make_jaxpr(lambda traced: 1 if constant(traced) is None else 2)(jnp.arange(3)).consts == []


@pytest.mark.parametrize("band", [(None, None), (0, None), (0, 2), (-3, None), (None, 1), (-2, 1), (-2, 0)])
def test_the_rule_of_a_band_sees_the_keys_in_it(band: tuple[int | None, int | None]) -> None:
    distance = np.arange(ROWS)[:, None] - np.arange(COLUMNS)
    least, most = band
    expected = (distance >= (-COLUMNS if least is None else least)) & (distance <= (ROWS if most is None else most))
    seen: Any = Masks(band).rule
    assert isinstance(seen, Mask)
    seen = seen.visible(np.arange(ROWS)[:, None], np.arange(COLUMNS))
    np.testing.assert_array_equal(np.broadcast_to(np.asarray(seen), expected.shape), expected)
