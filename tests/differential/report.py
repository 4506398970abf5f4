"""What is printed and kept of a run: a line a failure, the least case of each, and one table in Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from .cases import Outcome, changed, parsed, printed
from .runner import Result, Worker
from .shrink import shrunk

REFUSALS = 0.25
"""The share of refused cases above which a family's generator is wrong."""
COLUMNS = "| family | seed | cases | refused | failed | worst error |\n|---|---:|---:|---:|---:|---|"


def row(name: str, seed: int, results: Sequence[Result]) -> str:
    """A family's row of the table; the worst error stands for each precision, relative to the size of the reference."""
    refused, failed = (sum(test) for test in zip(*((r.outcome.kind == "refused", r.outcome.failed) for r in results)))
    return f"| {name} | {seed} | {len(results)} | {refused} | {failed} | {worst(results)} |"


def worst(results: Sequence[Result]) -> str:
    """The largest error of each precision among the cases that are right."""
    found: dict[str, float] = {}
    for result in results:
        for label, error in result.outcome.errors.items():
            if not result.outcome.failed:
                found[label] = max(found.get(label, 0.0), error)
    return ", ".join(f"{label} {error:.1e}" for label, error in sorted(found.items()))


def too_many_refused(results: Sequence[Result]) -> bool:
    """Whether so many cases are refused that the family tests little. Of a few cases nothing is said."""
    return len(results) >= 20 and sum(r.outcome.kind == "refused" for r in results) > REFUSALS * len(results)


def smallest(name: str, result: Result, worker: Worker, budget: int = 200) -> tuple[str, Outcome]:
    """The least case that fails as ``result`` does, as Python, and what becomes of it."""
    outcomes = {result.case: result.outcome}

    def fails(case: object) -> bool:
        text = printed(case)
        outcomes[text] = worker.ask(text).outcome
        return outcomes[text].alike(result.outcome)

    found = printed(shrunk(parsed(name, result.case), fails, budget))
    return found, outcomes[found]


def explained(name: str, result: Result, least: str, worker: Worker) -> bool:
    """Whether a failure is one that is already known by its least case: it is gone where the fields of that case are at their defaults.

    Fields of sizes stay: without its devices a case would be another one.
    """
    case, known = parsed(name, result.case), changed(parsed(name, least))
    back = {f.name: f.default for f in fields(case) if f.name in known and not _counts(f.default)}
    if not back or any(getattr(case, field) == default for field, default in back.items()):
        return False
    return not worker.ask(printed(replace(case, **back))).outcome.failed


def _counts(default: object) -> bool:
    return isinstance(default, int) and not isinstance(default, bool)


def told(name: str, seed: int, result: Result, least: str, outcome: Outcome) -> str:
    """A failure and the command that shows it alone."""
    return (
        f"\n{name} {result.index}: {result.outcome.kind}: {result.outcome.text}\n"
        f"  drawn:   uv run python -m tests.differential {name} --seed {seed} --case {result.index}\n"
        f"  least:   uv run python -m tests.differential {name} --case {json.dumps(least)}\n"
        f"           {outcome.kind}: {outcome.text}"
    )


def keep(path: Path, name: str, seed: int, results: Sequence[Result], least: dict[int, str]) -> None:
    """Adds a family's results to a JSON file."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[f"{name} {seed}"] = [asdict(r) | ({"least": least[r.index]} if r.index in least else {}) for r in results]
    path.write_text(json.dumps(kept, indent=1))
