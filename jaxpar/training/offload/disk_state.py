"""Which arrays of an optimizer's state are on disk, how they are grouped, and whether the optimizer allows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal
from jax.sharding import NamedSharding

from jaxpar.errors import ConfigError
from jaxpar.parallel.collectives.bucketing import LAYERS
from jaxpar.parallel.offload.placement import OnDisk, Stored
from jaxpar.sharding.layout import Layout, to_spec
from jaxpar.training.model import leaves_with_paths, show
from jaxpar.training.offload.host_update import entangled
from jaxpar.training.optimizers import accepted
from jaxpar.training.state import PlacedLeaf, TrainState, moment_names, place


@dataclass(frozen=True)
class MomentLeaf:
    """An array of the optimizer's state, and one row of it (one layer of a stack; all of any other array).

    Attributes:
      number: index among the leaves of the state as it would be in memory.
      tensor: its sharding; ``path`` is such as ``opt_state/0/mu/up``.
      shape: shape of a row.
      sharding: sharding of a row.
    """

    number: int
    tensor: PlacedLeaf
    shape: tuple[int, ...]
    sharding: NamedSharding

    @property
    def dtype(self) -> Any:
        return self.tensor.dtype


@dataclass(frozen=True)
class LeafGroup:
    """A parameter with state on disk; the step updates its rows one by one.

    Attributes:
      parameter: index among the leaves of ``params``.
      rows: number of layers of a stack, 1 otherwise.
      stored: its moments on disk.
      kept: its moments that stay in memory because they are small.
    """

    parameter: int
    rows: int
    stored: tuple[MomentLeaf, ...]
    kept: tuple[MomentLeaf, ...]


def is_stored(x: Any) -> bool:
    return isinstance(x, Stored)


def disk_of(state: TrainState) -> OnDisk | None:
    """Returns the optimizer if its state is on disk, else ``None``."""
    tx: Any = state.metadata.tx
    return tx if isinstance(tx, OnDisk) else None


def in_memory(state: TrainState) -> TrainState:
    """Returns the state as it would be without a disk; arrays on disk are ``ShapeDtypeStruct``."""
    tx = disk_of(state)
    if tx is None:
        return state
    one = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_stored(x) else x
    whole = jax.tree.map(one, state.opt_state, is_leaf=is_stored)
    return replace(state, opt_state=whole, metadata=replace(state.metadata, tx=tx.inner))


def stored_tensors(layout: Layout, state: TrainState) -> list[PlacedLeaf]:
    """Returns the sharding of each array on disk; the files hold its shards."""
    if disk_of(state) is None:
        return []
    found = [tensor for tensor in place(layout, in_memory(state)) if tensor.role == "opt_state"]
    leaves = jax.tree.leaves(state.opt_state, is_leaf=is_stored)
    return [tensor for tensor, leaf in zip(found, leaves, strict=True) if is_stored(leaf)]


def offered(tx: Any, loss: Any, grads: Any) -> dict[str, Any]:
    """Returns those extra arguments of ``tx.update`` that are available piece by piece."""
    return accepted(tx, {"value": loss, "grad": grads})


def refusal(state: TrainState) -> str | None:
    """Returns why the optimizer's state cannot be on disk, as text; ``None`` if it can."""
    if disk_of(state) is None:
        return None
    whole = in_memory(state)
    operation = entangled(whole, offered(whole.metadata.tx, np.float32(0), None))
    if operation is not None:
        return (
            f"offload: the optimizer mixes elements of an array ({operation}), so its state cannot be read from disk "
            "piece by piece. Remedy: use an elementwise optimizer (such as Adam, Lion or SGD; clip with clip_norm), "
            "or optimizer: host (to='host')."
        )
    params = {path: x.shape for path, x in leaves_with_paths(state.params)}
    for path, x, owner in _owned(state):
        if is_stored(x) and (owner is None or params[owner] != x.shape):
            return (
                f"offload: {show(path)} {list(x.shape)} is not a moment with the shape of its parameter, so it cannot "
                "be read from disk piece by piece. Remedy: set optimizer: host (to='host'), or increase min_bytes."
            )
    return None


def zeros(function: Callable[..., Any], *given: Any) -> list[bool]:
    """Returns which leaves of ``function(*given)`` are zeros for any arguments, as far as its trace shows.

    >>> zeros(lambda x: (x, jax.numpy.zeros_like(x)), np.ones(2))
    [False, True]
    """
    return _zeros(jax.make_jaxpr(function)(*given).jaxpr)


def _zeros(jaxpr: Any) -> list[bool]:
    is_zero = lambda v: not np.any(v.val) if isinstance(v, Literal) else v in known
    known: set[Any] = set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("broadcast_in_dim", "convert_element_type", "copy", "reshape") and is_zero(equation.invars[0]):
            known.add(equation.outvars[0])
        elif name in ("jit", "pjit"):
            known |= {
                v for v, is_so in zip(equation.outvars, _zeros(equation.params["jaxpr"].jaxpr), strict=True) if is_so
            }
    return [bool(is_zero(v)) for v in jaxpr.outvars]


def groups_of(layout: Layout, state: TrainState) -> list[LeafGroup]:
    """Returns the parameters with state on disk, in the order of their updates.

    Raises:
      ConfigError: the optimizer's state cannot be on disk, or is not configured to be.
    """
    if disk_of(state) is None:
        raise ConfigError(
            "disk_offloaded_train_step: the optimizer's state is in memory. Remedy: pass jp.offload.to_disk(tx, "
            "path=...) instead of tx, also to jp.init; or use jp.train_step."
        )
    if text := refusal(state):
        raise ConfigError(text)
    tensors = [tensor for tensor in place(layout, in_memory(state)) if tensor.role == "opt_state"]
    owned = [(owner, tensors[i], is_stored(x)) for i, (_, x, owner) in enumerate(_owned(state))]
    groups, dims = [], dict(state.metadata.dims)
    for number, (path, w) in enumerate(leaves_with_paths(state.params)):
        mine = [(i, tensor, away) for i, (owner, tensor, away) in enumerate(owned) if owner == path]
        mine = [(i, tensor, away) for i, tensor, away in mine if tensor.shape == w.shape]
        if not any(away for *_, away in mine):
            continue
        # If an axis shards the layers dim itself, a device does not hold a part of every layer.
        stack = dims.get(("params", *path), ())[:1] == (LAYERS,) and w.ndim > 1
        stack = stack and not any(tensor.resolved.axes[0] for _, tensor, _ in mine)
        shape = (1, *w.shape[1:]) if stack else w.shape
        moments = [
            (MomentLeaf(i, tensor, shape, NamedSharding(layout.mesh, to_spec(tensor.resolved))), away)
            for i, tensor, away in mine
        ]
        split = (tuple(m for m, away in moments if away is on_disk) for on_disk in (True, False))
        groups.append(LeafGroup(number, w.shape[0] if stack else 1, *split))
    return groups


def _owned(state: TrainState) -> list[tuple[Any, Any, Any]]:
    """Returns path, array (or its placeholder) and owner's path of each leaf of the optimizer's state."""
    params = {path: x.shape for path, x in leaves_with_paths(state.params)}
    dims = dict(state.metadata.dims)
    leaves = leaves_with_paths(state.opt_state, is_stored)
    return [(("opt_state", *path), x, moment_names(path, tuple(x.shape), params, dims)[0]) for path, x in leaves]
