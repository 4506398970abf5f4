"""``experts`` under every kind of layout, dispatch and routing, against a dense loop over experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.errors import ConfigError, LayoutError
from tests.covers import covering
from tests.profiles import few

E, D, F = 8, 16, 20
IN, OUT = ("experts", "embed", "expert_mlp"), ("experts", "expert_mlp", "embed")
X = ("batch", "residual_seq", "embed")


class Chosen(NamedTuple):
    weights: jax.Array
    experts: jax.Array


def layout(mesh: dict[str, int], **rules: Any) -> jp.Layout:
    table = {"batch": ("data", "expert"), "residual_seq": "context", "embed": None, "experts": "expert"}
    return jp.Layout(jp.MeshSpec(**mesh).build(), jp.Rules(**{**table, "expert_mlp": None, **rules}))


FSDP = {"params": {"embed": "data"}}
LAYOUTS: dict[str, Callable[[], jp.Layout]] = {
    "ep8": lambda: layout({"expert": 8}),
    "ep4 fsdp2": lambda: layout({"data": 2, "expert": 4}, **FSDP),
    "ep2 tp2 sp": lambda: layout(
        {"data": 2, "expert": 2, "model": 2}, expert_mlp="model", residual_seq=("context", "model"), **FSDP
    ),
    "ep2 tp2": lambda: layout({"data": 2, "expert": 2, "model": 2}, expert_mlp="model"),
    "ep2 cp2": lambda: layout({"data": 2, "expert": 2, "context": 2}),
    "folded": lambda: layout({"data": 2, "context": 4}, batch="data", experts=("context", "data")),
    "over model": lambda: layout({"data": 2, "model": 4}, residual_seq="model", experts="model"),
    "fsdp": lambda: layout({"data": 8}, experts=None, **FSDP),
}
DISPATCHES: list[dict[str, Any]] = [
    {},
    {"dispatch": "ragged", "pieces": 1},
    {"dispatch": "ragged", "pieces": 2},
    {"dispatch": "deduplicated", "pieces": 2},
    {"dispatch": "gather", "pieces": 1},
    {"dispatch": "all_to_all", "capacity_factor": float(E)},
    {"dispatch": "ragged", "capacity_factor": float(E), "pieces": 2},
]


def problem(k: int, dtype: Any = np.float64) -> tuple[dict[str, jax.Array], jax.Array]:
    rng = np.random.default_rng(k)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), dtype)
    weights = {"router": normal(D, E), "gate": normal(E, D, F), "up": normal(E, D, F), "down": normal(E, F, D)}
    return weights, normal(8, 8, D)


def mixture(w: dict[str, jax.Array], x: jax.Array, k: int, **options: Any) -> jax.Array:
    routing = jp.moe.Router(E, k)(x @ w["router"])
    arrays = ((w["gate"], IN), (w["up"], IN), (w["down"], OUT))
    return jp.experts(x, routing, *arrays, x_dims=X, **options)[0]


def dense(w: dict[str, jax.Array], x: jax.Array, k: int) -> jax.Array:
    routing = jp.moe.Router(E, k)(x @ w["router"])
    return dense_of(w, x, routing.weights, routing.experts)


def dense_of(w: dict[str, jax.Array], x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    """Every expert on every token."""
    every = jnp.sum(jax.nn.one_hot(chosen, E, dtype=weights.dtype) * weights[..., None], -2)
    hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, w["gate"])) * jnp.einsum("bsd,edf->bsef", x, w["up"])
    return jnp.einsum("bsef,efd,bse->bsd", hidden, w["down"], every)


def gradients(f: Callable[..., jax.Array]) -> Callable[..., Any]:
    loss = lambda w, x: jnp.mean(jnp.sin(f(w, x)) ** 2)
    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def close(got: Any, expected: Any, bound: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert jnp.abs(a - b).max() <= bound * jnp.abs(b).max()


@functools.cache
def expected_of(k: int) -> Any:
    w, x = problem(k)
    return gradients(lambda w, x: dense(w, x, k))(w, x)


PAIRED = [name for name in LAYOUTS if name not in ("ep2 tp2", "fsdp")]
"""The layouts that meet every dispatch: one without the sharded sequence, and one that exchanges no rows, meet one."""


@pytest.mark.parametrize(
    ("name", "options", "k"),
    covering(LAYOUTS, DISPATCHES[:2], [2, 5, E], keep=1, strength=1)
    + covering(PAIRED, DISPATCHES[2:], [2, 5, E], keep=0),
)
def test_values_and_gradients_are_those_of_a_dense_loop(name: str, options: dict[str, Any], k: int) -> None:
    with jax.enable_x64(True):
        w, x = problem(k)
        expected = expected_of(k)
        here = LAYOUTS[name]()
        dims = {"router": (None, None), "gate": IN, "up": IN, "down": OUT}
        with here:
            w = {n: jax.device_put(a, here.sharding(dims[n], a.shape, role="params")) for n, a in w.items()}
            x = jax.device_put(x, here.sharding(X, x.shape))
            close(gradients(lambda w, x: mixture(w, x, k, **options))(w, x), expected, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ep4 fsdp2", pytest.param("ep2 tp2 sp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, pytest.param(DISPATCHES[5], marks=pytest.mark.slow)], ids=str)
def test_int8_weights_are_multiplied_as_integers(name: str, options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        w, x = problem(2)
        made = {n: a if n == "router" else jp.inference.Int8.of(a, [-2]) for n, a in w.items()}
        same = {n: a if n == "router" else a.astype(jnp.float64) for n, a in made.items()}
        with LAYOUTS[name]():
            close(jax.jit(lambda x: mixture(made, x, 2, **options))(x), dense(same, x, 2), 1e-6)
            wrong = {**made, "gate": jp.inference.Int8.of(w["gate"], [-1])}
            with raises(ConfigError, "Int8", "got [-1]"):
                jax.eval_shape(lambda: mixture(wrong, x, 2, **options))


@pytest.mark.slow
def test_fp32_gradients_are_within_1e_6() -> None:
    w, x = problem(2, np.float32)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(jnp.float64), (w, x))
        expected = jax.tree.map(np.asarray, gradients(lambda w, x: dense(w, x, 2))(*wide))
    with LAYOUTS["ep4 fsdp2"]():
        got = gradients(lambda w, x: mixture(w, x, 2))(w, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(np.asarray(a, np.float64) - b) <= 1e-6 * np.linalg.norm(b)


def routings(k: int) -> dict[str, np.ndarray]:
    """Choices [batch, seq, k] that a balanced router would never make."""
    rng = np.random.default_rng(0)
    random = np.stack([rng.permutation(E)[:k] for _ in range(64)]).reshape(8, 8, k)
    return {
        "random": random,
        "all to one": np.broadcast_to(np.arange(k), (8, 8, k)),
        "all to the last": np.broadcast_to(np.arange(E - k, E), (8, 8, k)),
        "nobody chooses expert 3": np.where(random == 3, (random.max(-1, keepdims=True) + 1) % E, random),
        "each device to another": (np.arange(8)[:, None, None] + np.arange(k) + np.zeros((1, 8, 1), int)) % E,
        "one expert twice": np.zeros((8, 8, k), int),
    }


@pytest.mark.slow
@pytest.mark.parametrize("options", few([DISPATCHES[2], {}, *DISPATCHES[3:5]], 1), ids=str)
def test_every_routing_is_exact(options: dict[str, Any]) -> None:
    k = 2
    with jax.enable_x64(True):
        w, x = problem(k)
        weights = jnp.asarray(np.random.default_rng(1).uniform(0.1, 1, (8, 8, k)))
        arrays = lambda w: ((w["gate"], IN), (w["up"], IN), (w["down"], OUT))
        chosen = lambda c: Chosen(weights, jnp.asarray(c, jnp.int32))
        run = lambda w, x, c: jp.experts(x, Chosen(weights, c), *arrays(w), x_dims=X, **options)[0]
        with LAYOUTS["ep4 fsdp2"]():
            step = jax.jit(jax.value_and_grad(lambda w, x, c: jnp.mean(run(w, x, c) ** 2), (0, 1)))
            for name, c in routings(k).items():
                reference = lambda w, x, c=c: jnp.mean(dense_of(w, x, weights, chosen(c).experts) ** 2)
                expected = jax.value_and_grad(reference, (0, 1))(w, x)
                got = step(w, x, jnp.asarray(c, jnp.int32))
                for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
                    assert jnp.abs(a - b).max() <= 1e-12 * max(jnp.abs(b).max(), 1e-3), name


@pytest.mark.parametrize("rows_over", [("data", "expert"), ("data",)], ids=["all axes", "replicated over experts"])
def test_every_dispatch_reaches_the_experts_beside_one_without_rows(rows_over: tuple[str, ...]) -> None:
    """The values alone, in one program; where tokens are replicated over the experts, only a gather is possible."""
    w, x = problem(2, np.float32)
    chosen = routings(2)["random"]
    chosen = jnp.asarray(np.where(chosen == 2, 3, chosen), jnp.int32)
    routing = Chosen(jnp.asarray(np.random.default_rng(1).uniform(0.1, 1, chosen.shape), jnp.float32), chosen)
    arrays = ((w["gate"], IN), (w["up"], IN), (w["down"], OUT))
    options = [DISPATCHES[i] for i in ((1, 4) if "expert" in rows_over else (4,))]
    with layout({"data": 2, "expert": 4}, batch=rows_over):
        run = lambda x: [jp.experts(x, routing, *arrays, x_dims=X, **words)[0] for words in options]
        results = jax.jit(run)(x)
    for words, y in zip(options, results, strict=True):
        np.testing.assert_allclose(y, dense_of(w, x, *routing), atol=2e-6, err_msg=str(words))


@pytest.mark.slow
def test_a_permutation_of_the_experts_changes_no_bit() -> None:
    w, x = problem(2, np.float32)
    order = np.random.default_rng(3).permutation(E)
    routing = jp.moe.Router(E, 2)(x @ w["router"])
    place = jnp.asarray(np.argsort(order), jnp.int32)
    arrays = lambda w: ((w["gate"], IN), (w["up"], IN), (w["down"], OUT))
    with LAYOUTS["ep8"]():
        run = jax.jit(lambda w, c: jp.experts(x, Chosen(routing.weights, c), *arrays(w), x_dims=X)[0])
        permuted = {name: a[order] if name != "router" else a for name, a in w.items()}
        assert (run(w, routing.experts) == run(permuted, place[routing.experts])).all()


@pytest.mark.slow
def test_a_token_of_nan_harms_no_other() -> None:
    w, x = problem(2, np.float32)
    logits = (x @ w["router"]).at[1, 2, 0].set(jnp.nan)
    arrays = ((w["gate"], IN), (w["up"], IN), (w["down"], OUT))
    with LAYOUTS["ep4 fsdp2"]():
        y, _ = jax.jit(lambda: jp.experts(x, jp.moe.Router(E, 2)(logits), *arrays, x_dims=X))()
        expected = jax.jit(lambda: mixture(w, x, 2))()
    bad = np.zeros((8, 8), bool)
    bad[1, 2] = True
    assert np.isnan(y[1, 2]).all() and (np.asarray(y)[~bad] == np.asarray(expected)[~bad]).all()


@pytest.mark.parametrize("dispatch", few(["ragged", "gather", "all_to_all", "deduplicated"], 1))
def test_a_capacity_drops_the_last_choices_of_each_device_and_counts_them(dispatch: Any) -> None:
    w, x = problem(2, np.float32)
    routing = jp.moe.Router(E, 2)(x @ w["router"])
    arrays = ((w["gate"], IN), (w["up"], IN), (w["down"], OUT))
    options: dict[str, Any] = {"dispatch": dispatch, "capacity_factor": 1.0, "x_dims": X, "pieces": 1}
    with LAYOUTS["ep8"]():
        y, dropped = jax.jit(lambda: jp.experts(x, routing, *arrays, **options))()
    kept, capacity = np.ones((8, 8, 2), bool), 2  # 8 tokens × 2 choices / 8 experts
    for device, choices in enumerate(np.asarray(routing.experts)):
        seen = dict.fromkeys(range(E), 0)
        for token, k in np.ndindex(8, 2):
            seen[choices[token, k]] += 1
            kept[device, token, k] = seen[choices[token, k]] <= capacity
    expected = dense_of(w, x, jnp.where(kept, routing.weights, 0), routing.experts)
    assert float(dropped) == pytest.approx(1 - kept.mean()) and 0 < dropped < 1
    np.testing.assert_allclose(y, expected, atol=2e-6)


@pytest.mark.slow
def test_any_function_of_the_rows_can_be_the_experts() -> None:
    w, x = problem(2, np.float32)

    def linear(rows: jax.Array, row_weights: jax.Array, matmul: Any, up: jax.Array, bias: jax.Array) -> jax.Array:
        ones = jnp.ones((rows.shape[0], 1), rows.dtype)
        return (matmul(rows, up) + matmul(ones, bias[:, None])) * row_weights[:, None]

    routing, bias = jp.moe.Router(E, 2)(x @ w["router"]), jnp.arange(E * F, dtype=jnp.float32).reshape(E, F) / E
    with LAYOUTS["ep4 fsdp2"]():
        options: dict[str, Any] = {"x_dims": X, "expert_fn": linear}
        y, _ = jax.jit(lambda: jp.experts(x, routing, (w["up"], IN), (bias, (IN[0], IN[2])), **options))()
    every = jnp.sum(jax.nn.one_hot(routing.experts, E) * routing.weights[..., None], -2)
    expected = jnp.einsum("bsef,bse->bsf", jnp.einsum("bsd,edf->bsef", x, w["up"]) + bias, every)
    np.testing.assert_allclose(y, expected, atol=2e-5)


def test_explain_says_where_the_experts_are_and_how_rows_travel() -> None:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(mixture(w, x, 2) ** 2)

    dims = {"router": ("embed", None), "gate": IN, "up": IN, "down": OUT}
    make = lambda key: {n: jp.tag(a, *dims[n]) for n, a in problem(2, np.float32)[0].items()}
    batch = jp.tag(jax.ShapeDtypeStruct((8, 8, D), np.float32), *X)
    report = jp.explain(LAYOUTS["ep4 fsdp2"](), make, optax.sgd(0.1), batch=batch, loss_fn=loss)
    (note,) = (note for note in report.notes if note.startswith("experts in mixture (test_experts.py:"))
    assert note.partition("): ")[2] == (
        "8 experts, 2 on each of 4 devices over expert (0 to 1 on the first); one piece with room for 64 rows on a "
        "device, 16 if balanced; dispatch ragged: MiB sent per device and transfer: deduplicated 0.0006801, "
        "ragged 0.0007324, gather 0.001465"
    )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"dispatch": "rugged"}, "rugged"),
        ({"capacity_factor": 0}, "experts: capacity_factor"),
        ({"dispatch": "all_to_all"}, "'all_to_all'"),
        ({"pieces": 0}, "experts: pieces"),
        ({"pieces": 3}, "device's"),
    ],
)
def test_a_bad_option_is_an_error_with_the_remedy(options: dict[str, Any], name: str) -> None:
    w, x = problem(2, np.float32)
    with LAYOUTS["ep8"](), raises(ConfigError, name):
        jax.eval_shape(lambda: mixture(w, x, 2, **options))


def test_sizes_that_do_not_fit_are_errors_with_the_remedy() -> None:
    w, x = problem(2, np.float32)
    six = {name: a[:6] if name != "router" else a[:, :6] for name, a in w.items()}
    routing = Chosen(jnp.ones((8, 8, 2)), jnp.zeros((8, 8, 2), jnp.int32))
    with LAYOUTS["ep4 fsdp2"](), raises(LayoutError, "experts", "expert=4"):
        jp.experts(x, routing, (six["gate"], IN), (six["up"], IN), (six["down"], OUT), x_dims=X)
    with LAYOUTS["ep8"](), raises(ConfigError, "experts: each"):
        chosen = Chosen(jnp.ones((8, 8, 9)), jnp.zeros((8, 8, 9), jnp.int32))
        jp.experts(x, chosen, (w["gate"], IN), (w["up"], IN), (w["down"], OUT), x_dims=X)
    with LAYOUTS["ep8"](), raises(LayoutError, "expert_mlp", "'embed'"):
        jp.experts(x, routing, (w["gate"], IN), (w["down"][0], OUT[1:]), x_dims=X)
    same = layout({"data": 2, "expert": 4}, batch="data")
    with same, raises(ConfigError, "ragged", "'expert'"):
        jax.eval_shape(lambda: mixture(w, x, 2, dispatch="ragged"))


@pytest.mark.slow
def test_devices_with_the_same_tokens_share_the_experts() -> None:
    w, x = problem(2, np.float32)
    with layout({"data": 2, "expert": 4}, batch="data"):
        np.testing.assert_allclose(jax.jit(lambda: mixture(w, x, 2))(), dense(w, x, 2), atol=2e-6)
