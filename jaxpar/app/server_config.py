"""The table ``parallel.parameter_server`` of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxpar.app.config_ranges import NonNegative
from jaxpar.errors import prefixed
from jaxpar.parameter_server.config import ServerConfig, ServerTable


@dataclass(frozen=True)
class ServerSettings(ServerTable):
    """A run with parameter servers: ``{mode: stale_synchronous, staleness: 4, servers: 2, workers: 4}``.

    Attributes:
      mode, servers, workers, staleness, sync_every, outer_learning_rate, outer_momentum, compression, piece_bytes,
        snapshot_every, patience, max_restarts: see :class:`jaxpar.parameter_server.ServerConfig`. ``sync_every: {0: 1,
        60: 20}`` exchanges after each step at first, and every 20 steps from step 60 on.
      cluster: ``ray``, or ``threads`` of one process, to try a configuration.
      address: ``HOST:PORT`` of a Ray cluster; by default ``RAY_ADDRESS``, or a Ray that the run starts on this machine.
      resources: Ray resources of each worker: ``{CPU: 4, GPU: 1}``.
    """

    cluster: Literal["ray", "threads"] = "ray"
    address: str | None = None
    resources: dict[str, NonNegative] = field(default_factory=lambda: {"CPU": 1.0})


def server_config(settings: ServerSettings) -> ServerConfig:
    """Returns the :class:`jaxpar.parameter_server.ServerConfig` of a run, from the table of its configuration.

    Raises:
      ConfigError: a value is out of range; the text names the key.
    """
    values: dict[str, Any] = {one.name: getattr(settings, one.name) for one in dataclasses.fields(ServerConfig)}
    with prefixed("parallel."):
        return ServerConfig(**values)
