"""Split backward passes: the halves keep the least, repeat no product, and give the gradients of the full pass."""

import itertools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import JaxprEqn, Var
from one_step import LLAMA_RULES
from profiles import examples

import jaxpar as jp
from jaxpar.models.llama import Llama, LlamaConfig
from jaxpar.models.llama.layers import rope_table
from jaxpar.models.llama.pipeline import staged_next_token_loss
from jaxpar.parallel.pipeline.executor.min_cut import least_kept
from jaxpar.parallel.pipeline.executor.split_backward import Halves, halves
from jaxpar.parallel.pipeline.executor.stage import Chunk

N = 4


def products(equations: Any) -> int:
    return sum(e.primitive.name == "dot_general" for e in equations)


def behind(equations: list[JaxprEqn], wanted: list[Any]) -> list[JaxprEqn]:
    """The equations that compute these values."""
    needed, found = {v for v in wanted if isinstance(v, Var)}, []
    for e in reversed(equations):
        if needed & {*e.outvars}:
            found.append(e)
            needed |= {v for v in e.invars if isinstance(v, Var)}
    return found


def size(v: Any) -> int:
    return math.prod(v.aval.shape) * v.aval.dtype.itemsize


def random_pull(draw: Any) -> Any:
    """A random program of two weights, residuals and a cotangent: sums, products, sines and row sums."""
    steps = draw(
        st.lists(st.tuples(st.sampled_from("+*@sr"), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=7)
    )
    which = draw(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)))

    def pull(weights: Any, kept: list[jax.Array], side: Any, cotangent: jax.Array) -> tuple[Any, jax.Array]:
        values = [*kept, cotangent, weights["a"]]
        for kind, i, j in steps:
            x, y = values[i % len(values)], values[j % len(values)]
            one = {
                "+": lambda x, y: x + y,
                "*": lambda x, y: x * y,
                "@": lambda x, y: x @ y,
                "s": lambda x, y: jnp.sin(x),
            }
            values.append(one[kind](x, y) if kind in one else jnp.broadcast_to(x.sum(0), x.shape))
        found = [values[-1 - i % (len(steps) + 1)] for i in which]
        return {"a": found[0], "b": found[1].sum(0)}, found[2]

    return pull


def least_by_trying(one: Halves, early: list[JaxprEqn]) -> float:
    """Bytes of the smallest set of values from which the second half can run, found by exhaustive search."""
    jaxpr, some = one.closed.jaxpr, one.sizes[0]
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    free, first = {*jaxpr.constvars, *jaxpr.invars[:some]}, set(map(id, early))
    dear = lambda e: e.primitive.name == "dot_general"

    def possible(saved: set[Var]) -> bool:
        """Whether the first half makes these values, the second all gradients, and neither repeats a product."""

        def first_makes(v: Any) -> bool:
            if not isinstance(v, Var) or v not in made:
                return True
            return (id(made[v]) in first or not dear(made[v])) and all(map(first_makes, made[v].invars))

        def second_makes(v: Any) -> bool:
            if not isinstance(v, Var) or v in free or v in saved:
                return True
            if v not in made or (dear(made[v]) and id(made[v]) in first):
                return False
            return all(map(second_makes, made[v].invars))

        return all(map(first_makes, saved)) and all(map(second_makes, jaxpr.outvars[:-1]))

    candidates = [*jaxpr.invars[some:], *made]
    sets = itertools.chain.from_iterable(itertools.combinations(candidates, n) for n in range(5))
    return min((sum(map(size, saved)) for saved in sets if possible(set(saved))), default=math.inf)


@examples(20)
@given(st.data())
def test_the_least_is_kept(data: st.DataObject) -> None:
    pull, keys = random_pull(data.draw), jax.random.split(jax.random.key(0), 5)
    weights = {"a": jax.random.normal(keys[0], (N, N)), "b": jnp.zeros(N)}
    kept, cotangent = [jax.random.normal(key, (N, N)) for key in keys[1:3]], jax.random.normal(keys[3], (N, N))
    one = halves(pull, weights, kept, None, cotangent)
    jaxpr = one.closed.jaxpr
    assert products(one.first) + products(one.second) == products(behind(jaxpr.eqns, jaxpr.outvars))
    before, found = one.inputs(weights, kept, None, cotangent)
    grads = one.weights(weights, None, found)
    wanted, exact = pull(weights, kept, None, cotangent)
    np.testing.assert_allclose(before, exact, rtol=1e-5)
    chex.assert_trees_all_close(grads, wanted, rtol=1e-5)

    early = behind(jaxpr.eqns, jaxpr.outvars[-1:])
    assert sum(map(size, one.between)) <= least_by_trying(one, early)


def test_what_is_free_is_not_kept() -> None:
    jaxpr = jax.make_jaxpr(lambda w, x: (jnp.sin(w), x @ jnp.sin(w)))(jnp.ones((N, N)), jnp.ones((N, N))).jaxpr
    assert least_kept(jaxpr, {jaxpr.invars[0]}, [jaxpr.outvars[0]], jaxpr.eqns) == []
    assert least_kept(jaxpr, set(), [jaxpr.outvars[0]], jaxpr.eqns) == [
        jaxpr.outvars[0]
    ]  # of equal candidates, the last


@pytest.mark.slow
def test_a_llamas_layer_keeps_the_inputs_of_its_products_and_their_cotangents() -> None:
    """Of the 24 numbers per token and embedding dim in the layer's backward, 14 are kept.

    They belong to q, k and v, to gate and up, to the output and to down.
    """
    config = LlamaConfig(
        vocab=16, embed=32, mlp=64, layers=1, heads=4, kv_heads=4, head_dim=8, dtype="bfloat16", remat="full"
    )
    loss = staged_next_token_loss(config)
    graph, state = nnx.split(Llama(config, rngs=nnx.Rngs(0)).blocks)
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16)[None], state)
    x, positions = jnp.ones((2, 16, 32), jnp.bfloat16), jnp.broadcast_to(jnp.arange(16), (2, 16))
    side = rope_table(positions, config), None, None
    with jp.Layout(jp.MeshSpec(data=1).build(jax.devices()[:1]), LLAMA_RULES):
        chunk = Chunk(
            lambda w, x, side: loss.layer(nnx.merge(graph, w), x, side), weights, jnp.asarray(0), jnp.asarray(1)
        )
        one = chunk.halves(side, chunk.kept(x, side)[1], x)
    kept = sum(math.prod(s.shape) * s.dtype.itemsize for s in one.shapes)
    rows = 2 * 32 * 2  # the scales of two norms
    assert kept == 14 * x.nbytes + rows
    jaxpr = one.closed.jaxpr
    assert products(one.first) + products(one.second) == products(behind(jaxpr.eqns, jaxpr.outvars))
