"""The table ``parallel.parameter_server`` of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from jaxpar.errors import prefixed


@dataclass(frozen=True)
class ServerSettings:
    """A run with parameter servers: ``{mode: stale_synchronous, staleness: 4, servers: 2, workers: 4}``.

    Attributes:
      mode, servers, workers, staleness, sync_every, outer_learning_rate, outer_momentum, compression, piece_bytes,
        snapshot_every, patience, max_restarts: see :class:`jaxpar.parameter_server.ServerConfig`.
      cluster: ``ray``, or ``threads`` of one process, to try a configuration.
      address: ``HOST:PORT`` of a Ray cluster; by default ``RAY_ADDRESS``, or a Ray that the run starts on this machine.
      resources: Ray resources of each worker: ``{CPU: 4, GPU: 1}``.
    """

    mode: str = "synchronous"
    servers: int = 1
    workers: int = 2
    staleness: int = 0
    sync_every: int = 1
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    compression: Literal["int8"] | None = None
    piece_bytes: int = 2**26
    snapshot_every: int = 100
    patience: float = 120.0
    max_restarts: int = 100
    cluster: Literal["ray", "threads"] = "ray"
    address: str | None = None
    resources: dict[str, float] = field(default_factory=lambda: {"CPU": 1.0})


def server_config(settings: ServerSettings, servers: int | None, workers: int | None) -> object:
    """Returns the :class:`jaxpar.parameter_server.ServerConfig` of a run.

    Args:
      settings: the table of the configuration.
      servers, workers: the options ``--servers`` and ``--workers``, which win.

    Raises:
      ConfigError: a value is out of range; the text names the key.
    """
    from jaxpar.parameter_server.config import ServerConfig

    names = {one.name for one in dataclasses.fields(ServerConfig)}
    values = {name: value for name, value in dataclasses.asdict(settings).items() if name in names}
    values |= {} if servers is None else {"servers": servers}
    values |= {} if workers is None else {"workers": workers}
    with prefixed("parallel."):
        return ServerConfig(**values)
