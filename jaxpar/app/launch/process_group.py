"""``ProcessGroup``: processes that start and end together; ``Local`` runs them as children of this process."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from jaxpar.app.launch.heartbeat import BEATS
from jaxpar.app.launch.peers import Peer
from jaxpar.errors import LaunchError
from jaxpar.utils.durable import link_text, open_regular

LOOPBACK = "127.0.0.1"
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
"""Environment variable that overrides the address on which a coordinator or supervisor listens."""
type Command = Callable[[int, int, str], Sequence[str]]
"""The command of process ``rank`` of ``total``, given the address of process 0."""


class ProcessGroup(Protocol):
    """The interface of a group of processes to its supervisor, wherever they run."""

    peers: list[Peer]

    def start(self, command: Command, count: int) -> None:
        """Start ``count`` processes."""

    def poll(self, seconds: float) -> None:
        """Receive the processes' messages, waiting at most ``seconds`` for one."""

    def room(self, remaining: int, requested: int) -> int:
        """Returns how many processes an elastic restart may start, at most ``requested``, if ``remaining`` are left."""

    def pass_on(self, number: int) -> None:
        """Send a signal to all running processes."""

    def end(self) -> None:
        """End all running processes, and wait until they have ended."""

    def tail(self, rank: int, lines: int) -> list[str]:
        """Returns the last lines that a process wrote."""


class Local:
    """Processes on this host, each in its own session, so that Ctrl-C reaches them only through their supervisor.

    Process 0 writes to this process's standard output; all other output goes to ``process-N.log`` in ``logs``, to which
    each restart appends.

    Args:
      logs: the folder of the logs, created if missing.
      first: rank of the first process here.
      total: number of processes on all hosts; by default those that are started here.
      coordinator: ``HOST:PORT`` of process 0; by default a free port of the loopback interface.
      variables: changes to a process's environment, by its index among those started here; ``None`` removes a variable.
      console: whether process 0 writes to standard output; if false, to its log as the others do.
      append: whether to keep an earlier run's logs.
      stdin: standard input of process 0, from its current position; empty by default.
      grace: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        logs: Path,
        *,
        first: int = 0,
        total: int | None = None,
        coordinator: str | None = None,
        variables: Callable[[int], Mapping[str, str | None]] = lambda index: {},
        console: bool = True,
        append: bool = False,
        stdin: IO[bytes] | None = None,
        grace: float = 2.0,
    ):
        self._logs, self._first, self._total, self._coordinator = logs, first, total, coordinator
        self._grace, self._variables = grace, variables
        self._running: dict[int, _Child] = {}
        self._fresh, self._console, self._stdin = not append, console, stdin
        self.peers: list[Peer] = []

    def start(self, command: Command, count: int) -> None:
        """Start ``count`` processes.

        Raises:
          LaunchError: the coordinator's port is in use, a program cannot be started, the folder of the logs cannot be
            created, or it or a log is a symbolic link.
        """
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"{self._logs}, the folder of the processes' logs, cannot be created: {error.strerror}. Remedy: "
                "another output."
            ) from error
        if self._logs.is_symlink():
            raise LaunchError(
                f"{self._logs}, the folder of the processes' logs, is {link_text(self._logs)}, which is not followed. "
                "Remedy: delete the link, or another output."
            )
        first, total = self._first, self._total or count
        address = self._coordinator or f"{LOOPBACK}:{free_port()}"
        if self._coordinator is not None and first == 0 and total > 1:
            check_free(self._coordinator)
        how, self._fresh, self.peers = (os.O_TRUNC if self._fresh else os.O_APPEND), False, []
        try:
            for rank in range(first, first + count):
                changed = {**os.environ, **self._variables(rank - first)}
                environ = {name: text for name, text in changed.items() if text is not None}
                with self._open_log(rank, how) as log:
                    own, stdin = rank != 0 or not self._console, None if rank else self._stdin
                    self._running[rank] = _Child(command(rank, total, address), environ, log, own=own, stdin=stdin)
                self.peers.append(Peer(rank, time.monotonic()))
        except LaunchError:
            self.end()
            raise
        except OSError as error:
            self.end()
            raise LaunchError(f"process {rank} of {total} cannot be started: {error}.") from error

    def log(self, rank: int) -> Path:
        """The log file of a process."""
        return self._logs / f"process-{rank}.log"

    def _open_log(self, rank: int, how: int) -> IO[str]:
        try:
            return open(open_regular(self.log(rank), os.O_WRONLY | os.O_CREAT | how), "w", encoding="utf-8")
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EINVAL):
                raise
            why = error.strerror
        # Not raised because of the other error: a new start would fail too.
        raise LaunchError(f"{self.log(rank)}, the log of process {rank}, cannot be written: {why}. Remedy: delete it.")

    def poll(self, seconds: float) -> None:
        """Receive the processes' messages and exit statuses; return at the first news, or after ``seconds``."""
        until = time.monotonic() + seconds
        while True:
            news = False
            for peer in self.peers:
                child = self._running[peer.rank]
                code = child.process.poll()  # before reading the pipe, so that no message of an ended process is lost
                for message in child.read():
                    peer.hear(message, time.monotonic())
                    news = True
                news |= peer.code != code
                peer.code = code
            if news or time.monotonic() >= until:
                return
            time.sleep(min(0.02, seconds))

    def room(self, remaining: int, requested: int) -> int:
        """Returns ``remaining``: on one host a process that was lost is not replaced."""
        return remaining

    def pass_on(self, number: int) -> None:
        """Send a signal to all running processes."""
        for child in self._running.values():
            if child.process.poll() is None:
                child.process.send_signal(number)

    def end(self) -> None:
        """Send SIGTERM, after the grace period SIGKILL, also to all processes that they started in their sessions."""
        self.pass_on(signal.SIGTERM)
        until = time.monotonic() + self._grace
        for child in self._running.values():
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, until - time.monotonic()))
        for child in self._running.values():
            child.close()
        self._running.clear()

    def tail(self, rank: int, lines: int) -> list[str]:
        """Returns the last lines of a process's log."""
        try:
            with open(open_regular(self.log(rank), os.O_RDONLY), encoding="utf-8", errors="replace") as file:
                return [line.rstrip() for line in deque(file, lines)]
        except OSError:
            return []


class _Child:
    """A process, and the reading end of its pipe."""

    def __init__(
        self, command: Sequence[str], environ: dict[str, str], log: IO[str], *, own: bool, stdin: IO[bytes] | None
    ):
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        self._rest = b""
        try:
            self.process = subprocess.Popen(
                command,
                env={**environ, BEATS: str(write)},
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=log if own else None,
                stderr=log,
                pass_fds=(write,),
                start_new_session=True,
            )
        except OSError:
            os.close(self._read)
            raise
        finally:
            os.close(write)

    def read(self) -> list[dict[str, Any]]:
        """All complete messages that have arrived."""
        while True:
            try:
                data = os.read(self._read, 65536)
            except BlockingIOError:
                break
            if not data:
                break
            self._rest += data
        found, self._rest = messages(self._rest)
        return found

    def close(self) -> None:
        """Kill the rest of its session, and wait."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._read)


def messages(data: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """Split received data into messages, one JSON object per line, and the incomplete last line.

    >>> messages(b'{"step": 3}\\nnonsense\\n{"st')
    ([{'step': 3}], b'{"st')
    """
    *lines, rest = data.split(b"\n")
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [message for message in found if isinstance(message, dict)], rest


def free_port(host: str = LOOPBACK) -> int:
    """Returns a port on which nothing listens at this moment.

    >>> 0 < free_port() < 65536
    True
    """
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def split_address(address: str, what: str = "--coordinator") -> tuple[str, int]:
    """Returns host and port of ``HOST:PORT``.

    Raises:
      LaunchError: the address is malformed.

    >>> split_address("node001:1234"), split_address("[::1]:80")
    (('node001', 1234), ('::1', 80))
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"{what} must be HOST:PORT, such as {LOOPBACK}:1234, got {address!r}.")
    return host.strip("[]"), int(port)


def check_free(address: str) -> None:
    """Raise a ``LaunchError`` if process 0 could not listen on this address."""
    host, port = split_address(address)
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        raise LaunchError(
            f"the coordinator's address {address} is not available: {error.strerror}. Remedy: end the process that "
            "uses the port, or use another port of this host (process 0 runs here)."
        ) from error
