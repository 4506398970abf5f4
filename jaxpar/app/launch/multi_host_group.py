"""``Hosts``: a group over several hosts, of whose supervisors that of process 0 decides. The others (:mod:`jaxpar.app.launch.follower`) do as it says.

Where one of them may take over (:mod:`jaxpar.app.launch.host_supervisor`), it tells them where each is, and in which order they would. So one sees all processes, names who died, and starts all again together. What goes over the wire is numbers and news: each host makes the
commands that it runs by itself, from its own command line.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxpar.app.launch.leader import Lead
from jaxpar.app.launch.peers import Cause, Peer
from jaxpar.app.launch.process_group import Command, Local
from jaxpar.app.launch.protocol import Wire, listen
from jaxpar.app.launch.successor import News
from jaxpar.errors import LaunchError

_ENDING = 15.0
"""Seconds that a host has to end its processes."""
_NOTICE = 5.0
"""Seconds of waiting for hosts after which it is said."""


@dataclass
class _Host:
    """Another host: the processes that it was told to have, and those that it runs."""

    wire: Wire
    first: int
    room: int
    at: str = ""
    heir: bool = False
    ranks: range = range(0)
    ended: bool = True
    tails: dict[int, list[str]] = field(default_factory=dict)


class Hosts:
    """Processes of this host, which has process 0, and of others.

    Args:
      local: of this host.
      room, total: how many processes have their place here, and on all hosts.
      coordinator: ``HOST:PORT`` of process 0; the supervisors meet at the port after it.
      first: the first process that this host was told to have; after another host's supervisor it is not 0.
      listener: where the others are met, when that is open already.
      lead: this host's, where others may take over.
      began: whether processes have run under another supervisor.
      causes: why they were started again so far, which whoever takes over goes on with.
      fits: how many of so many processes would fit, and a text on that.
      tell: takes each line for the user.
      patience: seconds to wait until all hosts are there, also for one that was lost.

    Raises:
      LaunchError: the address cannot be had.
      Deposed: by :meth:`start` and :meth:`poll`, when another has taken over.
    """

    def __init__(
        self,
        local: Local,
        room: int,
        total: int,
        coordinator: str,
        *,
        first: int = 0,
        listener: socket.socket | None = None,
        lead: Lead | None = None,
        began: bool = False,
        causes: Sequence[Cause] = (),
        fits: Callable[[int], tuple[int, str]] = lambda count: (count, ""),
        tell: Callable[[str], None] = print,
        patience: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._local, self._own, self._total, self._fits, self._tell = local, room, total, fits, tell
        self._patience, self._clock, self._listener = patience, clock, listener or listen(coordinator)
        self._coordinator, self._first, self._lead, self._causes = coordinator, first, lead, causes
        self._new: dict[Wire, float] = {}
        self._hosts: list[_Host] = []
        self._command: Command | None = None  # of processes that wait for their hosts
        self._count, self._since, self._told = 0, 0.0, False
        self.again = began
        self.peers: list[Peer] = []

    @property
    def room(self) -> int:
        """How many processes have a place now."""
        self._take_in(0.0)
        return self._own + sum(host.room for host in self._hosts)

    def gather(self, least: float, most: float, wanted: int, stop: Callable[[], bool]) -> None:
        """Take in hosts for ``least`` seconds, and for ``most`` at most while there is no place for ``wanted`` processes."""
        began = self._clock()
        while not stop() and ((waited := self._clock() - began) < least or (waited < most and self.room < wanted)):
            self._check()
            self._take_in(0.1)

    def start(self, command: Command, count: int) -> None:
        """Start ``count`` processes as soon as there are hosts for them, which :meth:`poll` looks after."""
        self._command, self._count, self._since, self._told = command, count, self._clock(), False
        self.peers = [Peer(rank, self._since) for rank in range(count)]
        self._begin()

    def poll(self, seconds: float) -> None:
        """Take in what all tell.

        Raises:
          LaunchError: the hosts have not come; a process cannot be started.
        """
        self._check()
        self._take_in(min(seconds, 0.05))
        if self._command is not None:
            self._begin()
            return
        self._local.poll(0.0)

    def pass_on(self, number: int) -> None:
        """Give all that run a signal; those that wait for hosts have come to their end."""
        if self._command is not None:
            for peer in self.peers:
                peer.code = 0
            return
        for host in self._hosts:
            host.wire.send(signal=number)
        self._local.pass_on(number)

    def end(self) -> None:
        """End all that run, on all hosts, and wait for that."""
        self._command = None
        for host in self._hosts:
            host.wire.send(end=True)
        self._local.end()
        until = self._clock() + _ENDING
        while not all(host.ended for host in self._hosts) and self._clock() < until:
            self._take_in(0.05)
        for host in self._hosts:
            if not host.ended:
                host.wire.gone = f"it did not end its processes within {_ENDING:g} s"
        self._take_in(0.0)

    def tail(self, rank: int, lines: int) -> list[str]:
        """The last lines that a process wrote, as far as its host told them."""
        for host in self._hosts:
            if rank in host.ranks:
                return host.tails.get(rank, [])[-lines:]
        return self._local.tail(rank, lines) if rank < self._own else []

    def say(self, text: str) -> None:
        """A line for the users at all hosts."""
        self._tell(text)
        for host in self._hosts:
            host.wire.send(say=text)

    def close(self, status: int | None) -> None:
        """The run is over: the other supervisors end with this exit status; without one they look for another that leads."""
        for host in self._hosts if status is not None else ():
            host.wire.send(over=status)
        for wire in (*self._new, *(host.wire for host in self._hosts)):
            wire.finish()
        self._listener.close()

    def _begin(self) -> None:
        """Start what waits, if there is a place for each of it."""
        command, own = self._command, min(self._own, self._count)
        if command is None:
            return
        left, shares = self._count - own, []
        for host in self._hosts:
            shares.append(min(host.room, left))
            left -= shares[-1]
        if left:
            self._wait(left)
            return
        self._check(now=True)
        self._command, at = None, own
        for host, count in zip(self._hosts, shares, strict=True):
            host.ranks, host.ended, host.tails = range(at, at + count), not count, {}
            if count:
                host.wire.send(start=at, count=count, total=self._count, again=self.again)
            at += count
        self._local.start(command, own, total=self._count)
        self.again = True
        self._inform()
        self.peers = [*self._local.peers, *(Peer(rank, self._clock()) for rank in range(own, self._count))]

    def _wait(self, lacking: int) -> None:
        """Some hosts are not there: say so, and in the end do without them or give up."""
        now = self._clock()
        for peer in self.peers:
            peer.sign = peer.tick = now  # who is not started is not late
        waited, who = now - self._since, ", ".join(map(str, self._missing()))
        if waited > _NOTICE and not self._told:
            self._told = True
            self.say(
                f"waits {self._patience:g} s at most for the host of processes {who} of {self._total}{self._instead()}"
            )
        if waited <= self._patience:
            return
        if not self.again:
            raise LaunchError(
                f"processes {who} of {self._total} did not come within {self._patience:g} s. Remedy: start their supervisors too, with the same "
                f"--coordinator and --process-count."
            )
        for peer in self.peers[self._count - lacking :]:
            peer.lost = f"has no host, and none came within {self._patience:g} s,"

    def _missing(self) -> list[int]:
        """The processes, as the hosts were told to have them, whose host is not there."""
        here = {
            *range(self._first, self._first + self._own),
            *(n for host in self._hosts for n in range(host.first, host.first + host.room)),
        }
        return [rank for rank in range(self._total) if rank not in here]

    def _instead(self) -> str:
        """What could be done without the hosts that are missing, after one was lost."""
        if not self.again:
            return ""
        room = self.room
        count, text = self._fits(room)
        if count < 1:
            return f"; without it nothing fits: {text}"
        return f"; supervise.elastic: true would go on with {count} of the {room} that have one{f' ({text})' if text else ''}"

    def _take_in(self, seconds: float) -> None:
        """Whatever came from other hosts, waiting for it for so many seconds at most; and those that went."""
        asked: list[Any] = [self._listener, *self._new, *(host.wire for host in self._hosts)]
        ready = select.select(asked, [], [], seconds)[0]
        if self._listener in ready:
            with suppress(OSError):
                self._new[Wire(self._listener.accept()[0])] = self._clock()
        for host in self._hosts:
            for message in host.wire.read():
                try:
                    self._hear(host, message)
                except (ValueError, TypeError, KeyError, IndexError) as error:
                    host.wire.gone = f"it sends what is no message: {error}"
        lost = [host for host in self._hosts if host.wire.gone]
        for host in lost:
            self._hosts.remove(host)
            for peer in self._running(host):
                peer.lost = f"was lost with its host {host.wire.host} ({host.wire.gone})"
            host.wire.close()
        if lost:
            self._inform()
        for wire in list(self._new):  # after those that went, in whose place they may be
            self._greet(wire)

    def _check(self, *, now: bool = False) -> None:
        if self._lead is not None:
            self._lead.check(now=now)

    def _inform(self) -> None:
        """Tell the hosts what they need to go on without this one."""
        if self._lead is None:
            return
        record = self._lead.record
        news = News(
            term=record.term,
            mark=record.mark,
            at=self._coordinator,
            places=self._own,
            count=self._count if self.again else 0,
            own=min(self._own, self._count),
            causes=tuple(one.text for one in self._causes),
            hosts=tuple((host.first, host.room) for host in self._hosts),
            heirs=tuple((host.first, host.at) for host in self._hosts if host.heir and host.at),
        )
        for host in self._hosts:
            host.wire.send(news=asdict(news))

    def _running(self, host: _Host) -> Iterator[Peer]:
        if self._command is None:
            yield from (
                self.peers[rank] for rank in host.ranks if rank < len(self.peers) and not self.peers[rank].ended
            )

    def _hear(self, host: _Host, message: dict[str, object]) -> None:
        match message:
            case {"peers": list(peers), "tails": dict(tails)}:
                if self._command is not None or host.ended:
                    return  # of what has been ended since
                for rank, told in zip(host.ranks, peers, strict=True):
                    self.peers[rank].take(told, self._clock())
                host.tails = {int(rank): [str(line) for line in lines] for rank, lines in tails.items()}
            case {"ended": True}:
                host.ended = True
            case {"sees": True}:
                host.heir = True
                self._inform()

    def _greet(self, wire: Wire) -> None:
        """Take a host in by its first message, or send it away."""
        hello = next(iter(wire.read()), None)
        if hello is None or wire.gone:
            if wire.gone or self._clock() - self._new[wire] > _ENDING:
                del self._new[wire]
                wire.close()
            return
        del self._new[wire]
        match hello:
            case {"first": int(first), "count": int(count), "total": int(total)}:
                asked = set(range(first, first + count)) if 0 < count <= self._total else set()
                taken = asked - set(self._missing())
                if total == self._total and asked and not taken:
                    self._hosts.append(_Host(wire, first, count, str(hello.get("at", ""))))
                    self._hosts.sort(key=lambda host: host.first)
                    self._inform()
                    return
                held = (
                    f"of which {', '.join(map(str, sorted(taken)))} have a host" if taken else "which has other numbers"
                )
                wire.send(
                    refused=f"processes {first} to {first + count - 1} of {total} are none of this run's {self._total}, {held}"
                )
            case _:
                wire.send(refused="this was no greeting of a supervisor")
        wire.finish()
