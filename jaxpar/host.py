"""``offload``: an optimizer whose state waits in the host's memory, and comes to the device a layer at a time.

After ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840), with the arithmetic left on the device: :mod:`jaxpar.streaming` brings the state there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


def offload(tx: optax.GradientTransformation, *, min_bytes: int | str = "64KiB") -> Any:
    """``tx`` with its state in the host's memory, but for arrays of fewer bytes: for :func:`jaxpar.init` and all that takes an optimizer.

    Raises:
      ConfigError: ``min_bytes`` is no size.

    >>> import optax
    >>> offload(optax.adam(1e-3), min_bytes="1MiB").min_bytes
    1048576
    """
    try:
        return Offloaded(tx.init, tx.update, over("data", min_bytes).min_bytes)
    except RulesError:
        raise ConfigError(f"offload: min_bytes is {min_bytes!r}, but a size, as '64KiB', is wanted.") from None


def hosted(tx: Any, shape: Sequence[int], dtype: Any) -> bool:
    """Whether an array of the state of ``tx`` lies in the host's memory."""
    size = getattr(dtype, "itemsize", 0)
    for length in shape:
        size *= length
    return isinstance(tx, Offloaded) and len(shape) > 1 and size >= tx.min_bytes
