"""What a run's servers and workers run on: the interface, and ``ThreadCluster``, which needs no Ray."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jaxpar.parameter_server.config import ServerConfig
from jaxpar.parameter_server.piece_optimizer import PieceOptimizer
from jaxpar.parameter_server.program import TrainingProgram
from jaxpar.parameter_server.server_shard import ServerShard
from jaxpar.parameter_server.service import Coordinator, ServerService
from jaxpar.parameter_server.transport import ThreadTransport, Transport
from jaxpar.parameter_server.worker import ParameterServerWorker, WorkerPrograms, WorkerReport

type LoadProgram = Callable[[], TrainingProgram]
"""Makes the program in the process of a server or a worker."""


@dataclass(frozen=True)
class RunFiles:
    """The folder of a run: its membership, and a folder for each server and worker."""

    folder: Path

    @property
    def membership(self) -> Path:
        return self.folder / "membership.json"

    def server(self, number: int) -> Path:
        return self.folder / "servers" / str(number)

    def worker(self, number: int) -> Path:
        return self.folder / "workers" / str(number)

    def open_shard(self, number: int, program: TrainingProgram, config: ServerConfig) -> ServerShard:
        """Returns a server's shard, as its log left it."""
        optimizer = PieceOptimizer(program.server_tx(config))
        return ServerShard(number, self.server(number), config, optimizer, program.tables)


class ServerCluster(Protocol):
    """Starts and ends servers and workers."""

    @property
    def transport(self) -> Transport: ...

    def launch_server(self, number: int) -> None:
        """Start a server, and wait until it answers."""

    def stop_server(self, number: int) -> None:
        """End a server that holds nothing any more."""

    def launch_worker(self, number: int, steps: int) -> None:
        """Start a worker, which trains up to a step."""

    def stop_worker(self, number: int) -> None:
        """End a worker that trains no more."""

    def ended(self, seconds: float) -> dict[int, WorkerReport]:
        """Returns the reports of workers that have ended since the last call, after at most so many seconds."""

    def finish(self, number: int, steps: int) -> Mapping[str, float]:
        """Let a worker that has ended evaluate and store the final parameters."""

    def close(self) -> None:
        """End everything."""


class ThreadCluster:
    """Servers and workers as threads of this process, with its devices. Workers share the devices.

    Args:
      files: the run's folder.
      program: what to train.
      config: the run's configuration.
    """

    def __init__(self, files: RunFiles, program: TrainingProgram, config: ServerConfig):
        self._files, self._program, self._config = files, program, config
        self._transport = ThreadTransport(Coordinator(str(files.membership)))
        self._programs = WorkerPrograms(program, config)
        self._workers: dict[int, ParameterServerWorker] = {}
        self._results: queue.Queue[tuple[int, WorkerReport | BaseException]] = queue.Queue()

    @property
    def transport(self) -> ThreadTransport:
        return self._transport

    def launch_server(self, number: int) -> None:
        service = ServerService(lambda: self._files.open_shard(number, self._program, self._config))
        self._transport.services[number] = service

    def stop_server(self, number: int) -> None:
        self._transport.services.pop(number).call("close")

    def launch_worker(self, number: int, steps: int) -> None:
        threading.Thread(target=self._run, args=(number, steps), daemon=True).start()

    def stop_worker(self, number: int) -> None:
        self._workers.pop(number, None)

    def _run(self, number: int, steps: int) -> None:
        try:
            folder = self._files.worker(number)
            worker = ParameterServerWorker(self._programs, self._config, self._transport, number, folder)
            self._workers[number] = worker
            self._results.put((number, worker.run(steps)))
        except BaseException as error:  # noqa: BLE001 (raised by the thread that waits)
            self._results.put((number, error))

    def ended(self, seconds: float) -> dict[int, WorkerReport]:
        try:
            number, found = self._results.get(timeout=seconds)
        except queue.Empty:
            return {}
        if isinstance(found, BaseException):
            raise found
        return {number: found}

    def finish(self, number: int, steps: int) -> Mapping[str, float]:
        return self._workers[number].finish(steps)

    def close(self) -> None:
        for number in list(self._transport.services):
            self.stop_server(number)
