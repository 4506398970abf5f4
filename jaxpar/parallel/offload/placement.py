"""``to_host`` and ``to_disk``: optimizer state in host memory or on disk, and stacked weights in host memory.

After ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840) and ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857),
except that the device does the arithmetic. :mod:`jaxpar.training.offload.host_update` brings state in host memory to
the device and back, :mod:`jaxpar.training.disk_step` does so for state on disk, and
:mod:`jaxpar.parallel.offload.host_weights` brings the weights of one layer at a time to the device.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import optax

from jaxpar.errors import ConfigError, RulesError
from jaxpar.sharding.names import LAYERS, Names
from jaxpar.sharding.rules import over

KIND = "pinned_host"
"""jax's name of the memory kind for host memory."""
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class Offloaded(NamedTuple):
    """An optax transform whose larger state arrays are in host memory. Made by :func:`to_host`."""

    init: Callable[..., Any]
    update: Callable[..., Any]
    min_bytes: int
    parameters: bool = False


class OnDisk(NamedTuple):
    """An optax transform whose larger state arrays are on disk; ``init`` returns a :class:`Stored` for each of them."""

    init: Callable[..., Any]
    update: Callable[..., Any]
    min_bytes: int
    path: str
    inner: optax.GradientTransformation


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["shape", "dtype"])
@dataclass(frozen=True)
class Stored:
    """The placeholder of an array on disk. It has no leaves, so jax never allocates the array."""

    shape: tuple[int, ...]
    dtype: Any


def to_host(tx: optax.GradientTransformation, *, parameters: bool = False, min_bytes: int | str = "64KiB") -> Offloaded:
    """Returns ``tx`` with its larger state arrays in host memory.

    The result can be passed to :func:`jaxpar.init` and to every other function that takes an optimizer.

    Args:
      tx: an optax transform. With ``parameters``, it has to be elementwise, as Adam, Lion and SGD are.
      parameters: also keep the weights of stacked layers in host memory (first logical dim ``layers``, three dims or
        more), and bring those of each layer to the device when it runs; see :func:`jaxpar.offload.to_device`.
      min_bytes: smaller arrays stay on the device; the global size in bytes, as a number or a text such as ``64KiB``.

    Raises:
      ConfigError: ``min_bytes`` cannot be read.

    >>> import optax
    >>> to_host(optax.adam(1e-3), min_bytes="1MiB").min_bytes
    1048576
    """
    return Offloaded(tx.init, tx.update, _least(min_bytes), parameters)


def to_disk(
    tx: optax.GradientTransformation, path: str | os.PathLike[str], *, min_bytes: int | str = "64KiB"
) -> OnDisk:
    """Returns ``tx`` with its larger state arrays on disk; train with
    :func:`jaxpar.offload.disk_offloaded_train_step`.

    Args:
      tx: an elementwise optax transform, as Adam, Lion and SGD are.
      path: the folder of the files.
      min_bytes: smaller arrays stay on the device; the global size in bytes, as a number or a text such as ``64KiB``.

    Raises:
      ConfigError: ``min_bytes`` cannot be read.

    >>> import optax
    >>> to_disk(optax.adam(1e-3), "/fast/disk").path
    '/fast/disk'
    """
    least = _least(min_bytes)
    return OnDisk(functools.partial(_init, tx, least), _not_in_jit, least, os.fspath(path), tx)


def _least(min_bytes: int | str) -> int:
    try:
        return over("data", min_bytes).min_bytes
    except RulesError:
        raise ConfigError(f"offload: min_bytes must be a size such as '64KiB', got {min_bytes!r}.") from None


def _init(tx: optax.GradientTransformation, least: int, params: Any) -> Any:
    def one(x: Any) -> Any:
        shape, dtype = tuple(getattr(x, "shape", ())), getattr(x, "dtype", None)
        return Stored(shape, dtype) if len(shape) > 1 and _bytes(shape, dtype) >= least else x

    return jax.tree.map(one, tx.init(params))


def _not_in_jit(*_: Any, **__: Any) -> Any:
    raise ConfigError(
        "offload: the optimizer state is on disk, where a jitted step cannot reach it. Remedy: use "
        "jp.offload.disk_offloaded_train_step instead of jp.train_step, or jp.offload.to_host."
    )


def hosted(tx: Any, shape: Sequence[int], dtype: Any) -> bool:
    """Returns whether an array of the state of ``tx`` is in host memory."""
    return isinstance(tx, Offloaded) and len(shape) > 1 and _bytes(shape, dtype) >= tx.min_bytes


def hosted_layers(tx: Any, names: Names | None, shape: Sequence[int], dtype: Any) -> tuple[bool, str]:
    """Returns whether a parameter with these logical dims is in host memory.

    If it is not, although ``tx`` keeps parameters there, the second value is the reason.
    """
    if not (isinstance(tx, Offloaded) and tx.parameters):
        return False, ""
    if (names or ())[:1] != (LAYERS,):
        return False, "stays on the device: not a stack of layers"
    if len(shape) < 3:  # the TPU compiler cannot slice rows out of host memory
        return False, "stays on the device: a stack of vectors, not of matrices"
    small = _bytes(shape, dtype) < tx.min_bytes
    return not small, "stays on the device: below min_bytes" if small else ""


def no_layers(tx: Any, some: bool) -> str | None:
    """Returns the problem if ``tx`` keeps parameters in host memory but none qualifies; else ``None``."""
    if some or not (isinstance(tx, Offloaded) and tx.parameters):
        return None
    return (
        f"offload: parameters are to be stored in host memory, but none is a stack of layers (first logical dim "
        f"{LAYERS!r}, three dims or more, {tx.min_bytes} bytes or more). Remedy: stack the layers, as nnx.vmap with "
        f"jaxpar.nnx.stacked({LAYERS!r}) does, use a smaller min_bytes, or leave parameters out."
    )


def on_host(x: Any) -> bool:
    """Returns whether an array, traced or not, is in host memory."""
    return bool(jax.typeof(x).memory_space == HOST)


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * int(getattr(dtype, "itemsize", 0))
