"""The report of a run: one line per failure, the smallest case of each, and one Markdown table."""

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
    """A family's row of the table, with the worst error of each precision, relative to the size of the reference."""
    refused, failed = (sum(test) for test in zip(*((r.outcome.kind == "refused", r.outcome.failed) for r in results)))
    return f"| {name} | {seed} | {len(results)} | {refused} | {failed} | {worst(results)} |"


def worst(results: Sequence[Result]) -> str:
    """The largest error of each precision among the cases that passed."""
    found: dict[str, float] = {}
    for result in results:
        for label, error in result.outcome.errors.items():
            if not result.outcome.failed:
                found[label] = max(found.get(label, 0.0), error)
    return ", ".join(f"{label} {error:.1e}" for label, error in sorted(found.items()))


def too_many_refused(results: Sequence[Result]) -> bool:
    """Whether more cases are refused than ``REFUSALS`` allows. Fewer than 20 results do not decide it."""
    return len(results) >= 20 and sum(r.outcome.kind == "refused" for r in results) > REFUSALS * len(results)


def smallest(name: str, result: Result, worker: Worker, budget: int = 200) -> tuple[str, Outcome]:
    """The smallest case that fails as ``result`` does, as Python, and its outcome."""
    outcomes = {result.case: result.outcome}

    def fails(case: object) -> bool:
        text = printed(case)
        outcomes[text] = worker.ask(text).outcome
        return outcomes[text].alike(result.outcome)

    found = printed(shrunk(parsed(name, result.case), fails, budget))
    return found, outcomes[found]


def explained(name: str, result: Result, least: str, worker: Worker) -> bool:
    """Whether a failure is already known: it vanishes if the fields of the known smallest case are reset to their
    defaults.

    Integer fields, which are sizes, stay: without its devices it would be another case.
    """
    case, known = parsed(name, result.case), changed(parsed(name, least))
    back = {f.name: f.default for f in fields(case) if f.name in known and not _counts(f.default)}
    if not back or any(getattr(case, field) == default for field, default in back.items()):
        return False
    return not worker.ask(printed(replace(case, **back))).outcome.failed


def _counts(default: object) -> bool:
    return isinstance(default, int) and not isinstance(default, bool)


def told(name: str, seed: int, result: Result, least: str, outcome: Outcome) -> str:
    """The text of a failure with the command that reproduces it."""
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
