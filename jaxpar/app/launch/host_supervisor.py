"""``Member``: one of several hosts that run together, whichever part its supervisor has: to lead, to follow, or first the one and then the other.

Without ``folder`` the host of process 0 leads and the others follow, to the end. With it, who leads is who has the newest :class:`jaxpar.app.launch.leader.Lead`: when
the one that has it is lost, the first of the others takes it over.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jaxpar.app.launch.follower import Follower, Inherited
from jaxpar.app.launch.leader import FENCE, Deposed, Lead, Watch
from jaxpar.app.launch.multi_host_group import Hosts
from jaxpar.app.launch.peers import Cause
from jaxpar.app.launch.process_group import Command, Local
from jaxpar.app.launch.protocol import listen
from jaxpar.app.launch.signal_handlers import listening
from jaxpar.app.launch.successor import Heir, News
from jaxpar.app.launch.supervisor import Policy, Supervisor

_GATHER = 15.0
"""Seconds that a new leader waits for the others, at most."""


@dataclass
class _Post:
    """What a host that leads begins with."""

    coordinator: str
    lead: Lead | None = None
    listener: socket.socket | None = None
    fence: float = 0.0
    news: News | None = None
    lost: Inherited | None = None


@dataclass
class Member:
    """A host's part of a run.

    Args:
      local: its processes.
      command: what to run as one of them; ``again`` is set where the run goes on.
      first, count, total: the number of the first, how many have their place here and on all hosts.
      coordinator: ``HOST:PORT`` of process 0, as long as the host that was told to have it leads.
      policy, latest: as a :class:`Supervisor` has them.
      fits: how many of so many processes fit, and a text on that.
      folder: where leads are kept, on storage that all hosts share; ``None`` where nobody takes over.
      tell: takes each line for the user.
      patience: seconds to wait for hosts that are not there.
      allowance: seconds that a leader who is gone has to come back, before another takes over.
    """

    local: Local
    command: Callable[[bool], Command]
    first: int
    count: int
    total: int
    coordinator: str
    policy: Policy
    latest: Callable[[], int | None] = lambda: None
    fits: Callable[[int], tuple[int, str]] = lambda count: (count, "")
    folder: Path | None = None
    tell: Callable[[str], None] = print
    patience: float = 300.0
    allowance: float = 5.0
    fence: float = FENCE
    signals: list[int] = field(default_factory=list)

    def run(self) -> int:
        """Until the run is over; returns its exit status.

        Raises:
          LaunchError: the others, or the one that leads, are not there.
        """
        with listening(self.signals):
            part: _Post | str | int = self.coordinator if self.first else self._begin()
            while not isinstance(part, int):
                part = self._follow(part) if isinstance(part, str) else self._lead(part)
            return part

    def _begin(self) -> _Post | str | int:
        """The host of process 0 leads, unless another has taken over since and lives: then it follows that one."""
        if self.folder is None:
            return _Post(self.coordinator)
        listener = listen(self.coordinator)
        try:
            part = self._claim(self.folder, listener)
        except BaseException:
            listener.close()
            raise
        if not isinstance(part, _Post):
            listener.close()
        return part

    def _claim(self, folder: Path, listener: socket.socket) -> _Post | str | int:
        watch, said = Watch(folder), False
        while not self.signals:
            found = watch.look()
            # Whoever led at this address does not any more, as this host has its port.
            gone = found is None or found.over is not None or found.at == self.coordinator
            if not gone and found is not None and found.at and watch.live:
                self.tell(f"{found} leads this run since process 0's host was lost, so this host follows it")
                return found.at
            if gone or watch.still > self.allowance:
                lead = Lead.claim(folder, found, self.coordinator, self.first)
                if lead is not None:
                    fence = 0.0 if found is None or found.over is not None else self.fence
                    return _Post(self.coordinator, lead, listener, fence)
            if not said:
                self.tell(
                    f"{found} did not end in order; whether it still leads is seen in {self.allowance:g} s at most"
                )
                said = True
            time.sleep(0.1)
        return 0

    def _follow(self, coordinator: str) -> _Post | int:
        """Do as the one that leads says, until the run is over or this host's turn to lead has come."""
        heir = None if self.folder is None else Heir(self.folder, self.first, allowance=self.allowance)
        place = (self.first, self.count, self.total)
        follower = Follower(
            self.local,
            self.command,
            *place,
            coordinator,
            heir=heir,
            tell=self.tell,
            patience=self.patience,
            signals=self.signals,
        )
        try:
            found = follower.run()
            if isinstance(found, int):
                return found
            assert heir is not None  # or nothing would have been inherited
            return _Post(heir.at, found.lead, heir.take(), self.fence, heir.news, found)
        finally:
            if heir is not None:
                heir.close()

    def _lead(self, post: _Post) -> str | int:
        """Decide for all hosts, until the run is over or another has taken over: then its address."""
        status: int | None = 1
        causes = [] if post.news is None else [Cause(text, ()) for text in post.news.causes]
        self.local.move(post.coordinator)
        hosts = Hosts(
            self.local,
            self.count,
            self.total,
            post.coordinator,
            first=self.first,
            listener=post.listener,
            lead=post.lead,
            began=post.news is not None and post.news.count > 0,
            causes=causes,
            fits=self.fits,
            tell=self.tell,
            patience=self.patience,
        )
        command = lambda rank, total, address: self.command(hosts.again)(rank, total, address)
        remaining = lambda count: self.fits(min(count, hosts.room))
        try:
            after, count = self._inherit(hosts, post)
            if self.signals:
                status = 0
                return status
            supervisor = Supervisor(
                hosts,
                command,
                count,
                self.policy,
                self.latest,
                remaining,
                tell=hosts.say,
                causes=causes,
                signals=self.signals,
            )
            status = supervisor.run(after) if count else 1
            return status
        except Deposed as error:
            self.tell(f"{error}, so what ran here was ended, and this host follows")
            status = None
            return error.by.at
        finally:
            hosts.close(status)
            if post.lead is not None:
                post.lead.end(status)

    def _inherit(self, hosts: Hosts, post: _Post) -> tuple[Cause | None, int]:
        """Wait until an older leader has ended what it ran, and for the hosts that follow this one; why the run stopped, and how many processes it had."""
        news, lost, stop = post.news, post.lost, lambda: bool(self.signals)
        if news is None or lost is None or post.lead is None:
            hosts.gather(post.fence, 0.0, 0, stop)
            return None, self.total
        others = sum(count for _, count in news.hosts)
        hosts.gather(post.fence, _GATHER, others, stop)
        record, room = post.lead.record, hosts.room
        led = f"the supervisor of the host of process{_ranks(self.first, self.count)} leads now, at {record.at} (term {record.term})"
        if not news.count:
            # As many as were told of are waited for, without those of the host that is lost.
            count, text = self.fits(self.total - news.places)
            start = f"{led}, and {count or 'no'} processes are to start"
            hosts.say(f"process 0 of {self.total} {lost.how} before the start; {start}")
            if not count:
                hosts.say(f"gave up: {text}")
            return None, count
        cause = Cause(f"process 0 of {news.count} {lost.how} {lost.when}", (0,), tuple(range(news.own)))
        count, _ = self.fits(min(news.count - news.own, room))
        more = others - room
        absent = f", as {more} more {'has' if more == 1 else 'have'} no host either" if more > 0 else ""
        hosts.say(f"{cause.text}; {led}, and {count or 'none'} of {news.count} processes go on{absent}")
        return cause, news.count


def _ranks(first: int, count: int) -> str:
    return f" {first}" if count == 1 else f"es {first} to {first + count - 1}"
