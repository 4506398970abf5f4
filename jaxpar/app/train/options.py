"""The command line's options about processes, and the devices of a process."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.app.config import RunConfig
from jaxpar.app.launch import device_assignment
from jaxpar.app.launch.cluster_detection import Cluster
from jaxpar.app.launch.join import ProcessPlace, join


@dataclass(frozen=True)
class LaunchOptions:
    """The command line's options about processes; see ``jaxpar train --help``."""

    processes: int | None = None
    coordinator: str | None = None
    process_count: int | None = None
    process_id: int | None = None
    ray: bool = False
    servers: int | None = None
    workers: int | None = None


def set_up_devices(config: RunConfig, cluster: ProcessPlace | Cluster | None) -> None:
    """Join the other processes, if any, and simulate a share of ``cpu_devices`` if the machine has no accelerator."""
    from jaxpar.utils.simulate_devices import prefer_accelerators

    if cluster is not None:
        # Only jax tells the processes of other hosts that a host is gone.
        join(cluster, heartbeat=max(10, min(100, int(config.supervise.step_timeout))))
    count = 1 if cluster is None else cluster.count or 1
    if config.cpu_devices is not None:
        prefer_accelerators(device_assignment.share(config.cpu_devices, count, "simulated devices ('cpu_devices')"))
