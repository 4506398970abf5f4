"""``MayShard`` against the compiler: it names every axis that shards a result which nobody constrains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.parallel.partitioner.shards import MayShard

NHWC = ("NHWC", "HWIO", "NHWC")
X, Y, XY = P("x"), P(None, "y"), P("x", "y")
OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], tuple[P, ...]]] = {
    "elementwise": (lambda a, b: jnp.sin(a) * b, ((8, 8), (8, 8)), (X, Y)),
    "broadcast": (lambda a, b: a + b[:, None], ((8, 8), (8,)), (Y, X)),
    "matmul": (jnp.matmul, ((8, 8), (8, 8)), (X, Y)),
    "batched matmul": (lambda a, b: jnp.einsum("bij,bkj->bik", a, b), ((4, 8, 8), (4, 6, 8)), (XY, X)),
    "transpose": (jnp.transpose, ((8, 4),), (XY,)),
    "sum": (lambda a: a.sum(1), ((8, 4, 6),), (P("x", None, "y"),)),
    "argmax": (lambda a: jnp.argmax(a, 0), ((4, 8, 6),), (P(None, "x", "y"),)),
    "flatten": (lambda a: a.reshape(32, 6), ((4, 8, 6),), (P("x", None, "y"),)),
    "split dim": (lambda a: a.reshape(4, 2, 8), ((8, 8),), (XY,)),
    "squeeze": (lambda a: a[:, 0] * 2, ((8, 1, 4),), (P("x", None, "y"),)),
    "slice": (lambda a: a[:, 1:5] * 2, ((8, 8),), (XY,)),
    "concatenate": (lambda a, b: jnp.concatenate([a, b], 1), ((8, 4), (8, 4)), (X, XY)),
    "pad": (lambda a: jnp.pad(a, ((0, 0), (1, 1))), ((8, 6),), (XY,)),
    "rev": (lambda a: a[::-1], ((8, 8),), (XY,)),
    "cumsum": (lambda a: jnp.cumsum(a, 1), ((8, 8),), (XY,)),
    "sort": (lambda a: jnp.sort(a, 1), ((8, 8),), (XY,)),
    "top_k": (lambda a: lax.top_k(a, 2)[0], ((8, 8),), (X,)),
    "lookup": (lambda a, i: a[i], ((16, 8), (8, 4)), (Y, X)),
    "one_hot": (lambda i: jax.nn.one_hot(i, 8), ((8, 4),), (XY,)),
    "take_along": (lambda a, i: jnp.take_along_axis(a, i, 1), ((8, 8), (8, 2)), (X, X)),
    "scatter": (lambda a, i, u: a.at[i].add(u), ((8, 8), (4,), (4, 8)), (Y, P(), Y)),
    "conv": (lambda a, w: lax.conv_general_dilated(a, w, (1, 1), "SAME", dimension_numbers=NHWC),
             ((4, 8, 8, 4), (3, 3, 4, 8)), (P("x", "y"), P())),
    "strided conv": (lambda a, w: lax.conv_general_dilated(a, w, (2, 2), "SAME", dimension_numbers=NHWC),
                     ((4, 8, 8, 4), (3, 3, 4, 8)), (P("x"), P(None, None, None, "y"))),
    "pool": (lambda a: lax.reduce_window(a, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
             ((4, 8, 8, 4),), (XY,)),
    "scan": (lambda a: lax.scan(lambda c, x: (c + x, c * x), a[0], a), ((4, 8, 8),), (P(None, "x", "y"),)),
    "while": (lambda a: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, a))[1],
              ((8, 8),), (XY,)),
    "cond": (lambda a: lax.cond(a[0, 0] > 0, jnp.sin, jnp.cos, a), ((8, 8),), (XY,)),
    "remat": (jax.grad(lambda a: jax.checkpoint(lambda x: (jnp.sin(x) ** 2).sum())(a)), ((8, 8),), (XY,)),
    "vmap": (jax.vmap(lambda a, b: a @ b), ((4, 8, 8), (4, 8)), (XY, X)),
    "shard_map": (lambda a: jax.shard_map(lambda b: b * 2, in_specs=X, out_specs=X, axis_names={"x"})(a),
                  ((8, 8),), (Y,)),
    "constraint": (lambda a: jnp.sin(lax.with_sharding_constraint(
        a, NamedSharding(jax.sharding.get_abstract_mesh(), P(P.UNCONSTRAINED, "y")))), ((8, 8),), (X,)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_compiler_shards_by_no_other_axis(name: str) -> None:
    run, shapes, specs = OPERATIONS[name]
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    integers = {"lookup": [1], "one_hot": [0], "take_along": [1], "scatter": [1]}.get(name, [])
    args = [
        jnp.zeros(shape, jnp.int32 if i in integers else jnp.float32, device=NamedSharding(mesh, spec))
        for i, (shape, spec) in enumerate(zip(shapes, specs, strict=True))
    ]
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(run)(*args).jaxpr
        results = jax.tree.leaves(jax.jit(run).lower(*args).compile().output_shardings)
    may, sharded = MayShard(jaxpr, specs), False
    for var, sharding in zip(jaxpr.outvars, results, strict=True):
        for dim, entry in enumerate(sharding.spec):
            axes = {entry} if isinstance(entry, str) else set(entry or ())
            assert axes <= {axis for one in may.axes(var, dim) for axis in one}, (dim, axes)
            sharded |= bool(axes)
    assert sharded, "the compiler shards nothing, so the case shows nothing"


def test_a_constraint_ends_what_it_does_not_leave_free() -> None:
    """Of a constraint that makes a dim whole, the result is whole, and what comes before stays as it is."""
    mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def run(a: jax.Array) -> tuple[jax.Array, jax.Array]:
        b = jnp.sin(a)
        return b, jnp.cos(lax.with_sharding_constraint(b, NamedSharding(mesh, P(None, "y"))))

    jaxpr = jax.make_jaxpr(run)(jnp.zeros((8, 8))).jaxpr
    may = MayShard(jaxpr, [X])
    before, after = jaxpr.outvars
    assert [may.axes(before, dim) for dim in range(2)] == [{("x",)}, {("y",)}]
    assert [may.axes(after, dim) for dim in range(2)] == [set(), {("y",)}]
