"""A model of the family in a train step of the library, and in plain jax."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar as jp

from . import model_linen, model_nnx
from .cases import Differences
from .model_parts import ATTENTION_KEY, DROPPED, batch_of, library, plain
from .stepping import check_trees, layout_of, state_with, step_key, wide

TX = optax.sgd(0.1)


class Found(NamedTuple):
    """The metrics, gradients and carried variables of a step, on the host."""

    metrics: dict[str, Any]
    grads: Any
    variables: Any

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.metrics["loss"]))


def layout_for(case: Any) -> jp.Layout:
    zero = jp.Zero(case.zero, min_bytes=0)
    split = {"params": {"embed": "data"}} if case.sharded else {}
    rules = jp.Rules(
        batch="data",
        seq="context",
        embed=None,
        mlp="model",
        heads="model",
        kv_heads="model",
        head_dim=None,
        vocab="model",
        layers=None,
        **split,
    )
    return layout_of(zero.rules(rules), case.sizes)


def make_model(case: Any) -> Any:
    """The function that constructs the model, as the library receives it."""
    if case.flavour == "nnx":
        return lambda key: model_nnx.Model(case, nnx.Rngs(key))
    example = {name: x[:1] for name, x in batch_of(case).items()}
    return lambda key: model_linen.Model(case, plain(case, None, None)).init(key, example)


def loss_fn(case: Any) -> Any:
    """The loss function, as the library receives it."""

    def compute(model: Any, batch: Any, key: Any = None) -> Any:
        tools = library(case, key)
        updates: tuple[Any, ...] = ()
        if case.flavour == "nnx":
            loss, weight = model(batch, tools)
        else:
            (loss, weight), new = model_linen.Model(case, tools).apply(model, batch, mutable=["batch_stats"])
            updates = (new,) if new else ()
        return (loss, {} if weight is None else {"weight": weight}, *updates)

    return compute if case.dropout else lambda model, batch: compute(model, batch)


def drawn(case: Any, shapes: Any) -> tuple[Any, Any]:
    """Parameters and carried variables of these shapes, from the case's seed."""
    rng = np.random.default_rng(case.seed)

    def one(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if "scale" in name:
            return (1 + 0.2 * rng.normal(size=leaf.shape)).astype(leaf.dtype)
        # Divides by the fan-in, and by less for heads: scores and gradients of about 1 are well conditioned.
        fan = 4 if leaf.ndim < 2 else 1 if "embedding" in name else leaf.size // leaf.shape[-1]
        return (rng.normal(size=leaf.shape) / max(1, fan) ** 0.5).astype(leaf.dtype)

    rest = lambda path, leaf: np.full(leaf.shape, "var" in jax.tree_util.keystr(path), leaf.dtype)
    return jax.tree_util.tree_map_with_path(one, shapes.params), jax.tree_util.tree_map_with_path(
        rest, shapes.variables
    )


def precision_of(case: Any) -> Any:
    if case.precision == "fp16":
        return {"compute": "fp16", "scale": {"initial": float(case.scale)}}
    return case.precision


def found(case: Any, differences: Differences) -> Found:
    """Run one step of the library from given parameters; also claims that a second call does not compile again."""
    layout, precision, batch = layout_for(case), precision_of(case), batch_of(case)
    zero = jp.Zero(case.zero, min_bytes=0)
    first = "jaxpar.parallel.attention.attention" not in sys.modules
    with layout:
        shapes = jp.abstract_state(layout, make_model(case), TX, precision)
        params, rest = drawn(case, shapes)
        state = state_with(shapes, params, rest=rest, seed=case.seed)
        if state.loss_scale is not None:
            start = jp.Precision.of(precision).scale
            assert start is not None
            state = replace(state, loss_scale=jax.device_get(start.start()))
        options = {"grad_accum_steps": case.microbatches, "precision": precision, **zero.step}
        step = jp.train_step(layout, loss_fn(case), return_grads=True, donate=False, **options)
        new, metrics = step(state, batch)
        if first and "attention" in case.body:
            step(state, batch)
            differences.claim(_programs(step) == 1, "a second call with the same shapes compiles the step again")
    metrics = dict(metrics)
    grads = jax.device_get(metrics.pop("grads"))
    return Found(jax.device_get(metrics), grads, _host(new.variables))


def _programs(step: Any) -> int:
    """The number of programs that a jitted function has compiled."""
    count: int = step._cache_size()
    return count


def _host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def reference(case: Any, keep: Any, *, exact: bool = True) -> Found:
    """Loss, gradients and statistics of the full batch without the library, in fp64, or in fp32 if not ``exact``."""
    widened = wide if exact else lambda tree: tree
    tools = plain(case, step_key(case.seed) if case.dropout else None, keep)
    shapes = jp.abstract_state(layout_for(case), make_model(case), TX)
    params, rest = (widened(tree) for tree in drawn(case, shapes))
    batch = widened(batch_of(case))

    def loss(params: Any) -> Any:
        model = shapes.metadata.kind.merge(params, jax.tree.map(jnp.asarray, rest))
        if case.flavour == "nnx":
            value, _ = model(batch, tools)
            carried = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
            return value, carried
        (value, _), new = model_linen.Model(case, tools).apply(model, batch, mutable=["batch_stats"])
        return value, new

    (value, carried), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return Found({"loss": np.asarray(value)}, jax.device_get(grads), _host(carried))


def found_again(case: Any) -> Found:
    """Run one step and ignore its claims."""
    return found(case, Differences())


def compare(
    case: Any, found: Found, want: Found, differences: Differences, bound: float, label: str, skipped: float
) -> None:
    """Compare a step with the reference. A skipped step has no gradients to compare; whether it may be skipped is
    checked."""
    if case.precision == "fp16" and bool(found.metrics.get("skipped", False)):
        largest = max(float(np.abs(g).max(initial=0)) for g in jax.tree.leaves(want.grads))
        small = case.scale * max(largest, 1.0 / case.batch) < skipped
        differences.claim(not small, f"a step with gradients of {largest:.1e} and a scale of {case.scale} is skipped")
        if case.loss != "plain" and not small:  # the step must also be skipped if the same loss is written by hand
            by_hand = found_again(replace(case, loss="plain"))
            told = f"a step with a scale of {case.scale} is skipped, but not where the loss is written by hand"
            differences.claim(bool(by_hand.metrics["skipped"]), told)
        return
    differences.check("loss", found.metrics["loss"], want.metrics["loss"], bound, 1e-2, label)
    check_trees(differences, "gradient of ", found.grads, want.grads, bound, label)
    if jax.tree.leaves(want.variables):
        check_trees(
            differences, "statistic ", jax.tree.leaves(found.variables), jax.tree.leaves(want.variables), bound, label
        )


def kept(case: Any) -> Any:
    """The factors that dropout applies to the attention weights on one device, [batch, heads, seq, seq]."""
    shape = (case.batch, case.seq, case.heads, 1)
    q, v = jnp.zeros(shape), jnp.broadcast_to(jnp.eye(case.seq)[None, :, None], (*shape[:3], case.seq))
    options: dict[str, Any] = {"impl": "dense", "mask": jp.Mask(causal=False), "dropout": DROPPED}
    with layout_of(jp.Rules(batch=None, seq=None, heads=None, kv_heads=None, head_dim=None), {"data": 1}):
        o = jax.jit(lambda: jp.attention(q, q, v, key=jax.random.key(ATTENTION_KEY), **options))()
    return np.where(np.moveaxis(np.asarray(o), 1, 2) > 0, 1 / (1 - DROPPED), 0.0)


def check_initial(case: Any, differences: Differences) -> None:
    """Claim that initial parameters equal those of one device, bit for bit."""
    layout = layout_for(case)
    one, several = (_host(jp.init(where, make_model(case), TX).params) for where in (layout.on_one_device(), layout))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(several), strict=True):
        different = int((a != b).sum())
        text = (
            f"{different} of {a.size} entries of the initial {jax.tree_util.keystr(path)} are not those of one device"
        )
        differences.claim(not different, text)
