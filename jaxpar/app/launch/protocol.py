"""``Wire``: messages between the supervisors of several hosts, a line of JSON each, and a sign of life from each side once a second."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from jaxpar.app.launch.heartbeat import TICK
from jaxpar.app.launch.process_group import BIND, messages, split_address
from jaxpar.errors import LaunchError

SILENT = 30.0
"""Seconds without a sign of life after which the other side is gone: a host without power sends no end of its connection."""
_MOST = 1 << 20
"""Bytes of a message at most; whoever sends more is none of us."""


class Wire:
    """One connection. ``gone`` says why it is over, empty while it is not; nothing here raises because of the other side.

    ``host`` is the other side's address, ``own`` this one's.
    """

    def __init__(self, connection: socket.socket):
        self._connection, self._rest, self._heard = connection, b"", time.monotonic()
        self._lock = threading.Lock()
        self.host, self.own, self.gone = "", "", ""
        try:
            connection.settimeout(10.0)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.host, self.own = str(connection.getpeername()[0]), str(connection.getsockname()[0])
        except OSError as error:  # it ended before it began
            self.gone = error.strerror or str(error)
        threading.Thread(target=self._beat, name="wire", daemon=True).start()

    def fileno(self) -> int:
        """For ``select``; -1 when it is closed."""
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Send a message, or learn that the other side is gone."""
        try:
            with self._lock:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            self.gone = self.gone or (error.strerror or str(error) or "no longer takes messages")

    def read(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        """Every whole message that has come, waiting for the first for so many seconds at most."""
        found: list[dict[str, Any]] = []
        while not self.gone:
            if not select.select([self], [], [], 0.0 if found else seconds)[0]:
                if time.monotonic() - self._heard > SILENT:
                    self.gone = f"nothing was heard of it for {SILENT:g} s"
                break
            try:
                data = self._connection.recv(65536)
            except OSError as error:
                data, self.gone = b"", error.strerror or str(error)
            self._heard = time.monotonic()
            if not data or len(self._rest) > _MOST:
                self.gone = self.gone or ("the connection was closed" if not data else "it sends what is no message")
            came, self._rest = messages(self._rest + data)
            found += [message for message in came if message]  # an empty one is a sign of life
            if came:
                seconds = 0.0
        return found

    def finish(self, seconds: float = 2.0) -> None:
        """End it when the other side has read what was sent to it: closed with something unread, a connection drops that."""
        until = time.monotonic() + seconds
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        while not self.gone and time.monotonic() < until:
            self.read(0.1)
        self.close()

    def close(self) -> None:
        """End it."""
        self.gone = self.gone or "closed here"
        with self._lock:
            self._connection.close()

    def _beat(self) -> None:
        while not self.gone:
            self.send()
            time.sleep(TICK)


def meeting_place(coordinator: str) -> tuple[str, int]:
    """Where the supervisors of a run meet: on process 0's host, at the port after its coordinator's.

    Raises:
      LaunchError: there is no such port.

    >>> meeting_place("node001:1234")
    ('node001', 1235)
    """
    host, port = split_address(coordinator)
    if port == 65535:
        raise LaunchError(
            f"--coordinator is {coordinator!r}, but supervisors meet at the port after it, and there is none. Remedy: a lower port."
        )
    return host, port + 1


def listen(coordinator: str) -> socket.socket:
    """A socket for the supervisors of the other hosts; it listens on the coordinator's own address alone, or on what the environment says of that.

    Raises:
      LaunchError: the address cannot be had.
    """
    bind = os.environ.get(BIND)
    named, port = meeting_place(coordinator)
    host = split_address(bind, BIND)[0] if bind else named
    made: socket.socket | None = None
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(target)
        made.listen()
    except OSError as error:
        if made is not None:
            made.close()
        raise LaunchError(
            f"{named}:{port}, where supervisors meet (the port after the coordinator's), cannot be had: {error.strerror}. Remedy: end the process "
            f"that holds it, or another --coordinator on this host (process 0 runs here)."
        ) from error
    return made


def connect(coordinator: str, seconds: float = 2.0) -> Wire | None:
    """To the supervisor of process 0, ``None`` where it does not listen (yet), or says nothing within so many seconds.

    To be connected proves nothing: the kernel takes connections for a process that is stopped.
    """
    with suppress(OSError):
        wire = Wire(socket.create_connection(meeting_place(coordinator), timeout=seconds))
        if select.select([wire], [], [], seconds)[0]:
            return wire
        wire.close()
    return None
