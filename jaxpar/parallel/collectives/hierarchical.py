"""``all_to_all_local``, ``gather_local``, ``scatter_local``: collectives in rounds, where the TPU compiler does worse at once.

The TPU compiler routes an all-to-all hop by hop. Of up to 64 devices that takes it a second; of 256 half a minute for each
one in the program, and more from there. Two rounds among 16 are routed at once, for twice the bytes. An all-gather
among all devices of a closed 3-D torus it makes an all-reduce of zeros and the one part that each has, twice the bytes, and
takes three times as long for it as for a line and then a plane. A reduce-scatter over all of a torus of 16 or more it makes an
all-reduce and a slice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxpar.errors import LayoutError
from jaxpar.sharding.hardware.topology import torus_of

MOST = 64
"""Devices of one round of an all-to-all."""
GATHERED = {3: 64}
"""Dims of a torus → the least number of chips, all of them, that the compiler does not gather among at once."""
SCATTERED = {2: 16, 3: 16}
"""The same of a reduce-scatter."""


def all_to_all_local(x: jax.Array, axes: str | Sequence[str], *, split_dim: int, concat_dim: int) -> jax.Array:
    """``jax.lax.all_to_all(..., tiled=True)`` inside a ``shard_map``, in rounds where many devices take part.

    Args:
      x: its dim ``split_dim`` is cut into as many pieces as there are devices, and each sent to its own.
      axes: the mesh axes to exchange over, major to minor.
      split_dim, concat_dim: the pieces that arrive are joined along ``concat_dim``, in the order of the devices.

    Raises:
      LayoutError: the devices do not divide ``split_dim``.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> from jax.sharding import PartitionSpec as P
    >>> with jax.set_mesh(jp.MeshSpec(data=-1).build()):
    ...     swap = lambda x: all_to_all_local(x, "data", split_dim=1, concat_dim=0)
    ...     y = jax.jit(jax.shard_map(swap, in_specs=P("data", None), out_specs=P(None, "data")))(jnp.eye(16))
    >>> bool((y == jnp.eye(16)).all()), y.sharding.spec
    (True, P(None, 'data'))
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    devices = math.prod(jax.lax.axis_size(name) for name in names)
    if x.shape[split_dim] % devices:
        raise LayoutError(
            f"all_to_all_local(): dim {split_dim} of an array of shape {x.shape} cannot be cut into {devices} pieces, one for "
            f"each device over {', '.join(names)}. Remedy: pad it to a multiple of {devices}."
        )
    parts = rounds(devices, MOST)
    if len(parts) == 1:
        return jax.lax.all_to_all(x, names, split_dim, concat_dim, tiled=True)
    pieces = jnp.moveaxis(x, split_dim, 0)
    pieces = pieces.reshape(*parts, pieces.shape[0] // devices, *pieces.shape[1:])
    for dim, part in enumerate(parts):
        pieces = jax.lax.all_to_all(pieces, names, dim, dim, axis_index_groups=_groups(parts, dim), tiled=True)
    pieces = jnp.moveaxis(pieces.reshape(devices, *pieces.shape[len(parts) :]), 1, split_dim + 1)
    joined = jnp.moveaxis(pieces, 0, concat_dim)
    return joined.reshape(*joined.shape[:concat_dim], -1, *joined.shape[concat_dim + 2 :])


def gather_local(x: jax.Array, axes: str | Sequence[str], *, dim: int, parts: Sequence[int] | None = None) -> jax.Array:
    """``jax.lax.all_gather(..., tiled=True)`` inside a ``shard_map``, in rounds where :func:`gather_rounds` says so.

    Args:
      x: the part of one device.
      axes: the mesh axes to gather over, major to minor.
      dim: the parts are joined along it, in the order of the devices.
      parts: devices of each round; those of the mesh if not given. The last one goes first.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> from jax.sharding import PartitionSpec as P
    >>> with jax.set_mesh(jp.MeshSpec(data=-1).build()):
    ...     gather = lambda x: gather_local(x, "data", dim=0, parts=(4, 2))
    ...     y = jax.jit(jax.shard_map(gather, in_specs=P("data"), out_specs=P(), check_vma=False))(jnp.arange(16))
    >>> bool((y == jnp.arange(16)).all()), y.sharding.is_fully_replicated
    (True, True)
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    parts = gather_rounds(jax.sharding.get_abstract_mesh(), names) if parts is None else parts
    if len(parts) == 1:
        return jax.lax.all_gather(x, names, axis=dim, tiled=True)
    for digit in reversed(range(len(parts))):  # neighbours first, whose parts lie side by side
        x = jax.lax.all_gather(x, names, axis=dim, tiled=True, axis_index_groups=_groups(parts, digit))
    return x


def gather_across(x: jax.Array, axes: Sequence[str], *, dim: int, group: int) -> jax.Array:
    """The first of two rounds of a gather: among the devices that have the same place in their groups of ``group`` neighbours.

    What a device then has is as much of the whole as there are groups; :func:`gather_within` makes the whole of it.
    """
    devices = math.prod(jax.lax.axis_size(name) for name in axes)
    if devices == group:
        return x
    groups = _groups((devices // group, group), 0)
    return jax.lax.all_gather(x, tuple(axes), axis=dim, tiled=True, axis_index_groups=groups)


def gather_within(x: jax.Array, axes: Sequence[str], *, dim: int, group: int) -> jax.Array:
    """The second round, among the devices of a group."""
    outer = math.prod(jax.lax.axis_size(name) for name in axes) // group
    if outer == 1:
        return gather_local(x, axes, dim=dim)
    if group == 1:
        return x
    y = jax.lax.all_gather(x, tuple(axes), axis=dim, tiled=True, axis_index_groups=_groups((outer, group), 1))
    # Each brought its part of every group; in the order of the devices the groups come first.
    shape = (*x.shape[:dim], group, outer, x.shape[dim] // outer, *x.shape[dim + 1 :])
    return y.reshape(shape).swapaxes(dim, dim + 1).reshape(y.shape)


def scatter_local(
    x: jax.Array, axes: str | Sequence[str], *, dim: int, parts: Sequence[int] | None = None
) -> jax.Array:
    """``jax.lax.psum_scatter(..., tiled=True)`` inside a ``shard_map``, in rounds where :func:`scatter_rounds` says so.

    Args:
      x: what each device adds; its dim ``dim`` is cut into as many pieces as there are devices.
      axes: the mesh axes to sum over, major to minor.
      dim: each device keeps its piece of the sum along it.
      parts: devices of each round; those of the mesh if not given. The first one goes first.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> from jax.sharding import PartitionSpec as P
    >>> with jax.set_mesh(jp.MeshSpec(data=-1).build()):
    ...     scatter = lambda x: scatter_local(x[0], "data", dim=0, parts=(4, 2))
    ...     y = jax.jit(jax.shard_map(scatter, in_specs=P("data"), out_specs=P("data"), check_vma=False))(jnp.eye(8))
    >>> bool((y == 1).all()), y.sharding.spec
    (True, P('data',))
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    parts = scatter_rounds(jax.sharding.get_abstract_mesh(), names) if parts is None else parts
    if len(parts) == 1:
        return jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)
    for digit in range(len(parts)):  # the reverse of a gather: large pieces first
        groups = _groups(parts, digit)
        x = jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    return x


def gather_rounds(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> tuple[int, ...]:
    """Devices of each round of an all-gather over ``axes``; the last, among neighbours, goes first.

    One round, but over all of a closed 3-D torus: there a line of it (about the cube root of all), then a plane.
    """
    return _rounds_over(mesh, axes, GATHERED)


def scatter_rounds(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> tuple[int, ...]:
    """Devices of each round of a reduce-scatter over ``axes``; the first goes first.

    One round, but over all of a torus: there all dims but one, then a line.
    """
    return _rounds_over(mesh, axes, SCATTERED)


def _rounds_over(mesh: Mesh | AbstractMesh, axes: Sequence[str], least: Mapping[int, int]) -> tuple[int, ...]:
    devices, dims = math.prod(mesh.shape[axis] for axis in axes), torus_of(mesh)
    if devices < mesh.size or dims not in least or devices < least[dims]:
        return (devices,)
    line = min((n for n in range(1, devices + 1) if devices % n == 0), key=lambda n: abs(n - devices ** (1 / dims)))
    return (devices // line, line)


def _groups(parts: Sequence[int], digit: int) -> list[list[int]]:
    """Who meets in one round: with devices numbered in mixed radix, those that differ in one digit alone."""
    outer, part, inner = math.prod(parts[:digit]), parts[digit], math.prod(parts[digit + 1 :])
    return [[(o * part + p) * inner + i for p in range(part)] for o in range(outer) for i in range(inner)]


def rounds(devices: int, most: int = MOST) -> tuple[int, ...]:
    """Devices of each round, as even as can be; their product is ``devices``.

    >>> rounds(64), rounds(256), rounds(8192), rounds(67)
    ((64,), (16, 16), (64, 8, 16), (67,))
    """
    small = max(n for n in range(1, math.isqrt(devices) + 1) if devices % n == 0)
    return (devices,) if devices <= most or small == 1 else (*rounds(small, most), *rounds(devices // small, most))
