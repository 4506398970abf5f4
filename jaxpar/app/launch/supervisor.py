"""``Supervisor``: keeps a group of processes running, or reports in one line why it cannot."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxpar.app.launch.exit_codes import ENDED_WELL, ExitCode, exit_code
from jaxpar.app.launch.peers import Allowance, Cause, cause
from jaxpar.app.launch.process_group import Command, ProcessGroup
from jaxpar.app.launch.signal_handlers import listening
from jaxpar.errors import LaunchError

_POLL = 0.2
_UNSURE = 3.0
"""Seconds to wait for the root cause, when a failure may be the consequence of another."""
_LINES = 5


@dataclass(frozen=True)
class Policy:
    """How a group is supervised.

    Attributes:
      step_timeout, compile_timeout: maximum seconds for a step, and for any other activity.
      restarts: maximum number of restarts; ``None`` never restarts, and prints nothing about it.
      restart_delay: seconds before the first restart; doubles with each one, up to ``most``.
      elastic: whether a restart may take another number of processes: those that remain, or on Ray those that the
        nodes have room for.
      most: maximum seconds before a restart.
      signalled: whether a signal that ended all processes gives the exit status 128 + its number, because the work is
        incomplete.
    """

    step_timeout: float = 300.0
    compile_timeout: float = 1800.0
    restarts: int | None = 3
    restart_delay: float = 1.0
    elastic: bool = False
    most: float = 60.0
    signalled: bool = False

    def wait(self, restart: int) -> float:
        """The seconds before restart number ``restart``.

        >>> [Policy(restart_delay=2).wait(n) for n in (1, 2, 3, 9)]
        [2.0, 4.0, 8.0, 60.0]
        """
        return min(self.restart_delay * 2.0 ** min(restart - 1, 60), self.most)


@dataclass
class Supervisor:
    """Runs a group to its end, and restarts it after failures.

    Args:
      group: the processes.
      command: the command of each process.
      count: number of processes.
      policy: timeouts and restarts.
      latest: returns the newest step from which a restart would resume, or ``None``.
      refit: for ``policy.elastic``: given the number of remaining processes, returns how many to continue with (0 for
        none), and a text about it.
      tell: called with each line for the user.
      causes: receives the cause of each failure.
      total: number of processes on all hosts, if others run elsewhere.

    >>> import sys, tempfile
    >>> from pathlib import Path
    >>> from jaxpar.app.launch.process_group import Local
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     failing = lambda rank, total, address: [sys.executable, "-c", f"raise SystemExit({rank} * 3)"]
    ...     Supervisor(Local(Path(folder)), failing, 2, Policy(restarts=0), tell=print).run()
    process 1 of 2 ended with exit status 3 before its first step
    gave up: no restart is allowed
    <ExitCode.FAILED: 1>
    """

    group: ProcessGroup
    command: Command
    count: int
    policy: Policy = field(default_factory=Policy)
    latest: Callable[[], int | None] = lambda: None
    refit: Callable[[int], tuple[int, str]] = lambda count: (count, "")
    tell: Callable[[str], None] = print
    causes: list[Cause] = field(default_factory=list)
    total: int | None = None

    def run(self) -> int:
        """Run the group to its end and return the exit status.

        Returns:
          If every process ended well, the largest of their exit statuses, or 128 + the signal's number with
          ``policy.signalled``. Otherwise the :class:`~jaxpar.app.launch.exit_codes.ExitCode` of the last cause, or
          ``GAVE_UP`` if all restarts are used up.
        """
        began, self._requested = time.monotonic(), self.count
        self.signals: list[int] = []
        with listening(self.signals):
            while (found := self._attempt()) is not None:
                self.causes.append(found)
                if not self._again(found):
                    break
        if found is None and self.causes:
            first = self._requested
            now = f", {first} processes became {self.count}" if self.count != first else ""
            self.tell(f"done after {_times(len(self.causes), 'restart')} in {time.monotonic() - began:.0f} s{now}:")
            for number, one in enumerate(self.causes, 1):
                self.tell(f"  {number}. {one.text}")
        if found is not None:
            return self._failed(found)
        if self.signals and self.policy.signalled:
            return 128 + self.signals[0]
        return max(peer.code or 0 for peer in self.group.peers)

    def _failed(self, found: Cause) -> ExitCode:
        """The exit status of a run that failed."""
        if self.signals and not self.policy.signalled:
            return ExitCode.NOT_SAVED
        used_up = self.policy.restarts and len(self.causes) > self.policy.restarts
        return ExitCode.GAVE_UP if found.again and used_up else found.code

    def _attempt(self) -> Cause | None:
        """Start the group and watch it; ``None`` if every process succeeded."""
        try:
            self.group.start(self.command, self.count)
        except LaunchError as error:
            if not self.causes or exit_code(error) != ExitCode.RETRYABLE:
                raise
            return self._worst(Cause(f"the processes could not be started again: {error}", ()))
        passed, allowance = 0, Allowance(self.policy.step_timeout, self.policy.compile_timeout)
        unsure: float | None = None
        try:
            while True:
                self.group.poll(_POLL)
                self._pass_lines()
                for number in self.signals[passed:]:
                    passed += 1
                    if passed > 1:
                        return self._worst(Cause("ended immediately by a second signal", ()))
                    self.tell(f"{signal.Signals(number).name}: stopping the processes")
                    self.group.pass_on(number)
                if all(peer.code in ENDED_WELL for peer in self.group.peers):
                    return None
                found = cause(self.group.peers, self.total or self.count, allowance, time.monotonic())
                if found is not None and not found.sure:
                    unsure = time.monotonic() if unsure is None else unsure
                    all_over = all(peer.ended for peer in self.group.peers)
                    if not all_over and time.monotonic() - unsure < _UNSURE:
                        continue
                if found is not None:
                    return self._worst(found)
        finally:
            self.group.end()

    def _pass_lines(self) -> None:
        """Print the processes' lines for the user."""
        for peer in self.group.peers:
            while peer.lines:
                self.tell(peer.lines.pop(0))

    def _worst(self, found: Cause) -> Cause:
        """Print the cause, and the last lines of its process's log."""
        self.tell(found.text)
        for rank in found.ranks[:1]:
            for line in self.group.tail(rank, _LINES):
                self.tell(f"  {rank}| {line}")
        return found

    def _again(self, found: Cause) -> bool:
        """Prepare a restart; returns whether there is one."""
        if self.signals or self.policy.restarts is None:
            return False
        done = len(self.causes) - 1
        if not found.again:
            self.tell("gave up: a restart would fail with the same error")
            return False
        if done >= self.policy.restarts:
            self.tell(
                f"gave up: {_times(done, 'restart') if done else 'no restart'} "
                f"{'were' if done > 1 else 'was' if done else 'is'} allowed"
            )
            return False
        if self.policy.elastic:
            count, text = self.refit(self.group.room(self.count - len(found.gone), self._requested))
            if text:
                self.tell(text)
            if count < 1:
                self.tell("gave up: no number of the remaining processes fits")
                return False
            self.count = count
        seconds, step = self.policy.wait(done + 1), self.latest()
        start = "step 0, because there is no checkpoint" if step is None else f"step {step}"
        self.tell(
            f"restart {done + 1} of {self.policy.restarts} in {seconds:g} s: {_times(self.count, 'process')} from "
            f"{start}"
        )
        until = time.monotonic() + seconds
        while not self.signals and time.monotonic() < until:
            time.sleep(min(0.2, seconds))
        return not self.signals


def _times(count: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"
