"""``one_bit_adam``: data-parallel Adam that replaces gradients by the signs of the momentum after its warm-up.

After 1-bit Adam (Tang et al. 2021, arXiv:2102.02888). The first ``warmup`` steps are ordinary Adam. From then on the
variance is frozen: each device adds its own gradient to the common momentum, and
:func:`jaxpar.parallel.collectives.one_bit.average` averages the results over the devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxpar.errors import ConfigError, LayoutError, ModelError, RulesError
from jaxpar.parallel.collectives import one_bit
from jaxpar.parallel.collectives.gather_reduce import batch_axes
from jaxpar.sharding.layout import Layout, current_layout
from jaxpar.sharding.names import Names
from jaxpar.sharding.resolve import Resolved, ResolvedDim, num_shards_over
from jaxpar.sharding.rules import Axes, over
from jaxpar.training.model import Path, leaves_with_paths, show
from jaxpar.utils.arrays import accumulator, at_least_fp32
from jaxpar.utils.checks import is_count

NAME = "one_bit_adam"
_ROLES = ("params", "gradients", "optimizer")

type LeafDims = Mapping[Path, Names]


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`one_bit_adam`."""

    learning_rate: float | Callable[[Any], Any]
    b1: float
    b2: float
    eps: float
    weight_decay: float
    warmup: int
    block: int
    min_bytes: int


class State(NamedTuple):
    """The state of :func:`one_bit_adam`.

    Attributes:
      count: int32 scalar, the number of updates.
      mu, nu: Adam's moments of each parameter.
      worker: for each array sent as signs, ``[devices, *shape]``: the compression error of each device's signs.
      server: for each array sent as signs, ``[devices, pieces, numbers]``: the compression error of the average's
        signs, for the part that each device averages. ``pieces`` is the number of shards of the array over other axes
        than the batch's.
    """

    count: Any
    mu: Any
    nu: Any
    worker: Any
    server: Any


class OneBit(NamedTuple):
    """An optimizer that reduces gradients itself. Made by :func:`one_bit_adam`."""

    init: Callable[..., State]
    update: Callable[..., Any]
    settings: Settings

    def check_options(self, options: Iterable[tuple[str, Any, Any]]) -> None:
        """Raises if an argument of a step is incompatible with the optimizer.

        Args:
          options: for each argument its name, its value, and the only compatible value.

        Raises:
          ConfigError: the first incompatible argument.
        """
        why = {
            "clip_norm": "each device keeps its own gradient, so the norm of the mean gradient is not known",
            "weight_gather": "it requires replicated weights",
            "grad_reduction": "it reduces gradients itself, once per step",
            "precision: reduce": "it reduces in fp32 during its warm-up and sends signs afterwards",
        }
        for name, value, required in options:
            if value != required:
                reason = why.get(name, "it sends all signs together and reduces everything else itself")
                raise ConfigError(
                    f"{name} is {value!r}, which {NAME} does not support: {reason}. Remedy: leave "
                    f"{name.replace(': ', '.')} out"
                    + (" (clip_norm: null in a run), or clip in loss_fn." if name == "clip_norm" else ".")
                )

    def place(
        self, layout: Layout, path: Path, shape: tuple[int, ...], params: Mapping[Path, tuple[int, ...]], dims: LeafDims
    ) -> tuple[Names, Resolved] | None:
        """Returns the names and sharding of a compression error; ``None`` for arrays placed like any optimizer's.

        Args:
          layout: mesh and rules.
          path: the array's path in the optimizer's state.
          shape: the array's shape.
          params: parameter path → shape.
          dims: ("params", *path) → logical dims.
        """
        kind, owner = path[0], path[1:]
        if kind not in ("worker", "server"):
            return None
        axes, batch = batch_axes(layout), layout.resolve(("batch",))
        param = _split(layout, dims, owner, params[owner])
        error_of = {"worker": "the error of its own signs", "server": "the error of the average's signs, for its part"}
        first = ResolvedDim("batch", shape[0], axes, batch.dims[0].rule, f"each device keeps {error_of[kind]}")
        if kind == "worker":
            return ("batch", *(dim.name for dim in param.dims)), Resolved(
                (first, *param.dims), (), param.used | batch.used
            )
        pieces = ResolvedDim(None, shape[1], _axes_of(param), "", "one per shard of the parameter")
        part = ResolvedDim(
            None, shape[2], (), "", "the elements that one device averages, rounded up to full bytes of signs"
        )
        return ("batch", None, None), Resolved((first, pieces, part), (), batch.used)

    def problems(self, layout: Layout, path: Path, shape: tuple[int, ...], dims: LeafDims) -> tuple[str, ...]:
        """Returns the problem with a parameter's sharding, if the batch's axes shard it; each device needs all of it.

        Args:
          layout: mesh and rules.
          path: the parameter's path.
          shape: the parameter's shape.
          dims: ("params", *path) → logical dims.
        """
        names = dims.get(("params", *path), (None,) * len(shape))
        for role in _ROLES:
            used = set(_axes_of(layout.resolve(names, shape, role=role))) & set(batch_axes(layout))
            if used:
                text = (
                    f"{show(('params', *path))} {list(shape)} is sharded over {', '.join(sorted(used))} by the rules "
                    f"for {role}, as the batch is, but {NAME} requires replicated weights and moments (stage 0). "
                    "Remedy: use a layout such as configs/layouts/dp.yaml, without parallel.optimizer, or another "
                    "optimizer."
                )
                return (text,)
        return ()

    def update_sharded(
        self, layout: Layout, dims: LeafDims, grads: Any, state: State, params: Any
    ) -> tuple[Any, State]:
        """Returns the parameters' updates and the new state.

        Args:
          layout: mesh and rules.
          dims: ("params", *path) → logical dims.
          grads: for each parameter ``[devices, *shape]``, the per-device gradients; their mean is the gradient.
          state: the optimizer's state.
          params: the parameters.

        Raises:
          LayoutError: the state's compression errors are for another number of devices.
        """
        settings, axes, devices = self.settings, batch_axes(layout), num_shards_over(batch_axes(layout), layout.sizes)
        leaves, structure = jax.tree.flatten(params)
        paths = [path for path, _ in leaves_with_paths(params)]
        packed = [_packed(settings, x) for x in leaves]
        _check_devices(
            layout, dims, state, [(p, x.shape) for p, x, flag in zip(paths, leaves, packed, strict=True) if flag]
        )
        places = [_split(layout, dims, path, x.shape) for path, x in zip(paths, leaves, strict=True)]
        param_specs = [PartitionSpec(*(dim or None for dim in r.axes)) for r in places]
        device_specs = [PartitionSpec(axes or None, *spec) for spec in param_specs]
        server_specs = [
            PartitionSpec(axes or None, _axes_of(r) or None) for r, flag in zip(places, packed, strict=True) if flag
        ]
        worker_specs = [spec for spec, flag in zip(device_specs, packed, strict=True) if flag]
        # Manual over every axis, so that each device forms blocks from its own shard and nothing is resharded for them.
        run = jax.shard_map(
            functools.partial(_moments, settings, packed, axes, devices),
            in_specs=(PartitionSpec(), device_specs, param_specs, param_specs, worker_specs, server_specs),
            out_specs=(param_specs, param_specs, worker_specs, server_specs),
            check_vma=False,  # JAX would take the gathered values to vary between devices
        )
        given = (jax.tree.leaves(tree) for tree in (grads, state.mu, state.nu, state.worker, state.server))
        mu, nu, errors, others = run(state.count, *given)
        count = optax.safe_increment(state.count)
        rate = settings.learning_rate
        rate = rate(state.count) if callable(rate) else rate

        def one(p: jax.Array, m: jax.Array, v: jax.Array, flag: bool) -> jax.Array:
            # The variance's bias correction is frozen with the variance.
            seen = jnp.minimum(count, settings.warmup) if flag else count
            change = (m / _correction(settings.b1, count)) / (
                jnp.sqrt(v / _correction(settings.b2, seen)) + settings.eps
            )
            return (-rate * (change + settings.weight_decay * p)).astype(p.dtype)

        updates = [one(*xs) for xs in zip(leaves, mu, nu, packed, strict=True)]
        like = lambda tree, found: jax.tree.unflatten(jax.tree.structure(tree), found)
        new = State(count, like(params, mu), like(params, nu), like(state.worker, errors), like(state.server, others))
        return jax.tree.unflatten(structure, updates), new


def one_bit_adam(
    learning_rate: float | Callable[[Any], Any],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    warmup: int,
    block: int = one_bit.BLOCK,
    min_bytes: int | str = "64KiB",
) -> Any:
    """Returns Adam (AdamW with ``weight_decay``) that sends one bit per number after its warm-up.

    :func:`jaxpar.init` and every function that takes an optimizer accept it. Weights and moments are replicated over
    the batch's devices (ZeRO stage 0). Each device computes its own gradient, as with ``grad_reduction="per_step"``.

    Args:
      learning_rate, b1, b2, eps, weight_decay: as for ``optax.adamw``; the rate may be a schedule.
      warmup: number of ordinary Adam updates, with gradients reduced in fp32, before the variance is frozen.
      block: how many numbers share one fp32 scale; a multiple of 8.
      min_bytes: arrays with fewer bytes in fp32 always use ordinary Adam; one fp32 all-reduce sums all of their
        gradients.

    Returns:
      The optimizer. It cannot be part of ``optax.chain`` or another transform.

    Raises:
      ConfigError: an argument is out of its range.

    >>> one_bit_adam(1e-3, warmup=100, min_bytes="4KiB").settings.min_bytes
    4096
    """
    for name, value in (("warmup", warmup), ("block", block)):
        step = 8 if name == "block" else 1
        if not is_count(value) or value % step:
            what = "a positive integer" if name == "warmup" else "a positive multiple of 8"
            raise ConfigError(f"{NAME}: {name} must be {what}, got {value!r}.")
    for name, rate in (("b1", b1), ("b2", b2)):
        if not 0 <= rate < 1:
            raise ConfigError(f"{NAME}: {name} must be in [0, 1), got {rate!r}.")
    try:
        threshold = over("data", min_bytes).min_bytes
    except RulesError:
        raise ConfigError(f"{NAME}: min_bytes must be a size such as '64KiB', got {min_bytes!r}.") from None
    settings = Settings(learning_rate, b1, b2, eps, weight_decay, warmup, block, threshold)
    return OneBit(functools.partial(_init, settings), _not_composable, settings)


def without_signs(tx: Any, steps: int) -> Any:
    """Returns ``tx``, with its warm-up extended to ``steps`` updates if it is a one-bit optimizer with a shorter one.

    Args:
      tx: any optimizer.
      steps: number of updates that must not send signs.
    """
    if not isinstance(tx, OneBit) or tx.settings.warmup >= steps:
        return tx
    settings = replace(tx.settings, warmup=steps)
    return OneBit(functools.partial(_init, settings), _not_composable, settings)


def _not_composable(*_: Any, **__: Any) -> Any:
    raise ConfigError(
        f"{NAME} averages the gradients of the devices itself, so it cannot be inside another transform (optax.chain, "
        "optax.masked, jp.offload). Remedy: pass it to init() and train_step() directly."
    )


def _packed(settings: Settings, x: Any) -> bool:
    """Whether an array is sent as signs."""
    return math.prod(x.shape) * accumulator(x).itemsize >= settings.min_bytes


def _init(settings: Settings, params: Any, dims: LeafDims | None = None) -> State:
    if dims is None:
        _not_composable()
    layout = current_layout()
    errors: dict[str, list[Any]] = {"worker": [], "server": []}
    for keys, x in leaves_with_paths(params):
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            path = show(("params", *keys))
            raise ModelError(f"{path} has dtype {x.dtype}, but {NAME} sends signs and therefore requires real numbers.")
        shapes = _shapes(layout, dims or {}, keys, x.shape) if _packed(settings, x) else None
        for name, found in errors.items():
            found.append(None if shapes is None else jnp.zeros(shapes[name], accumulator(x)))
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, accumulator(x)), params)
    structure = jax.tree.structure(params)
    worker, server = (jax.tree.unflatten(structure, found) for found in errors.values())
    return State(jnp.zeros((), jnp.int32), zeros(), zeros(), worker, server)


def _split(layout: Layout, dims: LeafDims, path: Path, shape: tuple[int, ...]) -> Resolved:
    """Resolves a parameter's sharding without the batch's axes, which :meth:`OneBit.problems` reports."""
    names = dims.get(("params", *path), (None,) * len(shape))
    found, batch = layout.resolve(names, shape, role="params"), batch_axes(layout)
    kept = tuple(replace(dim, axes=tuple(axis for axis in dim.axes if axis not in batch)) for dim in found.dims)
    return Resolved(kept, found.problems, found.used)


def _shapes(layout: Layout, dims: LeafDims, path: Path, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    devices = num_shards_over(batch_axes(layout), layout.sizes)
    shards = num_shards_over(_axes_of(_split(layout, dims, path, shape)), layout.sizes)
    return {
        "worker": (devices, *shape),
        "server": (devices, shards, one_bit.chunk_of(math.prod(shape) // shards, devices)),
    }


def _axes_of(resolved: Resolved) -> Axes:
    return tuple(axis for dim in resolved.axes for axis in dim)


def _correction(decay: float, count: jax.Array) -> jax.Array:
    return 1 - jnp.asarray(decay, jnp.float32) ** count


def _check_devices(layout: Layout, dims: LeafDims, state: State, sent: Sequence[tuple[Path, tuple[int, ...]]]) -> None:
    for name in ("worker", "server"):
        for (path, shape), x in zip(sent, jax.tree.leaves(getattr(state, name)), strict=True):
            expected = _shapes(layout, dims, path, shape)[name]
            if x.shape != expected:
                raise LayoutError(
                    f"{show(('opt_state', name, *path))} {list(x.shape)} holds the compression errors of {x.shape[0]} "
                    f"devices, but the batch is sharded over {expected[0]}, which requires {list(expected)}. Remedy: "
                    "use the layout that the state was created for, or call init() again."
                )


type _Arrays = list[jax.Array]


def _moments(
    settings: Settings,
    packed: Sequence[bool],
    axes: Axes,
    devices: int,
    count: jax.Array,
    grads: _Arrays,
    *state: _Arrays,
) -> tuple[_Arrays, ...]:
    """Returns the new moments and compression errors, for those in ``state``, of one device's shards."""
    mu, nu, worker, server = state
    grads = [at_least_fp32(g[0]) for g in grads]
    large, small = ([i for i, flag in enumerate(packed) if flag is want] for want in (True, False))
    index: Any = jax.lax.axis_index(axes) if axes else 0

    def momentum(m: jax.Array, g: jax.Array) -> jax.Array:
        return settings.b1 * m + (1 - settings.b1) * g

    def adam(grads: _Arrays, mu: _Arrays, nu: _Arrays) -> tuple[_Arrays, _Arrays]:
        variance = lambda v, g: settings.b2 * v + (1 - settings.b2) * g**2
        return list(map(momentum, mu, grads)), list(map(variance, nu, grads))

    def mean(x: jax.Array) -> jax.Array:
        # Without the barrier, the TPU compiler sums in the dtype that the gradient was cast from.
        return jax.lax.psum(jax.lax.optimization_barrier(x), axes) / devices if axes else x

    def ordinary(grads: _Arrays, mu: _Arrays, nu: _Arrays, worker: _Arrays, server: _Arrays) -> Any:
        return *adam(list(map(mean, grads)), mu, nu), worker, server

    def by_signs(grads: _Arrays, mu: _Arrays, nu: _Arrays, worker: _Arrays, server: _Arrays) -> Any:
        # A number without a variance (no gradient during the warm-up) takes no step.
        # Flatten before the comparison: the TPU compiler takes minutes to flatten booleans.
        live = [jax.lax.optimization_barrier(v.ravel()) > 0 for v in nu]
        parts = [
            one_bit.SignPart(momentum(m, g).ravel(), alive, w.ravel(), s.ravel())
            for m, g, alive, w, s in zip(mu, grads, live, worker, server, strict=True)
        ]
        found = one_bit.average(parts, axes, index, settings.block)
        of_live = lambda x, v, like: jnp.where(v > 0, x.reshape(v.shape), 0).reshape(like.shape)
        means = [of_live(p.values, v, v) for p, v in zip(found, nu, strict=True)]
        errors = [of_live(p.worker, v, w) for p, v, w in zip(found, nu, worker, strict=True)]
        return means, nu, errors, [p.server.reshape(s.shape) for p, s in zip(found, server, strict=True)]

    new_mu, new_nu = list(mu), list(nu)
    pick = lambda xs, which: [xs[i] for i in which]
    if small:
        summed_small = mean(jnp.concatenate([grads[i].ravel() for i in small]))
        bounds = [sum(grads[i].size for i in small[:n]) for n in range(1, len(small))]
        summed = [g.reshape(mu[i].shape) for i, g in zip(small, jnp.split(summed_small, bounds), strict=True)]
        for i, m, v in zip(small, *adam(summed, pick(mu, small), pick(nu, small)), strict=True):
            new_mu[i], new_nu[i] = m, v
    if large:
        # The count is equal on all devices, so all take the same branch.
        given = (pick(grads, large), pick(mu, large), pick(nu, large), worker, server)
        some_mu, some_nu, worker, server = jax.lax.cond(count < settings.warmup, ordinary, by_signs, *given)
        for i, m, v in zip(large, some_mu, some_nu, strict=True):
            new_mu[i], new_nu[i] = m, v
    return new_mu, new_nu, worker, server
