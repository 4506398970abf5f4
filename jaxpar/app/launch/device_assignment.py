"""Divide a host's devices among its processes, and find a number of processes that fits a layout."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, LaunchError
from jaxpar.sharding.mesh import MeshSpec
from jaxpar.sharding.rules import FirstOf, Rules, options

_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def simulated(configured: int | None, variables: Mapping[str, str]) -> int | None:
    """Returns the number of simulated devices: that of ``XLA_FLAGS``, which jax prefers, else ``configured``."""
    flag = _FLAG.search(variables.get("XLA_FLAGS", ""))
    return int(flag[1]) if flag else configured


def without_flag(flags: str) -> str:
    """Returns ``XLA_FLAGS`` without the number of simulated devices.

    >>> without_flag("--xla_a=1 --xla_force_host_platform_device_count=8")
    '--xla_a=1'
    """
    return _FLAG.sub("", flags).strip()


def share(devices: int, count: int, kind: str) -> int:
    """Returns the number of devices of each process.

    Args:
      devices: number of devices on the host.
      count: number of processes.
      kind: the devices' name, for errors.

    Raises:
      LaunchError: there are fewer devices than processes, or they cannot be divided evenly.

    >>> share(8, 2, "simulated devices")
    4
    """
    fits = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
    if devices < count:
        raise LaunchError(
            f"{count} processes are requested, but there are {devices} {kind}. Remedy: set --processes to one of "
            f"{fits}."
        )
    if devices % count:
        raise LaunchError(
            f"{devices} {kind} cannot be divided evenly over {count} processes. Remedy: set --processes to one of "
            f"{fits}, or use a multiple of {count} devices."
        )
    return devices // count


def gpus(variables: Mapping[str, str], folder: Path = Path("/dev")) -> list[str]:
    """Returns the GPUs of this host as ``CUDA_VISIBLE_DEVICES`` lists them: the visible ones, else all.

    Empty if ``JAX_PLATFORMS`` selects other devices.
    """
    platforms = variables.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu", "rocm"} & set(platforms.split(",")):
        return []
    if "CUDA_VISIBLE_DEVICES" in variables:
        return [name for name in variables["CUDA_VISIBLE_DEVICES"].split(",") if name and name != "-1"]
    return sorted((m[1] for p in folder.glob("nvidia*") if (m := re.fullmatch(r"nvidia(\d+)", p.name))), key=int)


def has_tpu(variables: Mapping[str, str], folder: Path = Path("/dev")) -> bool:
    """Whether this host has TPU chips that jax would use."""
    platforms = variables.get("JAX_PLATFORMS", "")
    allowed = not platforms or "tpu" in platforms.split(",")
    return allowed and any((folder / name).exists() for name in ("accel0", "vfio/0"))


def misfit(
    count: int, each: int, batch: int, mesh: Mapping[str, Any], rules: Mapping[str, Any], split: Callable[..., MeshSpec]
) -> str | None:
    """Returns why a run does not fit ``count`` processes of ``each`` devices, or ``None`` if it does.

    Args:
      count: number of processes.
      each: devices of each process.
      batch: rows of the global batch.
      mesh, rules: of the layout, as plain data.
      split: maps ``(spec, devices)`` to the mesh of the run, as :meth:`jaxpar.Zero.mesh`.

    >>> misfit(3, 2, 8, {"data": -1, "model": 4}, {}, lambda spec, devices: spec)
    '6 devices are not a multiple of model=4'
    >>> misfit(3, 2, 8, {"data": -1, "model": 2}, {"batch": "data"}, lambda spec, devices: spec)
    'a batch of 8 rows cannot be divided by 3 processes'
    """
    spec, devices = MeshSpec.from_dict(mesh), count * each
    named = ", ".join(f"{axis}={size}" for axis, size in vars(spec).items() if size not in (1, -1)) or "1"
    fixed = math.prod(size for size in vars(spec).values() if size != -1)
    if -1 not in vars(spec).values() and fixed != devices:
        return f"{devices} devices do not match the {fixed} of {named}, and no axis is -1"
    if devices % fixed:
        return f"{devices} devices are not a multiple of {named}"
    try:
        sizes = split(spec, devices).sizes(devices)
    except JaxparError as error:
        return str(error).partition(" Remedy")[0].rstrip(".")
    inner = 1
    for axis, size in reversed(sizes.items()):
        inner *= size
        if count > 1 and inner <= each and each % inner:
            return f"the {inner} devices from {axis} inwards would span several processes of {each} devices"
    if batch % count:
        return f"a batch of {batch} rows cannot be divided by {count} processes"
    num_shards = _batch_shards(sizes, rules)
    if batch % num_shards:
        return f"a batch of {batch} rows cannot be divided by the {num_shards} devices of its axes"
    return None


def _batch_shards(sizes: Mapping[str, int], rules: Mapping[str, Any]) -> int:
    """The number of shards of a batch under the rule of ``batch``; 1 if the rule has alternatives."""
    found = Rules.from_dict(rules).for_role("activations")[0].get("batch")
    if found is None or isinstance(found[1], FirstOf):
        return 1
    return math.prod(sizes.get(axis, 1) for axes in options(found[1]) for axis in axes)


def refit(most: int, each: int, reason: Callable[[int], str | None]) -> tuple[int, str]:
    """Returns the largest number of processes up to ``most`` that fits (0 for none), and a text if it is not ``most``.

    >>> refit(3, 2, lambda count: None if count % 2 == 0 else f"{count * 2} devices are odd")
    (2, '3 processes x 2 devices = 6 devices do not fit: 6 devices are odd. 2 processes would fit')
    """
    reasons = {count: reason(count) for count in range(most, 0, -1)}
    good = next((count for count, why in reasons.items() if why is None), 0)
    if good == most or not reasons:
        return good, "" if good else "no process remains"
    text = f"{_processes(most)} x {each} devices = {most * each} devices do not fit: {reasons[most]}. "
    return good, text + (f"{_processes(good)} would fit" if good else "No smaller number would fit")


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
