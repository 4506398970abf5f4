"""Run processes on a Ray cluster, each as a child of an actor on the node that Ray chooses.

Ray places the actors and reports lost nodes; the rest works as on a single host. All nodes must have the same paths for
environment, configuration and output.
"""

from __future__ import annotations

import enum
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxpar.app.launch.peers import Peer
from jaxpar.app.launch.process_group import LOOPBACK, Command, Local, free_port
from jaxpar.errors import LaunchError
from jaxpar.utils.durable import open_regular
from jaxpar.utils.extras import import_extra

_CARRIED = ("JAX", "XLA", "LIBTPU", "TPU_", "PYTHON", "NCCL_")
"""Prefixes of variables that a process gets from the launching environment, in addition to those of its node."""

_RESOURCES = {"CPU": "num_cpus", "GPU": "num_gpus"}
"""Resources for which Ray has an option of its own."""

_SILENT = 3.0
"""Seconds without news from a process after which its node is tried."""

_NEAR = "127.0.0.2" if sys.platform == "linux" else LOOPBACK
"""Address of a Ray that is started here; Ray would replace 127.0.0.1 by the host's network address."""


class RayWorker:
    """The actor: runs one process, and returns its state and its output; ``again`` appends to its log."""

    def __init__(
        self, rank: int, total: int, logs: str, folder: str, variables: Mapping[str, str | None], *, again: bool
    ):
        os.chdir(folder)
        keep: dict[str, Any] = {"console": False, "append": again}
        self._group = Local(Path(logs), first=rank, total=total, variables=lambda index: variables, **keep)
        self._rank, self._log = rank, self._group.log(rank)
        self._read = self._log.stat().st_size if again and self._log.exists() else 0

    def address(self) -> tuple[str, str]:
        """Returns a free ``HOST:PORT`` on this node, and the node's id."""
        import ray

        host = str(ray.util.get_node_ip_address())
        return f"{host}:{free_port(host)}", str(ray.get_runtime_context().get_node_id())

    def start(self, command: Sequence[str]) -> None:
        """Start the process."""
        # `command` already contains the coordinator's address, which is on process 0's node.
        self._group.start(lambda rank, total, address: command, 1)

    def poll(self, seconds: float) -> tuple[dict[str, Any], str]:
        """Returns the state of the process, with times as ages in seconds, and for process 0 its new output."""
        self._group.poll(seconds)
        return self._group.peers[0].state(time.monotonic()), "" if self._rank else self.printed()

    def pass_on(self, number: int) -> None:
        """Send a signal to the process."""
        self._group.pass_on(number)

    def end(self) -> None:
        """End the process."""
        self._group.end()

    def tail(self, lines: int) -> list[str]:
        """Returns the last lines of its log."""
        return self._group.tail(self._rank, lines)

    def printed(self) -> str:
        """Returns the output since the last call."""
        text = b""
        with suppress(OSError), open(open_regular(self._log, os.O_RDONLY), "rb") as file:
            file.seek(self._read)
            text = file.read()
            self._read += len(text)
        return text.decode(errors="replace")


class RayGroup:
    """Processes on the cluster at ``RAY_ADDRESS``, or on a Ray that is started here, with token authentication.

    Args:
      logs: the folder of their logs, on each node.
      variables: changes to a process's environment, by its rank.
      resources: of each process, such as ``{"CPU": 4, "GPU": 1}``.
      patience: seconds to wait until Ray has placed all processes.
      append: whether to keep an earlier run's logs.
      show: called with the output of process 0.

    Raises:
      MissingExtraError: ray is not installed.
      LaunchError: Ray cannot be reached or started.
    """

    def __init__(
        self,
        logs: Path,
        *,
        variables: Callable[[int], Mapping[str, str | None]] = lambda rank: {},
        resources: Mapping[str, float] | None = None,
        patience: float = 120.0,
        append: bool = False,
        show: Callable[[str], None] = lambda text: print(text, end="", flush=True),
    ):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send usage statistics
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        starts = "RAY_ADDRESS" not in os.environ
        if starts:
            # Its daemons listen on every interface, whatever its address; Ray's default is then to require a token.
            os.environ.pop("RAY_AUTH_MODE", None)
        self._ray = ray = import_extra("ray", "ray", "starting processes on a Ray cluster")
        self._logs, self._variables, self._show = logs.absolute(), variables, show
        self._resources, self._patience = resources or {"CPU": 1}, patience
        self._members: dict[int, Any] = {}
        self._pending: dict[int, Any] = {}
        self._nodes: dict[int, str] = {}  # of the processes that Ray has placed
        self._probed = 0.0
        self.peers: list[Peer] = []
        self._again = append
        # Without an address, Ray would join any cluster that it finds on this host.
        own = {"address": "local", "_node_ip_address": _NEAR, "include_dashboard": False}
        try:
            if not ray.is_initialized():
                ray.init(log_to_driver=False, **(own if starts else {}))
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise LaunchError(
                f"Ray cannot be reached or started: {first}. Remedy: set RAY_ADDRESS=HOST:PORT of a running cluster, "
                "and RAY_AUTH_MODE=token if it requires a token."
            ) from error

    def start(self, command: Command, count: int) -> None:
        """Start ``count`` processes, spread over the nodes.

        Raises:
          LaunchError: Ray cannot place or start all of them.
        """
        others = dict(self._resources)
        options = {kind: others.pop(name) for name, kind in _RESOURCES.items() if name in others}
        actor = self._ray.remote(RayWorker).options(
            scheduling_strategy="SPREAD", max_concurrency=1, resources=others, **options
        )
        carried = {name: text for name, text in os.environ.items() if name.startswith(_CARRIED)}
        self._nodes = {}
        place = str(self._logs), os.getcwd()
        for rank in range(count):
            variables = {**carried, **self._variables(rank)}
            self._members[rank] = actor.remote(rank, count, *place, variables, again=self._again)
        try:
            requests = [member.address.remote() for member in self._members.values()]
            places = self._ray.get(requests, timeout=self._patience)
            self._nodes = {rank: node for rank, (_, node) in enumerate(places)}
            commands = [list(command(rank, count, places[0][0])) for rank in range(count)]
            starts = [member.start.remote(commands[rank]) for rank, member in self._members.items()]
            self._ray.get(starts, timeout=self._patience)
        except self._ray.exceptions.GetTimeoutError as error:
            self.end()
            has = {name: n for name, n in self._ray.cluster_resources().items() if name in {"CPU", *self._resources}}
            raise LaunchError(
                f"Ray could not place {count} processes with resources {self._resources} within {self._patience:g} s; "
                f"the cluster has {has}. Remedy: fewer processes, supervise.resources, more nodes, or "
                "supervise.elastic."
            ) from error
        except self._ray.exceptions.RayError as error:
            self.end()
            raise LaunchError(
                f"Ray could not start {count} processes: {(str(error).strip().splitlines() or [''])[-1]}"
            ) from error
        self.peers, self._again = [Peer(rank, time.monotonic()) for rank in self._members], True

    def room(self, remaining: int, requested: int) -> int:
        """Returns for how many processes the nodes that answer have room; waits for the first one.

        Only the resources that nodes have count, not those that other jobs use.
        """
        until, found = time.monotonic() + self._patience, 0
        while not found and time.monotonic() < until:
            nodes = [node for node in self._ray.nodes() if _reply(node) is _Reply.ACCEPTED]
            found = sum(_times(node["Resources"], self._resources) for node in nodes)
            time.sleep(0 if found else 1)
        return min(requested, found)

    def poll(self, seconds: float) -> None:
        """Request the state of every process; a node that does not answer is not waited for."""
        for rank, member in self._members.items():
            if rank not in self._pending:
                self._pending[rank] = member.poll.remote(seconds)
        pending = {ref: rank for rank, ref in self._pending.items()}
        if not pending:
            time.sleep(seconds)
            return
        ready, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=seconds + 1)
        for ref in ready:
            rank = pending[ref]
            del self._pending[rank]
            self._take(self.peers[rank], ref)
        self._probe(time.monotonic())

    def _probe(self, now: float) -> None:
        """Find the nodes of silent processes on which nothing runs any more; Ray itself takes longer.

        A node that does not answer at all is left to Ray's own timeout, because the network may come back.
        """
        silent = [rank for rank in self._pending if now - self.peers[rank].tick > _SILENT]
        if not silent or now - self._probed < 1:
            return
        self._probed = now
        for rank in silent:
            node = self._node(rank)
            match _reply(node):
                case _Reply.REFUSED:
                    self._lose(self.peers[rank])
                case _Reply.NONE:
                    self.peers[rank].silent = f"and its Ray node {node['NodeManagerAddress']} does not answer"

    def _node(self, rank: int) -> dict[str, Any]:
        """What Ray says about the node of a process."""
        nodes = (node for node in self._ray.nodes() if node["NodeID"] == self._nodes[rank])
        return next(nodes, {"Alive": False, "NodeManagerAddress": ""})

    def _lose(self, peer: Peer) -> None:
        """Record that a process was lost, with its node or alone."""
        node = self._node(peer.rank)
        alone = _reply(node) is _Reply.ACCEPTED
        peer.lost = f"was lost with its Ray {'worker' if alone else 'node ' + node['NodeManagerAddress']}"
        self._members.pop(peer.rank, None)
        self._pending.pop(peer.rank, None)

    def _take(self, peer: Peer, ref: Any) -> None:
        try:
            state, printed = self._ray.get(ref)
        except self._ray.exceptions.RayActorError:
            self._lose(peer)
            return
        peer.update(state, time.monotonic())
        if printed:
            self._show(printed)

    def pass_on(self, number: int) -> None:
        """Send a signal to all running processes."""
        for member in self._members.values():
            member.pass_on.remote(number)

    def end(self) -> None:
        """End all running processes, and release their resources."""
        ended = [member.end.remote() for rank, member in self._members.items() if rank in self._nodes]
        if ended:
            self._ray.wait(ended, num_returns=len(ended), timeout=10)
        for rank, member in self._members.items():
            if rank == 0 and self.peers and not self.peers[0].lost:
                with suppress(self._ray.exceptions.RayError):
                    self._show(self._ray.get(member.printed.remote(), timeout=5))
            self._ray.kill(member)
        self._members, self._pending = {}, {}

    def tail(self, rank: int, lines: int) -> list[str]:
        """Returns the last lines that a process wrote, if its node still answers."""
        if rank not in self._members:
            return []
        with suppress(self._ray.exceptions.RayError):
            return list(self._ray.get(self._members[rank].tail.remote(lines), timeout=5))
        return []


def _times(has: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """How many processes with these needs fit the resources of a node.

    >>> _times({"CPU": 8, "GPU": 3}, {"CPU": 2, "GPU": 1}), _times({"CPU": 8}, {"GPU": 1})
    (3, 0)
    """
    return int(min(has.get(name, 0) // need for name, need in needs.items() if need > 0))


class _Reply(enum.Enum):
    """What a node's Ray daemon does with a connection."""

    ACCEPTED = enum.auto()
    REFUSED = enum.auto()
    NONE = enum.auto()


def _reply(node: Mapping[str, Any]) -> _Reply:
    """Connect to a node's Ray daemon."""
    if not node["Alive"]:
        return _Reply.REFUSED
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=2):
            return _Reply.ACCEPTED
    except ConnectionRefusedError:
        return _Reply.REFUSED
    except OSError:
        return _Reply.NONE
