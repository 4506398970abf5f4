"""Shardings of a generator's prepared parameters and of its cache, both from the layout's rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxpar.analysis.layout.explain import _row
from jaxpar.analysis.layout.report import Report
from jaxpar.errors import LayoutError
from jaxpar.parallel.precision.int8 import is_int8
from jaxpar.parallel.precision.quantized_array import is_quantized
from jaxpar.sharding.layout import Layout, to_spec
from jaxpar.sharding.names import Names
from jaxpar.sharding.resolve import num_shards_over
from jaxpar.training.model import Tagged, show, to_path
from jaxpar.training.state import PlacedLeaf, TrainState, place


def prepared(layout: Layout, state: TrainState, prepare: Callable[[Any], Any]) -> tuple[Any, list[PlacedLeaf]]:
    """Returns the parameters after ``prepare`` as shapes with shardings, and as leaves for :func:`report`.

    A plain array keeps its sharding. An :class:`jaxpar.inference.Int8` or :class:`jaxpar.compression.QuantizedArray`
    shards its integers by the parameter's logical dims, and its scales by those of the dims that they keep.

    Args:
      layout: the layout of the generator.
      state: an abstract training state.
      prepare: ``prepare(params) -> params`` of :class:`jaxpar.inference.DecoderFns`.

    Raises:
      LayoutError: the mesh does not divide all parameters; it lists every problem.
    """
    dims = dict(state.metadata.dims)
    before = {tensor.path: tensor for tensor in place(layout, state) if tensor.role == "params"}
    found: list[PlacedLeaf] = []

    sharded = functools.partial(_sharded, layout, found, "params")

    def one(keys: Any, x: Any, old: Any) -> Any:
        path = show(("params", *to_path(keys)))
        if not is_quantized(x):
            found.append(replace(before[path], dtype=x.dtype))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=old.sharding)
        names = dims.get(("params", *to_path(keys)))
        values = sharded(f"{path}/values", x.values, names)
        if names is None:
            own: Any = None
        elif is_int8(x):
            own = x.of_scales(names)
        else:
            own = _whole_groups(layout, x.names_of_scales(names), x.scales.shape)
        return replace(x, values=values, scales=sharded(f"{path}/scales", x.scales, own))

    shapes = jax.eval_shape(prepare, state.params)
    params = jax.tree_util.tree_map_with_path(one, shapes, state.params, is_leaf=is_quantized)
    return params, _fitting(found)


def _whole_groups(layout: Layout, names: Names, shape: tuple[int, ...]) -> Names:
    """Returns the logical dims of scales, without those along which groups lie across shards."""
    axes = layout.resolve(names, role="params").axes
    counts = [num_shards_over(own, layout.sizes) for own in axes]
    return tuple(n if size % count == 0 else None for n, size, count in zip(names, shape, counts, strict=True))


def placed_cache(layout: Layout, cache: Any) -> tuple[Any, list[PlacedLeaf]]:
    """Returns a model's cache as shapes with shardings, and as leaves for :func:`report`.

    Raises:
      LayoutError: the mesh does not divide all arrays of the cache; it lists every problem.
    """
    found: list[PlacedLeaf] = []

    def one(keys: Any, tagged: Tagged) -> jax.ShapeDtypeStruct:
        return _sharded(layout, found, "cache", show(("cache", *to_path(keys))), tagged.value, tagged.dims)

    shapes = jax.tree_util.tree_map_with_path(one, cache, is_leaf=lambda x: isinstance(x, Tagged))
    return shapes, _fitting(found)


def _sharded(
    layout: Layout, found: list[PlacedLeaf], role: str, path: str, x: Any, names: Names | None
) -> jax.ShapeDtypeStruct:
    """Shard an array by its logical dims, and append it to ``found``."""
    known = (None,) * x.ndim if names is None else names
    table = "params" if role == "params" else "activations"
    resolved = layout.resolve(known, x.shape, role=table, dtype=x.dtype, path=path)
    found.append(PlacedLeaf(role, path, x.shape, x.dtype, names, resolved))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(layout.mesh, to_spec(resolved)))


def report(layout: Layout, tensors: list[PlacedLeaf]) -> Report:
    """Returns the report of :meth:`jaxpar.Generator.explain`."""
    sizes = {axis: size for axis, size in layout.sizes.items() if size > 1}
    rows = tuple(_row(layout, tensor, tensor.role) for tensor in tensors)
    return Report(sizes, layout.mesh.size, rows, (), False, ())


def _fitting(tensors: list[PlacedLeaf]) -> list[PlacedLeaf]:
    problems = [text for tensor in tensors for text in tensor.problems]
    if problems:
        raise LayoutError(list(dict.fromkeys(problems)))
    return tensors
