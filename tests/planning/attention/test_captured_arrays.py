"""Attention whose mask is an array that the model captures, inside of calls, loops, branches and derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxpar as jp
from jaxpar.utils.contexts import attention_observer
from tests.covers import covering
from tests.one_step import SGD, initial
from tests.planning.names import models

SEQ, HEADS, HEAD, EMBED = 16, 4, 8, 32
MASK, PLACES, SCALE = np.tril(np.ones((SEQ, SEQ), bool)), np.arange(SEQ), jnp.float32(HEAD**-0.5)
KEY = jax.random.key(3)
Layer = Callable[..., Any]


def layer(x: Any, w: Any, mask: Callable[[], Any] = lambda: MASK) -> Any:
    """Attention with a captured mask, scale and key."""
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, w[name]) for name in "qkv")
    scores = jnp.where(mask(), jnp.einsum("bqhd,bkhd->bhqk", q, k) * SCALE, -1e30)
    o = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return x + jnp.einsum("bqhd,hde->bqe", o, w["o"]) + jax.random.normal(KEY, x.shape)


def own_derivative(f: Layer) -> Layer:
    g = jax.custom_vjp(f)
    g.defvjp(lambda *args: jax.vjp(f, *args), lambda back, cotangent: back(cotangent))
    return g


CALLS: dict[str, Callable[[Layer], Layer]] = {
    "as it is": lambda f: f,
    "jit": jax.jit,
    "jit in jit": lambda f: jax.jit(lambda *args: jax.jit(f)(*args)),
    "recomputed": jax.checkpoint,
    "jit, recomputed": lambda f: jax.checkpoint(jax.jit(f)),
    "recomputed, jit": lambda f: jax.jit(jax.checkpoint(f)),
    "scan": lambda f: lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, None, length=2)[0],
    "jit in a scan": lambda f: lambda x, w: lax.scan(lambda c, _: (jax.jit(f)(c, w), None), x, None, length=2)[0],
    "jit in a recomputed scan": lambda f: (
        lambda x, w: lax.scan(jax.checkpoint(lambda c, _: (jax.jit(f)(c, w), None)), x, None, length=2)[0]
    ),
    "branch": lambda f: lambda x, w: lax.cond(x.sum() > -1e9, f, lambda x, w: x, x, w),
    "jit in a branch": lambda f: lambda x, w: lax.cond(x.sum() > -1e9, jax.jit(f), lambda x, w: x, x, w),
    "jit under vmap": lambda f: lambda x, w: jax.vmap(lambda row: jax.jit(f)(row[None], w)[0])(x),
}
LOOPS: dict[str, Callable[[Layer], Layer]] = {
    "while": lambda f: lambda x, w: lax.while_loop(lambda c: c.sum() < -1e9, lambda c: f(c, w), x),
    "jit in while": lambda f: lambda x, w: lax.while_loop(lambda c: c.sum() < -1e9, lambda c: jax.jit(f)(c, w), x),
}
"""They have no reverse derivative."""
MASKS: dict[str, Callable[[], Any]] = {
    "array": lambda: MASK,
    "jax array": lambda: CAPTURED,
    "positions": lambda: PLACES[:, None] >= jnp.asarray(PLACES),
}
CAPTURED = jnp.asarray(MASK)


def case(f: Layer) -> models.Case:
    shapes = {name: (EMBED, HEADS, HEAD) for name in "qkv"} | {"o": (HEADS, HEAD, EMBED), "up": (EMBED, EMBED)}
    loss = lambda p, batch: jnp.square(f(batch["x"] @ p["up"], p)).mean()
    return models.weights(**shapes), loss, {"x": models.floats(8, SEQ, EMBED)}


@pytest.mark.parametrize(("call", "mask"), covering(CALLS | LOOPS, MASKS, keep=14))
def test_a_captured_mask_is_known(call: str, mask: str) -> None:
    f = (CALLS | LOOPS)[call](lambda x, w: layer(x, w, MASKS[mask]))
    (site,) = jp.annotate(*case(f)).attention
    assert (site.text, site.reason) == ("16 queries, 16 keys, 4 heads, causal", "")


@pytest.mark.slow
@pytest.mark.parametrize("call", covering(sorted(CALLS, key=lambda call: call != "jit in a scan"), keep=1, strength=1))
def test_it_computes_what_one_device_computes(call: str) -> None:
    make_model, loss_fn, shapes = case(CALLS[call](layer))
    annotation = jp.annotate(make_model, loss_fn, shapes)
    rules = dict.fromkeys(annotation.names) | {"batch": "data", "seq": "context"}
    layout = jp.Layout(jp.MeshSpec(data=2, context=4).build(), jp.Rules(**rules))
    batch = {"x": np.random.default_rng(0).normal(size=(8, SEQ, EMBED)).astype("float32")}
    outcomes, choices = [], []
    for here, loss in ((layout.on_one_device(), loss_fn), (layout, annotation.loss_fn)):
        abstract = jp.abstract_state(here, annotation.make_model, SGD)
        with attention_observer(lambda *_, here=here: choices.append(here)):
            step = jp.train_step(here, loss, return_grads=True, donate=False).lower(abstract, batch).compile()
        _, metrics = step(initial(abstract, annotation.make_model, layout.rules), batch)
        outcomes.append({"loss": metrics["loss"], **metrics["grads"]})
    assert set(choices) == {layout}
    for name, right in outcomes[0].items():
        np.testing.assert_allclose(np.asarray(outcomes[1][name]), np.asarray(right), rtol=1e-5, atol=1e-6, err_msg=name)


def test_attention_in_a_function_with_its_own_derivative_is_reported() -> None:
    (site,) = jp.annotate(*case(own_derivative(lambda x, w: layer(x, w)))).attention
    assert site.attention is None
    assert site.reason == "it is in a function with a derivative of its own, which runs as it is"


def test_attention_across_a_function_with_shardings_is_left_with_the_reason() -> None:
    mesh = jp.MeshSpec(data=8).build()
    replicated = jax.NamedSharding(mesh, jax.P())
    hide = jax.jit(lambda scores: jnp.where(MASK, scores, -1e30), out_shardings=replicated)

    def f(x: Any, w: Any) -> Any:
        q, k = (jnp.einsum("bse,ehd->bshd", x, w[name]) for name in "qk")
        weights = jax.nn.softmax(hide(jnp.einsum("bqhd,bkhd->bhqk", q, k)))
        return jnp.einsum("bhqk,bkhd,hde->bqe", weights, q, w["o"])

    (site,) = jp.annotate(*case(f)).attention
    assert site.reason == (
        "its scores go through the jitted function '<lambda>', which has shardings or compiler options of its own"
    )
