"""``PipelineLoss``: a loss that names the model's stack of layers, and what comes before and after it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ModelError, listing
from jaxpar.parallel.collectives.gather_reduce import wide

ADDED = "loss"
"""Under this name a layer gives what is added to the loss."""
REPORTED = "aux_loss"
"""Under this name it is a metric."""


def _as_it_is(model: Any, batch: Any) -> Any:
    return batch


def _nothing(model: Any, batch: Any) -> Any:
    return None


@dataclass(frozen=True)
class PipelineLoss:
    """A ``loss_fn`` in pieces, so that a pipeline can give the layers to its stages; called, it runs them one after the other.

    Attributes:
      layers: the path of the stack in the model, as ``blocks`` or ``decoder/blocks``: equal layers, their parameters stacked along a
        first dim with the logical name ``layers``.
      embed: ``embed(model, batch) -> x``, what the first layer is given: [rows, ...], with the sequence second if there is one.
      layer: ``layer(block, x, side) -> x`` of one layer; the same shape and dtype come out. A policy of recomputation is its own matter
        (``jax.checkpoint`` around what it does): what it keeps is what its backward pass is given. It may return ``(x, aux)``: a scalar is
        added to the loss, its weight already applied, and is the metric ``aux_loss``; of a dict of scalars ``loss`` is, and all others are
        metrics. They are summed over layers, and over microbatches averaged as the loss is.
      head: ``head(model, x, batch) -> loss`` or ``(loss, aux)``, the mean over the rows that it is given. A metric ``weight`` in ``aux`` says how
        much these count, 1 without.
      prepare: ``prepare(model, batch) -> batch``, once for the whole batch: the order of tokens, positions. Arrays [rows, seq, ...]. What it computes of
        parameters, of the layers too, has no gradient.
      layer_inputs: ``layer_inputs(model, batch) -> arrays`` that layers want to know of a batch beside ``x``. They may be computed from parameters, but have no gradient.
      dims: the logical dims of ``x``.
      keys: layers draw random numbers: ``layer(block, x, side, keys)``, with a PRNG key for each row of ``x``, [rows]. A key is of the step, the
        row's place in the whole batch and the layer's in the model, so that microbatches, stages and devices change nothing of what is drawn
        (but where a sequence is split: then each part draws its own). It costs a hash a row and layer, and one a row. Keys of jax's kind
        ``rbg`` draw otherwise in another batch: with them results depend on microbatches and devices.
      chunked_layer: for schedules that cut sequences into chunks: ``chunked_layer(block, x, side, carry, chunk) -> (x, carry)``, a layer of one chunk of
        a microbatch, whose number ``chunk`` is traced; ``x`` and ``side`` are of the chunk. ``carry`` is what its chunks so far have left, as keys and
        values: it returns it with its own part written, from ``chunk * x.shape[1]`` on. Neither its result nor any gradient may depend on what
        stands in the carry behind that part (that of another microbatch, or of later chunks), nor on what stood in it.
      chunk_carry: ``chunk_carry(model, batch)``: the carry of a layer for all of a microbatch, arrays [rows, seq, ...] or their shapes. Integers have no
        gradient.

    ``model`` is what ``make_model`` returned, for ``loss_fn``. Under a pipeline ``embed``, ``layer_inputs``, ``chunk_carry`` and ``head`` get it with shapes for the
    parameters of its layers, and a :class:`jaxpar.errors.ModelError` says so if they read one. ``block`` is one layer: an NNX module
    (the stack's, with one layer's arrays) or the stack's subtree of one layer's arrays.

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
    prepare: Callable[[Any, Any], Any] = _as_it_is
    layer_inputs: Callable[[Any, Any], Any] = _nothing
    dims: tuple[str | None, ...] | None = None
    keys: bool = False
    chunked_layer: Callable[[Any, jax.Array, Any, Any, jax.Array], tuple[jax.Array, Any]] | None = None
    chunk_carry: Callable[[Any, Any], Any] = _nothing

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.layers.split("/"))

    def __call__(self, model: Any, batch: Any, key: Any = None) -> Any:
        """What ``head`` returns, with what layers add.

        Raises:
          ModelError: layers draw random numbers, but there is no ``key``; or they return what cannot be.
        """
        return self.of_rows(model, (batch, self.rows(batch, key)))

    def rows(self, batch: Any, key: Any) -> Any:
        """A key for each row of a whole batch; ``None`` where none are drawn from."""
        if not self.keys:
            return None
        if key is None:
            raise ModelError(
                "PipelineLoss(keys=True) draws random numbers, but was called without a key. Remedy: loss(model, batch, key=jax.random.key(0))."
            )
        count = max(
            x.shape[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)
        )  # one row may serve all, and a scalar has none
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))

    def of_rows(self, model: Any, given: tuple[Any, Any]) -> Any:
        """As when called, of a batch and the keys of its rows, which may be a part of the whole."""
        batch, keys = given
        batch = _no_gradient(self.prepare(model, batch), but=batch)
        side = _no_gradient(self.layer_inputs(model, batch))
        leaves, block = stacked_part(model, self.path)

        def one(x: jax.Array, at: Any) -> tuple[jax.Array, Any]:
            number, leaves = at
            return self.one(block(leaves), x, side, of_layer(keys, number))

        numbers = jnp.arange(jax.tree.leaves(leaves)[0].shape[0])
        x, extras = jax.lax.scan(one, self.embed(model, batch), (numbers, leaves))
        return with_extras(self.head(model, x, batch), jax.tree.map(lambda each: each.sum(0), extras))

    def one(self, block: Any, x: jax.Array, side: Any, keys: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """One layer: ``x``, and the scalars beside it, in fp32 or wider."""
        found = self.layer(block, x, side, keys) if self.keys else self.layer(block, x, side)
        if not isinstance(found, tuple):
            return found, {}
        if len(found) != 2:
            raise ModelError(
                f"PipelineLoss(layer=...) returned a tuple of {len(found)}, but x or (x, aux) is wanted, aux being a scalar or a dict of scalars. "
                f"Remedy: return one of these; a layer carries no variables."
            )
        x, aux = found
        extras = {} if aux is None else dict(aux) if isinstance(aux, Mapping) else {ADDED: aux}
        for name, value in extras.items():
            if jnp.shape(value):
                raise ModelError(
                    f"PipelineLoss(layer=...) returned {name!r} of shape {jnp.shape(value)} beside x, but layers are summed and microbatches averaged, "
                    f"so scalars are wanted. Remedy: return its mean."
                )
        return x, {name: wide(value) for name, value in extras.items()}


def _no_gradient(tree: Any, but: Any = None) -> Any:
    """A tree whose arrays have no gradient, but for those of another tree: a pipeline computes them beside what it differentiates."""
    same = {id(x) for x in jax.tree.leaves(but)}
    stop = lambda x: jax.lax.stop_gradient(x) if isinstance(x, jax.Array) and id(x) not in same else x
    return jax.tree.map(stop, tree)


def of_layer(keys: Any, number: Any) -> Any:
    """The keys of rows, of one layer."""
    return None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def with_extras(value: Any, extras: Mapping[str, jax.Array]) -> Any:
    """What ``after`` returned, with what layers add to its loss and to its metrics."""
    if not extras:
        return value
    loss, aux, *updates = value if isinstance(value, tuple) else (value, None)
    metrics = {} if aux is None else dict(aux) if isinstance(aux, Mapping) else {"aux": aux}
    return (loss + extras.get(ADDED, 0), joined(metrics, extras), *updates)


def joined(metrics: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of ``after`` and those of the layers.

    Raises:
      ModelError: a name is in both.
    """
    named = {REPORTED if name == ADDED else name: value for name, value in extras.items()}
    both = sorted({*metrics, "weight"} & set(named))
    if both:
        raise ModelError(
            f"PipelineLoss(layer=...) returned metrics named {listing(both)}, which after returns or weighs by. Remedy: rename them."
        )
    return {**metrics, **named}


def stacked_part(model: Any, path: tuple[str, ...]) -> tuple[Any, Callable[[Any], Any]]:
    """The stacked arrays at a path of a model, and what makes one layer of one layer's arrays.

    Raises:
      ModelError: there is nothing at the path, or the stack carries arrays that are not trained.
    """
    nnx = sys.modules.get("flax.nnx")
    tree = model["params"] if isinstance(model, dict) and "params" in model else model
    for at, name in enumerate(path):
        inner = tree.get(name) if isinstance(tree, dict) else getattr(tree, name, None)
        if inner is None:
            have = sorted(tree) if isinstance(tree, dict) else sorted(vars(tree))
            raise ModelError(
                f"PipelineLoss(layers={'/'.join(path)!r}): the model has no {'/'.join(path[: at + 1])!r}. Remedy: the path of its stack of layers; "
                f"there are {listing(name for name in have if not name.startswith('_'))}."
            )
        tree = inner
    if nnx is None or not isinstance(tree, nnx.Module):
        return tree, lambda leaves: leaves
    graphdef, params, rest = nnx.split(tree, nnx.Param, ...)
    if jax.tree.leaves(rest):
        paths = ["/".join((*path, *map(str, keys))) for keys, _ in nnx.to_flat_state(rest)]
        raise ModelError(
            f"PipelineLoss(layers={'/'.join(path)!r}): the layers carry {listing(paths)}, which no pipeline can: each stage sees its own microbatch. "
            f"Remedy: keep counters and statistics out of the stack; for random numbers PipelineLoss(keys=True) in the place of keys."
        )
    structure = jax.tree.structure(params)
    return jax.tree.leaves(params), lambda leaves: nnx.merge(
        graphdef, jax.tree.unflatten(structure, jax.tree.leaves(leaves)), rest
    )
