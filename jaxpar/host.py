"""``offload``: an optimizer whose state waits in the host's memory or on disk, and comes to the device a layer at a time.

After ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840) and ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857), with the arithmetic left on
the device: :mod:`jaxpar.streaming` brings the state there from the host's memory and back, :mod:`jaxpar.disk` from the disk.
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
from jaxpar.rules import over

KIND = "pinned_host"
"""What jax calls the host's memory."""


class Offloaded(NamedTuple):
    """An optax transform whose state's larger arrays lie in the host's memory. Made by :func:`offload`."""

    init: Callable[..., Any]
    update: Callable[..., Any]
    min_bytes: int


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
    min_bytes: int | str = "64KiB",
) -> Any:
    """``tx`` with its state elsewhere, but for arrays of fewer bytes: for :func:`jaxpar.init` and all that takes an optimizer.

    Args:
      tx: any optax transform; on disk, one that treats every number by itself.
      to: ``host`` for the host's memory; ``disk`` for files, which :class:`jaxpar.DiskStep` trains with.
      path: the files' folder.
      min_bytes: of an array, over all devices.

    Raises:
      ConfigError: ``min_bytes`` is no size, or ``to`` and ``path`` do not go together.

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
    if path is None:
        return Offloaded(tx.init, tx.update, least)
    return OnDisk(functools.partial(_init, tx, least), _refuse, least, os.fspath(path), tx)


def _init(tx: optax.GradientTransformation, least: int, params: Any) -> Any:
    def one(x: Any) -> Any:
        shape, dtype = tuple(getattr(x, "shape", ())), getattr(x, "dtype", None)
        size = math.prod(shape) * getattr(dtype, "itemsize", 0)
        return Stored(shape, dtype) if len(shape) > 1 and size >= least else x

    return jax.tree.map(one, tx.init(params))


def _refuse(*_: Any, **__: Any) -> Any:
    raise ConfigError(
        "offload: the optimizer's state is on disk, where no jitted step can reach it. Remedy: jp.DiskStep in the place of "
        "jp.train_step, or to='host'."
    )


def hosted(tx: Any, shape: Sequence[int], dtype: Any) -> bool:
    """Whether an array of the state of ``tx`` lies in the host's memory."""
    size = getattr(dtype, "itemsize", 0)
    for length in shape:
        size *= length
    return isinstance(tx, Offloaded) and len(shape) > 1 and size >= tx.min_bytes
