"""The groups of parameters that each stage of ``pipedream`` updates on its own, and stages padded to equal size.

Each group has its own optimizer state. A parameter that is read before and after the layers (tied embeddings) belongs
to the first stage; see ``tied`` in :class:`Groups`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxpar.errors import ConfigError, listing
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.training.asynchronous.in_flight import InFlightCall, split_over
from jaxpar.training.model import leaves_with_paths, to_path
from jaxpar.training.pipeline.stage_functions import Given, run_embed, run_head
from jaxpar.training.state import moment_names
from jaxpar.utils.arrays import at_least_fp32
from jaxpar.utils.contexts import param_dims

GROUPS = ("before", "layers", "after")
"""The groups with their own optimizer state; ``layers`` has one for each stage."""


@dataclass(frozen=True)
class Groups:
    """Splits parameters into those before the layers, the layers ``[stages, layers, ...]``, and those after them.

    Attributes:
      call: the call whose parameters are split.
      first: paths of the parameters that ``PipelineLoss.embed`` reads. All other parameters outside the layers belong
        to the last stage.
      tied: those of ``first`` that ``PipelineLoss.head`` also reads. They belong to the first stage. The last stage
        reads the version that the microbatch used there, and its part of their gradient is pending until the first
        stage adds its own.
    """

    call: InFlightCall
    first: frozenset[tuple[Any, ...]]
    tied: frozenset[tuple[Any, ...]]

    def cut(self, params: Any) -> dict[str, Any]:
        """Returns the groups of a tree of parameters.

        A group has ``None`` for the leaves of the others, so that a rule of the optimizer for some parameters, such as
        the mask of its weight decay, has the paths of the model.
        """
        stages, layers = self.call.window.stages, self.call.split.path
        group_of = lambda path: (
            "layers" if path[: len(layers)] == layers else "before" if path in self.first else "after"
        )
        part: Callable[[str], Any] = lambda name: _only(params, lambda path: group_of(path) == name)
        groups = {name: part(name) for name in GROUPS}
        of_stages = lambda w: w.reshape(stages, -1, *w.shape[1:])
        return {**groups, "layers": jax.tree.map(of_stages, groups["layers"])}

    def join(self, groups: dict[str, Any]) -> Any:
        """Reverses :meth:`cut`."""
        layers = jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), groups["layers"])
        return _merged(groups["before"], _merged(groups["after"], layers))

    def of_tied(self, params: Any) -> Any:
        """Returns the leaves of the tied parameters."""
        return _only(self.call.split.others(params), lambda path: path in self.tied)

    def with_tied(self, params: Any, tied: Any) -> Any:
        """Returns parameters, or gradients, with the tied ones replaced."""
        split = self.call.split
        return split.join(split.stack(params), _merged(tied, split.others(params)))

    def with_first(self, params: Any, first: Any) -> Any:
        """Returns parameters with the first group replaced."""
        return self.join({**self.cut(params), "before": first})

    def start(self, params: Any) -> dict[str, Any]:
        """Returns the groups' initial optimizer states."""
        tx, cut = self.call.state.metadata.tx, self.cut(params)
        with param_dims(self.call.state.metadata.dims):
            return {name: (jax.vmap(tx.init) if name == "layers" else tx.init)(cut[name]) for name in GROUPS}

    def update(self, grads: Any, states: dict[str, Any], params: Any, updated: dict[str, jax.Array]) -> tuple[Any, Any]:
        """Returns parameters and states after an update of some groups.

        Args:
          grads: gradients of all parameters.
          states: the groups' optimizer states.
          params: all parameters.
          updated: for each group whether it is updated; ``updated["layers"]`` is ``[stages]``.
        """
        tx, cut, given = self.call.state.metadata.tx, self.cut(params), self.cut(grads)
        new, after = {}, {}
        for name in GROUPS:
            f = jax.vmap(tx.update) if name == "layers" else tx.update
            updates, state = f(given[name], states[name], cut[name])
            select = lambda a, b, on=updated[name]: jnp.where(on.reshape(on.shape + (1,) * (a.ndim - on.ndim)), a, b)
            new[name] = jax.tree.map(select, optax.apply_updates(cut[name], updates), cut[name])
            after[name] = jax.tree.map(select, state, states[name])
        return self.join(new), after

    def squares(self, grads: Any) -> dict[str, jax.Array]:
        """Returns the squared gradient norm of each group; ``layers`` is ``[stages]``."""
        square = lambda g, n: jnp.sum(jnp.square(at_least_fp32(g)), range(n, g.ndim))
        return {
            name: sum((square(g, int(name == "layers")) for g in jax.tree.leaves(part)), jnp.zeros(()))
            for name, part in self.cut(grads).items()
        }

    def placed(self, states: dict[str, Any]) -> dict[str, Any]:
        """Constrains the optimizer states to the sharding of their parameters' moments."""
        call, dims = self.call, dict(self.call.state.metadata.dims)
        shapes, names = {}, {}
        for group, tree in jax.eval_shape(self.cut, call.state.params).items():
            of_layers = group == "layers"
            for path, w in leaves_with_paths(tree):
                own = dims.get(("params", *path))
                shapes[group, *path] = w.shape
                if own is not None:
                    names["params", group, *path] = (own[0], None, *own[1:]) if of_layers else own

        def one(group: str, keys: Any, x: jax.Array) -> jax.Array:
            within = {path[1:]: shape for path, shape in shapes.items() if path[0] == group}
            known = {("params", *path[2:]): name for path, name in names.items() if path[1] == group}
            _, found, _ = moment_names(to_path(keys), x.shape, within, known)
            if found is None:
                return call.put(x, *((AXIS,) if group == "layers" else ()))
            return call.put(x, *split_over(call.layout, found, "optimizer", x.shape, ()))

        return {
            group: jax.tree_util.tree_map_with_path(lambda keys, x, group=group: one(group, keys, x), states[group])
            for group in GROUPS
        }


def _only(params: Any, chosen: Callable[[tuple[Any, ...]], bool]) -> Any:
    """Returns the leaves at the chosen paths, and ``None`` at all others."""
    return jax.tree_util.tree_map_with_path(lambda keys, w: w if chosen(to_path(keys)) else None, params)


def _merged(some: Any, others: Any) -> Any:
    """Returns the leaves of the first tree, and those of the second where it has ``None``."""
    return jax.tree.map(lambda a, b: b if a is None else a, some, others, is_leaf=lambda x: x is None)


def with_padded_stages(call: InFlightCall) -> InFlightCall:
    """Returns the call on parameters whose stages are padded to equal size; see :func:`in_stages`.

    Raises:
      ConfigError: the layers are not sharded over their stages, or ``grad_reduction`` is ``per_microbatch``.
    """
    if call.options.grad_reduction == "per_microbatch":
        raise ConfigError(
            "asynchronous pipeline: grad_reduction is 'per_microbatch', but 'pipedream' updates with every microbatch "
            "and reduces its gradients once. Remedy: leave grad_reduction out, or use 'pipedream_2bw'."
        )
    transfer = call.transfer
    for sharding in jax.tree.leaves(transfer.split.stack(transfer.param_shardings)):
        if sharding.dims[0] != (AXIS,) and transfer.layers.pieces.stages > 1:
            placement = f"sharded over {listing(sharding.dims[0])}" if sharding.dims[0] else "replicated"
            raise ConfigError(
                f"asynchronous pipeline: the layers of {'/'.join(call.split.path)} are {placement}, but 'pipedream' "
                f"requires each stage to hold its own layers. Remedy: set the rule layers: {AXIS}."
            )
    counts = transfer.layers.counts
    if counts is None:
        return call
    state = replace(call.state, params=in_stages(call, call.state.params))
    return replace(call, state=state, options=replace(call.options, layers_per_stage=()), counts=counts)


def in_stages(call: InFlightCall, params: Any, *, back: bool = False) -> Any:
    """Pads the stack ``[layers, ...]`` to ``[stages * most layers of a stage, ...]`` with zeros; ``back`` removes them.

    Because of the zeros, sums that an optimizer takes over a stage's tensors equal those of its layers. Stages also
    compute the padding, since all do the same in a tick, and drop the result. If all stages have the same size, nothing
    changes.
    """
    layers, split = call.transfer.layers, call.split
    if layers.counts is None:
        return params
    one = (lambda w: layers.back(w[None], split=True)) if back else (lambda w: layers.cut(w)[0])
    local = lambda stack: jax.tree.map(one, stack)
    spec = PartitionSpec(AXIS)
    moved = jax.shard_map(local, in_specs=spec, out_specs=spec, axis_names={AXIS}, check_vma=False)
    return call.put_params(split.join(moved(split.stack(params)), split.others(params)))


def groups_of(call: InFlightCall, batch: Any) -> Groups:
    """Returns the groups, found by tracing which parameters ``embed`` and ``head`` read."""
    split, count = call.split, call.window.batch
    others = split.others(split.shapes)
    piece = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]), x.dtype), batch)

    def read(others: Any, piece: Any) -> None:
        x = run_embed(split, others, piece)
        run_head(split, others, x, Given(piece))

    jax.eval_shape(read, others, piece)
    first, last = split.read["embed"], split.read["head"]
    return Groups(call, first, first & last)
