"""``all_to_all_local``, ``gather_local``, ``scatter_local``: collectives in rounds, where XLA:TPU compiles one badly.

- The TPU compiler routes an all-to-all hop by hop. That takes about a second of compile time for up to 64 devices, half
  a minute per all-to-all for 256, and more beyond. Two rounds among 16 devices each are routed immediately, but send
  twice the bytes.
- It compiles an all-gather among all devices of a closed 3-D torus to an all-reduce of zeros and each device's part:
  twice the bytes, and three times the compile time of a gather along a line and then one over a plane.
- It compiles a reduce-scatter over all of a torus of 16 or more devices to an all-reduce and a slice.
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
"""The most devices in one round of an all-to-all."""
GATHERED = {3: 64}
"""Dims of a torus → the number of chips from which on a gather among all of them takes two rounds."""
SCATTERED = {2: 16, 3: 16}
"""Dims of a torus → the number of chips from which on a reduce-scatter among all of them takes two rounds."""


def all_to_all_local(x: jax.Array, axes: str | Sequence[str], *, split_dim: int, concat_dim: int) -> jax.Array:
    """Returns ``jax.lax.all_to_all(..., tiled=True)`` inside a ``shard_map``, in rounds if there are many devices.

    Args:
      x: the local array. Its dim ``split_dim`` is split into one piece per device; piece i goes to device i.
      axes: the mesh axes to exchange over, major to minor.
      split_dim: the dim to split.
      concat_dim: the dim along which the received pieces are joined, in device order.

    Returns:
      The local array after the exchange.

    Raises:
      LayoutError: the number of devices does not divide the dim ``split_dim``.

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
    devices = jax.lax.axis_size(names)
    if x.shape[split_dim] % devices:
        raise LayoutError(
            f"all_to_all_local(): dim {split_dim} of an array of shape {x.shape} cannot be split into {devices} equal "
            f"pieces, one for each device over {', '.join(names)}. Remedy: pad it to a multiple of {devices}."
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
    """Returns ``jax.lax.all_gather(..., tiled=True)`` inside a ``shard_map``, in the rounds of :func:`gather_rounds`.

    Args:
      x: the shard of this device.
      axes: the mesh axes to gather over, major to minor.
      dim: the dim along which the shards are joined, in device order.
      parts: the number of devices of each round, by default those of :func:`gather_rounds`. The last round runs first.

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
    for digit in reversed(range(len(parts))):  # neighbours first, because their shards are adjacent in the result
        x = jax.lax.all_gather(x, names, axis=dim, tiled=True, axis_index_groups=_groups(parts, digit))
    return x


def gather_across(x: jax.Array, axes: tuple[str, ...], *, dim: int, group: int) -> jax.Array:
    """The first of two rounds of a gather, among devices with the same rank in their groups of ``group`` neighbours.

    Each device then holds one shard of every group; :func:`gather_within` completes the gather.
    """
    groups = _groups((jax.lax.axis_size(axes) // group, group), 0)
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True, axis_index_groups=groups)


def gather_within(x: jax.Array, axes: tuple[str, ...], *, dim: int, group: int) -> jax.Array:
    """The second round of a gather, within the groups; see :func:`gather_across`."""
    if group == 1:
        return x
    outer = jax.lax.axis_size(axes) // group
    y = jax.lax.all_gather(x, axes, axis=dim, tiled=True, axis_index_groups=_groups((outer, group), 1))
    # The result is ordered by rank within the group, then by group. In device order, the groups come first.
    shape = (*x.shape[:dim], group, outer, x.shape[dim] // outer, *x.shape[dim + 1 :])
    return y.reshape(shape).swapaxes(dim, dim + 1).reshape(y.shape)


def scatter_local(
    x: jax.Array, axes: str | Sequence[str], *, dim: int, parts: Sequence[int] | None = None
) -> jax.Array:
    """Returns ``jax.lax.psum_scatter(..., tiled=True)`` in a ``shard_map``, in the rounds of :func:`scatter_rounds`.

    Args:
      x: this device's summand. Its dim ``dim`` is split into one piece per device.
      axes: the mesh axes to sum over, major to minor.
      dim: the dim along which each device keeps its piece of the sum.
      parts: the number of devices of each round, by default those of :func:`scatter_rounds`. The first round runs
        first.

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
    for digit in range(len(parts)):  # the reverse of a gather: the largest pieces first
        groups = _groups(parts, digit)
        x = jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    return x


def gather_rounds(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> tuple[int, ...]:
    """Returns the devices per round of an all-gather over ``axes``; the last round, of neighbours, runs first.

    There is one round, except over all of a closed 3-D torus: there one round runs along a line of it (about the cube
    root of all devices), and then one over a plane.
    """
    return _rounds_over(mesh, axes, GATHERED)


def scatter_rounds(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> tuple[int, ...]:
    """Returns the devices per round of a reduce-scatter over ``axes``; the first round runs first.

    There is one round, except over all of a torus: there one round runs over all dims but one, and then one along a
    line.
    """
    return _rounds_over(mesh, axes, SCATTERED)


def _rounds_over(mesh: Mesh | AbstractMesh, axes: Sequence[str], least: Mapping[int, int]) -> tuple[int, ...]:
    devices, dims = math.prod(mesh.shape[axis] for axis in axes), torus_of(mesh)
    if devices < mesh.size or dims not in least or devices < least[dims]:
        return (devices,)
    line = min((n for n in range(1, devices + 1) if devices % n == 0), key=lambda n: abs(n - devices ** (1 / dims)))
    return (devices // line, line)


def _groups(parts: Sequence[int], digit: int) -> list[list[int]]:
    """Returns the device groups of one round: in mixed radix, members differ only in the digit ``digit``."""
    outer, part, inner = math.prod(parts[:digit]), parts[digit], math.prod(parts[digit + 1 :])
    return [[(o * part + p) * inner + i for p in range(part)] for o in range(outer) for i in range(inner)]


def rounds(devices: int, most: int = MOST) -> tuple[int, ...]:
    """Returns the number of devices of each round, as equal as possible; their product is ``devices``.

    >>> rounds(64), rounds(256), rounds(8192), rounds(67)
    ((64,), (16, 16), (64, 8, 16), (67,))
    """
    small = max(n for n in range(1, math.isqrt(devices) + 1) if devices % n == 0)
    return (devices,) if devices <= most or small == 1 else (*rounds(small, most), *rounds(devices // small, most))
