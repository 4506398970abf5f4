"""``PipelineLoss``: a loss function split into embedding, layers and head, so that a pipeline can run the layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ModelError, listing
from jaxpar.parallel.pipeline.separate_layers import check_same_code, separate_layers, stacked_arrays
from jaxpar.utils.arrays import at_least_fp32

ADDED = "loss"
"""The key of the scalar that a layer adds to the loss."""
REPORTED = "aux_loss"
"""The name of the metric that reports this scalar."""


@dataclass(frozen=True)
class PipelineLoss:
    """A ``loss_fn`` in parts, so that a pipeline can distribute the layers over its stages.

    Called directly, it runs all layers one after the other, without a pipeline.

    Attributes:
      layers: the path of the layer stack in the model, such as ``blocks`` or ``decoder/blocks``. The layers have equal
        structure. Their parameters are stacked along a first dim with the logical name ``layers``. The layers may also
        be separate in the model, as a list or as ``Block_0``, ``Block_1`` (path ``Block``); a pipeline then requires
        :func:`jaxpar.pipeline.stack`.
      embed: ``embed(model, batch) -> x`` computes the input of the first layer, [rows, ...], with the sequence as the
        second dim if there is one.
      layer: ``layer(block, x, side) -> x`` runs one layer and keeps the shape and dtype of ``x``. To set a checkpoint
        policy, wrap its body in ``jax.checkpoint``: its backward then receives the residuals that the policy saves. It
        may return ``(x, aux)``. A scalar ``aux`` is added to the loss, with its weight already applied, and is reported
        as the metric ``aux_loss``. In a dict of scalars, ``loss`` is treated in this way, and all others are metrics.
        These scalars are summed over layers and averaged over microbatches as the loss is.
      head: ``head(model, x, batch) -> loss`` or ``(loss, aux)`` computes the mean over the rows that it receives. A
        metric ``weight`` in ``aux`` is the weight of these rows in the mean over microbatches; the default is 1.
      prepare: ``prepare(model, batch) -> batch`` runs once for the full batch, for instance to reorder tokens or to add
        positions. Arrays are [rows, seq, ...]. It may read all parameters, those of the layers included, but no
        gradient flows to them.
      layer_inputs: ``layer_inputs(model, batch) -> arrays`` computes further inputs of the layers, which receive them
        as ``side``. It may read parameters, but no gradient flows to them.
      dims: the logical dims of ``x``.
      keys: layers draw random numbers: ``layer(block, x, side, keys)`` also receives a PRNG key for each row of ``x``,
        [rows]. A key depends on the step, the index of the row in the full batch and the index of the layer in the
        model. Results therefore do not depend on microbatches, stages or devices, except where the sequence is sharded:
        each shard then draws its own numbers. The cost is one hash per row and layer, and one per row. Keys of JAX's
        ``rbg`` implementation draw different numbers in a different batch, so results with them depend on microbatches
        and devices.
      numbered: layers differ: ``layer(block, x, side, number)`` also receives the index of the layer in the model, a
        traced int32; with ``keys`` after the keys. Stages run different layers at the same time, so what depends on the
        index must not communicate.
      chunked_layer: for schedules that split sequences into chunks:
        ``chunked_layer(block, x, side, carry, chunk) -> (x, carry)`` runs one layer on one chunk of a microbatch. ``x``
        and ``side`` belong to the chunk, and its number ``chunk`` is traced. ``carry`` holds the data that earlier
        chunks wrote, such as keys and values. The function returns it with the chunk's own part written at
        ``chunk * x.shape[1]``. Neither the result nor any gradient may depend on the carry behind that part, which
        holds values of another microbatch or of later chunks, nor on the previous content of that part.
      chunk_carry: ``chunk_carry(model, batch)`` returns the carry of one layer for a full microbatch: arrays
        [rows, seq, ...], or their shapes. Integer arrays have no gradient.

    ``model`` is the value that ``make_model`` returned, as for any ``loss_fn``. Under a pipeline, ``embed``,
    ``layer_inputs``, ``chunk_carry`` and ``head`` receive shapes instead of arrays for the parameters of the layers;
    reading one of these raises :class:`jaxpar.errors.ModelError`. ``block`` is one layer: an NNX module (the stack's
    module with the arrays of one layer), or the stack's subtree with the arrays of one layer.

    >>> import jax, jax.numpy as jnp
    >>> loss = PipelineLoss(
    ...     layers="blocks",
    ...     embed=lambda model, batch: batch["x"],
    ...     layer=lambda block, x, side: x + jnp.tanh(x @ block["w"]),
    ...     head=lambda model, x, batch: jnp.mean((x - batch["y"]) ** 2),
    ... )
    >>> ones = jnp.ones((2, 4))
    >>> float(loss({"blocks": {"w": jnp.zeros((3, 4, 4))}}, {"x": ones, "y": 2 * ones}))
    1.0
    """

    layers: str
    embed: Callable[[Any, Any], jax.Array]
    layer: Callable[..., Any]
    head: Callable[[Any, jax.Array, Any], Any]
    prepare: Callable[[Any, Any], Any] = lambda model, batch: batch
    layer_inputs: Callable[[Any, Any], Any] = lambda model, batch: None
    dims: tuple[str | None, ...] | None = None
    keys: bool = False
    numbered: bool = False
    chunked_layer: Callable[[Any, jax.Array, Any, Any, jax.Array], tuple[jax.Array, Any]] | None = None
    chunk_carry: Callable[[Any, Any], Any] = lambda model, batch: None

    @property
    def path(self) -> tuple[str, ...]:
        """The path of the layer stack as a tuple of names."""
        return tuple(self.layers.split("/"))

    def __call__(self, model: Any, batch: Any, key: Any = None) -> Any:
        """Returns the result of ``head``, with the layers' losses and metrics added.

        Args:
          model: as ``make_model`` returned it.
          batch: the full batch, arrays [rows, ...].
          key: a PRNG key; required if ``keys`` is set.

        Raises:
          ModelError: ``keys`` is set and ``key`` is missing; the model has no stack of parameters at ``layers``; a
            layer returned something other than ``x`` or ``(x, aux)``; or a layer and ``head`` return metrics of one
            name.
        """
        return self.of_rows(model, (batch, self.rows(batch, key)))

    def rows(self, batch: Any, key: Any) -> Any:
        """Returns a key for each row of a full batch, [rows], or ``None`` if layers draw no random numbers.

        Raises:
          ModelError: ``keys`` is set and ``key`` is ``None``.
        """
        if not self.keys:
            return None
        if key is None:
            raise ModelError(
                "PipelineLoss(keys=True) draws random numbers, but was called without a key. Remedy: call loss(model, "
                "batch, key=jax.random.key(0))."
            )
        # An array may have one row for all, and a scalar has none.
        count = max(x.shape[0] for x in jax.tree.leaves(batch) if jnp.ndim(x))
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))

    def of_rows(self, model: Any, given: tuple[Any, Any]) -> Any:
        """Returns the same as :meth:`__call__`, for some or all rows of a batch.

        Args:
          model: as ``make_model`` returned it.
          given: the batch, and the keys of its rows as :meth:`rows` returned them.

        Raises:
          ModelError: as :meth:`__call__`, but for the key.
        """
        batch, keys = given
        return self.of_prepared(model, _no_gradient(self.prepare(model, batch), but=batch), keys)

    def of_prepared(self, model: Any, batch: Any, keys: Any = None) -> Any:
        """Returns the same as :meth:`of_rows`, for a batch that ``prepare`` returned."""
        side = _no_gradient(self.layer_inputs(model, batch))
        leaves, block = stacked_part(model, self.path)

        def one(x: jax.Array, at: Any) -> tuple[jax.Array, Any]:
            number, leaves = at
            return self.one(block(leaves), x, side, of_layer(keys, number), number)

        numbers = jnp.arange(jax.tree.leaves(leaves)[0].shape[0], dtype=jnp.int32)
        x, extras = jax.lax.scan(one, self.embed(model, batch), (numbers, leaves))
        return with_extras(self.head(model, x, batch), jax.tree.map(lambda each: each.sum(0), extras))

    def one(
        self, block: Any, x: jax.Array, side: Any, keys: Any, number: Any = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the output of one layer and the layer's scalars by name, in fp32 or wider.

        Args:
          block: the layer.
          x: its input, [rows, ...].
          side: the result of ``layer_inputs``.
          keys: a key for each row, [rows], or ``None``.
          number: the index of the layer in the model, if the loss is ``numbered``.

        Raises:
          ModelError: the layer returned something other than ``x`` or ``(x, aux)``, or an array that is not a scalar in
            ``aux``.
        """
        more = (*((keys,) if self.keys else ()), *((number,) if self.numbered else ()))
        found = self.layer(block, x, side, *more)
        if not isinstance(found, tuple):
            return found, {}
        if len(found) != 2:
            raise ModelError(
                "PipelineLoss(layer=...) must return x or (x, aux), where aux is a scalar or a dict of scalars, got a "
                f"tuple of {len(found)}. Remedy: return one of these; a layer carries no variables."
            )
        x, aux = found
        extras = {} if aux is None else dict(aux) if isinstance(aux, Mapping) else {ADDED: aux}
        for name, value in extras.items():
            if jnp.shape(value):
                raise ModelError(
                    f"PipelineLoss(layer=...) returned {name!r} of shape {jnp.shape(value)} in addition to x, but "
                    "such values are summed over layers, averaged over microbatches and must be scalars. Remedy: "
                    "return its mean."
                )
        return x, {name: at_least_fp32(value) for name, value in extras.items()}


def _no_gradient(tree: Any, but: Any = None) -> Any:
    """Stops the gradient of all arrays but those in ``but``, as a pipeline does not differentiate their computation."""
    same = {id(x) for x in jax.tree.leaves(but)}
    stop = lambda x: jax.lax.stop_gradient(x) if isinstance(x, jax.Array) and id(x) not in same else x
    return jax.tree.map(stop, tree)


def of_layer(keys: Any, number: Any) -> Any:
    """Folds the number of a layer into the keys of rows, [rows]; ``None`` stays ``None``."""
    return None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def with_extras(value: Any, extras: Mapping[str, jax.Array]) -> Any:
    """Adds the layers' scalars to the loss and the metrics that ``head`` returned.

    Args:
      value: the result of ``head``.
      extras: the layers' scalars by name, summed over layers.

    Returns:
      ``value`` if there are no extras, else a tuple ``(loss, metrics, ...)``.

    Raises:
      ModelError: a name is in both.
    """
    if not extras:
        return value
    loss, aux, *updates = value if isinstance(value, tuple) else (value, None)
    metrics = {} if aux is None else dict(aux) if isinstance(aux, Mapping) else {"aux": aux}
    return (loss + extras.get(ADDED, 0), joined(metrics, extras), *updates)


def joined(metrics: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the metrics of ``head`` with those of the layers.

    Raises:
      ModelError: a name is in both, or a layer's metric is named ``weight``.
    """
    named = {REPORTED if name == ADDED else name: value for name, value in extras.items()}
    if both := sorted({*metrics, "weight"} & set(named)):
        raise ModelError(
            f"PipelineLoss(layer=...) returned metrics named {listing(both)}, which head returns or uses as the "
            "weight. Remedy: rename them."
        )
    return {**metrics, **named}


def stacked_part(model: Any, path: tuple[str, ...]) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the stacked arrays at a path of a model, and a function that builds one layer from one layer's arrays.

    Args:
      model: as ``make_model`` returned it.
      path: the names from the model to the stack, as :attr:`PipelineLoss.path`.

    Returns:
      The arrays ``[layers, ...]``: the subtree of a pytree, or the list of an NNX module's parameters; and the function
      that builds one layer from the same structure without the first dim.

    Raises:
      ModelError: the model has nothing at the path, or the stack holds arrays that are not parameters.

    >>> import jax, jax.numpy as jnp
    >>> leaves, build = stacked_part({"params": {"blocks": {"w": jnp.ones((3, 4, 8))}}}, ("blocks",))
    >>> build(jax.tree.map(lambda x: x[0], leaves))["w"].shape
    (4, 8)
    """
    nnx = sys.modules.get("flax.nnx")
    tree = model["params"] if isinstance(model, dict) and "params" in model else model
    for at, name in enumerate(path):
        if at == len(path) - 1 and (layers := separate_layers(tree, name)):
            return _stacked_layers(layers, path)
        inner = tree.get(name) if isinstance(tree, dict) else getattr(tree, name, None)
        if inner is None:
            have = sorted(tree) if isinstance(tree, dict) else sorted(vars(tree))
            raise ModelError(
                f"PipelineLoss(layers={'/'.join(path)!r}): the model has no {'/'.join(path[: at + 1])!r}. Remedy: "
                "give the path of its stack of layers; the model has "
                f"{listing(name for name in have if not name.startswith('_'))}."
            )
        tree = inner
    if nnx is None or not isinstance(tree, nnx.Module):
        return tree, lambda leaves: leaves
    params, layer_of = _split_module(tree, path)
    return jax.tree.leaves(params), layer_of


def _stacked_layers(layers: list[Any], path: tuple[str, ...]) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the same as :func:`stacked_part`, for layers that the model keeps apart."""
    nnx, where = sys.modules.get("flax.nnx"), f"PipelineLoss(layers={'/'.join(path)!r})"
    if nnx is None or not isinstance(layers[0], nnx.Module):
        return stacked_arrays(layers, where), lambda leaves: leaves
    check_same_code(layers, where)
    params = [_split_module(layer, path)[0] for layer in layers]
    leaves = jax.tree.leaves(stacked_arrays([nnx.to_pure_dict(each) for each in params], where))
    return leaves, _split_module(layers[0], path)[1]


def _split_module(module: Any, path: tuple[str, ...]) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the parameters of an NNX module, and a function that builds the module from other arrays.

    Raises:
      ModelError: it has other variables.
    """
    from flax import nnx

    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    if jax.tree.leaves(rest):
        paths = ["/".join((*path, *map(str, keys))) for keys, _ in nnx.to_flat_state(rest)]
        raise ModelError(
            f"PipelineLoss(layers={'/'.join(path)!r}): the layers carry {listing(paths)}, which a pipeline does not "
            "support: each stage sees its own microbatch. Remedy: keep counters and statistics out of the stack; for "
            "random numbers, use PipelineLoss(keys=True) instead of carried keys."
        )
    structure = jax.tree.structure(params)
    return params, lambda leaves: nnx.merge(graphdef, jax.tree.unflatten(structure, jax.tree.leaves(leaves)), rest)
