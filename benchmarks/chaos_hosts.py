"""What ``chaos.py --hosts`` does: a run of four processes under the supervisors of two hosts (both are this one), whose processes, and which themselves, are killed.

In one run, not elastic: a process of each host, all of the second host, which is started again, and all of the first one, the same. In others, elastic:
all of the second host, which stays away; all of the first one, after whom the second leads, and follows whom it does when it is started again; the first one while it
compiles. Seconds are from the signal to the line at the *other* host's supervisor, and to the first step after the
restart, without what the restart spends compiling.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from chaos_processes import AGAIN, Run, stepping

from jaxpar.app.launch.process_group import free_port

EACH, COUNT = 2, 4


class Two:
    """The supervisors of two hosts; ``hosts[0]`` has process 0."""

    def __init__(self, folder: Path, **supervise: object):
        self._folder, self._supervise = folder, supervise
        self._address = f"127.0.0.1:{free_port()}"
        self.hosts = [self._start(0), self._start(1)]

    def _start(self, host: int) -> Run:
        words = (
            "--coordinator",
            self._address,
            "--process-count",
            str(COUNT),
            "--process-id",
            str(host * EACH),
            "--processes",
            str(EACH),
        )
        return Run(self._folder, COUNT, words, **self._supervise)

    def kill(self, rank: int) -> float:
        """One process; the time."""
        os.kill(self.hosts[0].child(rank), signal.SIGKILL)
        return time.monotonic()

    def lose(self, host: int) -> float:
        """All of a host, its supervisor first; the time."""
        children = [self.hosts[host].child(rank) for rank in range(host * EACH, host * EACH + EACH)]
        self.hosts[host].process.kill()
        for child in children:
            os.kill(child, signal.SIGKILL)
        return time.monotonic()

    def log(self, rank: int) -> str:
        """What a process has written."""
        file = self._folder / "run/logs" / f"process-{rank}.log"
        return file.read_text() if file.exists() else ""

    def bring_back(self, host: int) -> None:
        """Start its supervisor again."""
        self.hosts[host] = self._start(host)

    def end(self) -> None:
        """End all."""
        for host in self.hosts:
            host.end()


def said(run: Run, pattern: str, before: int) -> tuple[float, str]:
    """The line, when it has come."""
    run.until(lambda: run.find(pattern, before) is not None, pattern)
    found = run.find(pattern, before)
    assert found is not None
    return found


def hosts(root: Path) -> list[str]:
    """All of it; a line for each kill, which ends in ``as wanted`` where it is."""
    lines, two = [], Two(root / "two", allowance=30.0)
    try:
        for rank in (1, 3):
            two.hosts[0].progress()
            before = [len(host.lines) for host in two.hosts]
            sent = two.kill(rank)
            pattern = rf"^process {rank} of {COUNT} was killed by SIGKILL after step"
            named = max(said(host, pattern, n)[0] for host, n in zip(two.hosts, before, strict=True))
            lines.append(told(f"SIGKILL to process {rank}", two.hosts[0], before[0], sent, named - sent, COUNT))
        two.hosts[0].progress()
        before = [len(host.lines) for host in two.hosts]
        sent = two.lose(1)
        named, text = said(two.hosts[0], rf"^process 2 of {COUNT} was lost with its host", before[0])
        offer = said(two.hosts[0], r"^waits .* supervise.elastic: true would go on with 2 of the 2", before[0])[1]
        two.bring_back(1)
        lines.append(told("SIGKILL to all of the second host", two.hosts[0], before[0], sent, named - sent, COUNT))
        lines += [f"  {text}", f"  {offer}"]
        two.hosts[0].progress()
        before = [len(host.lines) for host in two.hosts]
        sent = two.lose(0)
        named, text = said(two.hosts[1], r"^the supervisor of process 0 at .* is gone", before[1])
        two.bring_back(0)
        lines.append(told("SIGKILL to all of the first host", two.hosts[0], 0, sent, named - sent, COUNT))
        lines.append(f"  {text}")
    finally:
        two.end()
    return lines + [
        line for host, early in ((1, False), (0, False), (0, True)) for line in lost_for_good(root, host, early=early)
    ]


def lost_for_good(root: Path, host: int, *, early: bool = False) -> list[str]:
    """Elastic: a host is lost and stays away, ``early`` while its processes compile; the other goes on alone."""
    two, other = Two(root / f"elastic-{host}-{early}", allowance=30.0, elastic=True), 1 - host
    try:
        if early:
            said(two.hosts[0], r"^launch ", 0)
            two.hosts[1].until(lambda: "process" in two.log(EACH), "the second host's processes")
        else:
            two.hosts[0].progress()
        run, before = two.hosts[other], len(two.hosts[other].lines)
        sent = two.lose(host)
        pattern = (
            rf"^process {host * EACH} of {COUNT} was lost with its host"
            if host
            else r"^the supervisor of process 0 at .* is gone"
        )
        named, text = said(run, pattern, before)
        what = (
            f"elastic: SIGKILL to all of the {'second' if host else 'first'} host{' in its compile' if early else ''}"
        )
        lines = [told(what, run, before, sent, named - sent, EACH)]
        if not host:
            at, led = said(run, rf"^process 0 of {COUNT} was lost with its host .* leads now", before)
            two.bring_back(host)
            follows = said(
                two.hosts[host], r"leads this run since process 0's host was lost, so this host follows it", 0
            )[1]
            size = two.hosts[other].step()
            two.hosts[other].progress()
            lines += [
                f"  {text}",
                f"  after {at - sent:.1f} s: {led}",
                f"  started again: {follows}",
                f"  steps go on: {two.hosts[other].step() > size}",
            ]
            print(*lines[1:], sep="\n", flush=True)
        return lines
    finally:
        two.end()


def told(what: str, run: Run, before: int, sent: float, named: float, count: int) -> str:
    """A line on a kill, when the run steps again with ``count`` processes."""
    again, compiling = stepping(run, before)
    size = next((int(m[1]) for _, line in run.lines[before:] if (m := re.search(r"data (\d+) = \d+ devices", line))), 0)
    good = again - sent - compiling <= AGAIN and size == count
    line = (
        f"{what}: said at the other host after {named:.1f} s; {size} processes step again after {again - sent - compiling:.1f} s without the compile of "
        f"{compiling:.1f} s (wanted: {count} processes, {AGAIN:g} s): {'as wanted' if good else 'NOT as wanted'} (load {os.getloadavg()[0]:.0f})"
    )
    print(line, flush=True)
    return line
