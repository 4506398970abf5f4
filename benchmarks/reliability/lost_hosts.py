"""A run over two hosts survives the loss of a process, of a host, and of the leading host.

    uv run python benchmarks/reliability/lost_hosts.py

Starts four processes under the supervisors of two hosts, both on this machine. A run that is not elastic loses a
process of each host; then all of the second host, which is restarted; then all of the first host, which is restarted.
Elastic runs lose all of the second host for good; all of the first host, after which the second leads and the restarted
first host follows it; and the first host while it compiles.

Prints seconds from the signal to the line of the *other* host's supervisor, and to the first step after the restart,
without compile time.

Goal: ``RESTART_SECONDS`` to the next step, with the expected number of processes. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.shared.supervised_run import RESTART_SECONDS, Run, stepping
from jaxpar.app.launch.process_group import free_port

EACH, COUNT = 2, 4


class Two:
    """The supervisors of two hosts; ``hosts[0]`` runs process 0."""

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
        """Kill one process; return the time."""
        os.kill(self.hosts[0].child(rank), signal.SIGKILL)
        return time.monotonic()

    def lose(self, host: int) -> float:
        """Kill all of a host, its supervisor first; return the time."""
        children = [self.hosts[host].child(rank) for rank in range(host * EACH, host * EACH + EACH)]
        self.hosts[host].process.kill()
        for child in children:
            os.kill(child, signal.SIGKILL)
        return time.monotonic()

    def log(self, rank: int) -> str:
        """Return the log of a process."""
        file = self._folder / "run/logs" / f"process-{rank}.log"
        return file.read_text() if file.exists() else ""

    def bring_back(self, host: int) -> None:
        """Restart a host's supervisor."""
        self.hosts[host] = self._start(host)

    def end(self) -> None:
        """Stop both hosts."""
        for host in self.hosts:
            host.end()


def said(run: Run, pattern: str, before: int) -> tuple[float, str]:
    """Wait for a line that matches; return its time and text."""
    run.until(lambda: run.find(pattern, before) is not None, pattern)
    found = run.find(pattern, before)
    assert found is not None
    return found


def hosts(root: Path) -> bool:
    """Run all kills and print a line about each; return whether all goals are met."""
    good, two = True, Two(root / "two", step_timeout=30.0)
    try:
        for rank in (1, 3):
            two.hosts[0].progress()
            before = [len(host.lines) for host in two.hosts]
            sent = two.kill(rank)
            pattern = rf"^process {rank} of {COUNT} was killed by SIGKILL after step"
            named = max(said(host, pattern, n)[0] for host, n in zip(two.hosts, before, strict=True))
            good &= told(f"SIGKILL to process {rank}", two.hosts[0], before[0], sent, named - sent, COUNT)
        two.hosts[0].progress()
        before = [len(host.lines) for host in two.hosts]
        sent = two.lose(1)
        named, text = said(two.hosts[0], rf"^process 2 of {COUNT} was lost with its host", before[0])
        offer = said(two.hosts[0], r"^waits .* supervise.elastic: true would go on with 2 of the 2", before[0])[1]
        two.bring_back(1)
        good &= told(
            "SIGKILL to all of the second host", two.hosts[0], before[0], sent, named - sent, COUNT, text, offer
        )
        two.hosts[0].progress()
        before = [len(host.lines) for host in two.hosts]
        sent = two.lose(0)
        named, text = said(two.hosts[1], r"^the supervisor of process 0 at .* is gone", before[1])
        two.bring_back(0)
        good &= told("SIGKILL to all of the first host", two.hosts[0], 0, sent, named - sent, COUNT, text)
    finally:
        two.end()
    for host, early in ((1, False), (0, False), (0, True)):
        good &= lost_for_good(root, host, early=early)
    return good


def lost_for_good(root: Path, host: int, *, early: bool = False) -> bool:
    """Lose a host for good in an elastic run, with ``early`` while it compiles; return whether the goal is met."""
    two, other = Two(root / f"elastic-{host}-{early}", step_timeout=30.0, elastic=True), 1 - host
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
        lost = f"all of the {'second' if host else 'first'} host"
        what = f"elastic: SIGKILL to {lost}{' while it compiles' if early else ''}"
        good = told(what, run, before, sent, named - sent, EACH, text)
        if not host:
            at, led = said(run, rf"^process 0 of {COUNT} was lost with its host .* leads now", before)
            two.bring_back(host)
            follows = said(
                two.hosts[host], r"leads this run since process 0's host was lost, so this host follows it", 0
            )[1]
            two.hosts[other].progress()  # ends the benchmark if the run no longer steps
            print(
                f"      after {at - sent:.1f} s: {led}", f"      first host restarted: {follows}", sep="\n", flush=True
            )
        return good
    finally:
        two.end()


def told(what: str, run: Run, before: int, sent: float, named: float, count: int, *lines: str) -> bool:
    """Wait for the next step; print a line about the kill, and ``lines``; return whether the goal is met."""
    again, compiling = stepping(run, before)
    size = next((int(m[1]) for _, line in run.lines[before:] if (m := re.search(r"data (\d+) = \d+ devices", line))), 0)
    seconds = again - sent - compiling
    good = seconds <= RESTART_SECONDS and size == count
    print(
        f"{'pass' if good else 'FAIL'}  {what}: the other host reports it after {named:.1f} s; {size} processes run "
        f"the next step after {seconds:.1f} s, without the compile of {compiling:.1f} s (goal: {count} processes, "
        f"{RESTART_SECONDS:g} s; load {os.getloadavg()[0]:.0f})",
        *(f"      {line}" for line in lines),
        sep="\n",
        flush=True,
    )
    return good


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 0 if hosts(Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
