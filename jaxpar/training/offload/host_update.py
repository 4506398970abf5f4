"""The update of an optimizer whose state, and possibly the parameters, are in host memory.

The state of layers stacked in one array stays on the host. A loop brings one layer's slice to the device, updates it
and writes it back. Arrays that are not stacks move in full. Only an elementwise optimizer (such as Adam, Lion, SGD) can
be updated layer by layer; the state of one that operates on full matrices moves in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxpar.errors import ConfigError
from jaxpar.parallel.offload.placement import DEVICE, HOST, on_host
from jaxpar.sharding.layout import Layout, to_spec, with_sharding
from jaxpar.sharding.names import LAYERS
from jaxpar.training.model import Path, leaves_with_paths, show
from jaxpar.training.state import TrainState, moment_names, place
from jaxpar.training.weight_changes import changed, is_narrow
from jaxpar.utils.arrays import placeholder

# Elementwise: each element of the result depends on one element of each operand.
_ELEMENTWISE = frozenset((
    "abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "div",
    "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "round", "rsqrt", "select_n", "sign",
    "sin", "sqrt", "square", "stop_gradient", "sub", "tanh", "xor",
))  # fmt: skip
_INNER = ("jaxpr", "call_jaxpr")

type Apply = Callable[..., tuple[list[Any], list[Any]]]
type Specs = Mapping[Path, PartitionSpec]


def update(
    layout: Layout, state: TrainState, grads: Any, finite: jax.Array, extra: dict[str, Any]
) -> tuple[Any, Any, jax.Array]:
    """Returns new parameters and optimizer state; the old ones where ``finite`` is false.

    Also returns how many weights of 16 bits in host memory changed.

    Args:
      layout: the ambient layout.
      state: the state that the step received.
      grads: gradients of the parameters, on the device.
      finite: bool scalar.
      extra: the extra arguments of ``tx.update``.

    Raises:
      ConfigError: parameters are in host memory, but the optimizer or the layout does not allow an update layer by
        layer.
    """
    tx, (weights, structure) = state.metadata.tx, jax.tree.flatten(state.params)
    states, state_structure = jax.tree.flatten(state.opt_state)
    gradients = jax.tree.leaves(grads)

    def apply(
        weights: Sequence[Any], gradients: Sequence[Any], states: Sequence[Any], finite: jax.Array, loss: Any
    ) -> tuple[list[Any], list[Any]]:
        p, g = (jax.tree.unflatten(structure, xs) for xs in (weights, gradients))
        given = extra | {name: x for name, x in (("grad", g), ("value", loss)) if name in extra}
        updates, s = tx.update(g, jax.tree.unflatten(state_structure, states), p, **given)
        new = (jax.tree.leaves(optax.apply_updates(p, updates)), jax.tree.leaves(s))
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (list(weights), list(states)))

    tensors = place(layout, state)
    state_specs = [to_spec(t.resolved) for t in tensors if t.role == "opt_state"]
    param_specs = jax.tree.unflatten(structure, [to_spec(t.resolved) for t in tensors if t.role == "params"])
    w_layered, s_layered, loop_specs = _by_layers(state, extra, param_specs, state_specs)
    # First the arrays that move in full. Nothing reads the placeholders of the stacks.
    # Those of the host are pinned to their own sharding: otherwise the compiler would reshard them on the host.
    to_device = lambda x, spec: with_sharding(layout.mesh, jax.device_put(x, DEVICE), spec)
    full_states = [
        placeholder(x) if skip else to_device(x, spec) if on_host(x) else x
        for x, spec, skip in zip(states, state_specs, s_layered, strict=True)
    ]
    loss = extra.get("value", jnp.zeros(()))
    new_w, new_s = apply(_without(weights, w_layered), _without(gradients, w_layered), full_states, finite, loss)
    new_s = [
        jax.device_put(with_sharding(layout.mesh, new, spec), HOST) if on_host(old) and not skip else new
        for old, new, spec, skip in zip(states, new_s, state_specs, s_layered, strict=True)
    ]
    hosted = jnp.zeros(())
    if any(w_layered):
        specs = loop_specs, _only(state_specs, s_layered)
        arrays, chosen = (weights, gradients, states), (w_layered, s_layered)
        layered = _layers(layout, apply, arrays, chosen, specs, (finite, loss))
        new_w, new_s = _filled(layered[0], w_layered, new_w), _filled(layered[1], s_layered, new_s)
        hosted = layered[2]
    return jax.tree.unflatten(structure, new_w), jax.tree.unflatten(state_structure, new_s), hosted


def _by_layers(
    state: TrainState, extra: dict[str, Any], placed: Any, state_specs: Sequence[PartitionSpec]
) -> tuple[list[bool], list[bool], list[PartitionSpec]]:
    """Returns which parameters and optimizer arrays are updated layer by layer, and the specs of their state."""
    dims = dict(state.metadata.dims)
    params = dict(leaves_with_paths(state.params))
    owners: list[Any] = []
    shapes = {path: w.shape for path, w in params.items()}
    for path, x in leaves_with_paths(state.opt_state):
        owner = moment_names(path, x.shape, shapes, dims)[0]
        owners.append(owner if owner is not None and params[owner].shape == x.shape else None)
    states = jax.tree.leaves(state.opt_state)
    hosted_params = {path for path, w in params.items() if on_host(w)}
    hosted = hosted_params | {
        owner for owner, x in zip(owners, states, strict=True) if owner is not None and on_host(x)
    }
    # Not 2-D stacks: the TPU compiler cannot slice single rows out of host memory.
    stacks = {path for path in hosted if dims.get(("params", *path), ())[:1] == (LAYERS,) and params[path].ndim > 2}
    lengths = [params[path].shape[0] for path in params if path in (hosted_params or stacks)]
    stacks = {path for path in stacks if params[path].shape[0] == lengths[0]}
    mixing = entangled(state, extra) if stacks else None
    if not stacks or mixing:
        if hosted_params:  # they would have to move in full
            raise ConfigError(
                "offload: parameters in host memory are updated layer by layer, but the optimizer mixes elements of an "
                f"array ({mixing}). Remedy: use an elementwise optimizer (such as adamw, lion or sgd; to clip, use "
                "clip_norm of the step), or keep parameters on the device."
            )
        return [False] * len(params), [False] * len(states), []
    loop_specs = {owner: spec for owner, spec in zip(owners, state_specs, strict=True) if owner in stacks}
    param_specs = dict(leaves_with_paths(placed))
    _check_same_specs(params, hosted_params, stacks, param_specs, loop_specs)
    loop_specs |= {path: param_specs[path] for path in hosted_params}
    return (
        [path in stacks for path in params],
        [owner in stacks for owner in owners],
        [loop_specs[path] for path in params if path in stacks],
    )


def _check_same_specs(
    params: Mapping[Path, Any], hosted_params: set[Path], stacks: set[Path], param_specs: Specs, state_specs: Specs
) -> None:
    """Raises if parameters in host memory need resharding, or their stacks differ in length; one loop updates all."""
    for path in params:
        where = show(("params", *path))
        if path in hosted_params - stacks:
            raise ConfigError(
                f"offload: {where} {list(params[path].shape)} is in host memory, but another stack in host memory has "
                "a different number of layers, and one loop updates all stacks. Remedy: keep parameters on the device."
            )
        if path in hosted_params and state_specs.get(path, param_specs[path]) != param_specs[path]:
            raise ConfigError(
                f"offload: {where} is in host memory with the sharding {param_specs[path]}, but its optimizer state "
                f"has {state_specs[path]}, and arrays are not resharded in host memory. Remedy: use the same rules "
                "for the roles params and optimizer."
            )


def entangled(state: TrainState, extra: Mapping[str, Any] | None = None) -> str | None:
    """Returns the first operation that mixes elements of an array, by name; ``None`` if the optimizer is elementwise.

    Args:
      state: supplies the optimizer and the shapes.
      extra: the extra arguments of ``tx.update``.
    """
    extra = extra or {}
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    given = jax.tree.map(shape, (state.params, state.opt_state, state.params))

    def run(g: Any, s: Any, p: Any) -> Any:
        return state.metadata.tx.update(g, s, p, **(dict(extra) | ({"grad": g} if "grad" in extra else {})))

    return _entangled(jax.make_jaxpr(run)(*given).jaxpr)


def _entangled(jaxpr: Any) -> str | None:
    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, equation.invars
        inner = next((equation.params[key] for key in _INNER if key in equation.params), None)
        if not any(getattr(v.aval, "ndim", 0) for v in (*inputs, *equation.outvars)):
            continue  # a schedule, a count
        if inner is not None:
            found = _entangled(getattr(inner, "jaxpr", inner))
        else:
            spread = name == "broadcast_in_dim" and not inputs[0].aval.ndim
            found = None if spread or name in _ELEMENTWISE else str(name)
        if found:
            return found
    return None


def _layers(
    layout: Layout,
    apply: Apply,
    arrays: tuple[Sequence[Any], Sequence[Any], Sequence[Any]],
    chosen: tuple[Sequence[bool], Sequence[bool]],
    specs: tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]],
    scalars: tuple[Any, Any],
) -> tuple[list[Any], list[Any], jax.Array]:
    """Returns parameters and states of stacked layers, updated layer by layer in their own memory; and the changes."""
    (weights, gradients, states), (w_layered, s_layered) = arrays, chosen
    absent = [placeholder(w) for w in weights]
    # During the update a parameter is sharded like its state.
    param_specs, state_specs = (list(some) for some in specs)
    counted = [i for i, x in enumerate(_only(weights, w_layered)) if is_narrow(x) and on_host(x)]
    # Each device counts its shards, and devices that hold the same shard a part of it.
    shares = np.array([_share(layout, param_specs[i]) for i in counted], np.float32)

    def loop(
        weights: list[Any], gradients: list[Any], moving: list[Any], staying: list[Any], scalars: tuple[Any, Any]
    ) -> tuple[list[Any], list[Any], jax.Array]:
        def one(i: jax.Array, carry: tuple[list[Any], list[Any], jax.Array]) -> tuple[list[Any], list[Any], jax.Array]:
            part = lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1, 0)
            load = lambda x: jax.device_put(part(x), DEVICE) if on_host(x) else part(x)
            store = lambda x, new: jax.lax.dynamic_update_slice_in_dim(
                x, jax.device_put(new, HOST) if on_host(x) else new, i, 0
            )
            w, g, s = ([load(x) for x in xs] for xs in (carry[0], gradients, carry[1]))
            new_w, new_s = apply(
                _filled(w, w_layered, absent), _filled(g, w_layered, absent), _filled(s, s_layered, staying), *scalars
            )
            write = lambda old, new, flags: [store(x, n) for x, n in zip(old, _only(new, flags), strict=True)]
            pairs = [(w[n], _only(new_w, w_layered)[n]) for n in counted]
            count = carry[2] + sum((share * changed(*pair) for share, pair in zip(shares, pairs, strict=True)), 0.0)
            return write(carry[0], new_w, w_layered), write(carry[1], new_s, s_layered), count

        # Carry the host arrays themselves: otherwise the compiler copies them in full.
        weights, moving, count = jax.lax.fori_loop(0, weights[0].shape[0], one, (weights, moving, jnp.zeros(())))
        return weights, moving, jax.lax.psum(count, layout.mesh.axis_names) if counted else count

    # Manual, because the compiler does any resharding between host and device on the host.
    run = jax.shard_map(
        loop,
        mesh=layout.mesh if isinstance(layout.mesh, Mesh) else None,
        in_specs=(param_specs, param_specs, state_specs, PartitionSpec(), PartitionSpec()),
        out_specs=(param_specs, state_specs, PartitionSpec()),
        check_vma=False,
    )
    staying = [placeholder(x) if x.ndim else x for x in states]
    return run(_only(weights, w_layered), _only(gradients, w_layered), _only(states, s_layered), staying, scalars)


def _share(layout: Layout, spec: PartitionSpec) -> float:
    """The share of the devices that hold different shards."""
    axes = [axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
    return math.prod(layout.sizes[axis] for axis in axes) / layout.mesh.size


def _only(values: Sequence[Any], chosen: Sequence[bool]) -> list[Any]:
    return [x for x, flag in zip(values, chosen, strict=True) if flag]


def _filled(some: Sequence[Any], chosen: Sequence[bool], others: Sequence[Any]) -> list[Any]:
    """Returns ``others``, with ``some`` at the chosen positions."""
    given = iter(some)
    return [next(given) if flag else other for flag, other in zip(chosen, others, strict=True)]


def _without(values: Sequence[Any], chosen: Sequence[bool]) -> list[Any]:
    return [placeholder(x) if flag else x for x, flag in zip(values, chosen, strict=True)]
