"""``ServerConfig``: how many servers and workers a run has, and how far apart their clocks may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.parameter_server.sync_schedule import SyncEvery, SyncSchedule, check_sync_every
from jaxpar.utils.checks import Range, is_count, shown

type ServerMode = Literal["synchronous", "stale_synchronous", "asynchronous", "local_sgd"]
MODES = get_args(ServerMode.__value__)
type DeltaBits = Literal[8, 4]
DELTA_BITS: dict[str, DeltaBits] = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class ServerTable:
    """The values of a :class:`ServerConfig`, as a table of a configuration may have them: not checked."""

    mode: str = "synchronous"
    servers: Annotated[int, Range(1, 2**16)] = 1
    workers: Annotated[int, Range(1, 2**16)] = 2
    staleness: int = 0
    sync_every: SyncEvery = 1
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    compression: Literal["int8", "int4"] | None = None
    piece_bytes: int = 2**26
    snapshot_every: int = 100
    patience: float = 120.0
    max_restarts: int = 100


@dataclass(frozen=True)
class ServerConfig(ServerTable):
    """Servers, workers, and when the servers apply what the workers push.

    Attributes:
      mode: ``synchronous`` sums the gradients of all workers in worker order, then updates once. ``stale_synchronous``
        applies each gradient when it arrives; a worker waits while it is more than ``staleness`` steps ahead of the
        slowest one (Ho et al. 2013). ``asynchronous`` never waits. ``local_sgd`` lets each worker take ``sync_every``
        steps of its own, then applies the mean change of the parameters with an outer optimizer (DiLoCo, Douillard et
        al. 2023, arXiv:2311.08105).
      servers, workers: how many of each a run starts with.
      staleness: the bound of ``stale_synchronous``, in steps.
      sync_every: steps between two exchanges of ``local_sgd``. ``{0: 1, 60: 20}`` exchanges after each step at first,
        and every 20 steps from step 60 on, as in post-local SGD (Lin et al. 2018, arXiv:1808.07217).
      outer_learning_rate, outer_momentum: of the outer optimizer of ``local_sgd``, SGD with Nesterov momentum. The
        defaults suit hundreds of exchanges; 1.0 and 0.0, the mean of the workers, is better for few.
      compression: ``int8`` or ``int4`` sends the changes of ``local_sgd`` in 8 or 4 bits, to the servers and back. Each
        worker adds its rounding error to its next change, and the servers add theirs to the next update (Tang et al.
        2019, arXiv:1905.05957).
      piece_bytes: larger parameters are cut by rows into pieces of at most this many bytes, which servers share. The
        cut does not depend on the number of servers, so neither does any bit of the result.
      snapshot_every: updates of a server between two snapshots, each of which replaces its log.
      patience: seconds that a worker waits for a server that is gone.
      max_restarts: how often servers and workers are restarted before the run ends with an error.

    Raises:
      ConfigError: a value is out of range, or belongs to another mode.

    >>> ServerConfig(mode="stale_synchronous", servers=2, workers=4, staleness=3).staleness
    3
    """

    mode: ServerMode = "synchronous"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(
                f"parameter_server.mode is {shown(self.mode)}.{did_you_mean(self.mode, MODES)} Remedy: one of "
                f"{', '.join(MODES)}."
            )
        for name, least in (
            *(("servers", 1), ("workers", 1), ("staleness", 0)),
            *(("piece_bytes", 1), ("snapshot_every", 1), ("max_restarts", 0)),
        ):
            _check_count(name, getattr(self, name), least)
        check_sync_every(self.sync_every)
        for name, most in (("outer_learning_rate", math.inf), ("outer_momentum", 1.0), ("patience", math.inf)):
            _check_number(name, getattr(self, name), most)
        if self.compression not in (None, *DELTA_BITS):
            raise ConfigError(
                f"parameter_server.compression is {shown(self.compression)}. Remedy: int8, int4, or leave it out."
            )
        self._check_mode("staleness", 0, "stale_synchronous")
        self._check_mode("sync_every", 1, "local_sgd")
        self._check_mode("compression", None, "local_sgd")

    def _check_mode(self, name: str, default: Any, mode: ServerMode) -> None:
        value = getattr(self, name)
        if value != default and self.mode != mode:
            raise ConfigError(
                f"parameter_server.{name} is {value}, but mode is {self.mode}. Remedy: mode: {mode}, or leave {name} "
                "out."
            )

    @property
    def schedule(self) -> SyncSchedule:
        """The rounds; of the modes other than ``local_sgd``, one for each step."""
        return SyncSchedule.of(self.sync_every)

    @property
    def delta_bits(self) -> DeltaBits | None:
        """The bits of each number of a change; ``None`` without ``compression``."""
        return None if self.compression is None else DELTA_BITS[self.compression]

    @property
    def in_rounds(self) -> bool:
        """Whether servers apply the pushes of all workers together."""
        return self.mode in ("synchronous", "local_sgd")

    @property
    def lead(self) -> int | None:
        """How many steps a worker may be ahead of the slowest one; ``None`` without a bound."""
        return {"stale_synchronous": self.staleness, "asynchronous": None}.get(self.mode, 0)


def _check_count(name: str, value: Any, least: int) -> None:
    if not is_count(value, least):
        raise ConfigError(
            f"parameter_server.{name} must be an integer of at least {least}, got {shown(value)}. Remedy: {name}: "
            f"{max(least, 1)}."
        )


def _check_number(name: str, value: Any, most: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < most
    if not good or (name == "patience" and value == 0):
        above = "above 0" if name == "patience" else f"from 0{'' if math.isinf(most) else f' to below {most:g}'}"
        raise ConfigError(f"parameter_server.{name} must be a number {above}, got {shown(value)}.")
