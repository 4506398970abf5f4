"""``Follower``: the supervisor of a host that has not process 0. It starts, tells and ends what :class:`jaxpar.app.launch.multi_host_group.Hosts` there says."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpar.app.launch.leader import Lead
from jaxpar.app.launch.process_group import Command, Local
from jaxpar.app.launch.protocol import Wire, connect, meeting_place
from jaxpar.app.launch.signal_handlers import listening
from jaxpar.app.launch.successor import Heir
from jaxpar.errors import LaunchError

_LINES = 5
_OFTEN = 0.05
"""Seconds between two reports, at least; there is one a second at any rate."""


@dataclass(frozen=True)
class Inherited:
    """A lead that has come to a follower, whose leader was lost: ``how``, and ``when`` (after which step)."""

    lead: Lead
    how: str
    when: str


class Follower:
    """Some processes of a run whose supervisor is elsewhere.

    Args:
      local: the processes of this host.
      command: what to run as one of them; ``again`` is set where the run goes on.
      first, count, total: the number of the first, how many have their place here and on all hosts.
      coordinator: ``HOST:PORT`` of process 0.
      heir: what this host needs to take over, where it may.
      tell: takes each line for the user.
      patience: seconds to wait for the supervisor of process 0, also for one that is gone.
      signals: those that came, when others listen too.
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
        heir: Heir | None = None,
        tell: Callable[[str], None] = print,
        patience: float = 300.0,
        signals: list[int] | None = None,
    ):
        self._local, self._command, self._coordinator, self._tell = local, command, coordinator, tell
        self._hello, self._patience, self._heir = {"first": first, "count": count, "total": total}, patience, heir
        self._signals: list[int] = [] if signals is None else signals
        self._told: tuple[list[dict[str, Any]], float] = ([], 0.0)
        self._busy = False
        self._lost = "", ""

    @property
    def _address(self) -> str:
        return "{}:{}".format(*meeting_place(self._coordinator))

    def run(self) -> int | Inherited:
        """Until the run is over; returns its exit status, or what makes this host the one that leads.

        Raises:
          LaunchError: the supervisor of process 0 is not there, or does not want these processes.
        """
        with listening(self._signals):
            while not self._signals:
                met = self._meet()
                if not isinstance(met, Wire):
                    return met
                try:
                    status = self._serve(met)
                finally:
                    self._end()
                    met.close()
                if status is not None:
                    return status
                if not self._signals:
                    self._tell(
                        f"the supervisor of process 0 at {self._address} is gone ({met.gone}), so what ran here was ended{self._what_next()}"
                    )
        return 0

    def _what_next(self) -> str:
        if self._heir is None or self._heir.news is None or not self._heir.news.heirs:
            return ""
        first = self._heir.news.heirs[0][0]
        who = "this host" if first == self._heir.first else f"the host that was told to have process {first}"
        return f"; unless it comes back within {self._heir.allowance:g} s, {who} leads next"

    def _meet(self) -> Wire | Inherited | int:
        """To the supervisor of process 0, wherever that is now; an exit status after a signal, or when the run has ended meanwhile."""
        until, said = time.monotonic() + self._patience, False
        while not self._signals:
            wire = self._connect()
            if wire is not None:
                at = {} if self._heir is None else {"at": self._heir.reserve(wire, self._coordinator)}
                wire.send(**self._hello, **at)
                return wire
            if self._heir is not None:
                if (lead := self._heir.claim()) is not None:
                    return Inherited(lead, *self._lost)
                if (status := self._heir.over) is not None:
                    self._tell("the run has ended meanwhile")
                    return status
            if time.monotonic() > until:
                raise LaunchError(self._in_vain())
            if not said:
                self._tell(f"waits {self._patience:g} s at most for the supervisor of process 0 at {self._address}")
                said = True
            time.sleep(0.5)
        return 0

    def _connect(self) -> Wire | None:
        """To whoever leads now, else to whom this host was told of."""
        other = None if self._heir is None else self._heir.others(self._coordinator)
        if other is not None and (wire := connect(other.at)) is not None:
            self._tell(f"{other} leads now, so this host follows it")
            self._coordinator = other.at
            return wire
        return connect(self._coordinator)

    def _in_vain(self) -> str:
        if self._heir is not None and self._heir.unseen:
            return (
                f"the supervisor of process 0 at {self._address} was out of reach of this host for {self._patience:g} s, but still leads: its file in "
                f"{self._heir.folder} is renewed. Remedy: the network between the two hosts; then start this one again, with the same words."
            )
        return (
            f"the supervisor of process 0 was not there within {self._patience:g} s: nobody answers at {self._address}. Remedy: start it on the "
            f"coordinator's host, with --process-id 0 and the same --process-count; a run that has lost process 0's host is started anew."
        )

    def _serve(self, wire: Wire) -> int | None:
        """Do as the other side says until it is over; ``None`` where that side went."""
        passed = 0
        self._local.move(self._coordinator)
        while not wire.gone:
            for message in wire.read(_OFTEN):
                if (status := self._do(message, wire)) is not None:
                    return status
            for number in self._signals[passed:]:
                passed += 1
                if passed > 1 or not self._busy:
                    return 1 if passed > 1 else 0
                self._tell(f"{signal.Signals(number).name}: the processes are asked to end")
                self._local.pass_on(number)
            if self._heir is not None:
                self._look(self._heir, wire)
            if self._busy:
                self._local.poll(0.0)
                self._report(wire)
        if self._heir is not None:
            self._heir.lose()
        peers = self._local.peers
        when = peers[0].when if peers else "before its first step"
        self._lost = f"was lost with its host {wire.host} ({wire.gone})", when
        return None

    def _do(self, message: dict[str, Any], wire: Wire) -> int | None:
        """What a message asks for; the exit status of a run that is over."""
        match message:
            case {"start": int(first), "count": int(count), "total": int(total), "again": bool(again)}:
                self._busy, self._told = True, ([], 0.0)
                self._local.start(self._command(again), count, first=first, total=total)
            case {"end": True}:
                self._end()
                wire.send(ended=True)
            case {"signal": int(number)}:
                self._local.pass_on(number)
            case {"news": dict(news)} if self._heir is not None:
                self._heir.hear(news)
            case {"say": str(text)}:
                self._tell("".join(c if c.isprintable() else "?" for c in text))
            case {"refused": str(text)}:
                raise LaunchError(
                    f"the supervisor at {self._address}: {text}. Remedy: the --process-id and --process-count of this host."
                )
            case {"over": int(status)}:
                return status
        return None

    def _look(self, heir: Heir, wire: Wire) -> None:
        """Say whether this host could take over."""
        if heir.sees():
            wire.send(sees=True)
        if why := heir.blind():
            self._tell(why)

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
