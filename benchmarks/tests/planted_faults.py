"""Plants faults in a clone of the repository, one at a time, and reports which tests find them.

    python benchmarks/tests/planted_faults.py                      # the default suite, at HEAD
    python benchmarks/tests/planted_faults.py --at COMMIT --results before.jsonl
    python benchmarks/tests/planted_faults.py --suite slow --results before.jsonl    # the faults that were not found
    python benchmarks/tests/planted_faults.py --table before.jsonl after.jsonl       # nothing runs

``faults.yaml`` has the faults. First the suite runs once, and records the lines of ``jaxpar`` that each test executes
(``recorder/``). For each fault then run, up to the first failure: the tests that execute its lines; the other tests of
their files and of the fault's folder, because a cache may have kept a line from them; and the house rules. A test that
fails without a fault does not count, and neither does a time limit that ends a hang.

Goal: at least 90 % found by the default suite; exit status 1 below it. A run takes some 20 minutes beyond the suite's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from benchmarks.shared.paths import ROOT
from benchmarks.tests.faults import Fault, Found, Reach, file_of, read_results

HERE = Path(__file__).parent
RECORDER = HERE / "recorder"
GOAL = 0.9
MARKS = {"default": "not slow", "slow": "slow"}


@dataclass(frozen=True)
class Checkout:
    """A clone of the repository, and the environment in which its tests run.

    Attributes:
      root: the clone.
      work: a folder for caches and results.
    """

    root: Path
    work: Path

    @classmethod
    def make(cls, commit: str, work: Path) -> Checkout:
        """Clones the repository into ``work``, unless it is there."""
        root = work / "clone"
        if not root.exists():
            subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", ROOT, root], check=True)
        subprocess.run(["git", "-C", root, "checkout", "--quiet", "--force", "--detach", commit], check=True)
        return cls(root, work)

    def pytest(self, plugin: str, arguments: Sequence[str], limit: float | None, **more: str) -> int | None:
        """Runs pytest in one process; returns its status, ``None`` if it was ended after ``limit`` seconds."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-p", plugin, *arguments]
        environment = os.environ | more | {
            "PYTHONPATH": f"{RECORDER}{os.pathsep}{self.root}",
            # The programs of all tests and faults: without it each run would compile them again.
            "JAX_COMPILATION_CACHE_DIR": str(self.work / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "true",
        }  # fmt: skip
        with open(self.work / "pytest.log", "w") as log:
            process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                return None
            finally:  # also the processes that tests started
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()

    def record(self, suite: str, paths: Sequence[str], limit: float | None) -> Path:
        """Runs a suite, or a part of it, and returns the folder of the lines that each test executes."""
        folder = self.work / f"lines-{suite}"
        if folder.exists():
            raise SystemExit(f"{folder} has lines already. Remedy: --lines {folder}, or delete it.")
        folder.mkdir(parents=True)
        self.pytest(
            "record_tests",
            ["-m", MARKS[suite], "-k", "not mypy", *paths],
            limit,
            JAXPAR_LINES=str(folder),
            JAXPAR_LINES_ROOT=str(self.root),
        )
        return folder

    def first_failure(self, tests: Sequence[str], limit: float) -> tuple[str | None, bool]:
        """Runs tests up to the first that fails; returns it, and whether the time limit ended the run."""
        chosen = self.work / "tests.txt"
        outcomes = chosen.with_suffix(".outcomes")
        outcomes.unlink(missing_ok=True)
        chosen.write_text("\n".join(tests))
        files = [str(file) for file in dict.fromkeys(map(file_of, tests)) if (self.root / file).exists()]
        status = self.pytest("chosen_tests", ["-x", "-m", "", *files], limit, JAXPAR_TESTS=str(chosen))
        seen = [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else []
        failed = next((test for test, outcome in seen if outcome == "failed"), None)
        if failed is None and status not in (0, 5, None):
            failed = f"pytest ended with {status}: {(self.work / 'pytest.log').read_text()[-300:]}"
        return failed, status is None


def find(checkout: Checkout, fault: Fault, reach: Reach, suite: str, limit: float) -> Found:
    """Plants a fault, and runs the tests that may find it."""
    rounds = reach.rounds(fault, fault.lines(checkout.root))
    start, failed, timed_out = time.monotonic(), None, False
    with fault.planted(checkout.root):
        for tests in filter(None, rounds):
            left = limit - (time.monotonic() - start)
            failed, ended = checkout.first_failure(tests, max(left, 1.0))
            timed_out |= ended
            if failed is not None or ended:
                break
    seconds = round(time.monotonic() - start, 1)
    return Found(fault.name, suite, failed, seconds, timed_out and failed is None)


def without_false(checkout: Checkout, results: Sequence[Found], limit: float) -> list[str]:
    """Returns the tests among those that found a fault that also fail without one."""
    tests = sorted({one.test for one in results if one.test is not None and "::" in one.test})
    false: list[str] = []
    while tests:
        failed, _ = checkout.first_failure(tests, limit)
        if failed is None:
            break
        false.append(failed)
        tests = tests[tests.index(failed) + 1 :] if failed in tests else []
    return false


def table(faults: Sequence[Fault], columns: Mapping[str, Mapping[str, Found]]) -> str:
    """Returns which test finds each fault, as Markdown."""
    lines = [f"| fault | in | kind | {' | '.join(columns)} |", "|---" * (3 + len(columns)) + "|"]
    for fault in faults:
        cells = [_cell(results.get(fault.name)) for results in columns.values()]
        lines.append(f"| {fault.gives} | `{fault.file.removeprefix('jaxpar/')}` | {fault.kind} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{name}: {_summary(results)}" for name, results in columns.items())])


def _cell(one: Found | None) -> str:
    if one is None:
        return "not run"
    if one.test is None:
        return f"**not found**{' in time' if one.timed_out else ''}"
    return f"`{one.test.rpartition('/')[2]}`{' (slow)' if one.suite == 'slow' else ''}".replace("|", "\\|")


def _summary(results: Mapping[str, Found]) -> str:
    count = {suite: sum(one.suite == suite and one.test is not None for one in results.values()) for suite in MARKS}
    return f"{count['default']} of {len(results)} found by the default suite, {count['slow']} more by the slow suite."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", default="HEAD", metavar="COMMIT", help="what is cloned; changes must be committed")
    parser.add_argument("--suite", choices=MARKS, default="default")
    parser.add_argument("--results", type=Path, default=Path("planted_faults.jsonl"), help="is continued if it exists")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="faults by name")
    parser.add_argument("--lines", type=Path, metavar="FOLDER", help="of an earlier run at this commit (--work)")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keeps the clone, its programs and the lines")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each fault")
    parser.add_argument("--record-limit", type=float, default=3600.0, help="seconds for recording the lines")
    parser.add_argument("--table", type=Path, nargs="+", metavar="RESULTS", help="print the table of these results")
    options = parser.parse_args()
    faults = [Fault(**one) for one in yaml.safe_load((HERE / "faults.yaml").read_text())]
    if options.table:
        print(table(faults, {file.stem: read_results(file) for file in options.table}))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Checkout.make(options.at, (options.work or Path(scratch)).absolute())
        results = _measure(checkout, faults, options)
    print(table(faults, {options.results.stem: results}))
    share = sum(one.test is not None and one.suite == "default" for one in results.values()) / len(faults)
    return 0 if share >= GOAL or options.only or options.suite == "slow" else 1


def _measure(checkout: Checkout, faults: Sequence[Fault], options: argparse.Namespace) -> dict[str, Found]:
    for fault in faults:
        fault.lines(checkout.root)  # before anything runs
    before = read_results(options.results)
    wanted = [fault for fault in faults if options.only is None or fault.name in options.only]
    wanted = [fault for fault in wanted if _is_open(before.get(fault.name), options.suite)]
    folders = {f"tests/{fault.folder.partition('/')[0]}" for fault in wanted}
    paths = sorted(path for path in folders if (checkout.root / path).is_dir()) if options.suite == "slow" else []
    lines = options.lines or checkout.record(options.suite, paths, options.record_limit)
    reach, results = Reach(lines), list[Found]()
    for fault in wanted:
        one = find(checkout, fault, reach, options.suite, options.limit)
        results.append(one)
        print(f"{one.seconds:6.1f} s  {fault.name}: {one.test or 'not found'}", flush=True)
        with options.results.open("a") as stream:
            stream.write(json.dumps(asdict(one)) + "\n")
    if false := without_false(checkout, results, options.record_limit):
        raise SystemExit(f"these tests also fail without a fault: {', '.join(false)}. Remedy: delete their results.")
    return read_results(options.results)


def _is_open(one: Found | None, suite: str) -> bool:
    """Whether a suite is still to run for a fault."""
    return one is None or (one.test is None and one.suite != suite)


if __name__ == "__main__":
    sys.exit(main())
