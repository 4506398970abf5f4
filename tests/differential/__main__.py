"""The command ``python -m tests.differential FAMILY --cases N --seed S``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from . import report
from .cases import FAMILIES, drawn, printed
from .runner import Result, Worker, run


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=sys.modules[__package__].__doc__)
    parser.add_argument("family", choices=(*FAMILIES, "all"))
    parser.add_argument("--cases", type=int, default=100, help="how many cases of each family (100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case (0)")
    parser.add_argument("--case", help="one case alone: its number, or its Python as a failure prints it")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (2)")
    parser.add_argument("--shrink", type=int, default=20, help="failures of each family that are reduced (20)")
    parser.add_argument("--json", type=Path, help="keep all results in this file")
    return parser.parse_args()


def one(name: str, seed: int, text: str) -> bool:
    """Run one case and print its outcome; returns whether it passed."""
    worker = Worker(name)
    number = text.strip().isdecimal()
    result = worker.ask(printed(drawn(name, seed, int(text))) if number else text)
    worker.close()
    errors = ", ".join(f"{label} {error:.1e}" for label, error in result.outcome.errors.items())
    print(f"{result.case}\n{result.outcome.kind} ({result.seconds:.1f} s) {errors} {result.outcome.text}")
    return not result.outcome.failed


def several(name: str, options: argparse.Namespace) -> tuple[bool, str]:
    """Run the cases of a family and reduce its failures; returns whether all passed, and the family's row of the
    table."""
    begun, done = time.monotonic(), 0

    def told(result: Result) -> None:
        nonlocal done
        done += 1
        if result.outcome.failed:
            print(f"{name} {result.index}: {result.outcome.kind}: {result.outcome.text[:160]}", flush=True)
        if done % 25 == 0:
            print(f"{name}: {done} of {options.cases}, {time.monotonic() - begun:.0f} s", flush=True)

    results = run(name, options.seed, range(options.first, options.first + options.cases), options.jobs, told)
    seconds = time.monotonic() - begun
    if options.json:
        report.keep(options.json, name, options.seed, results, {})
    least = reduced(name, options, [r for r in results if r.outcome.failed])
    if options.json:
        report.keep(options.json, name, options.seed, results, least)
    refused = report.too_many_refused(results)
    if refused:
        print(f"{name}: more than {report.REFUSALS:.0%} of the cases are refused, so the rest says too little.")
    each = sum(r.seconds for r in results) / max(1, len(results))
    print(f"{name}: {seconds:.0f} s with {options.jobs} processes, {each:.2f} CPU seconds a case")
    right = not refused and not any(r.outcome.failed for r in results)
    return right, report.row(name, options.seed, results)


def reduced(name: str, options: argparse.Namespace, failures: list[Result]) -> dict[int, str]:
    """Print the smallest case of each failure with the command that runs it, and return them by number; a failure that
    an earlier one explains is not reduced."""
    least: dict[int, str] = {}
    worker = Worker(name)
    for result in failures[: options.shrink]:
        known = next((text for text in least.values() if report.explained(name, result, text, worker)), None)
        if known is not None:
            print(f"\n{name} {result.index}: as {known}, without which it is right")
        else:
            known, outcome = report.smallest(name, result, worker)
            print(report.told(name, options.seed, result, known, outcome), flush=True)
        least[result.index] = known
    worker.close()
    if failures[options.shrink :]:
        print(f"\n{name}: not reduced: {', '.join(str(r.index) for r in failures[options.shrink :])}")
    return least


def main() -> None:
    options = arguments()
    if options.case is not None:
        sys.exit(0 if one(options.family, options.seed, options.case) else 1)
    names = FAMILIES if options.family == "all" else (options.family,)
    found = [several(name, options) for name in names]
    print("\n".join(["", report.COLUMNS, *(text for _, text in found)]))
    sys.exit(0 if all(right for right, _ in found) else 1)


if __name__ == "__main__":
    main()
