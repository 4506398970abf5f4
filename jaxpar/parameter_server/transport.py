"""How workers reach servers, and ``ThreadTransport``, where servers are objects of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jaxpar.parameter_server.service import Coordinator, ServerService

type ServerCall = tuple[str, tuple[Any, ...]]
"""A method of :class:`ServerService`, and its arguments."""


@dataclass(frozen=True)
class ServerLost:
    """The answer where a server does not answer; it may come back."""

    why: str = ""


class Transport(Protocol):
    """Reaches servers and the coordinator."""

    def ask(self, calls: Mapping[int, ServerCall]) -> dict[int, Any]:
        """Returns the answer of each server, or :class:`ServerLost`; an error of a server is raised."""

    def coordinator(self, name: str, *arguments: Any) -> Any:
        """Returns the answer of the coordinator to a call of one of its methods."""


class ThreadTransport:
    """Servers and coordinator in this process; for tests, and to try a run without Ray.

    Attributes:
      services: the servers; remove one to lose it.
    """

    def __init__(self, coordinator: Coordinator):
        self.services: dict[int, ServerService] = {}
        self._coordinator = coordinator

    def ask(self, calls: Mapping[int, ServerCall]) -> dict[int, Any]:
        return {server: self._ask(server, *call) for server, call in sorted(calls.items())}

    def _ask(self, server: int, name: str, arguments: tuple[Any, ...]) -> Any:
        service = self.services.get(server)
        if service is None:
            return ServerLost("it does not run")
        answer = getattr(service, name)(*arguments)
        return answer if self.services.get(server) is service else ServerLost("it was killed")

    def coordinator(self, name: str, *arguments: Any) -> Any:
        return getattr(self._coordinator, name)(*arguments)
