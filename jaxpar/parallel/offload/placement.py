"""``offload``: an optimizer's state in the host's memory or on disk, and a model's layers in the host's memory; they come a layer at a time.

After ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840) and ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857), with the arithmetic left on
the device: :mod:`jaxpar.training.offload.host_update` brings the state there from the host's memory and back, :mod:`jaxpar.training.disk_step` from the disk,
:mod:`jaxpar.parallel.offload.host_weights` a layer's weights to where it runs.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import optax

from jaxpar.errors import ConfigError, RulesError
from jaxpar.sharding.names import LAYERS, Names
from jaxpar.sharding.rules import over

KIND = "pinned_host"
"""What jax calls the host's memory."""
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class Offloaded(NamedTuple):
    """An optax transform whose state's larger arrays lie in the host's memory. Made by :func:`offload`."""

    init: Callable[..., Any]
    update: Callable[..., Any]
    min_bytes: int
    parameters: bool = False


class OnDisk(NamedTuple):
    """An optax transform whose state's larger arrays lie on disk: ``init`` leaves a :class:`Stored` in their place."""

    init: Callable[..., Any]
    update: Callable[..., Any]
    min_bytes: int
    path: str
    inner: optax.GradientTransformation


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["shape", "dtype"])
@dataclass(frozen=True)
class Stored:
    """What stands in an optimizer's state for an array that lies on disk: no leaf of it, so nothing ever holds the array whole."""

    shape: tuple[int, ...]
    dtype: Any


def offload(
    tx: optax.GradientTransformation,
    *,
    to: Literal["host", "disk"] = "host",
    path: str | os.PathLike[str] | None = None,
    parameters: bool = False,
    min_bytes: int | str = "64KiB",
) -> Any:
    """``tx`` with its state elsewhere, but for arrays of fewer bytes: for :func:`jaxpar.init` and all that takes an optimizer.

    Args:
      tx: any optax transform; on disk or with ``parameters`` one that treats every number by itself, as Adam, Lion or SGD.
      to: ``host`` for the host's memory; ``disk`` for files, which :class:`jaxpar.DiskOffloadedStep` trains with.
      path: the files' folder.
      parameters: keep the weights of stacked layers there too (first logical dim ``layers``, three dims or more), and bring each layer's to the
        device when it runs; see :func:`jaxpar.to_device`.
      min_bytes: of the smallest array that goes there, over all devices.

    Raises:
      ConfigError: ``min_bytes`` is no size, or ``to``, ``path`` and ``parameters`` do not go together.

    >>> import optax
    >>> offload(optax.adam(1e-3), min_bytes="1MiB").min_bytes
    1048576
    """
    try:
        least = over("data", min_bytes).min_bytes
    except RulesError:
        raise ConfigError(f"offload: min_bytes is {min_bytes!r}, but a size, as '64KiB', is wanted.") from None
    if to not in ("host", "disk"):
        raise ConfigError(f"offload: to is {to!r}, but 'host' or 'disk' is wanted.")
    if (to == "disk") is not (path is not None):
        said = "to='disk' wants a path, the folder of its files" if to == "disk" else "a path is for to='disk' alone"
        raise ConfigError(f"offload: {said}.")
    if to == "disk" and parameters:
        raise ConfigError(
            "offload: parameters wait in the host's memory beside the optimizer's state, but to is 'disk'. Remedy: to='host', or leave "
            "parameters out."
        )
    if path is None:
        return Offloaded(tx.init, tx.update, least, parameters)
    return OnDisk(functools.partial(_init, tx, least), _refuse, least, os.fspath(path), tx)


def _init(tx: optax.GradientTransformation, least: int, params: Any) -> Any:
    def one(x: Any) -> Any:
        shape, dtype = tuple(getattr(x, "shape", ())), getattr(x, "dtype", None)
        size = math.prod(shape) * getattr(dtype, "itemsize", 0)
        return Stored(shape, dtype) if len(shape) > 1 and size >= least else x

    return jax.tree.map(one, tx.init(params))


def _refuse(*_: Any, **__: Any) -> Any:
    raise ConfigError(
        "offload: the optimizer's state is on disk, where no jitted step can reach it. Remedy: jp.DiskOffloadedStep in the place of "
        "jp.train_step, or to='host'."
    )


def hosted(tx: Any, shape: Sequence[int], dtype: Any) -> bool:
    """Whether an array of the state of ``tx`` lies in the host's memory."""
    return isinstance(tx, Offloaded) and len(shape) > 1 and _bytes(shape, dtype) >= tx.min_bytes


def hosted_layers(tx: Any, names: Names | None, shape: Sequence[int], dtype: Any) -> tuple[bool, str]:
    """Whether a parameter with these logical dims lies there, the weights of a stack of layers; or why it stays, if parameters were asked for."""
    if not (isinstance(tx, Offloaded) and tx.parameters):
        return False, ""
    if (names or ())[:1] != (LAYERS,):
        return False, "stays on the device: no stack of layers"
    if len(shape) < 3:  # the TPU's compiler cannot cut slices of a row from the host's memory
        return False, "stays on the device: rows of a stack, no matrices"
    small = _bytes(shape, dtype) < tx.min_bytes
    return not small, "stays on the device: below min_bytes" if small else ""


def no_layers(tx: Any, some: bool) -> str | None:
    """What is wrong where parameters were asked into the host's memory and none lies there."""
    if some or not (isinstance(tx, Offloaded) and tx.parameters):
        return None
    return (
        f"offload: parameters were asked into the host's memory, but none is a stack of layers (first logical dim {LAYERS!r}, three dims or "
        f"more, {tx.min_bytes} bytes or more), so nothing would lie there. Remedy: stack the layers, as nnx.vmap with "
        f"jaxpar.nnx.stacked({LAYERS!r}) does, a smaller min_bytes, or leave parameters out."
    )


def on_host(x: Any) -> bool:
    """Whether an array, traced or not, is in the host's memory."""
    return bool(jax.typeof(x).memory_space == HOST)


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * int(getattr(dtype, "itemsize", 0))
