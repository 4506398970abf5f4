"""Quantized parameters as the tensors and fields that transformers reads with the package ``compressed-tensors``.

The format is ``pack-quantized``: of a matrix ``[out, in]`` the integers, packed in int32 along the inputs with the
first in the lowest bits and 2**(bits - 1) added; a scale for each output, or for each group of inputs; and the shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.analysis.units import axes_of_dims, shard_count
from jaxpar.errors import ConfigError
from jaxpar.interop.quantized_tensors import COMPRESSED, PACKED
from jaxpar.interop.tensor_map import TensorRule
from jaxpar.parallel.precision.quantized_array import DTYPES, QuantizedArray, is_quantized

type Writes = list[tuple[TensorRule, jax.Array]]
"""Rules with the arrays that they write."""


def quantization_fields(rules: list[TensorRule], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``quantization_config`` of a model's ``config.json``; nothing if no parameter is quantized.

    Raises:
      ConfigError: a parameter has another form than ``compressed-tensors`` can express.
    """
    ways: dict[tuple[int, int | None], str] = {}
    ignored: list[str] = []
    for rule in rules:
        leaf = leaves[rule.path]
        modules = [name.removesuffix(".weight") for _, name in rule.names(tuple(leaf.shape))]
        if is_quantized(leaf):
            ways.setdefault(_way(rule, leaf), rule.path)
        elif leaf.ndim - rule.stacked >= 2 and rule.path != "embedding":
            ignored += modules
    if not ways:
        return {}
    if len(ways) > 1:
        raise ConfigError(
            f"export: {', '.join(ways.values())} differ in bits or groups, but a checkpoint has one form. Remedy: "
            "quantize all targets alike."
        )
    ((bits, group),) = ways
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "group_size": group}
    weights |= {"strategy": "channel" if group is None else "group", "observer": "minmax"}
    one = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": COMPRESSED,
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": {"group_0": one},
        "ignore": ignored,
    }


def packed_writes(rule: TensorRule, leaf: QuantizedArray) -> tuple[Writes, dict[str, np.ndarray]]:
    """Returns the arrays of a quantized parameter with their rules, and the small tensors beside them."""
    dim, bits = _input_dims(rule)[-1], _bits(leaf)
    base = rule.name.removesuffix(".weight")
    packed = _packed(leaf.values, dim, bits)
    shape = np.asarray(rule.shape(tuple(leaf.shape)), np.int64)
    writes = [(replace(rule, name=f"{base}.weight_packed"), packed)]
    writes.append((replace(rule, name=f"{base}.weight_scale"), leaf.scales))
    shapes = {f"{name.removesuffix('.weight')}.weight_shape": shape for _, name in rule.names(tuple(leaf.shape))}
    return writes, shapes


def _packed(values: jax.Array, dim: int, bits: int) -> jax.Array:
    per, shape = 32 // bits, values.shape

    def pack(x: jax.Array) -> jax.Array:
        unsigned = (x.astype(jnp.int32) + 2 ** (bits - 1)).astype(jnp.uint32)
        rows = unsigned.reshape(*shape[:dim], shape[dim] // per, per, *shape[dim + 1 :])
        places = (jnp.arange(per, dtype=jnp.uint32) * bits).reshape(per, *(1,) * (len(shape) - dim - 1))
        return jax.lax.bitcast_convert_type(jnp.sum(rows << places, dim + 1, dtype=jnp.uint32), jnp.int32)

    return jax.jit(pack, out_shardings=_sharding(values, dim, shape[dim] // per))(values)


def _sharding(values: jax.Array, dim: int, size: int) -> Any:
    """Returns the sharding of ``values`` for an array with ``size`` numbers along a dim, if its axes divide that."""
    found = values.sharding
    if not isinstance(found, NamedSharding):
        return None
    entries = list(axes_of_dims(found.spec, values.ndim))
    if size % shard_count(entries[dim], found.mesh.shape):
        entries[dim] = ()
    return NamedSharding(found.mesh, PartitionSpec(*(axes or None for axes in entries)))


def _input_dims(rule: TensorRule) -> list[int]:
    """Returns the dims of a parameter that its tensor joins as inputs."""
    ours = rule.pattern.split(" -> ")[1].split()
    return [rule.stacked + ours.index(dim) for dim in rule.groups[-1]]


def _bits(leaf: QuantizedArray) -> int:
    return next(bits for bits, dtype in DTYPES.items() if leaf.values.dtype == dtype)


def _way(rule: TensorRule, leaf: Any) -> tuple[int, int | None]:
    """Returns the bits of a parameter and the size of its groups, ``None`` for a scale per output."""
    if not isinstance(leaf, QuantizedArray) or rule.path == "embedding":
        raise ConfigError(
            f"export: {rule.path} is quantized, which {COMPRESSED} does not express. Remedy: jp.compression.quantize "
            "without it."
        )
    inputs, shape = _input_dims(rule), tuple(leaf.shape)
    group, rest = 1, False
    for dim in reversed(inputs):
        step = leaf.tile[dim]
        if rest and step > 1:
            raise _other_dims(rule, leaf)
        group, rest = group * step, rest or step < shape[dim]
    if any(step > 1 for dim, step in enumerate(leaf.tile) if dim not in inputs):
        raise _other_dims(rule, leaf)
    bits = _bits(leaf)
    if shape[inputs[-1]] % (32 // bits):
        raise ConfigError(
            f"export: {rule.path} {list(shape)}: {32 // bits} inputs are packed in an int32, but its dim "
            f"{inputs[-1] - len(shape)} has {shape[inputs[-1]]}. Remedy: jp.compression.quantize without it."
        )
    return bits, None if group == int(np.prod([shape[dim] for dim in inputs])) else group


def _other_dims(rule: TensorRule, leaf: QuantizedArray) -> ConfigError:
    dims = [dim - leaf.ndim for dim in _input_dims(rule)]
    return ConfigError(
        f"export: {rule.path} {list(leaf.shape)}: scales are shared by {list(leaf.tile)} neighbors, but {COMPRESSED} "
        f"groups its inputs (dims {dims}). Remedy: jp.compression.QuantizeConfig(axis={dims})."
    )
