"""``join``: makes this process one of several, as the command line or a launcher says."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.app.launch.cluster_detection import Cluster, address_in, detect
from jaxpar.app.launch.process_group import BIND, check_free, split_address
from jaxpar.errors import LaunchError


@dataclass(frozen=True)
class ProcessPlace:
    """The rank of this process, the number of processes, and the address of process 0, ``HOST:PORT``."""

    count: int
    rank: int
    coordinator: str

    def __str__(self) -> str:
        return f"process {self.rank} of {self.count}, coordinator {self.coordinator}"


def place_of(
    coordinator: str | None, count: int | None, rank: int | None, variables: Mapping[str, str] = os.environ
) -> ProcessPlace | Cluster | None:
    """Returns the place that the command line gives, else the launcher in ``variables``; ``None`` for a single process.

    Raises:
      LaunchError: options are missing or contradict each other.

    >>> place_of("127.0.0.1:1234", 4, 3)
    ProcessPlace(count=4, rank=3, coordinator='127.0.0.1:1234')
    """
    if count == 1 and rank in (None, 0):
        return None
    given = {"--coordinator": coordinator, "--process-count": count, "--process-id": rank}
    missing = [name for name, value in given.items() if value is None]
    if coordinator is None or count is None or rank is None:
        if len(missing) == len(given):
            return detect(variables)
        given_text = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        raise LaunchError(
            f"{given_text} {'is' if len(missing) == 2 else 'are'} given, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not. Remedy: pass all three, or --processes N, which starts the "
            "processes here."
        )
    if count < 1:
        raise LaunchError(f"--process-count must be at least 1, got {count}.")
    if not 0 <= rank < count:
        raise LaunchError(f"--process-id must be between 0 and {count - 1} with --process-count {count}, got {rank}.")
    split_address(coordinator)
    return ProcessPlace(count, rank, coordinator)


def join(what: ProcessPlace | Cluster, *, heartbeat: int = 100, patience: int = 300) -> None:
    """Make this process one of several; call it before jax runs anything.

    The coordinator has no authentication. It listens only on its own address, whereas jax's default is every interface.

    Args:
      what: the result of :func:`place_of`.
      heartbeat: seconds after which jax considers a silent process dead, and ends the others.
      patience: seconds to wait for the other processes.

    Raises:
      LaunchError: the processes do not find each other.
    """
    import jax

    if isinstance(what, ProcessPlace):
        bind = os.environ.get(BIND) or what.coordinator
        place: dict[str, Any] = {"cluster_detection_method": "deactivate", "coordinator_bind_address": bind}
        place |= {"coordinator_address": what.coordinator, "num_processes": what.count, "process_id": what.rank}
        if what.rank == 0:
            wait_for_name(bind)
            check_free(bind)
    else:
        place = {"cluster_detection_method": what.method, "coordinator_bind_address": bind_of(what)}
    place |= {"heartbeat_timeout_seconds": heartbeat, "initialization_timeout": patience}
    try:
        jax.distributed.initialize(**place)
    except (RuntimeError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LaunchError(
            f"{what}: the processes did not find each other within {patience} s: {first}. Remedy: start all processes, "
            "with a coordinator address that each can reach."
        ) from error


def wait_for_name(address: str, patience: float = 60, pause: float = 1) -> None:
    """Wait until a host's name resolves; Kubernetes publishes that of a pod only some seconds after its start.

    Args:
      address: ``HOST:PORT``.
      patience: maximum seconds to wait.
      pause: seconds between two attempts.

    Raises:
      LaunchError: the name does not resolve.
    """
    host, port = split_address(address)
    until = time.monotonic() + patience
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if time.monotonic() >= until:
                raise LaunchError(
                    f"the coordinator's host {host} has no address: {error.strerror}, for {patience:g} s. Remedy: a "
                    "name or an address of this host (process 0 runs here)."
                ) from error
        else:
            return
        time.sleep(pause)


def bind_of(cluster: Cluster) -> str | None:
    """Returns the address on which a cluster's process 0 listens: from the environment, else the one others use.

    ``None``, which means every interface, if that address is unknown here, or if this host resolves its own name to
    loopback.
    """
    bind = os.environ.get(BIND)
    address = cluster.address or address_in(os.environ)[0]
    if bind or not address:
        return bind
    host, port = split_address(address, cluster.name)
    try:
        ip = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return None
    hidden = ipaddress.ip_address(ip).is_loopback and host not in ("localhost", str(ip))
    return None if hidden else f"{ip}:{port}"
