"""Compiled plans in JSON files, a line each, so that estimates are compared with them where there is no compiler."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError
from jaxpar.planning.search.compiled import CompiledPlan, PlannedRun, compile_plan
from jaxpar.planning.search.plan import Plan
from jaxpar.sharding.hardware.topology import Topology

Row = dict[str, Any]
"""A line: a ``plan``, its ``figures``, or the ``problem`` for which it has none, and what else the file has of it."""


def read_rows(file: Path) -> list[Row]:
    """Returns the lines of a file."""
    rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))["plans"]
    return rows


def write_rows(file: Path, rows: Sequence[Row], **head: str) -> None:
    """Write the lines of a file, after what it says of all of them."""
    text = ",\n".join(json.dumps(row) for row in rows)
    before = "".join(f'"{key}": {json.dumps(value)}, ' for key, value in head.items())
    file.write_text(f'{{{before}"plans": [\n{text}\n]}}\n', encoding="utf-8")


def plan_of(row: Row) -> Plan:
    """Returns the plan of a line."""
    options: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in row["plan"].items()}
    return Plan(**options)


def plan_data(plan: Plan) -> Row:
    """Returns a plan as a line has it: the fields that are not their defaults."""
    options = {f.name: getattr(plan, f.name) for f in fields(plan) if getattr(plan, f.name) != f.default}
    data: Row = json.loads(json.dumps(options))
    return data


def compiled_row(run: PlannedRun, topology: Topology) -> Row:
    """Returns the figures of a compiled step, or the problem, as a line has them."""
    try:
        figures = asdict(compile_plan(run, topology))
    except JaxparError as error:
        return {"problem": str(error).splitlines()[0]}
    return {"figures": {name: value for name, value in figures.items() if name != "transfers"}}


def figures_of(row: Row) -> CompiledPlan | None:
    """Returns the figures of a line; ``None`` if it has none."""
    return CompiledPlan(transfers=(), **row["figures"]) if "figures" in row else None
