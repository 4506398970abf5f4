"""``Follower``: the supervisor of a host that has not process 0. It starts, tells and ends what :class:`jaxpar.launch.hosts.Hosts` there says."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from jaxpar.errors import LaunchError
from jaxpar.launch.group import Command, Local
from jaxpar.launch.listening import listening
from jaxpar.launch.wire import Wire, connect, meeting_place

_LINES = 5
_OFTEN = 0.05
"""Seconds between two reports, at least; there is one a second at any rate."""


class Follower:
    """Some processes of a run whose supervisor is elsewhere.

    Args:
      local: the processes of this host.
      command: what to run as one of them; ``again`` is set where the run goes on.
      first, count, total: the number of the first, how many have their place here and on all hosts.
      coordinator: ``HOST:PORT`` of process 0.
      tell: takes each line for the user.
      patience: seconds to wait for the supervisor of process 0, also for one that is gone.
    """

    def __init__(
        self,
        local: Local,
        command: Callable[[bool], Command],
        first: int,
        count: int,
        total: int,
        coordinator: str,
        *,
        tell: Callable[[str], None] = print,
        patience: float = 300.0,
    ):
        self._local, self._command, self._coordinator, self._tell = local, command, coordinator, tell
        self._hello, self._patience = {"first": first, "count": count, "total": total}, patience
        self._address = "{}:{}".format(*meeting_place(coordinator))
        self._signals: list[int] = []
        self._told: tuple[list[dict[str, Any]], float] = ([], 0.0)
        self._busy = False

    def run(self) -> int:
        """Until the run is over; returns its exit status.

        Raises:
          LaunchError: the supervisor of process 0 is not there, or does not want these processes.
        """
        with listening(self._signals):
            while not self._signals:
                wire = self._connect()
                if wire is None:
                    break
                try:
                    status = self._serve(wire)
                finally:
                    self._end()
                    wire.close()
                if status is not None:
                    return status
                if not self._signals:
                    self._tell(
                        f"the supervisor of process 0 at {self._address} is gone ({wire.gone}), so what ran here was ended"
                    )
        return 0

    def _connect(self) -> Wire | None:
        """To the supervisor of process 0; ``None`` after a signal."""
        until, said = time.monotonic() + self._patience, False
        while not self._signals:
            wire = connect(self._coordinator)
            if wire is not None:
                wire.send(**self._hello)
                return wire
            if time.monotonic() > until:
                raise LaunchError(
                    f"the supervisor of process 0 was not there within {self._patience:g} s: nobody listens at {self._address}. Remedy: start it on the "
                    f"coordinator's host, with --process-id 0 and the same --process-count; a run that has lost process 0's host is started anew."
                )
            if not said:
                self._tell(f"waits {self._patience:g} s at most for the supervisor of process 0 at {self._address}")
                said = True
            time.sleep(0.5)
        return None

    def _serve(self, wire: Wire) -> int | None:
        """Do as the other side says until it is over; ``None`` where that side went."""
        passed = 0
        while not wire.gone:
            for message in wire.read(_OFTEN):
                match message:
                    case {"start": int(first), "count": int(count), "total": int(total), "again": bool(again)}:
                        self._busy, self._told = True, ([], 0.0)
                        self._local.start(self._command(again), count, first=first, total=total)
                    case {"end": True}:
                        self._end()
                        wire.send(ended=True)
                    case {"signal": int(number)}:
                        self._local.pass_on(number)
                    case {"say": str(text)}:
                        self._tell("".join(c if c.isprintable() else "?" for c in text))
                    case {"refused": str(text)}:
                        raise LaunchError(
                            f"the supervisor at {self._address}: {text}. Remedy: the --process-id and --process-count of this host."
                        )
                    case {"over": int(status)}:
                        return status
            for number in self._signals[passed:]:
                passed += 1
                if passed > 1 or not self._busy:
                    return 1 if passed > 1 else 0
                self._tell(f"{signal.Signals(number).name}: the processes are asked to end")
                self._local.pass_on(number)
            if self._busy:
                self._local.poll(0.0)
                self._report(wire)
        return None

    def _report(self, wire: Wire) -> None:
        """Tell how the processes are, where that is another than before, and once a second."""
        now = time.monotonic()
        peers = [peer.told(now) for peer in self._local.peers]
        known = [{**peer, "began": 0, "sign": 0, "tick": 0} for peer in peers]
        before, when = self._told
        if now - when < (1.0 if known == before else _OFTEN):
            return
        failed = [peer.rank for peer in self._local.peers if peer.code]
        wire.send(peers=peers, tails={rank: self._local.tail(rank, _LINES) for rank in failed})
        self._told = known, now

    def _end(self) -> None:
        if self._busy:
            self._local.end()
        self._busy = False
