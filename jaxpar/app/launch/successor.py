"""``Heir``: what a follower knows of who leads, and what it needs to lead itself: a port of its own, the leader's last news, a view of the run's folder."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.app.launch.leader import Lead, Record, Watch, newest
from jaxpar.app.launch.process_group import BIND, split_address
from jaxpar.app.launch.protocol import Wire

_TRIES = 20
_BLIND = 30.0
"""Seconds after which a host that does not see the leader's file is said to be none that could lead: an NFS client may be that late."""


@dataclass(frozen=True)
class News:
    """What a leader tells whoever may lead after it.

    Attributes:
      term, mark: of its lead.
      at: ``HOST:PORT`` of its coordinator.
      places: how many processes were told to be on its own host.
      count: how many processes run, of which the first ``own`` on its own host; 0 before the first start.
      causes: why they were started again, one each.
      hosts: the first process that each other host was told to have, and how many.
      heirs: in which order they would lead: the first process of each, and its coordinator's address.
    """

    term: int
    mark: str
    at: str
    places: int
    count: int
    own: int
    causes: tuple[str, ...]
    hosts: tuple[tuple[int, int], ...]
    heirs: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> News:
        """From a message.

        Raises:
          KeyError, TypeError, ValueError: it is no such thing.
        """
        return cls(
            term=int(told["term"]),
            mark=str(told["mark"]),
            at=str(told["at"]),
            places=int(told["places"]),
            count=int(told["count"]),
            own=int(told["own"]),
            causes=tuple(str(text) for text in told["causes"]),
            hosts=tuple((int(first), int(count)) for first, count in told["hosts"]),
            heirs=tuple((int(first), str(at)) for first, at in told["heirs"]),
        )


class Heir:
    """One host's right to lead.

    Args:
      folder: where leads are kept, on storage that all hosts share.
      first: the first process that this host was told to have.
      allowance: seconds that a leader who is gone has to come back; the second heir waits twice as long, and so on.
    """

    def __init__(
        self, folder: Path, first: int, *, allowance: float = 5.0, clock: Callable[[], float] = time.monotonic
    ):
        self.folder, self.first, self.allowance, self._clock = folder, first, allowance, clock
        self.at = ""
        self.listener: socket.socket | None = None
        self.news: News | None = None
        self._asked, self._seen = 0.0, False
        self._since: float | None = clock()
        self._watch = Watch(folder, clock)

    def reserve(self, wire: Wire, coordinator: str) -> str:
        """Hold a port to lead at, on the address by which this host reached its leader: nobody is listened to as yet. Empty if there is none."""
        if self.listener is None:
            for held, at in _ports(wire.own, split_address(coordinator)[1]):
                self.listener, self.at = held, at
                break
        self._seen, self._since = False, None if self._since is None else self._clock()
        return self.at

    def hear(self, told: Mapping[str, Any]) -> None:
        """Take the leader's news."""
        with suppress(KeyError, TypeError, ValueError):
            news = News.of(told)
            if self.news is None or self.news.mark != news.mark:
                self._seen = False
            self.news = news

    def sees(self) -> bool:
        """Whether the leader's file is in the folder as this host sees it: true once. A host of another folder could not tell who leads."""
        if self.news is None or self._seen or self._clock() - self._asked < 0.5:
            return False
        self._asked = self._clock()
        with suppress(OSError):
            found = newest(self.folder)
            self._seen = found is not None and (found.term, found.mark) == (self.news.term, self.news.mark)
        return self._seen

    def blind(self) -> str:
        """Why this host could not lead, once that is sure: told once."""
        if self.news is None or self._since is None:
            return ""
        if self.listener is None:
            why = "has no port that it could lead at. Remedy: a free pair of ports at its address"
        elif not self._seen and self._clock() - self._since > _BLIND:
            why = f"does not see process 0's file in {self.folder}. Remedy: an output folder that all hosts share"
        else:
            return ""
        self._since = None
        return f"this host could not go on without process 0's: it {why}"

    def lose(self) -> None:
        """The leader is gone, or out of reach."""
        self._watch = Watch(self.folder, self._clock)

    def others(self, known: str) -> Record | None:
        """Who leads now, when that is not whom this host follows, at ``known``."""
        found = self._watch.look()
        if found is None or found.over is not None or found.at in ("", known):
            return None
        newer = self.news is not None and found.term > self.news.term
        return found if newer or self._watch.live else None

    @property
    def over(self) -> int | None:
        """The exit status of the run, if that has ended out of this host's sight."""
        found = self._watch.look()
        ours = found is not None and (self._watch.live if self.news is None else found.term >= self.news.term)
        return found.over if found is not None and ours else None

    @property
    def unseen(self) -> bool:
        """Whether the leader lives, as its file says, though it is out of reach."""
        return self._watch.live and self._watch.still < self.allowance

    def claim(self) -> Lead | None:
        """The lead, if it is this host's turn and nobody else has it."""
        found, news = self._watch.look(), self.news
        order = [] if news is None else [first for first, _ in news.heirs]
        if found is None or news is None or self.listener is None or self.first not in order:
            return None
        if (found.term, found.mark) != (news.term, news.mark) or found.over is not None:
            return None
        if self._watch.still < self.allowance * (order.index(self.first) + 1):
            return None
        return Lead.claim(self.folder, found, self.at, self.first)

    def take(self) -> socket.socket:
        """The port that was held, which listens from now on."""
        held, self.listener = self.listener, None
        assert held is not None
        held.listen()
        return held

    def close(self) -> None:
        """Give the port back."""
        if self.listener is not None:
            self.listener.close()


def _ports(own: str, wanted: int) -> Iterator[tuple[socket.socket, str]]:
    """Sockets that are bound to the port after a coordinator's, and that coordinator's address: first at its usual port, then at others."""
    bind = os.environ.get(BIND)
    host = split_address(bind, BIND)[0] if bind else own
    for port in (wanted + 1, *(0 for _ in range(_TRIES))):
        with suppress(OSError):
            family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            held = socket.socket(family, kind)
            try:
                held.bind(target)
                before = held.getsockname()[1] - 1
                if port == 0:
                    with socket.socket(family, kind) as probe:
                        probe.bind((target[0], before, *target[2:]))
            except OSError:
                held.close()
                continue
            name = f"[{own}]" if ":" in own else own
            yield held, f"{name}:{before}"
