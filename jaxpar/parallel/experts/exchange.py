"""Exchanges of rows whose number differs between pairs of devices.

``jax.lax.ragged_all_to_all`` sends slices of an array to the devices of an axis. XLA on CPU lacks it, so there every
device gathers the rows of all and takes its own.

Shape suffixes: N devices, E experts of all devices, L experts of one device, S slices (a device's, one after the
other), R rows, D embed.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxpar.sharding.hardware.topology import device_of, platform_of

type Exchange = Literal["native", "emulated", "none"]
_LARGEST_V5E = 16
"""The largest v5e slice, in chips, for which XLA compiles a ragged exchange; beyond, chips route along few links."""


def exchange_of(mesh: Mesh | AbstractMesh) -> Exchange:
    """Returns how rows are exchanged on the devices of a mesh.

    ``native`` is ``jax.lax.ragged_all_to_all``, ``emulated`` a gather of all rows, for tests on CPU devices, and
    ``none`` a TPU for which XLA has no ragged exchange.

    >>> from jax.sharding import AbstractMesh
    >>> exchange_of(AbstractMesh((4,), ("expert",)))
    'emulated'
    """
    return exchange_on(platform_of(mesh), str(getattr(device_of(mesh), "device_kind", "")), mesh.size)


def exchange_on(platform: str, device_kind: str, devices: int) -> Exchange:
    """Returns :func:`exchange_of` for devices of a platform and a kind, as jax names them.

    >>> exchange_on("tpu", "TPU v5 lite", 16), exchange_on("tpu", "TPU v5 lite", 32)
    ('native', 'none')
    """
    if platform == "tpu" and "v5 lite" in device_kind.lower() and devices > _LARGEST_V5E:
        return "none"
    return "emulated" if platform == "cpu" else "native"


class RowSlices(NamedTuple):
    """The slices that a device sends and receives, each ``[devices * slices per device]`` int32.

    Attributes:
      start: where the slice begins in the sender's rows.
      send: the number of rows that this device sends.
      put: where the slice begins in the receiver's rows.
      receive: the number of rows that this device receives.
    """

    start: jax.Array
    send: jax.Array
    put: jax.Array
    receive: jax.Array


class RoundTrip(NamedTuple):
    """The exchange of rows to the devices of their experts, and the exchange back."""

    there: RowSlices
    back: RowSlices


def round_trip(counts_NE: jax.Array, me: jax.Array) -> RoundTrip:
    """Returns the slices of an exchange after which the rows of a device's experts stand one expert after the other.

    Args:
      counts_NE: the number of rows that each device has for each expert ``[devices, experts]`` int32; each device holds
        its rows sorted by expert.
      me: the index of this device.

    >>> import jax.numpy as jnp
    >>> trip = round_trip(jnp.array([[1, 2], [3, 4]]), jnp.array(1))
    >>> trip.there.start.tolist(), trip.there.send.tolist(), trip.there.put.tolist(), trip.there.receive.tolist()
    ([0, 3], [3, 4], [1, 2], [2, 4])
    """
    devices = counts_NE.shape[0]
    by_NNL = counts_NE.reshape(devices, devices, -1)  # [source, destination, local expert]
    total_NL = by_NNL.sum(0)
    put_NNL = _starts(total_NL, 1)[None] + _starts(by_NNL, 0)
    start_NNL = _starts(counts_NE, 1).reshape(by_NNL.shape)
    flat = lambda x: x.reshape(-1)
    there = RowSlices(flat(start_NNL[me]), flat(by_NNL[me]), flat(put_NNL[me]), flat(by_NNL[:, me]))
    back = RowSlices(flat(put_NNL[:, me]), flat(by_NNL[:, me]), flat(start_NNL[:, me]), flat(by_NNL[me]))
    return RoundTrip(there, back)


def _starts(sizes: jax.Array, dim: int) -> jax.Array:
    return jnp.cumsum(sizes, dim) - sizes


class Wire(NamedTuple):
    """How rows travel: the mesh axes of the devices, and whether their platform has a ragged exchange."""

    axes: tuple[str, ...]
    native: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def exchange(wire: Wire, rows: int, x_RD: jax.Array, there: RowSlices, back: RowSlices) -> jax.Array:
    """Returns the rows that this device receives ``[rows, ...]``; those in no slice are 0.

    Args:
      wire: the devices.
      rows: the number of rows to return.
      x_RD: the rows that this device sends ``[rows, ...]``.
      there: the slices of this exchange.
      back: the slices of the exchange that undoes it, which the gradient takes.
    """
    return _exchanged(wire, rows, x_RD, there)


def _forward(wire: Wire, rows: int, x_RD: jax.Array, there: RowSlices, back: RowSlices) -> tuple[jax.Array, Any]:
    return _exchanged(wire, rows, x_RD, there), (back, x_RD[:, :0] if x_RD.ndim > 1 else x_RD.astype(jnp.bool))


def _backward(wire: Wire, rows: int, saved: Any, grad: jax.Array) -> tuple[jax.Array, None, None]:
    back, like = saved
    return _exchanged(wire, like.shape[0], grad, back), None, None


exchange.defvjp(_forward, _backward)


def _exchanged(wire: Wire, rows: int, x_RD: jax.Array, slices: RowSlices) -> jax.Array:
    if wire.native:
        empty = jnp.zeros((rows, *x_RD.shape[1:]), x_RD.dtype)
        return jax.lax.ragged_all_to_all(x_RD, empty, *slices, axis_name=wire.axes)
    devices, me = jax.lax.axis_size(wire.axes), jax.lax.axis_index(wire.axes)
    gather = functools.partial(jax.lax.all_gather, axis_name=wire.axes)
    mine = lambda x: jax.lax.dynamic_index_in_dim(gather(x).reshape(devices, devices, -1), me, 1, keepdims=False)
    start_NL, send_NL, put_NL = (mine(x) for x in (slices.start, slices.send, slices.put))
    start_NL += jnp.arange(devices, dtype=jnp.int32)[:, None] * x_RD.shape[0]  # in the rows of all devices
    put = jnp.where(send_NL > 0, put_NL, rows).reshape(-1)  # an empty slice covers no row
    order = jnp.argsort(put)
    put, start, send = put[order], start_NL.reshape(-1)[order], send_NL.reshape(-1)[order]
    at = jnp.arange(rows, dtype=jnp.int32)
    covering = jnp.maximum(jnp.searchsorted(put, at, side="right") - 1, 0)
    offset = at - put[covering]
    inside = (offset >= 0) & (offset < send[covering])
    source = jnp.where(inside, start[covering] + offset, 0)
    taken = gather(x_RD).reshape(-1, *x_RD.shape[1:])[source]
    return jnp.where(inside.reshape(-1, *(1,) * (x_RD.ndim - 1)), taken, 0)
