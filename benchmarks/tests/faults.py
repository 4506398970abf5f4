"""Faults, the tests that execute their lines, and the tests that find them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

HOUSE = "tests/test_house.py"
_NOT_RUN = "[mypy]"
"""The end of the name of a test that takes longer than all others of its file, and finds errors of types."""


@dataclass(frozen=True)
class Fault:
    """A slip in one place.

    Attributes:
      name: a few words.
      file: relative to the repository.
      kind: such as ``off by one``.
      old, new: the text, which occurs once in the file, and what replaces it.
      gives: what a user would get.
    """

    name: str
    file: str
    kind: str
    old: str
    new: str
    gives: str

    @property
    def folder(self) -> str:
        """The folder in ``jaxpar``; empty for its root."""
        return "/".join(PurePosixPath(self.file).parts[1:-1])

    def lines(self, root: Path) -> range:
        """Returns the numbers of its lines.

        Raises:
          SystemExit: the text does not occur once: the code has changed.
        """
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise SystemExit(f"{self.name}: {self.file} has the old text {count} times. Remedy: adapt faults.yaml.")
        first = text[: text.index(self.old)].count("\n") + 1
        return range(first, first + self.old.rstrip("\n").count("\n") + 1)

    @contextmanager
    def planted(self, root: Path) -> Iterator[None]:
        """Replaces the text within the ``with`` block."""
        file = root / self.file
        text = file.read_text()
        try:
            _write(file, text.replace(self.old, self.new))
            yield
        finally:
            _write(file, text)


def _write(file: Path, text: str) -> None:
    """Writes a source, and removes its bytecode, which is valid for a file of one size and second."""
    file.write_text(text)
    for cached in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        cached.unlink()


@dataclass(frozen=True)
class Found:
    """The result of one fault.

    Attributes:
      fault: its name.
      suite: ``default`` or ``slow``.
      test: the test that found it, if one did.
      seconds: that were needed to find it, or to run all tests that might.
      timed_out: whether a time limit left some of them out.
    """

    fault: str
    suite: str
    test: str | None
    seconds: float
    timed_out: bool


class Reach:
    """The lines that each test of a suite executes, read from the files of ``recorder``."""

    def __init__(self, folder: Path):
        self.seconds: dict[str, float] = {}
        self.tests_of: dict[str, dict[int, set[str]]] = {}
        failed = set()
        for text in (folder / "tests.jsonl").read_text().splitlines():
            record = json.loads(text)
            self.seconds[record["test"]] = record["seconds"]
            failed |= {record["test"]} if record["outcome"] != "passed" else set()
            for file, lines in record["lines"].items():
                self._add(record["test"], file, lines)
        for child in folder.glob("child-*"):
            test, *places = child.read_text().splitlines()
            for file, _, line in (place.rpartition(":") for place in places):
                self._add(test, file, [int(line)])
        self.seconds = {test: s for test, s in self.seconds.items() if test not in failed}

    def _add(self, test: str, file: str, lines: Iterable[int]) -> None:
        tests_of = self.tests_of.setdefault(file, {})
        for line in lines:
            tests_of.setdefault(line, set()).add(test)

    def rounds(self, fault: Fault, lines: range) -> list[list[str]]:
        """Returns the tests that may find a fault, in the order in which they run."""
        tests_of = self.tests_of.get(fault.file, {})
        reaching = {test for line in lines for test in tests_of.get(line, ())}
        files = {file_of(test) for test in reaching}
        others = {test for test in self.seconds if file_of(test) in files or nearness(test, fault)}
        house = [test for test in self.seconds if file_of(test) == HOUSE and not test.endswith(_NOT_RUN)]
        return [self._ordered(reaching, fault), self._ordered(others - reaching, fault), house]

    def _ordered(self, tests: Iterable[str], fault: Fault) -> list[str]:
        """The tests that passed, the nearest files first, then the shortest; those of a file share its fixtures."""
        by_file: dict[str, list[str]] = {}
        for test in tests:
            if test in self.seconds:
                by_file.setdefault(file_of(test), []).append(test)
        cost = lambda file: sum(self.seconds[test] for test in by_file[file])
        files = sorted(by_file, key=lambda file: (-nearness(file, fault), cost(file), file))
        return [test for file in files for test in sorted(by_file[file], key=lambda test: (self.seconds[test], test))]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def nearness(test: str, fault: Fault) -> int:
    """How many folders of a fault's file a test's file has too, and one more if it is named like it."""
    file, source = PurePosixPath(file_of(test)), PurePosixPath(fault.file)
    ours, theirs = source.parts[1:-1], file.parts[1:-1]
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return same + (file.stem.removeprefix("test_") == source.stem)


def read_results(file: Path) -> dict[str, Found]:
    """Returns the results of a file, by the fault's name; of several the last one that found it."""
    results: dict[str, Found] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        one = Found(**json.loads(line))
        if one.fault not in results or one.test is not None or results[one.fault].test is None:
            results[one.fault] = one
    return results
