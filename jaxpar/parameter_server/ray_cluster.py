"""``RayCluster``: servers, workers and coordinator as Ray actors, which Ray restarts when they are killed.

Actors get paths and numbers only: Ray repeats their arguments at a restart, when an array's object may be gone.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxpar.errors import LaunchError
from jaxpar.parameter_server.cluster import LoadProgram, RunFiles
from jaxpar.parameter_server.config import ServerConfig
from jaxpar.parameter_server.ray_start import connect, first_line
from jaxpar.parameter_server.service import Coordinator, ServerService
from jaxpar.parameter_server.transport import ServerCall, ServerLost
from jaxpar.parameter_server.worker import ParameterServerWorker, WorkerPrograms, WorkerReport

_COORDINATOR = "coordinator"
_THREADS = 64
_ANSWER = 60.0
"""Seconds after which an unanswered call is made again."""

_PATIENT = 120.0
"""Seconds to wait for the coordinator while Ray restarts it."""


class RayServer(ServerService):
    """The actor of a server, which updates parameters on the CPU."""

    def __init__(self, number: int, folder: str, load: LoadProgram, config: ServerConfig):
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax

        jax.config.update("jax_platforms", "cpu")
        files, program = RunFiles(Path(folder)), load()
        super().__init__(lambda: files.open_shard(number, program, config))


class RayTrainer:
    """The actor of a worker."""

    def __init__(self, number: int, folder: str, load: LoadProgram, config: ServerConfig, namespace: str):
        self._number, self._files, self._namespace = number, RunFiles(Path(folder)), namespace
        self._load, self._config = load, config
        self._worker: ParameterServerWorker | None = None

    def pid(self) -> int:
        """Returns the process."""
        return os.getpid()

    def run(self, steps: int) -> WorkerReport:
        """Train up to a step; see :meth:`ParameterServerWorker.run`."""
        return self._made().run(steps)

    def finish(self, steps: int) -> dict[str, float]:
        """Evaluate and store the final parameters."""
        return self._made().finish(steps)

    def _made(self) -> ParameterServerWorker:
        if self._worker is None:
            import ray

            program, config = self._load(), self._config
            folder = self._files.worker(self._number)
            transport = RayTransport(ray, self._namespace)
            programs = WorkerPrograms(program, config)
            self._worker = ParameterServerWorker(programs, config, transport, self._number, folder)
        return self._worker


class RayTransport:
    """Reaches the actors of a run by their names.

    Args:
      ray: the module, initialized.
      namespace: of the run's actors.
    """

    def __init__(self, ray: Any, namespace: str):
        self._ray, self._namespace = ray, namespace
        self._handles: dict[str, Any] = {}

    def ask(self, calls: Mapping[int, ServerCall]) -> dict[int, Any]:
        refs: dict[int, Any] = {}
        found: dict[int, Any] = {}
        for server, (name, arguments) in calls.items():
            try:
                refs[server] = getattr(self.actor(f"server-{server}"), name).remote(*arguments)
            except (ValueError, self._ray.exceptions.RayActorError) as error:
                found[server] = self._lost(f"server-{server}", error)
        for server, ref in refs.items():
            found[server] = self._answer(f"server-{server}", ref)
        return found

    def coordinator(self, name: str, *arguments: Any) -> Any:
        until = time.monotonic() + _PATIENT
        while True:
            try:
                ref = getattr(self.actor(_COORDINATOR), name).remote(*arguments)
                answer = self._answer(_COORDINATOR, ref)
            except (ValueError, self._ray.exceptions.RayActorError) as error:
                answer = self._lost(_COORDINATOR, error)
            if not isinstance(answer, ServerLost):
                return answer
            if time.monotonic() > until:
                raise LaunchError(f"the run's coordinator does not answer: {answer.why}.")
            time.sleep(0.2)

    def actor(self, name: str) -> Any:
        """Returns the handle of an actor.

        Raises:
          ValueError: there is no such actor.
        """
        if name not in self._handles:
            self._handles[name] = self._ray.get_actor(name, namespace=self._namespace)
        return self._handles[name]

    def _answer(self, name: str, ref: Any) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(ref, timeout=_ANSWER)
        except exceptions.RayTaskError as error:
            raise error.cause from None
        except (exceptions.RayActorError, exceptions.GetTimeoutError, exceptions.ObjectLostError) as error:
            return self._lost(name, error)

    def _lost(self, name: str, error: Exception) -> ServerLost:
        self._handles.pop(name, None)
        return ServerLost(first_line(error))


class RayCluster:
    """A run's actors.

    Args:
      files: the run's folder, at the same path on all nodes.
      load: makes the program in each actor. Ray sends it with the arguments of the actor, also to one that it starts
        again, so it may not hold arrays: those would be objects of this process.
      config: the run's configuration.
      address: of a Ray cluster; without one, Ray starts on this machine.
      worker_resources: of each worker, such as ``{"CPU": 4, "GPU": 1}``.

    Raises:
      MissingExtraError, LaunchError: as :func:`jaxpar.parameter_server.ray_start.connect`.
    """

    def __init__(
        self,
        files: RunFiles,
        load: LoadProgram,
        config: ServerConfig,
        *,
        address: str | None,
        worker_resources: Mapping[str, float],
    ):
        resources = dict(worker_resources)
        cpus = resources.pop("CPU", 1)
        self._ray, self._owns = connect(address, cpus * config.workers)
        self._files, self._config, self._namespace = files, config, f"jaxpar-{uuid.uuid4().hex[:12]}"
        self._program = load, config
        self._worker_options = {"num_cpus": cpus, "num_gpus": resources.pop("GPU", 0), "resources": resources}
        self._actors: dict[str, Any] = {}
        self._runs: dict[Any, tuple[int, int]] = {}
        self._restarts = 0
        self._transport = RayTransport(self._ray, self._namespace)
        self._actor(_COORDINATOR, Coordinator, {"num_cpus": 0, "max_restarts": -1}, str(files.membership))

    @property
    def transport(self) -> RayTransport:
        return self._transport

    def launch_server(self, number: int) -> None:
        options = {"num_cpus": 0, "max_concurrency": _THREADS, "max_restarts": self._config.max_restarts}
        self._actor(f"server-{number}", RayServer, options, number, str(self._files.folder), *self._program)
        self._placed(f"server-{number}")

    def stop_server(self, number: int) -> None:
        self._ray.kill(self._actors.pop(f"server-{number}"))

    def launch_worker(self, number: int, steps: int) -> None:
        options = {**self._worker_options, "max_concurrency": 2, "max_restarts": self._config.max_restarts}
        folder = str(self._files.folder)
        actor = self._actor(f"worker-{number}", RayTrainer, options, number, folder, *self._program, self._namespace)
        self._runs[actor.run.remote(steps)] = number, steps

    def stop_worker(self, number: int) -> None:
        self._ray.kill(self._actors.pop(f"worker-{number}"))

    def ended(self, seconds: float) -> dict[int, WorkerReport]:
        if not self._runs:
            return {}
        ready, _ = self._ray.wait(list(self._runs), timeout=seconds)
        found = {}
        for ref in ready:
            number, steps = self._runs.pop(ref)
            try:
                found[number] = self._ray.get(ref)
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except self._ray.exceptions.RayActorError as error:
                self._again(number, steps, error)
        return found

    def _again(self, number: int, steps: int, error: Exception) -> None:
        """Let a worker that was killed go on: Ray restarts its process, and until then calls it unavailable."""
        self._restarts += not isinstance(error, self._ray.exceptions.ActorUnavailableError)
        if self._restarts > self._config.max_restarts:
            raise LaunchError(
                f"workers were lost {self._restarts} times, the last one was worker {number}. Remedy: look into the "
                "logs of Ray, or raise parameter_server.max_restarts."
            ) from error
        time.sleep(0.2)
        self._runs[self._actors[f"worker-{number}"].run.remote(steps)] = number, steps

    def finish(self, number: int, steps: int) -> Mapping[str, float]:
        return self._call(f"worker-{number}", lambda actor: actor.finish.remote(steps))

    def pid(self, name: str) -> int:
        """Returns the process of ``server-0``, ``worker-1`` and so on."""
        return int(self._call(name, lambda actor: actor.pid.remote()))

    def _call(self, name: str, call: Callable[[Any], Any]) -> Any:
        """The answer of an actor, which may just be restarting."""
        exceptions = self._ray.exceptions
        until = time.monotonic() + self._config.patience
        while True:
            try:
                return self._ray.get(call(self._actors[name]))
            except exceptions.RayTaskError as error:
                raise error.cause from None
            except exceptions.RayActorError as error:
                if time.monotonic() > until:
                    raise LaunchError(
                        f"{name} has not come back for {self._config.patience:g} s. Remedy: look into the logs of Ray."
                    ) from error
                time.sleep(0.2)

    def _actor(self, name: str, kind: type, options: Mapping[str, Any], *arguments: Any) -> Any:
        # A process of Ray imports from the same folders as this one.
        variables = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        remote = self._ray.remote(kind).options(
            name=name, namespace=self._namespace, runtime_env={"env_vars": variables}, **options
        )
        self._actors[name] = remote.remote(*arguments)
        return self._actors[name]

    def _placed(self, name: str) -> None:
        try:
            self._ray.get(self._actors[name].pid.remote(), timeout=self._config.patience)
        except self._ray.exceptions.GetTimeoutError as error:
            raise LaunchError(
                f"Ray has not started {name} within {self._config.patience:g} s; the cluster has "
                f"{self._ray.cluster_resources()}. Remedy: fewer workers, fewer resources for each, or more nodes."
            ) from error
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayActorError as error:
            cause = getattr(error, "cause", None)
            raise LaunchError(f"{name} cannot be started: {str(cause or error).strip().splitlines()[-1]}") from error

    def close(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors = {}
        if self._owns:
            self._ray.shutdown()
