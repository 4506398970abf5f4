"""Golden files: the costs of a run's compiled step, stored next to the code, so that a review shows changes to them.

Counts must be equal; bytes may differ by 0.1%. Collectives are grouped by kind, axes, and the function and file that
they come from, without line numbers, which change often.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.analysis.hlo.audit import Audit
from jaxpar.analysis.units import show_bytes
from jaxpar.errors import ConfigError

FORM = 1
"""The version of the file format; files of other versions are rejected."""

TOLERANCE = 1e-3
"""The relative difference of bytes below which two figures count as equal."""

_REMEDY = "Remedy: remove {} and run again to write a new one, or name another file."
_EXACT = ("matmul_flops", "kernel_flops")


def facts_of(report: Audit, topology: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """Returns the contents of a program's golden file.

    Args:
      report: the program's audit, with the compiler's memory figures.
      topology: the topology that it was compiled for.
      versions: of jax and of the compiler.

    >>> facts_of(Audit({"data": 4}, 8, 0, 0, (), (), (), (), {"peak": 64}), "v5e:2x2", {"jax": "0.12"})["memory"]
    {'peak': 64}
    """
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for c in report.collectives:
        source = re.sub(r":\d+\)", ")", c.source) or "the compiler"
        key = (c.kind, "+".join(c.axes), source)
        row = groups.setdefault(key, {"kind": key[0], "axes": key[1], "from": source, "count": 0, "wire_bytes": 0.0})
        row["count"] += c.count
        row["wire_bytes"] += c.total_wire_bytes
    return {
        "form": FORM,
        "topology": topology,
        "mesh": {axis: size for axis, size in report.mesh.items() if size > 1},
        "versions": dict(versions),
        "matmul_flops": report.matmul_flops,
        "kernel_flops": report.kernel_flops,
        "certain": report.certain,
        "memory": dict(report.memory),
        "collectives": [groups[key] for key in sorted(groups)],
    }


def to_text(facts: Mapping[str, Any]) -> str:
    """Returns the text of a golden file."""
    return json.dumps(facts, indent=1) + "\n"


def against(file: Path, facts: Mapping[str, Any]) -> list[str]:
    """Returns the differences between a program and a golden file, one line each; empty if there are none.

    Args:
      file: the golden file.
      facts: of the program, as from :func:`facts_of`.

    Raises:
      ConfigError: the file is not a golden file, or has another topology, mesh, or version of jax or of the compiler.
    """
    golden = _load(file)
    remedy = _REMEDY.format(file)
    for what, word in (("topology", "another topology"), ("mesh", "another mesh"), ("versions", "other versions")):
        if golden[what] != facts[what]:
            raise ConfigError(
                f"golden file {file}: it has {word} ({_show(golden[what])}) than this program "
                f"({_show(facts[what])}), so their figures cannot be compared. {remedy}"
            )
    return differences(golden, facts)


def differences(golden: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Returns the lines of :func:`against`.

    >>> row = {"kind": "all-gather", "axes": "model", "from": "Attention.__call__ (layers.py)"}
    >>> row |= {"count": 2, "wire_bytes": 2**30}
    >>> same = {"matmul_flops": 1, "kernel_flops": 0, "certain": True, "memory": {}}
    >>> differences({**same, "collectives": []}, {**same, "collectives": [row]})
    ['+2 all-gathers over model, +1.00 GiB, from Attention.__call__ (layers.py)']
    """
    lines = [
        f"{name.replace('_flops', ' FLOPs')}: {_change(facts[name] - golden[name])}{abs(facts[name] - golden[name]):,} "
        f"({golden[name]:,} → {facts[name]:,})"
        for name in _EXACT
        if facts[name] != golden[name]
    ]
    if golden["certain"] != facts["certain"]:
        lines.append(f"all trip counts are known: {golden['certain']} → {facts['certain']}")
    lines += _memory(golden["memory"], facts["memory"])
    rows = [{(r["kind"], r["axes"], r["from"]): r for r in side["collectives"]} for side in (golden, facts)]
    nothing = {"count": 0, "wire_bytes": 0.0}
    found = []
    for key in sorted({*rows[0], *rows[1]}):
        before, after = (side.get(key, nothing) for side in rows)
        count, sent = after["count"] - before["count"], after["wire_bytes"] - before["wire_bytes"]
        if count or _differs(before["wire_bytes"], after["wire_bytes"]):
            kind, axes, source = key
            counts = (
                f"{_change(count)}{abs(count)} {kind}{'s' * (abs(count) != 1)}" if count else f"same number of {kind}s"
            )
            found.append(
                (abs(sent), f"{counts} over {axes}, {_change(sent)}{show_bytes(round(abs(sent)))}, from {source}")
            )
    return lines + [text for _, text in sorted(found, key=lambda pair: -pair[0])]


def _memory(golden: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    lines = []
    for name in sorted({*golden, *now}):
        before, after = golden.get(name, 0), now.get(name, 0)
        if _differs(before, after):
            change = f"{_change(after - before)}{show_bytes(abs(after - before))}"
            lines.append(f"memory, {name}: {change} ({show_bytes(before)} → {show_bytes(after)})")
    return lines


def _differs(before: float, after: float) -> bool:
    return abs(after - before) > TOLERANCE * max(abs(before), abs(after))


def _change(difference: float) -> str:
    return "+" if difference >= 0 else "−"


def _load(file: Path) -> dict[str, Any]:
    remedy = _REMEDY.format(file)
    try:
        golden = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"golden file {file}: it is not JSON ({error}). {remedy}") from error
    form = golden.get("form") if isinstance(golden, dict) else None
    if form != FORM:
        raise ConfigError(f"golden file {file}: its form must be {FORM}, got {form!r}. {remedy}")
    required = ("topology", "mesh", "versions", "certain", "memory", "collectives", *_EXACT)
    missing = [name for name in required if name not in golden]
    if missing:
        raise ConfigError(f"golden file {file}: missing fields: {', '.join(missing)}. {remedy}")
    return dict(golden)


def _show(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
