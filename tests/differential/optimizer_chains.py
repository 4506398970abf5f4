"""The transformations that the optimizer family draws from, and the library's step and a plain optax step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import jaxpar as jp

from .cases import Differences, InvalidCase
from .optimizers import BOUND, BOUND_FP64, PROBED
from .stepping import layout_of, state_with

RATE = 0.25
matrices = lambda params: jax.tree.map(lambda p: jnp.ndim(p) >= 2, params)
halving = optax.exponential_decay(1.0, 1, 0.5)

MADE: dict[str, Callable[[], Any]] = {
    "clip": lambda: optax.clip(0.75),
    "clip norm": lambda: optax.clip_by_global_norm(1.0),
    "clip block": lambda: optax.clip_by_block_rms(0.5),
    "momentum": lambda: optax.trace(0.75),
    "nesterov": lambda: optax.trace(0.75, nesterov=True),
    "ema": lambda: optax.ema(0.75),
    "decay": lambda: optax.add_decayed_weights(0.125),
    "masked decay": lambda: optax.add_decayed_weights(0.125, mask=matrices),
    "schedule": lambda: optax.scale_by_schedule(halving),
    "constant": lambda: optax.scale(0.5),
    "apply every": lambda: optax.apply_every(2),
    "optimistic": lambda: optax.scale_by_optimistic_gradient(),
    "centralize": lambda: optax.centralize(),
    "block norm": lambda: optax.scale_by_param_block_norm(),
    "block rms": lambda: optax.scale_by_param_block_rms(),
    "agc": lambda: optax.adaptive_grad_clip(0.5),
    "noise": lambda: optax.add_noise(0.1, 0.55, 0),
    "adam": lambda: optax.scale_by_adam(0.75, 0.875),
    "nadam": lambda: optax.scale_by_adam(0.75, 0.875, nesterov=True),
    "adamax": lambda: optax.scale_by_adamax(0.75, 0.875),
    "amsgrad": lambda: optax.scale_by_amsgrad(0.75, 0.875),
    "belief": lambda: optax.scale_by_belief(0.75, 0.875, eps=1e-4),
    "yogi": lambda: optax.scale_by_yogi(0.75, 0.875),
    "radam": lambda: optax.scale_by_radam(0.75, 0.875),
    "rms": lambda: optax.scale_by_rms(),
    "rss": lambda: optax.scale_by_rss(),
    "factored": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "sm3": lambda: optax.scale_by_sm3(),
    "novograd": lambda: optax.scale_by_novograd(),
    "trust": lambda: optax.scale_by_trust_ratio(),
    "lion": lambda: optax.scale_by_lion(),
    "sign": lambda: optax.scale_by_sign(),
    "rprop": lambda: optax.scale_by_rprop(0.1),
    "distance": lambda: optax.scale_by_distance_over_gradients(),
    "backtracking": lambda: optax.scale_by_backtracking_linesearch(8, store_grad=False),
    "stored": lambda: optax.scale_by_backtracking_linesearch(8, store_grad=True),
    "zoom": lambda: optax.scale_by_zoom_linesearch(6),
    "polyak": lambda: optax.scale_by_polyak(1.0),
    "lbfgs": lambda: optax.scale_by_lbfgs(3),
    "probe": lambda: probe(),
}
SMOOTH = tuple(list(MADE)[:17])
"""Transformations whose results depend smoothly on the gradients."""
PLAIN = tuple(name for name in MADE if name not in ("backtracking", "stored", "zoom", "polyak", "lbfgs", "probe"))
SEARCHES = ("backtracking", "stored", "zoom", "polyak")
WRAPPERS = ("masked", "partition", "multi steps", "if finite", "inject", "schedule free", "lookahead", "freeze")


class Probed(NamedTuple):
    """The values that an optimizer received: the loss, and the result of ``value_fn`` at the same parameters."""

    value: Any
    again: Any


def probe() -> optax.GradientTransformationExtraArgs:
    """A transformation that stores the values it receives in its state and returns the gradients unchanged."""

    def update(updates: Any, state: Any, params: Any = None, *, value: Any, value_fn: Any, **extra: Any) -> Any:
        told = jnp.asarray(value, jnp.float32), jnp.asarray(value_fn(params), jnp.float32)
        return updates, Probed(*told)

    return optax.GradientTransformationExtraArgs(lambda params: Probed(jnp.zeros(()), jnp.zeros(())), update)


def optimizer_of(case: Any) -> Any:
    """The chain, then a descent with a constant rate, inside the wrapper."""
    parts = [MADE[name]() for name in case.chain]
    inner = optax.chain(*parts, optax.scale(-1.0 if searches(case) else -RATE))
    if searches(case) and case.chain[-1] in (
        "backtracking",
        "stored",
        "zoom",
    ):  # a line search requires a descent direction
        inner = optax.chain(*parts[:-1], optax.scale(-1.0), parts[-1])
    kind = case.wrapper
    if kind == "masked":
        return optax.masked(inner, matrices)
    if kind in ("partition", "freeze"):
        other = optax.set_to_zero() if kind == "freeze" else optax.sgd(0.125, momentum=0.5)
        label = lambda params: jax.tree.map(lambda p: "inner" if jnp.ndim(p) != 1 else "other", params)
        return optax.multi_transform({"inner": inner, "other": other}, label)
    if kind == "multi steps":
        return optax.MultiSteps(inner, 2).gradient_transformation()
    if kind == "if finite":
        return optax.apply_if_finite(inner, 2)
    if kind == "inject":
        return optax.inject_hyperparams(lambda rate: optax.chain(inner, optax.scale(rate)))(rate=halving)
    if kind == "schedule free":
        return contrib.schedule_free(inner, RATE)
    if kind == "lookahead":
        return optax.lookahead(inner, 2, 0.5)
    return inner


def searches(case: Any) -> bool:
    """Whether a line search chooses the step from differences between losses."""
    return any(name in SEARCHES for name in case.chain)


def dtype_of(case: Any) -> Any:
    """fp64 for a line search: differences between losses that are nearly equal amplify fp32's rounding."""
    return np.float64 if searches(case) else np.float32


def parameters(case: Any) -> dict[str, Any]:
    """Parameters that are nonzero multiples of 1/8."""
    rng = np.random.default_rng(case.seed)
    draw = lambda shape: (rng.choice([-1, 1], shape) * rng.integers(1, 12, shape) / 8).astype(dtype_of(case))
    return {f"w{i}": draw(shape) for i, shape in enumerate(case.shapes)}


def batch_of(case: Any, step: int) -> dict[str, Any]:
    """A batch with rows of multiples of 1/8 for each parameter."""
    rng = np.random.default_rng((case.seed, step, 1))
    return {
        f"w{i}": (rng.integers(-16, 17, (case.batch, *shape)) / 8 + 0.125 * (i + 1)).astype(dtype_of(case))
        for i, shape in enumerate(case.shapes)
    }


def loss_of(case: Any) -> Callable[..., Any]:
    """The loss function of a case, a mean over rows."""
    rows = lambda x: x.reshape(x.shape[0], -1)

    def linear(model: Any, batch: Any) -> Any:
        return sum(jnp.sum(rows(batch[n] * model[n][None]), 1) for n in model)

    def curved(model: Any, batch: Any) -> Any:
        return sum(jnp.sum(rows(jnp.square(model[n][None] - batch[n] / 2)), 1) for n in model)

    def noisy(model: Any, batch: Any, key: Any) -> Any:
        weights = jax.random.uniform(key, (jax.tree.leaves(batch)[0].shape[0],))
        return jnp.mean(weights * curved(model, batch))

    if case.loss == "noisy":
        return noisy
    if case.loss == "uneven":
        return lambda model, batch: jnp.log1p(jnp.square(jnp.mean(linear(model, batch))))
    one = linear if case.loss == "linear" else curved
    return lambda model, batch: jnp.mean(one(model, batch))


def plain_step(case: Any, tx: Any) -> Callable[..., Any]:
    """One step of the full batch, as optax documents it."""
    loss, takes = loss_of(case), optax.with_extra_args_support(tx)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value_fn = lambda p: loss(p, batch)
        value, grads = jax.value_and_grad(value_fn)(params)
        if case.clip_norm is not None:
            norm = optax.tree.norm(grads)
            grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, case.clip_norm / jnp.maximum(norm, 1e-37)), grads)
        offered = {"value": value, "grad": grads, "value_fn": value_fn}
        if case.wrapper == "lookahead":
            inner, slow = opt_state
            updates, inner = takes.update(grads, inner, optax.LookaheadParams(params, slow), **offered)
            return optax.apply_updates(params, updates.fast), (inner, optax.apply_updates(slow, updates.slow)), value
        updates, opt_state = takes.update(grads, opt_state, params, **offered)
        return optax.apply_updates(params, updates), opt_state, value

    return jax.jit(step)


def first_state(case: Any, tx: Any, params: Any) -> Any:
    """The optimizer's state before the first step; lookahead also has the slow parameters."""
    if case.wrapper == "lookahead":
        return tx.init(optax.LookaheadParams(params, params)), params
    return tx.init(params)


def library_step(case: Any, tx: Any, params: Any) -> Callable[..., Any]:
    """The library's step, from a state on the host."""
    zero = jp.Zero(case.zero, min_bytes=case.min_bytes)
    rules = zero.rules(jp.Rules(batch="data", rows=None, columns="model", indivisible={"columns": "replicate"}))
    layout = layout_of(rules, {"data": case.data, "model": case.model})
    names = lambda x: ("rows", "columns") if x.ndim == 2 else ("rows",) if x.ndim == 1 else (None,) * x.ndim
    make = lambda key: {n: jp.tag(jnp.asarray(x), *names(x)) if x.ndim else jnp.asarray(x) for n, x in params.items()}
    with layout:
        shapes = jp.abstract_state(layout, make, tx)
        step = jp.train_step(
            layout,
            loss_of(case),
            grad_accum_steps=case.microbatches,
            clip_norm=case.clip_norm,
            precision=case.precision,
            donate=False,
            **zero.step,
        )

    def run(params: Any, opt_state: Any, batch: Any) -> Any:
        state, metrics = step(state_with(shapes, params, opt_state, seed=case.seed), batch)
        return jax.device_get((state.params, state.opt_state, metrics["loss"]))

    return run


def compared(case: Any, differences: Differences) -> None:
    """Compare a few steps; both loops start each step from the state of the plain one."""
    tx, params = optimizer_of(case), parameters(case)
    take = library_step(case, tx, params)
    if case.chain[-1:] == ("probe",):
        _probed(case, take(params, tx.init(params), batch_of(case, 0))[1], differences)
        return
    plain = plain_step(case, tx)
    try:
        opt_state = host(first_state(case, tx, params))
        jax.eval_shape(plain, params, opt_state, batch_of(case, 0))
    except Exception as error:
        raise InvalidCase(f"optax by itself raises {error}") from error
    for number in range(case.steps):
        batch = batch_of(case, number)
        want = host(plain(params, opt_state, batch))
        found = host(take(params, opt_state, batch))
        for what, a, b in zip(("parameter ", "state ", "loss"), found, want, strict=True):
            # Entries of a curved loss cancel: rounding is relative to parameters and data, which are about 1.
            size = 0.125 if case.loss == "curved" or what != "state " else 1e-6
            _check(differences, f"step {number}: {what}", a, b, size, searches(case))
        params, opt_state = want[:2]


def _check(differences: Differences, what: str, found: Any, want: Any, size: float, fp64: bool) -> None:
    bound, label = (BOUND_FP64, "fp64") if fp64 else (BOUND, "fp32")
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(want), strict=True):
        differences.check(what + jax.tree_util.keystr(path), a, b, bound, size, label)


def _probed(case: Any, opt_state: Any, differences: Differences) -> None:
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, Probed)) if isinstance(x, Probed)]
    for told in found:
        differences.check("value_fn(params)", told.again, told.value, PROBED, label="fp32")


def host(tree: Any) -> Any:
    """The tree on the host, with keys as their data."""
    key = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x)) if key(x) else np.asarray(x), tree)
