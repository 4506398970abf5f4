"""``ServerRun`` and ``train``: a run with servers and workers, from its start to its result."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from jaxpar.errors import ConfigError
from jaxpar.parameter_server.client import ServerClient, check_model
from jaxpar.parameter_server.cluster import LoadProgram, RunFiles, ServerCluster, ThreadCluster
from jaxpar.parameter_server.config import ServerConfig
from jaxpar.parameter_server.controller import Controller
from jaxpar.parameter_server.membership import from_json
from jaxpar.parameter_server.pieces import server_params
from jaxpar.parameter_server.program import TrainingProgram
from jaxpar.parameter_server.sync_schedule import check_steps
from jaxpar.parameter_server.worker import WorkerReport
from jaxpar.utils.checks import shown

type OnReport = Callable[[int, int, Mapping[str, float]], None]
"""Called with a worker, the steps that it has done, and its figures, such as ``loss``."""


@dataclass(frozen=True)
class ServerRunResult:
    """The result of a run.

    Attributes:
      params: the final parameters by path, without sparse tables.
      reports: by worker, of its last process.
      staleness: how often a worker pulled with the slowest one so many steps behind.
      finished: what the first worker found at the end, such as ``heldout_loss``.
    """

    params: Mapping[str, np.ndarray]
    reports: Mapping[int, WorkerReport]
    staleness: Mapping[int, int]
    finished: Mapping[str, float] = field(default_factory=dict)


class ServerRun:
    """A run in progress; a context manager, which ends its processes.

    Args:
      program: what to train, or a function that returns it in each process (then nothing of it is pickled but that).
      config: servers, workers and mode.
      steps: the number of steps of each worker.
      folder: logs of the servers and what workers keep. A run whose folder exists goes on where it was.
      cluster: ``ray``, or ``threads`` of this process.
      address: ``HOST:PORT`` of a Ray cluster; without one, Ray starts on this machine.
      resume: if false, what is in the folder is deleted.
      worker_resources: Ray resources of each worker.
      on_report: called with every worker's figures.

    Raises:
      ConfigError: ``steps`` is not the end of a round of ``sync_every`` steps, or the optimizer or a table cannot be
        served.
      ModelError: the folder is of a run with another model.
      MissingExtraError, LaunchError: Ray is not installed, or cannot be reached.
    """

    def __init__(
        self,
        program: TrainingProgram | LoadProgram,
        config: ServerConfig,
        *,
        steps: int,
        folder: str | Path,
        cluster: Literal["ray", "threads"] = "ray",
        address: str | None = None,
        resume: bool = True,
        worker_resources: Mapping[str, float] | None = None,
        on_report: OnReport = lambda worker, steps, figures: None,
    ):
        check_steps(steps, config.sync_every)
        self._config, self._steps, self._on_report = config, steps, on_report
        self._files = RunFiles(Path(folder).absolute())
        self._load: LoadProgram = (lambda: program) if isinstance(program, TrainingProgram) else program
        self._program = self._load()
        pieces = self._program.pieces(config)
        if not resume:
            shutil.rmtree(self._files.folder, ignore_errors=True)
        self._check_folder()
        self._reports: dict[int, WorkerReport] = {}
        self._running: set[int] = set()
        self.cluster = self._make(cluster, address, worker_resources or {"CPU": 1})
        try:
            self.controller = Controller(self.cluster.transport, config)
            self._start(pieces)
        except BaseException:
            self.cluster.close()
            raise

    def _make(self, kind: str, address: str | None, resources: Mapping[str, float]) -> ServerCluster:
        if kind == "threads":
            return ThreadCluster(self._files, self._program, self._config)
        if kind != "ray":
            raise ConfigError(f"cluster is {shown(kind)}. Remedy: 'ray', or 'threads' of this process.")
        from jaxpar.parameter_server.ray_cluster import RayCluster

        return RayCluster(self._files, self._load, self._config, address=address, worker_resources=resources)

    def _check_folder(self) -> None:
        if self._files.membership.exists():
            members = from_json(self._files.membership.read_text(encoding="utf-8"))
            model = server_params(self._program.model_params, self._program.tables)
            check_model(model, members.params(), f"the run in {self._files.folder}")

    def _start(self, pieces: Any) -> None:
        text = self.cluster.transport.coordinator("membership")
        servers = range(self._config.servers) if text is None else from_json(text).servers
        for server in servers:
            self.cluster.launch_server(server)
        for span in self.controller.begin(pieces).active:
            self._launch_worker(span.worker)

    def _launch_worker(self, worker: int) -> None:
        self._running.add(worker)
        self.cluster.launch_worker(worker, self._steps)

    def add_server(self) -> int:
        """Start one more server, to which pieces move; returns its number."""
        server = max(self.controller.members.servers) + 1
        self.cluster.launch_server(server)
        self.controller.add_server(server)
        return server

    def remove_server(self, server: int) -> None:
        """Move the pieces of a server to the others, and end it."""
        self.controller.remove_server(server)
        self.cluster.stop_server(server)

    def add_worker(self) -> int:
        """Start one more worker; returns its number."""
        worker = max(span.worker for span in self.controller.members.spans) + 1
        self.controller.add_worker(worker)
        self._launch_worker(worker)
        return worker

    def remove_worker(self, worker: int) -> None:
        """Let a worker leave after its present step."""
        self.cluster.transport.coordinator("dismiss", worker)
        while worker in self._running:
            self.poll()
        self.controller.remove_worker(worker)
        self.cluster.stop_worker(worker)

    def poll(self, seconds: float = 0.2) -> bool:
        """Take reports, for at most so many seconds; returns whether workers are still running.

        Raises:
          JaxparError: what a worker or a server raised.
        """
        for number, report in self.cluster.ended(seconds).items():
            self._reports[number] = report
            self._running.discard(number)
        for worker, steps, figures in self.cluster.transport.coordinator("take_reports"):
            self._on_report(worker, steps, figures)
        return bool(self._running)

    def wait(self) -> ServerRunResult:
        """Wait until all workers have ended; returns the result."""
        while self.poll():
            pass
        first = min(span.worker for span in self.controller.members.active)
        finished = self.cluster.finish(first, self._steps)
        staleness: Counter[int] = Counter()
        servers = self.controller.members.servers
        for answer in self.cluster.transport.ask({server: ("staleness", ()) for server in servers}).values():
            staleness.update(answer if isinstance(answer, dict) else {})
        return ServerRunResult(self.params(), dict(self._reports), dict(sorted(staleness.items())), finished)

    def params(self) -> dict[str, np.ndarray]:
        """Returns the newest parameters by path, without sparse tables."""
        tables = {table.path for table in self._program.tables}
        return {name: value for name, value in self._reader().pull(None).items() if name not in tables}

    def rows(self, path: str, ids: np.ndarray) -> np.ndarray:
        """Returns rows of a sparse table.

        Args:
          path: the table.
          ids: row numbers [n], ascending, without repetition.
        """
        return self._reader().pull(None, {path: np.asarray(ids, np.int64)})[path]

    def _reader(self) -> ServerClient:
        program = self._program
        return ServerClient(self.cluster.transport, -1, program.model_params, program.tables, self._config.patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.close()


def train(program: TrainingProgram | LoadProgram, config: ServerConfig, **options: Any) -> ServerRunResult:
    """Train with parameter servers; returns the result.

    Args:
      program, config: what to train, and with what.
      options: further arguments of :class:`ServerRun`, such as ``steps`` and ``folder``.

    Raises:
      JaxparError: as :class:`ServerRun`, and what a worker raised.

    >>> import tempfile, jax, optax
    >>> import jaxpar as jp
    >>> ps = jp.parameter_server
    >>> program = ps.TrainingProgram(
    ...     layout=lambda: jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), jp.Rules(batch=None, w=None)),
    ...     make_model=lambda key: {"w": jp.tag(jax.numpy.zeros(3), "w")},
    ...     loss_fn=lambda model, batch: ((batch["x"] @ model["w"] - 1) ** 2).mean(),
    ...     tx=optax.sgd(0.1),
    ...     batches=lambda worker, workers: lambda step: {"x": jax.numpy.ones((2, 3))},
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     config = ps.ServerConfig(servers=2, workers=2)
    ...     result = ps.train(program, config, steps=2, folder=folder, cluster="threads")
    >>> [round(float(loss), 2) for loss in result.reports[0].losses.values()]
    [1.0, 0.16]
    """
    with ServerRun(program, config, **options) as run:
        return run.wait()
