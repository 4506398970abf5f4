"""Simulated CPU devices. No other module requests them from XLA."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterable

from jaxpar.errors import MeshError


def simulate_devices(count: int) -> None:
    """Makes jax run on ``count`` simulated CPU devices in this process. Call it before jax runs anything.

    Args:
      count: the number of devices.

    Raises:
      MeshError: jax already runs on other devices.

    >>> simulate_devices(8)
    >>> import jax
    >>> jax.device_count()
    8
    """
    flag = f"--xla_force_host_platform_device_count={count}"
    if "jax" not in sys.modules:
        kept = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
        os.environ["XLA_FLAGS"] = " ".join([*kept, flag])
        os.environ["JAX_PLATFORMS"] = "cpu"
        return
    import jax

    with contextlib.suppress(RuntimeError):  # jax runs already; the check below finds out whether on these devices
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    if jax.device_count() != count or jax.default_backend() != "cpu":
        raise MeshError(
            f"jax already runs on {jax.device_count()} {jax.default_backend()} device(s), so {count} cannot be "
            f"simulated. Remedy: call simulate_devices({count}) first, or set XLA_FLAGS={flag} before jax starts."
        )


def sizes_or_suggestion(find: Callable[[int], dict[str, int]], devices: int, given: Iterable[int]) -> dict[str, int]:
    """Returns the sizes of a mesh on this machine's devices; if they are too few, the error says how to simulate more.

    Args:
      find: returns the size of every axis on a number of devices.
      devices: the number of devices of this machine.
      given: the sizes as they were given; -1 takes what is left.

    Raises:
      MeshError: as ``find`` raises it, with the suggestion.
    """
    given = tuple(given)
    needed = math.prod(size for size in given if size != -1)
    try:
        return find(devices)
    except MeshError as error:
        if not 0 < devices < needed:
            raise
        count = needed * math.ceil(8 / needed) if -1 in given else needed
        raise MeshError(
            f"{error} To try this mesh on a CPU, call jp.simulate_devices({count}) before jax runs anything."
        ) from None


def prefer_accelerators(count: int) -> None:
    """Makes jax run on TPU or GPU if there is one, else on ``count`` simulated CPU devices.

    Call it before jax runs anything.
    """
    import jax

    if "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return  # the environment has set a number already, and jax accepts only one
    with contextlib.suppress(RuntimeError):  # jax runs already, and keeps its devices
        jax.config.update("jax_num_cpu_devices", count)
