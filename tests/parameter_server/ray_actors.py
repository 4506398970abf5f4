"""The little of Ray that servers and workers need: actors that are objects of this process, called at once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class ActorError(Exception):
    """The actor was lost."""


class ActorUnavailable(ActorError):
    """The actor is being started again."""


class TaskError(Exception):
    """A method raised."""

    def __init__(self, cause: Exception):
        super().__init__("a trace of several lines")
        self.cause = cause


class Timeout(Exception):
    """There was no answer in time."""


class _Method:
    """``actor.method.remote(...)`` returns a call, which ``get`` makes."""

    def __init__(self, call: Callable[..., Any]):
        self.remote = lambda *arguments: lambda: call(*arguments)


def _handle(actor: Any) -> Any:
    return SimpleNamespace(**{n: _Method(getattr(actor, n)) for n in dir(actor) if not n.startswith("_")}, itself=actor)


class Actors:
    """Stands in for the module ``ray``.

    Args:
      actors: by name, with ``_`` for ``-``.

    Attributes:
      options: what each actor was made with.
      sought: the names that were looked up.
    """

    exceptions = SimpleNamespace(
        RayActorError=ActorError,
        ActorUnavailableError=ActorUnavailable,
        RayTaskError=TaskError,
        GetTimeoutError=Timeout,
        ObjectLostError=Timeout,
    )

    def __init__(self, **actors: Any):
        self.actors = {name.replace("_", "-"): actor for name, actor in actors.items()}
        self.options: dict[str, dict[str, Any]] = {}
        self.sought: list[str] = []

    def is_initialized(self) -> bool:
        return True

    def remote(self, kind: type) -> Any:
        def options(*, name: str, **others: Any) -> Any:
            def make(*arguments: Any) -> Any:
                self.options[name], self.actors[name] = others, kind(*arguments)
                return _handle(self.actors[name])

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def get_actor(self, name: str, namespace: str) -> Any:
        self.sought.append(name)
        if name not in self.actors:
            raise ValueError(f"Failed to look up actor '{name}'.\nIt may have died.")
        return _handle(self.actors[name])

    def get(self, call: Callable[[], Any], timeout: float | None = None) -> Any:
        return call()

    def wait(self, calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return calls, []

    def kill(self, handle: Any) -> None:
        self.actors = {name: actor for name, actor in self.actors.items() if actor is not handle.itself}

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}
