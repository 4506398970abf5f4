"""The model of the pipeline family, for the library and as a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp

from .stepping import layout_of, state_with, step_key, wide

RULES: dict[str, Any] = {
    "batch": "data",
    "seq": None,
    "embed": None,
    "mlp": "model",
    "vocab": ("pipeline", "model"),
    "layers": "pipeline",
}
DIMS = {
    "words": ("vocab", "embed"),
    "head": ("embed", "vocab"),
    "up": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
    "shift": ("layers", "embed"),
    "tilt": ("embed",),
}
ADDED = 0.1
"""The factor of a layer's own loss."""
DROPPED = 0.25

type Hint = Callable[..., Any]


def parameters(case: Any) -> dict[str, Any]:
    """The parameters of a case, from its seed and in its dtype."""
    rng, n = np.random.default_rng(case.seed), case.depth
    draw = lambda *shape: (rng.normal(size=shape) / max(1, shape[-2]) ** 0.5).astype(case.dtype)
    params = {
        "words": draw(case.words, case.width) * case.words**0.5,
        "blocks": {
            "up": draw(n, case.width, 2 * case.width),
            "down": draw(n, 2 * case.width, case.width),
            "shift": 0.1 * draw(n, case.width),
        },
        "tilt": rng.normal(size=(case.width,)).astype(case.dtype),
    }
    return params if case.tied else {**params, "head": draw(case.width, case.words)}


def batch_of(case: Any) -> dict[str, Any]:
    """Tokens, targets, and a mask of the tokens that count."""
    rng = np.random.default_rng((case.seed, 1))
    tokens = lambda: rng.integers(0, case.words, (case.batch, case.seq)).astype(np.int32)
    counted = rng.random((case.batch, case.seq)) < (0.3 if case.bare else 0.6)
    counted[-1, -1] = True
    return {"tokens": tokens(), "targets": tokens(), "counted": counted.astype(case.dtype)}


def before(model: Any, batch: Any) -> Any:
    return model["words"][batch["tokens"]] * (1 + 0.1 * model["tilt"])


def side_of(case: Any, model: Any, batch: Any) -> Any:
    side = jnp.sin(batch["tokens"].astype(model["words"].dtype))
    return side * model["tilt"][0] if case.side == "param" else side


def mixed(block: Any, x: Any, whole: Any, start: Any, side: Any, hint: Hint) -> Any:
    """A layer: an MLP of each token and of the mean of the tokens up to it, which ``whole`` [rows, seq, embed]
    holds."""
    at = start + jnp.arange(x.shape[1])
    seen = (jnp.arange(whole.shape[1])[None] <= at[:, None]).astype(x.dtype)
    mean = jnp.einsum("ts,bsw->btw", seen / seen.sum(1, keepdims=True), whole)
    given = x + mean + block["shift"] if side is None else x + mean + block["shift"] + 0.1 * side[..., None]
    return x + hint(jnp.tanh(given @ block["up"]), "batch", "seq", "mlp") @ block["down"] / 2


def layer(case: Any, block: Any, x: Any, side: Any, keys: Any, hint: Hint) -> tuple[Any, dict[str, Any]]:
    """A layer's output, and what it adds to the loss and the metrics."""
    y = mixed(block, x, x, 0, side, hint)
    if keys is not None:
        draw = lambda key: jax.random.uniform(key, y.shape[1:], jnp.float32) >= DROPPED
        y = x + jnp.where(jax.vmap(draw)(keys), (y - x) / (1 - DROPPED), 0)
    aux = {}
    if case.aux is not None:
        what = jnp.square(block["up"]) if case.aux == "weights" else jnp.square(y)
        aux = {"loss": ADDED * jnp.mean(what)}
        if case.aux == "dict":
            aux["warmth"] = jnp.mean(y)
    return y, aux


def after(case: Any, model: Any, x: Any, batch: Any, hint: Hint) -> Any:
    """The loss, and the number of tokens that count where the mean is over these."""
    head = model["words"].T if case.tied else model["head"]
    logits = hint(x @ head, "batch", "seq", "vocab")
    right = jax.nn.one_hot(batch["targets"], case.words, dtype=logits.dtype)
    losses = jax.nn.logsumexp(logits, -1) - jnp.sum(logits * right, -1)
    if not case.weighted:
        return jnp.mean(losses), None
    weight = jnp.sum(batch["counted"])
    return jnp.sum(losses * batch["counted"]) / (weight if case.bare else jnp.maximum(weight, 1)), weight


def reference(case: Any) -> tuple[dict[str, Any], Any]:
    """Metrics and gradients in fp64 of the full batch on one device, layer after layer."""
    batch, params, hint = wide(batch_of(case)), wide(parameters(case)), lambda x, *dims: x
    keys = jax.vmap(jax.random.fold_in, (None, 0))(step_key(case.seed), jnp.arange(case.batch)) if case.keys else None

    def loss(params: Any) -> tuple[Any, Any]:
        x, extras = before(params, batch), []
        side = None if case.side is None else jax.lax.stop_gradient(side_of(case, params, batch))
        for i in range(case.depth):
            own = None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, i)
            x, aux = layer(case, jax.tree.map(lambda w, i=i: w[i], params["blocks"]), x, side, own, hint)
            extras.append(aux)
        value, weight = after(case, params, x, batch, hint)
        metrics = {} if weight is None else {"weight": weight}
        for name in extras[0]:
            metrics["aux_loss" if name == "loss" else name] = sum(aux[name] for aux in extras)
        total = value + metrics.get("aux_loss", 0)
        return total, metrics | {"loss": total}

    gradients, metrics = jax.jit(jax.grad(loss, has_aux=True))(params)
    metrics.pop("weight", None)  # a mean over microbatches has its own weight
    return jax.device_get(metrics), jax.device_get(gradients)


def staged(case: Any) -> jp.pipeline.PipelineLoss:
    """The same model as a staged loss."""

    def one(block: Any, x: Any, side: Any, keys: Any = None) -> Any:
        y, aux = layer(case, block, x, side, keys, jp.hint)
        return (y, aux) if aux else y

    def carried(block: Any, x: Any, side: Any, carry: Any, chunk: Any) -> Any:
        start = chunk * x.shape[1]
        zero = jnp.zeros_like(start)
        whole = jax.lax.dynamic_update_slice(carry["x"], x, (zero, start, zero))
        return mixed(block, x, whole, start, side, jp.hint), {"x": whole}

    def last(model: Any, x: Any, batch: Any) -> Any:
        loss, weight = after(case, model, x, batch, jp.hint)
        return loss if weight is None else (loss, {"weight": weight})

    options: dict[str, Any] = {}
    if case.side is not None:
        options["layer_inputs"] = lambda model, batch: side_of(case, model, batch)
    if case.sequence_chunks > 1:
        dtype = np.dtype(case.dtype)
        zeros = lambda model, batch: {"x": jnp.zeros((*batch["tokens"].shape, case.width), dtype)}
        options |= {"chunked_layer": carried, "chunk_carry": zeros}
    return jp.pipeline.PipelineLoss(
        layers="blocks",
        embed=before,
        layer=jax.checkpoint(one) if case.remat else one,
        head=last,
        keys=case.keys,
        dims=("batch", "seq", "embed"),
        **options,
    )


def found(case: Any) -> tuple[dict[str, Any], Any]:
    """Metrics and gradients of one train step."""
    zero = jp.Zero(case.zero, min_bytes=0)
    uneven: dict[str, Any] = {"indivisible": {"layers": "replicate"}} if case.told and case.depth % case.stages else {}
    layout = layout_of(zero.rules(jp.Rules(**RULES, **uneven)), case.sizes)
    params = parameters(case)
    tagged = lambda path, x: jp.tag(jnp.asarray(x), *DIMS[path[-1].key])
    make = lambda key: jax.tree_util.tree_map_with_path(tagged, params)
    with jax.default_matmul_precision("highest"), layout:
        shapes = jp.abstract_state(layout, make, optax.sgd(0.1))
        step = jp.train_step(
            layout, staged(case), pipeline=_pipeline(case), return_grads=True, donate=False, **zero.step
        )
        metrics = dict(step(state_with(shapes, params, seed=case.seed), batch_of(case))[1])
    gradients = jax.device_get(metrics.pop("grads"))
    return jax.device_get(metrics), gradients


def _pipeline(case: Any) -> jp.Pipeline | None:
    if case.schedule == "none":
        return None
    options = {} if case.sequence_chunks == 1 else {"sequence_chunks": case.sequence_chunks}
    schedule = jp.pipeline.schedule(
        case.schedule, case.stages, case.microbatches, chunks=case.chunks, fused=case.fused, **options
    )
    uneven = case.layers if case.told and len(set(case.layers)) > 1 else ()
    return jp.Pipeline(
        schedule,
        activation_checkpointing=case.activation_checkpointing,
        layers_per_stage=uneven,
        grad_reduction=case.grad_reduction,
        executor=case.executor,
        recompute=case.recompute,
        embedding=case.embedding,
    )
