"""Joins a Ray cluster, or starts one on this machine. Nothing here imports ray before it is called."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxpar.errors import LaunchError
from jaxpar.utils.extras import import_extra

_NEAR = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""Address of a Ray that is started here; Ray would replace 127.0.0.1 by the host's network address."""

_CONNECT, _JOIN = 8.0, 20.0
"""Seconds to wait for a connection, and for everything until Ray has joined; the process needs time to end too."""

_LEAST = 5.0
"""Seconds that joining always gets, however long the import of ray took."""

_ATTEMPTS = 3
"""Ray gives its daemons 30 s to start, which a busy machine may exceed."""


def connect(address: str | None, cpus: float, *, object_store_bytes: int | None = None) -> tuple[Any, bool]:
    """Returns the module ``ray``, initialized, and whether this call started or joined a cluster.

    Args:
      address: ``HOST:PORT`` of a cluster; ``None`` for the variable ``RAY_ADDRESS``, or else a Ray that is started on
        this machine, with token authentication.
      cpus: the number of CPUs that a Ray on this machine offers at least.
      object_store_bytes: its object store's size; by default Ray's own choice.

    Raises:
      MissingExtraError: ray is not installed.
      LaunchError: the cluster does not answer within 30 seconds, or Ray cannot be started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send usage statistics
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address, until = address or os.environ.get("RAY_ADDRESS"), time.monotonic() + _JOIN
    if address is not None:
        _try(address)
    ray = import_extra("ray", "ray", "training with parameter servers")
    if ray.is_initialized():
        return ray, False
    if address is not None:
        _join(ray, address, max(until - time.monotonic(), _LEAST))
        return ray, True
    # Its daemons listen on every interface, whatever its address; Ray's default is then to require a token.
    os.environ.pop("RAY_AUTH_MODE", None)
    store = {} if object_store_bytes is None else {"object_store_memory": object_store_bytes}
    own = {"address": "local", "_node_ip_address": _NEAR, "include_dashboard": False, "logging_level": "ERROR"}
    before = _children()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with warnings.catch_warnings():
                # JAX warns of forks; Ray's children run another program immediately.
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                ray.init(num_cpus=max(os.cpu_count() or 1, int(cpus)), log_to_driver=False, **own, **store)
            break
        except Exception as error:
            ray.shutdown()
            _end(_children() - before)  # Ray leaves the daemons of a failed start running
            if attempt == _ATTEMPTS:
                raise LaunchError(
                    f"Ray cannot be started on this machine, after {attempt} attempts: {first_line(error)}."
                ) from error
    return ray, True


@contextmanager
def joined(address: str | None, cpus: float) -> Iterator[None]:
    """Be in a cluster that was joined or started before JAX is imported; later calls of :func:`connect` find it.

    Args:
      address, cpus: as for :func:`connect`.

    Raises:
      MissingExtraError, LaunchError: as :func:`connect`.
    """
    ray, owns = connect(address, cpus)
    try:
        yield
    finally:
        if owns:
            ray.shutdown()


def _children() -> set[int]:
    """The child processes of this process; empty where there is no ``/proc``."""
    files = Path("/proc/self/task").glob("*/children")
    return {int(pid) for file in files for pid in file.read_text().split()}


def _end(processes: set[int]) -> None:
    for pid in processes:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _try(address: str) -> None:
    """Raises if nothing accepts a connection at an address."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(f"the Ray address {address!r} is not HOST:PORT. Remedy: such as 10.0.0.1:6379.")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT).close()
    except OSError as error:
        raise _silent(address, error.strerror or str(error) or "no answer") from error


def _join(ray: Any, address: str, seconds: float) -> None:
    failed: list[BaseException] = []

    def join() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except BaseException as error:  # noqa: BLE001 (raised below)
            failed.append(error)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        why = "it accepts connections, but no Ray answers there"
        raise _silent(address, why) from TimeoutError(f"no answer within {seconds:.0f} s")
    if failed:
        raise _silent(address, first_line(failed[0])) from failed[0]


def _silent(address: str, why: str) -> LaunchError:
    return LaunchError(
        f"no Ray cluster answers at {address}: {why}. Remedy: the address of a running cluster (ray start --head), "
        "and RAY_AUTH_MODE=token if it requires a token; or leave the address out to start Ray on this machine."
    )


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text without a period, or else its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
