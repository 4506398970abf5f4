"""The table ``parallel.parameter_server`` of a run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from jaxpar.app.config_ranges import NonNegative
from jaxpar.errors import ConfigError, prefixed
from jaxpar.parameter_server.config import ServerConfig, ServerTable

if TYPE_CHECKING:
    from jaxpar.app.config import RunConfig


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


def check_run(run: RunConfig, config: ServerConfig) -> None:
    """Raises if a run has what servers do not train.

    Raises:
      ConfigError: the text names the key.
    """
    pipeline = run.parallel.pipeline
    for key, value in (
        ("parallel.offload.optimizer", run.parallel.offload.optimizer),
        ("model.lora", run.model.get("lora")),
        ("train.init_from", run.train.init_from),
        ("optimizer.name: one_bit_adam", run.optimizer.name == "one_bit_adam"),
        ("parallel.pipeline.schedule: pipedream", pipeline is not None and pipeline.schedule.startswith("pipedream")),
    ):
        if value:
            raise ConfigError(
                f"{key} does not work with parallel.parameter_server, whose servers hold the optimizer state. Remedy: "
                "leave one of them out."
            )
    if run.data.batch % config.workers:
        larger = math.ceil(run.data.batch / config.workers) * config.workers
        raise ConfigError(
            f"data.batch={run.data.batch} is divided among the {config.workers} workers of parallel.parameter_server, "
            f"and is not a multiple of {config.workers}. Remedy: data.batch: {larger}."
        )
