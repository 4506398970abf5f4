"""Tests that attention is recognised as public models write it, and that it computes the same as ``jp.attention``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.extend.core import jaxpr_as_fun

import jaxpar as jp
from jaxpar.planning.attention.attention import FoundAttention
from jaxpar.planning.attention.find import find
from jaxpar.planning.attention.run import attend
from jaxpar.planning.names.attention_sites import known_constants
from jaxpar.utils.contexts import attention_observer
from jaxpar.utils.jaxprs import inlined, opened
from tests.covers import covering
from tests.one_step import SGD, initial
from tests.planning.attention import styles
from tests.profiles import few

Q_DIMS, KV_DIMS = ("batch", "seq", "heads", None), ("batch", "seq", "kv_heads", None)
NAMES = {
    5: ("batch", "seq", "kv_heads", "heads", "head_dim"),
    4: ("batch", "seq", "heads", "head_dim"),
    3: ("batch", "seq", None),
}


def recognised(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Callable[..., jax.Array]]:
    """The attention in a function, described, and the function with ``jp.attention`` in place of it."""
    closed = jax.make_jaxpr(function)(*arguments)
    jaxpr = inlined(opened(closed))
    is_bias = lambda atom: len(atom.aval.shape) == 3 and atom.aval.shape[1] == styles.SEQ and atom.aval.shape[2] > 11
    reader = find(jaxpr, lambda atom: not is_bias(atom), known_constants(closed))
    (weighted,) = reader.found
    names = lambda var: NAMES[len(var.aval.shape)]
    attention = FoundAttention.of(weighted, reader, names)

    def replaced(*args: jax.Array) -> jax.Array:
        close = lambda jaxpr: closed.replace(jaxpr=jaxpr) if opened(closed) is not closed else jaxpr
        before = close(jaxpr.replace(outvars=list(attention.variables())))
        o = attend(attention, Q_DIMS, KV_DIMS)(*jaxpr_as_fun(before)(*args))
        at = next(i for i, eqn in enumerate(jaxpr.eqns) if eqn is attention.eqn)
        rest = jaxpr.replace(invars=[*jaxpr.invars, *attention.eqn.outvars], eqns=jaxpr.eqns[at + 1 :])
        (result,) = jaxpr_as_fun(close(rest))(*args, o)
        return result

    return attention.describe(), replaced


@pytest.mark.parametrize("style", styles.STYLES)
def test_it_is_recognised(style: str) -> None:
    function, description, options = styles.STYLES[style]
    assert recognised(function, styles.arrays(**options))[0] == description


@pytest.mark.parametrize("style", ["grouped", list(styles.STYLES)[13]])
def test_it_computes_the_same(style: str) -> None:
    """Below, every style computes the same on devices, among them that of a sequence that is not sharded."""
    function, _, options = styles.STYLES[style]
    *floats, lengths = styles.arrays(**options)
    _, replaced = recognised(function, (*floats, lengths))
    cotangent = jnp.cos(jnp.arange(function(*floats, lengths).size).reshape(function(*floats, lengths).shape))
    with jp.unsharded():
        results = [
            jax.jit(jax.value_and_grad(lambda *x, f=f: (f(*x, lengths) * cotangent).sum(), (0, 1, 2, 3)))(*floats)
            for f in (function, replaced)
        ]
    for right, own in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(np.asarray(own), np.asarray(right), rtol=1e-5, atol=1e-5)


# jax.nn's own attention computes in fp32.
BIASED = [style for style, (_, text, _) in styles.STYLES.items() if "bias" in text and not style.startswith("jax.nn")]


@pytest.mark.parametrize("style", few(BIASED, keep=1))
def test_a_bias_in_fp64_is_not_rounded(style: str) -> None:
    function, _, options = styles.STYLES[style]
    with jax.enable_x64(True), jp.unsharded():
        *floats, lengths = styles.arrays(**options)
        floats = [x.astype("float64") for x in floats]
        _, replaced = recognised(function, (*floats, lengths))
        right, result = jax.jit(lambda *x: [f(*x, lengths) for f in (function, replaced)])(*floats)
    np.testing.assert_allclose(np.asarray(result), np.asarray(right), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("style", "context"), covering(styles.STYLES, (8, 4), keep=0, strength=1))
def test_a_sharded_sequence_computes_what_one_device_computes(style: str, context: int) -> None:
    """Among 8 devices 4 heads cannot be exchanged: keys and values go around a ring."""
    function, _, options = styles.STYLES[style]
    q, k, v, bias, lengths = styles.arrays(**options)

    def make_model(key: jax.Array) -> Any:
        shapes = {"q": (6, *q.shape[2:]), "k": (6, *k.shape[2:]), "v": (6, *v.shape[2:])}
        return {name: 0.3 * jax.random.normal(key, shape) for name, shape in shapes.items()} | {"bias": bias}

    def loss_fn(p: Any, batch: Any) -> jax.Array:
        x = [jnp.einsum("bse,ehd->bshd", batch[name], p[own]) for name, own in (("x", "q"), ("y", "k"), ("y", "v"))]
        return jnp.sin(function(*x, p["bias"], batch["lengths"])).mean()

    inputs = [jax.random.normal(jax.random.key(5 + i), (styles.BATCH, x.shape[1], 6)) for i, x in enumerate((q, k))]
    batch = {"x": inputs[0], "y": inputs[1], "lengths": lengths}
    annotation = jp.annotate(make_model, loss_fn, batch)
    (site,) = annotation.attention
    assert site.q_dims[1] is not None and site.kv_dims[1] is not None
    rules = dict.fromkeys(annotation.names) | {"batch": "data", site.q_dims[1]: "context", site.kv_dims[1]: "context"}
    layout = jp.Layout(jp.MeshSpec(data=8 // context, context=context).build(), jp.Rules(**rules))
    outcomes, choices = [], []
    for here, loss in ((layout.on_one_device(), loss_fn), (layout, annotation.loss_fn)):
        abstract = jp.abstract_state(here, annotation.make_model, SGD)
        with attention_observer(lambda *_, here=here: choices.append(here)):
            step = jp.train_step(here, loss, return_grads=True, donate=False).lower(abstract, batch).compile()
        _, metrics = step(initial(abstract, annotation.make_model, layout.rules), batch)
        outcomes.append({"loss": metrics["loss"], **metrics["grads"]})
    assert choices and layout.on_one_device() not in choices
    for name, right in outcomes[0].items():
        np.testing.assert_allclose(np.asarray(outcomes[1][name]), np.asarray(right), rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_mask_made_before_the_layers_is_known_in_scanned_and_recomputed_ones() -> None:
    mask = nn.make_causal_mask(jnp.ones((1, styles.SEQ)))

    def loss_fn(p: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return x + nn.dot_product_attention(x @ w, x, x, mask=mask), None

        x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], p["layers"])
        return jnp.square(jax.checkpoint(layer)(x, p["last"])[0]).mean()

    make_model = lambda key: {"layers": jax.random.normal(key, (3, 8, 8)), "last": jnp.ones((8, 8))}
    shape = jax.ShapeDtypeStruct((styles.BATCH, styles.SEQ, styles.HEADS, 8), "float32")
    annotation = jp.annotate(make_model, loss_fn, {"x": shape})
    text = "24 queries, 24 keys, 4 heads, causal"
    assert sorted((site.text, site.count) for site in annotation.attention) == [(text, 1), (text, 3)]
