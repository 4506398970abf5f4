"""Runs cases in a few worker processes, so that a process that dies identifies the case that ended it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

from .cases import Outcome, drawn, printed

ROOT = Path(__file__).parents[2]
EACH = 25
"""Cases per process: enough to make up for its start, few enough to bound its memory."""
PATIENCE = 300.0
"""Seconds after which a case counts as hung."""


@dataclass(frozen=True)
class Result:
    """A finished case: its number under its seed, its Python, its outcome, and its duration in seconds."""

    index: int
    case: str
    outcome: Outcome
    seconds: float


@dataclass
class Worker:
    """One process at a time, replaced after ``EACH`` cases and whenever it ends."""

    name: str
    patience: float = PATIENCE
    served: int = 0
    process: subprocess.Popen[str] | None = None
    answers: SimpleQueue[str] = field(default_factory=SimpleQueue)
    words: IO[bytes] | None = None
    relay: Thread | None = None

    def ask(self, case: str, index: int = -1) -> Result:
        """Run a case, given as Python; if the process ends or does not answer, that is the outcome."""
        if self.process is None or self.served >= EACH:
            self.close()
            self._start()
        process = self.process
        assert process is not None and process.stdin is not None
        self.served += 1
        process.stdin.write(json.dumps({"family": self.name, "case": case}) + "\n")
        process.stdin.flush()
        begun = time.monotonic()
        lost = lambda kind, text: Result(index, case, Outcome(kind, text), time.monotonic() - begun)
        try:
            line = self.answers.get(timeout=self.patience)
        except Empty:
            self.close(kill=True)
            return lost("hung", f"no answer within {self.patience:.0f} s")
        if not line:
            words = self._last_words()
            self.close(kill=True)
            return lost("crashed", f"the process ended: {words}")
        answer: dict[str, Any] = json.loads(line)
        outcome = Outcome(answer["kind"], answer["text"], answer["errors"])
        return Result(index, case, outcome, float(answer["seconds"]))

    def _start(self) -> None:
        self.words = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.differential.worker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words,
            text=True,
        )
        self.served, self.answers = 0, SimpleQueue()
        self.relay = Thread(target=_relay, args=(self.process.stdout, self.answers), daemon=True)
        self.relay.start()

    def _last_words(self) -> str:
        """The last output of the process, where XLA writes why it aborted."""
        assert self.process is not None and self.words is not None
        code = self.process.wait(timeout=30)
        self.words.seek(0)
        lines = self.words.read().decode(errors="replace").strip().splitlines()
        said = next((line for line in lines if "Check failed" in line or line[:2] in ("F0", "F1")), "")
        return f"exit {code}; {said or ' | '.join(lines[-3:])}"[:1200]

    def close(self, kill: bool = False) -> None:
        """End the process, immediately if ``kill``, else once it has read the end of its input."""
        if self.process is None:
            return
        process, self.process = self.process, None
        assert process.stdin is not None and process.stdout is not None and self.relay is not None
        if kill:
            process.kill()
        try:
            process.stdin.close()
            process.wait(timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
        self.relay.join()
        process.stdout.close()
        if self.words is not None:
            self.words.close()


def _relay(stream: IO[str] | None, answers: SimpleQueue[str]) -> None:
    """Forward each line, and an empty one when the process has closed its output."""
    assert stream is not None
    for line in stream:
        answers.put(line)
    answers.put("")


def run(
    name: str, seed: int, indices: Sequence[int], jobs: int = 2, told: Callable[[Result], None] = lambda result: None
) -> list[Result]:
    """The results of a family's cases, in the order of their numbers.

    Args:
      told: called with each result as soon as it is available, from several threads.
    """
    groups = [indices[i : i + EACH] for i in range(0, len(indices), EACH)]

    def one(group: Sequence[int]) -> list[Result]:
        worker = Worker(name)
        try:
            return list(_served(worker, seed, group, told))
        finally:
            worker.close()

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        return [result for results in pool.map(one, groups) for result in results]


def _served(worker: Worker, seed: int, group: Sequence[int], told: Callable[[Result], None]) -> Iterator[Result]:
    for index in group:
        result = worker.ask(printed(drawn(worker.name, seed, index)), index)
        told(result)
        yield result
