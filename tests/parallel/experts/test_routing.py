"""Routing of tokens to experts, against a reference in NumPy that loops over tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import examples, few

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.parallel.experts.routing import Router, Routing

MIXTRAL = Router(experts=8, k=2)
DEEPSEEK = Router(experts=16, k=4, score="sigmoid", scale=2.5, groups=4, groups_per_token=2)
ROUTERS = {
    "Mixtral": MIXTRAL,
    "DeepSeek": DEEPSEEK,
    "softmax, not normalized": replace(MIXTRAL, normalize=False),
    "sigmoid, not normalized": replace(DEEPSEEK, normalize=False),
}


def scores_of(router: Router, logits: np.ndarray) -> np.ndarray:
    if router.score == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    exp = np.exp(logits - logits.max())
    return exp / exp.sum()


def first_best(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def choice_of(router: Router, scores: np.ndarray) -> tuple[list[int], list[tuple[float, ...]]]:
    """The experts of a token, and the numbers of each group whose sums were compared."""
    size = router.experts // router.groups
    members = [range(g * size, (g + 1) * size) for g in range(router.groups)]
    pairs = [tuple(sorted((float(scores[i]) for i in group), reverse=True)[:2]) for group in members]
    sums = [sum(pair) for pair in pairs]
    kept = first_best(sums, router.groups_per_token)
    allowed = [scores[i] if i // size in kept else -math.inf for i in range(router.experts)]
    return first_best(allowed, router.k), pairs


def weights_of(router: Router, logits: np.ndarray, chosen: list[int]) -> np.ndarray:
    weights = scores_of(router, logits)[chosen]
    return router.scale * (weights / weights.sum() if router.normalize else weights)


def near_tie(numbers: Any) -> bool:
    gaps = np.diff(np.sort(np.asarray(numbers)))
    return bool(np.any((gaps > 0) & (gaps < 1e-5)))


@st.composite
def routers(draw: Any) -> Router:
    groups, size = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    kept = draw(st.integers(1, groups))
    return Router(
        experts=groups * size,
        k=draw(st.integers(1, kept * size)),
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        groups=groups,
        groups_per_token=kept,
    )


@given(routers(), st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from(["float32", "bfloat16", "float16"]))
@examples(4)
def test_matches_the_reference(router: Router, seed: int, biased: bool, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(-8, 9, (2, 12, router.experts)) / 4  # few values, so that many scores are equal
    bias = rng.integers(-4, 5, router.experts) / 8 if biased else np.zeros(router.experts)
    given = (jnp.asarray(logits, dtype), jnp.asarray(bias, jnp.float32) if biased else None)
    got = jax.jit(router)(*given)
    assert [x.dtype for x in got] == [jnp.float32, jnp.int32, jnp.float32, jnp.float32]
    for at in np.ndindex(2, 12):
        scores = scores_of(router, logits[at])
        chosen, pairs = choice_of(router, scores + bias)
        sums = [sum(pair) for pair in pairs]
        # Rounding decides between scores that are not equal but nearly so, and between equal sums of other numbers.
        assume(not near_tie(scores + bias) and not near_tie(sums) and len(set(sums)) == len(set(pairs)))
        assert got.experts[at].tolist() == chosen
        np.testing.assert_allclose(got.weights[at], weights_of(router, logits[at], chosen), rtol=2e-6)
        np.testing.assert_allclose(got.probabilities[at], scores / scores.sum(), rtol=2e-6)
    np.testing.assert_array_equal(got.logits, logits)


@pytest.mark.parametrize("name", few(ROUTERS, 2))
def test_gradients(name: str) -> None:
    """Against central differences of the reference, whose choice is constant nearby."""
    router, rng = ROUTERS[name], np.random.default_rng(0)
    logits, bias = rng.normal(size=(3, router.experts)), rng.normal(size=router.experts) / 4
    cw, cp = rng.normal(size=(3, router.k)), rng.normal(size=(3, router.experts))

    def reference(logits: np.ndarray, token: int) -> float:
        scores = scores_of(router, logits)
        chosen, _ = choice_of(router, scores + bias)
        weighted = np.sum(cw[token] * weights_of(router, logits, chosen))
        return float(weighted + np.sum(cp[token] * scores / scores.sum()))

    def loss(logits: jax.Array, bias: jax.Array) -> jax.Array:
        found = router(logits, bias)
        return jnp.sum(found.weights * cw) + jnp.sum(found.probabilities * cp)

    step = 1e-5 * np.eye(router.experts)
    want = [[(reference(l + d, t) - reference(l - d, t)) / 2e-5 for d in step] for t, l in enumerate(logits)]
    got, of_bias = jax.jit(jax.grad(loss, (0, 1)))(jnp.asarray(logits, jnp.float32), jnp.asarray(bias, jnp.float32))
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert not np.any(of_bias)


def test_bias_changes_the_choice_but_not_the_weights() -> None:
    logits, bias = jnp.array([[3.0, 2.0, 1.0, 0.0]]), jnp.array([0.0, 0.0, 0.0, 10.0])
    got = jax.jit(Router(experts=4, k=2, score="sigmoid"))(logits, bias)
    assert got.experts.tolist() == [[3, 0]]
    high, low = 1 / (1 + math.exp(-3)), 0.5
    np.testing.assert_allclose(got.weights[0], [low / (high + low), high / (high + low)], rtol=1e-6)


def test_groups_limit_the_choice() -> None:
    # The best expert is alone in its group; the sums of two are 9, 14, 12 and 0.
    logits = jnp.log(jnp.array([[9.0, 1e-9, 7, 7, 6, 6, 1e-9, 1e-9]]))
    got = jax.jit(Router(experts=8, k=3, groups=4, groups_per_token=2))(logits)
    assert got.experts.tolist() == [[2, 3, 4]]
    assert jax.jit(Router(experts=8, k=3))(logits).experts.tolist() == [[0, 2, 3]]


def test_all_experts_may_be_chosen() -> None:
    got = jax.jit(Router(experts=4, k=4))(jnp.array([0.0, 1.0, 1.0, 2.0]))
    assert got.experts.tolist() == [3, 1, 2, 0]
    np.testing.assert_allclose(got.weights, got.probabilities[got.experts], rtol=1e-6)


def test_fp64_stays_fp64() -> None:
    with jax.enable_x64(True):
        got = jax.jit(MIXTRAL)(jnp.arange(8, dtype=jnp.float64))
        assert [x.dtype for x in got] == [jnp.float64, jnp.int32, jnp.float64, jnp.float64]
        assert float(got.weights[1]) == pytest.approx(1 / (1 + math.e), rel=1e-15)


@pytest.mark.parametrize("name", few(reversed(ROUTERS), 1))
def test_a_token_that_is_not_finite_harms_no_other(name: str) -> None:
    router, nan, inf = ROUTERS[name], math.nan, math.inf
    clean = np.random.default_rng(0).normal(size=(5, 2, router.experts)).astype(np.float32)
    bad = clean.copy()
    bad[:, 1, :2] = [[nan, 0], [inf, 0], [inf, -inf], [0, 0], [0, 0]]
    bad[3, 1], bad[4, 1] = nan, -inf

    @jax.jit
    def run(logits: jax.Array) -> Any:
        # The gradient of a weight of NaN is NaN.
        loss = lambda logits: (jnp.sum((found := router(logits)).weights ** 2 + found.probabilities[..., :1]), found)
        return jax.grad(loss, has_aux=True)(logits)

    (grad, got), (want_grad, want) = run(bad), run(clean)
    assert np.all(np.isnan(got.weights[:, 1])) and np.all(np.isfinite(got.probabilities))
    assert all(sorted(set(chosen)) == sorted(chosen) for chosen in got.experts[:, 1].tolist())
    assert np.all((got.experts >= 0) & (got.experts < router.experts))
    np.testing.assert_array_equal(grad[:, 1], 0)
    for a, b in ((grad, want_grad), *zip(got, want, strict=True)):
        np.testing.assert_array_equal(a[:, 0], b[:, 0])


@pytest.mark.parametrize("name", few(ROUTERS, 1))
def test_a_logit_of_minus_infinity_excludes_an_expert(name: str) -> None:
    router = ROUTERS[name]
    first = np.random.default_rng(0).normal(size=(5, 1)).astype(np.float32)
    logits = np.where(np.arange(router.experts) % 8 == 0, first, -np.inf)  # fewer experts than k remain

    @jax.jit
    def run(logits: jax.Array) -> Any:
        loss = lambda logits: (jnp.sum((found := router(logits)).weights[:, 0] + found.probabilities[:, 0]), found)
        return jax.grad(loss, has_aux=True)(logits)

    grad, found = run(logits)
    assert np.all(np.isfinite(grad))
    assert np.all(np.where(found.experts % 8 == 0, found.weights > 0, found.weights == 0))


def test_weights_without_underflow() -> None:
    got = jax.jit(Router(experts=4, k=2, score="sigmoid"))(jnp.array([-300.0, -301.0, -302.0, -303.0]))
    np.testing.assert_allclose(got.weights, np.array([math.e, 1]) / (1 + math.e), rtol=1e-6)


def test_each_device_routes_its_own_tokens() -> None:
    """XLA splits the routing and its gradient by rows, with no communication."""
    layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data", seq=None))
    logits = jax.random.normal(jax.random.key(0), (8, 4, DEEPSEEK.experts))

    def loss(logits: jax.Array, bias: jax.Array) -> tuple[jax.Array, Routing]:
        found = DEEPSEEK(logits, bias)
        return jnp.sum(found.weights**2), found

    with layout:
        sharding = layout.sharding(("batch", "seq", None), logits.shape)
        run = jax.jit(jax.grad(loss, has_aux=True), out_shardings=sharding)
        args = (jax.device_put(logits, sharding), jnp.zeros(DEEPSEEK.experts))
        found = jp.audit(run.lower(*args).compile())
    assert not found.collectives


WRONG = {
    "k > experts": ({"experts": 8, "k": 9}, "9"),
    "k < 1": ({"experts": 8, "k": 0}, "1, got 0"),
    "no experts": ({"experts": True, "k": 1}, "Router: experts"),
    "groups": ({"experts": 8, "k": 2, "groups": 3}, "got 3"),
    "groups_per_token": ({"experts": 8, "k": 2, "groups": 4, "groups_per_token": 5}, "4"),
    "too few experts in the groups": ({"experts": 8, "k": 3, "groups": 4, "groups_per_token": 1}, "k=3"),
    "score": ({"experts": 8, "k": 2, "score": "softmx"}, "Router: score"),
    "scale": ({"experts": 8, "k": 2, "scale": 0}, "Router: scale"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    options, text = WRONG[name]
    with raises(ConfigError, text):
        Router(**options)


def test_wrong_shapes() -> None:
    with raises(ConfigError, "Router", "logits"):
        MIXTRAL(jnp.zeros((2, 4, 7)))
    with raises(ConfigError, "Router: bias"):
        MIXTRAL(jnp.zeros((2, 8)), jnp.zeros((2, 8)))
