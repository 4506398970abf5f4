"""``Lead``: which host's supervisor leads a run, as its folder on the hosts' shared storage says; so never two of them do.

A lead is a file whose name is its term, a number that grows. Only one can make it, and rewrites it once a second for as long as it lives: whoever
cannot reach a leader sees there whether it is gone or only out of sight, and a leader that was taken for gone sees a newer term, and ends what it runs.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxpar.errors import LaunchError

RENEW = 1.0
"""Seconds between two times that a leader renews its file, and looks for a newer one."""
FENCE = 4.0
"""Seconds from a claim to the first start under it: within them an older leader that still runs has seen it, and ended its processes."""
_MOST = 1 << 16


class Deposed(LaunchError):
    """Another host's supervisor has taken the lead; ``by`` is its record."""

    def __init__(self, by: Record):
        super().__init__(f"{by} has taken the lead of this run")
        self.by = by


@dataclass(frozen=True)
class Record:
    """What is known of a lead.

    Attributes:
      term: its number.
      mark: a random word, by which it is told from that of another folder, or another run.
      at: ``HOST:PORT`` of its coordinator; supervisors meet at the port after it. Empty while it is being made.
      first: the first of the processes that its host was told to have.
      beat: how often it was renewed.
      over: the exit status of the run, when that has ended.
    """

    term: int
    mark: str = ""
    at: str = ""
    first: int = 0
    beat: int = 0
    over: int | None = None

    def __str__(self) -> str:
        return f"the supervisor at {self.at} (term {self.term})"


def newest(folder: Path) -> Record | None:
    """The lead of the highest term; ``None`` where there never was one.

    Raises:
      OSError: the folder cannot be read.
    """
    with suppress(FileNotFoundError):
        terms = [int(name) for name in os.listdir(folder) if name.isdecimal() and len(name) < 10]
        if terms:
            return _read(folder, max(terms))
    return None


def _read(folder: Path, term: int) -> Record:
    with (folder / str(term)).open("rb") as file:
        try:
            said = json.loads(file.read(_MOST))
        except (ValueError, RecursionError):
            return Record(term)
    match said:
        case {
            "mark": str(mark), "at": str(at), "first": int(first), "beat": int(beat), "over": (int() | None) as over,
        }:  # fmt: skip
            return Record(term, mark, at, first, beat, over)
    return Record(term)


class Lead:
    """A lead that this supervisor has, and renews until :meth:`end`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     folder = Path(name)
    ...     lead = Lead.claim(folder, None, "10.0.0.1:1234", 0)
    ...     late = Lead.claim(folder, None, "10.0.0.2:1234", 2)  # who has not seen the first one
    ...     lead.end(0)
    ...     print(late, newest(folder).at, newest(folder).over)
    None 10.0.0.1:1234 0
    """

    def __init__(self, folder: Path, record: Record):
        self._folder, self.record = folder, record
        self._newer: Record | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lead", daemon=True)
        self._thread.start()

    @classmethod
    def claim(cls, folder: Path, after: Record | None, at: str, first: int) -> Lead | None:
        """Take the lead from ``after``, the newest there is; ``None`` where somebody else just did.

        Raises:
          LaunchError: the folder cannot be written.
        """
        record = Record(1 if after is None else after.term + 1, secrets.token_hex(8), at, first)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / str(record.term)).open("x", encoding="utf-8") as file:
                file.write(_text(record))
            seen = newest(folder)
        except FileExistsError:
            return None
        except OSError as error:
            raise LaunchError(
                f"{folder}, where the host that leads keeps its term, cannot be written: {error.strerror}. Remedy: an output folder that every host "
                f"can write, or supervise.elastic: false."
            ) from error
        return cls(folder, record) if seen is not None and seen.term == record.term else None

    def check(self, *, now: bool = False) -> None:
        """Whether this is the newest lead, as seen within the last second, or ``now``.

        Raises:
          Deposed: it is not.
        """
        if now:
            with suppress(OSError):
                self._look()
        if self._newer is not None:
            raise Deposed(self._newer)

    def end(self, over: int | None = None) -> None:
        """Renew it no longer; with an exit status the run has ended, and nobody is to take over."""
        self._stop.set()
        self._thread.join(2 * RENEW)
        with suppress(OSError):
            if over is not None and not self._look():
                self._write(replace(self.record, over=over))

    def _look(self) -> bool:
        found = newest(self._folder)
        if found is not None and found.term > self.record.term and found.at:
            self._newer = found
        return self._newer is not None

    def _renew(self) -> None:
        """In a thread: storage that hangs is not to keep the supervisor from its processes."""
        while not self._stop.wait(RENEW):
            with suppress(OSError):  # what cannot be written now may be in a second
                if self._look():
                    return
                self.record = replace(self.record, beat=self.record.beat + 1)
                self._write(self.record)

    def _write(self, record: Record) -> None:
        # A new name in the folder also makes an NFS client look at it anew, and so find a newer term.
        draft = self._folder / f".{record.term}.{record.mark}"
        draft.write_text(_text(record), encoding="utf-8")
        draft.replace(self._folder / str(record.term))


def _text(record: Record) -> str:
    return json.dumps(asdict(record)) + "\n"


class Watch:
    """Looks at who leads, and how long nothing has changed there, by this host's clock alone.

    Attributes:
      live: whether the newest lead has been renewed, or made, since this began to look.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic):
        self._folder, self._clock, self._since, self.live = folder, clock, clock(), False
        self._seen: Record | None = None
        self._looked = False
        self.look()

    def look(self) -> Record | None:
        """The newest lead."""
        try:
            found = newest(self._folder)
        except OSError:  # who cannot see is not to take anyone for gone
            self._since = self._clock()
            return self._seen
        if found != self._seen:
            self.live |= self._looked
            self._seen, self._since = found, self._clock()
        self._looked = True
        return found

    @property
    def still(self) -> float:
        """Seconds for which nothing has changed."""
        return self._clock() - self._since
