"""Weights that are gathered exactly where all others are gathered in int8: above all those that choose experts."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from one_step import SGD, initial, layout_of

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.parallel.collectives import quantized
from jaxpar.training.exact_weights import router_weights

LAYERS, D, X, F, ROWS, SEQ = 2, 64, 8, 24, 8, 24
IN, OUT = ("experts", "embed", "expert_mlp"), ("experts", "expert_mlp", "embed")
RULES = jp.Rules(
    batch=("data", "expert"),
    seq=None,
    embed=None,
    experts="expert",
    expert_mlp=None,
    layers="pipeline",
    params={"embed": "data"},
)
INT8 = {"gather": "int8"}


def make(key: jax.Array) -> Any:
    """A model with names of its own; its routers read the batch, so that nothing else can change their choice."""
    normal = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), (LAYERS, *shape)) / np.sqrt(shape[-2])
    named = {"gating": (0, (D, X), ("embed", None)), "up": (1, (X, D, F), IN), "down": (2, (X, F, D), OUT)}
    return {"layers": {name: jp.tag(normal(i, *shape), "layers", *dims) for name, (i, shape, dims) in named.items()}}


def layer(block: Any, x: jax.Array, side: Any) -> tuple[jax.Array, Any]:
    routing = jp.moe.Router(X, 2)(side["x"] @ block["gating"])
    mlp = lambda rows, weights, matmul, up, down: matmul(jnp.tanh(matmul(rows, up)) * weights[:, None], down)
    y, _ = jp.experts(
        x, routing, (block["up"], IN), (block["down"], OUT), x_dims=("batch", "seq", "embed"), expert_fn=mlp
    )
    # One other choice changes it by at least 1 / (2 * ROWS * SEQ).
    return x + y, {"choices": jnp.mean(routing.experts * side["numbers"])}


LOSS = jp.pipeline.PipelineLoss(
    layers="layers",
    embed=lambda model, batch: batch["x"],
    layer=layer,
    head=lambda model, x, batch: jnp.mean((x - batch["y"]) ** 2),
    layer_inputs=lambda model, batch: {"x": batch["x"], "numbers": batch["numbers"]},
    dims=("batch", "seq", "embed"),
)


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((ROWS, SEQ, D)).astype(np.float32) for _ in range(2))
    return {"x": x, "y": y, "numbers": rng.uniform(1, 2, (ROWS, SEQ, 2)).astype(np.float32)}


def step(mesh: dict[str, int], **options: Any) -> tuple[float, Any]:
    """The choices of a step's routers as a number, and the gradients."""
    layout = layout_of(RULES, mesh)
    with jax.default_matmul_precision("highest"), layout:
        shapes = jp.abstract_state(layout, make, SGD)
        run = jp.train_step(layout, LOSS, return_grads=True, donate=False, **options)
        compiled = run.lower(shapes, batch()).compile(compiler_options={"xla_backend_optimization_level": 0})
        _, metrics = compiled(initial(shapes, make, RULES), batch())
    return float(metrics["choices"]), jax.device_get(metrics["grads"])


@functools.cache
def reference() -> tuple[float, Any]:
    return step({"data": 1})


@dataclass(frozen=True)
class Case:
    mesh: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "per step": Case({"data": 2, "expert": 2}, {"grad_reduction": "per_step"}),
    "gathered per step": Case({"data": 4, "expert": 2}, {"weight_gather": "per_step"}),
    "pipeline": Case(
        {"pipeline": 2, "data": 2, "expert": 2}, {"pipeline": jp.Pipeline(jp.pipeline.schedule("1f1b", 2, 2))}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "per step" else pytest.mark.slow) for n in CASES])
def test_routers_choose_the_same_experts_with_int8_gathers(name: str) -> None:
    case, (choices, grads) = CASES[name], reference()
    found, int8_grads = step(case.mesh, precision=INT8, **case.options)
    assert found == pytest.approx(choices, rel=1e-6)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(int8_grads), jax.tree.leaves(grads), strict=True):
        off = np.linalg.norm(a - b) / np.linalg.norm(b)
        # The experts are rounded: by 1 / 254 of the largest number of a block at most.
        assert 1e-4 < off < 0.02, path


@pytest.mark.slow
def test_rounded_routers_would_choose_others() -> None:
    gating = initial(jp.abstract_state(layout_of(RULES, {"data": 1}), make, SGD), make, RULES).params["layers"][
        "gating"
    ]
    rounded = quantized.unpack(quantized.pack(jnp.asarray(gating)))
    first, second = (jp.moe.Router(X, 2)(batch()["x"] @ w[0]).experts for w in (gating, rounded))
    assert 0 < np.mean(first != second) < 0.1


def test_weights_of_routers_are_found_through_scans_casts_and_recomputed_layers() -> None:
    def run(params: Any, x: jax.Array) -> Any:
        def one(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            x = x + jnp.tanh(x * params["scale"] @ w["mlp"])
            logits = 2 * (x.astype(jnp.bfloat16) @ w["gate"].astype(jnp.bfloat16).T) + w["shift"]
            return x * jp.moe.Router(4, 1)(logits, params["bias"]).weights, None

        body = jax.checkpoint(one)
        return jax.lax.scan(body, x @ params["embedding"], params["layers"])[0].sum()

    stacked = {"mlp": jnp.ones((2, 8, 8)), "gate": jnp.ones((2, 4, 8)), "shift": jnp.ones((2, 4))}
    params = {"embedding": jnp.eye(8), "scale": jnp.ones(8), "bias": jnp.ones(4), "layers": stacked}
    names = [("bias",), ("layers", "gate"), ("layers", "shift")]
    assert router_weights(run, params, jnp.ones((3, 8))) == dict.fromkeys(names, False)


def make_dense(key: jax.Array) -> Any:
    return {"gate": jp.tag(jnp.ones((16, 4)), "embed", "choice"), "head": jp.tag(jnp.ones((16, 6)), "embed", "vocab")}


def loss_of_dense(exact: bool, model: Any, batch: Any) -> Any:
    (logits,) = jp.sharded_dot(batch, (model["gate"], ("embed", "choice")), exact=exact)
    (y,) = jp.sharded_dot(batch, (model["head"], ("embed", "vocab")))
    return jp.moe.Router(4, 2)(logits).weights.sum() + y.sum()


def notes(exact_router: bool, **precision: Any) -> tuple[str, ...]:
    """What ``explain`` says of a step with a router that calls ``sharded_dot``."""
    rules = jp.Rules(batch="data", embed=None, choice=None, vocab=None, params={"embed": "data"})
    layout = jp.Layout(jp.MeshSpec(data=8).abstract(), rules)
    x = jp.tag(jax.ShapeDtypeStruct((8, 16), np.float32), "batch", "embed")
    loss, step = functools.partial(loss_of_dense, exact_router), {"precision": {**INT8, **precision}}
    found = jp.explain(layout, make_dense, SGD, batch=x, loss_fn=loss, step=step).notes
    return tuple(note for note in found if "exactly" in note or "router" in note)


CHOOSES = "gathered exactly: 'params/gate' in the compute dtype instead of int8, because it chooses experts"
NAMED = "in the compute dtype instead of int8, because precision.exact names its dim 'vocab'"
ROUNDED = (
    "rounded router: jp.sharded_dot gathers 'params/gate' in int8, so some tokens choose other experts. Remedy: "
    "jp.sharded_dot(x, (w, dims), exact=True)."
)


def test_explain_says_which_weights_stay_exact_and_why() -> None:
    assert notes(exact_router=True) == (CHOOSES,)
    assert notes(exact_router=False) == (ROUNDED,)
    assert notes(exact_router=True, exact=["vocab"]) == (CHOOSES, f"gathered exactly: 'params/head' {NAMED}")
    assert notes(exact_router=False, exact=["choice", "vocab"])[-1] == f"gathered exactly: 'params/head' {NAMED}"


def test_exact_dims_are_checked() -> None:
    with raises(ConfigError, "precision: exact", "got 'vocab'"):
        jp.Precision.of({"gather": "int8", "exact": "vocab"})
    with raises(ConfigError, "precision: exact", "vocabulary"):
        notes(exact_router=True, exact=["vocabulary"])


@pytest.mark.parametrize("exact", [False, True])
def test_sharded_dot_sends_exact_weights_in_their_own_dtype(exact: bool) -> None:
    """By the argument, and by a dim in ``precision.exact``."""
    rules = jp.Rules(batch="data", embed=None, choice=None, vocab=None, params={"embed": "data"})
    layout, x = layout_of(rules, {"data": 8}), np.ones((8, 16), np.float32)
    with layout:
        state = jp.abstract_state(layout, make_dense, SGD)
        precision = {**INT8, "exact": ["vocab"] if exact else []}
        step = jp.train_step(layout, functools.partial(loss_of_dense, exact), precision=precision)
        gathers = [line for line in step.lower(state, x).as_text().splitlines() if "stablehlo.all_gather" in line]
    assert any("xi8>" in line for line in gathers) is not exact
