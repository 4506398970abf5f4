"""The state of each process of a group, and the diagnosis of which process ended or stalled the group."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxpar.app.launch.exit_codes import ENDED_WELL, ExitCode, lost_peer

SILENT = 10.0
"""Seconds without a sign of life after which a process counts as stopped."""
_TIMES = ("began", "sign", "tick")


@dataclass
class Peer:
    """A process of a group, as its supervisor sees it; times are seconds of the supervisor's clock.

    Attributes:
      rank: its rank among all processes.
      began: when it was started.
      step: the last step it finished, ``None`` before the first.
      phase: ``start``, ``compile``, ``step``, or another that it reports.
      sign: when it last finished a step or began another phase.
      tick: when it last sent any message.
      where, waits: the position of its main thread, and whether that waits inside jax.
      raised, again: the error it ended with, and whether a restart may succeed.
      code: its exit status, negative for a signal; ``None`` while it runs.
      lost: a description of the loss, if it was lost with its host.
      silent: the explanation if it no longer sends messages.
      lines: text for the user that is not yet printed.
    """

    rank: int
    began: float
    step: int | None = None
    phase: str = "start"
    sign: float = field(default=0.0)
    tick: float = field(default=0.0)
    where: str = ""
    waits: bool = False
    raised: str | None = None
    again: bool = True
    code: int | None = None
    lost: str | None = None
    silent: str = "as of a process that is stopped"
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sign = self.tick = self.began

    def hear(self, message: Mapping[str, Any], now: float) -> None:
        """Apply a message of :mod:`jaxpar.app.launch.heartbeat`; unknown messages are ignored."""
        self.tick = now
        match message:
            case {"step": int(step)}:
                self.step, self.phase, self.sign = step, "step", now
            case {"phase": str(phase)}:
                self.phase, self.sign = phase, now
            case {"where": str(where), "waits": bool(waits)}:
                self.where, self.waits = where, waits
            case {"raised": str(text), "again": bool(again)}:
                self.raised, self.again = text, again
            case {"say": str(text)}:
                self.lines.append(text)

    def state(self, now: float) -> dict[str, Any]:
        """The state for a supervisor with another clock: times are given as ages."""
        return {**asdict(self), **{name: now - getattr(self, name) for name in _TIMES}}

    def update(self, state: Mapping[str, Any], now: float) -> None:
        """Apply the :meth:`state` of this process from another supervisor, except for its lines."""
        for name in state.keys() - {"rank", "lines"}:
            setattr(self, name, now - state[name] if name in _TIMES else state[name])

    @property
    def ended(self) -> bool:
        """Whether it no longer runs."""
        return self.code is not None or self.lost is not None

    @property
    def far(self) -> tuple[int, bool]:
        """Its progress, as a sort key."""
        return -1 if self.step is None else self.step, self.phase != "start"

    @property
    def when(self) -> str:
        """Its progress, as text."""
        return "before its first step" if self.step is None else f"after step {self.step}"


@dataclass(frozen=True)
class Cause:
    """Why a group was ended.

    Attributes:
      text: a line that names the rank.
      ranks: the processes to blame.
      gone: the processes that cannot come back.
      again: whether a restart may succeed.
      sure: whether the diagnosis is final.
      code: the exit status that it gives the run.
    """

    text: str
    ranks: tuple[int, ...]
    gone: tuple[int, ...] = ()
    again: bool = True
    sure: bool = True
    code: ExitCode = ExitCode.RETRYABLE


@dataclass(frozen=True)
class Allowance:
    """Maximum seconds of a process for a step, and for everything else (start, restore, compile)."""

    step: float
    compile: float

    def of(self, peer: Peer) -> float:
        """The allowance for a process's current phase."""
        return self.step if peer.phase == "step" else self.compile


def cause(peers: Sequence[Peer], total: int, allowance: Allowance, now: float) -> Cause | None:
    """Diagnose a group: return the most likely root cause of its failure, or ``None`` if nothing is wrong.

    When one process dies, the others fail or hang as a consequence. A killed process is therefore reported first, then
    one that raised on its own, then one that lost a peer. Among hung processes, one that is stopped is reported first,
    then, of those furthest behind, one that is not blocked inside jax. If ``sure`` is false, the root cause may still
    appear.

    Args:
      peers: the processes.
      total: their number on all hosts.
      allowance: when a process counts as hung.
      now: the supervisor's time.
    """
    ended = [peer for peer in peers if peer.ended and peer.code not in ENDED_WELL]
    gone = [peer for peer in ended if peer.lost is not None or (peer.code is not None and _killed(peer.code))]
    if gone:
        first = gone[0]
        how = first.lost or f"was killed by {_name(-(first.code or 0))}"
        return Cause(f"{_one(first, total)} {how} {first.when}", _ranks(gone), _ranks(gone))
    own = [peer for peer in ended if peer.code != -signal.SIGABRT and not _news(peer)]
    if own:
        again = all(peer.again for peer in own)
        return Cause(_of_error(own[0], total), _ranks(own), again=again, code=_code(own[0]))
    still = [peer for peer in peers if not peer.ended and now - peer.tick > SILENT]
    late = any(not peer.ended and now - peer.sign > allowance.of(peer) for peer in peers)
    if ended and still:
        return _hung(still, total, allowance, now)
    if ended:
        return Cause(_of_error(ended[0], total), _ranks(ended), sure=False)
    # Blame all running processes: one that waits for a hung process may become late slightly before it.
    return _hung([peer for peer in peers if not peer.ended], total, allowance, now) if late else None


def _hung(running: Sequence[Peer], total: int, allowance: Allowance, now: float) -> Cause:
    """The cause when a process is late: stopped processes, else, of those furthest behind, those not blocked in jax."""
    still = [peer for peer in running if now - peer.tick > SILENT]
    if not still:
        least = min(peer.far for peer in running)
        behind = [peer for peer in running if peer.far == least]
        blamed = [peer for peer in behind if not peer.waits] or behind
    else:
        blamed = still
    first, ranks = blamed[0], _ranks(blamed)
    limit, seconds = allowance.of(first), now - first.sign
    subject = _one(first, total) if len(ranks) == 1 else f"processes {', '.join(map(str, ranks))} of {total}"
    has, its = ("has", "its") if len(ranks) == 1 else ("have", "their")
    if first.phase == "step":
        late = f"{has} not finished a step for {seconds:.0f} s (step_timeout {limit:g} s)"
        text = f"{subject} {late}, last step {first.step}"
    else:
        text = f"{subject} {has} not ended {its} {first.phase} for {seconds:.0f} s (compile_timeout {limit:g} s)"
    if still:
        text += f"; no sign of life for {now - first.tick:.0f} s, {first.silent}"
    elif first.where:
        text += f"; {'waits for its peers' if first.waits else 'is'} at {first.where}"
    return Cause(text, ranks, ranks if still else ())


def _of_error(peer: Peer, total: int) -> str:
    if peer.raised is not None:
        return f"{_one(peer, total)} raised {peer.when}: {peer.raised}"
    if peer.code == -signal.SIGABRT:
        return f"{_one(peer, total)} was ended by SIGABRT {peer.when}, as jax ends one that has lost a peer"
    return f"{_one(peer, total)} ended with exit status {peer.code} {peer.when}"


def _code(peer: Peer) -> ExitCode:
    """The exit status of a process, if it is one that has a meaning."""
    return ExitCode(peer.code) if peer.code in list(ExitCode) else ExitCode.FAILED


def _one(peer: Peer, total: int) -> str:
    return f"process {peer.rank} of {total}"


def _ranks(peers: Sequence[Peer]) -> tuple[int, ...]:
    return tuple(peer.rank for peer in peers)


def _killed(code: int) -> bool:
    """Whether a signal killed the process, other than SIGABRT, with which jax ends a process that lost a peer."""
    return code < 0 and code != -signal.SIGABRT


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _news(peer: Peer) -> bool:
    return peer.raised is not None and peer.again and lost_peer(peer.raised)
