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

_EXACT = ("matmul_flops", "kernel_flops")


def facts_of(report: Audit, topology: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return the contents of a program's golden file.

    Args:
      report: the program's audit, with the compiler's memory figures.
      topology: the topology that it was compiled for.
      versions: of jax and of the compiler.

    >>> facts_of(Audit({"data": 4}, 8, 0, 0, (), (), (), (), {"peak": 64}), "v5e:2x2", {"jax": "0.12"})["memory"]
    {'peak': 64}
    """
    together: dict[tuple[str, str, str], dict[str, Any]] = {}
    for c in report.collectives:
        source = re.sub(r":\d+\)", ")", c.source) or "the compiler"
        key = (c.kind, "+".join(c.axes), source)
        row = together.setdefault(key, {"kind": key[0], "axes": key[1], "from": source, "count": 0, "wire_bytes": 0.0})
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
        "collectives": [together[key] for key in sorted(together)],
    }


def write(file: Path, facts: Mapping[str, Any]) -> None:
    """Write a golden file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def against(file: Path, facts: Mapping[str, Any]) -> list[str]:
    """Return the differences between a program and a golden file, one line each; empty if there are none.

    Args:
      file: the golden file.
      facts: of the program, as from :func:`facts_of`.

    Raises:
      ConfigError: the file is not a golden file, or has another topology, mesh, or version of jax or of the compiler.
    """
    kept = _load(file)
    remedy = f"Remedy: remove {file} and run again to write it anew, or name another file."
    for what, word in (("topology", "another topology"), ("mesh", "another mesh"), ("versions", "other versions")):
        if kept[what] != facts[what]:
            raise ConfigError(
                f"golden file {file}: it is of {word} ({_show(kept[what])}) than this program ({_show(facts[what])}), "
                f"so their figures cannot be compared. {remedy}"
            )
    return differences(kept, facts)


def differences(kept: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Return the lines of :func:`against`.

    >>> row = {"kind": "all-gather", "axes": "model", "from": "Attention.__call__ (layers.py)"}
    >>> row |= {"count": 2, "wire_bytes": 2**30}
    >>> same = {"matmul_flops": 1, "kernel_flops": 0, "certain": True, "memory": {}}
    >>> differences({**same, "collectives": []}, {**same, "collectives": [row]})
    ['+2 all-gathers over model, +1.00 GiB, from Attention.__call__ (layers.py)']
    """
    lines = [
        f"{name.replace('_flops', ' FLOPs')}: {_change(facts[name] - kept[name])}{abs(facts[name] - kept[name]):,} "
        f"({kept[name]:,} → {facts[name]:,})"
        for name in _EXACT
        if facts[name] != kept[name]
    ]
    if kept["certain"] != facts["certain"]:
        lines.append(f"every loop's length is known: {kept['certain']} → {facts['certain']}")
    lines += _memory(kept["memory"], facts["memory"])
    rows = [{(r["kind"], r["axes"], r["from"]): r for r in side["collectives"]} for side in (kept, facts)]
    nothing = {"count": 0, "wire_bytes": 0.0}
    found = []
    for key in sorted({*rows[0], *rows[1]}):
        before, after = (side.get(key, nothing) for side in rows)
        count, sent = after["count"] - before["count"], after["wire_bytes"] - before["wire_bytes"]
        if count or _apart(before["wire_bytes"], after["wire_bytes"]):
            kind, axes, source = key
            many = f"{_change(count)}{abs(count)} {kind}{'s' * (abs(count) != 1)}" if count else f"as many {kind}s"
            found.append(
                (abs(sent), f"{many} over {axes}, {_change(sent)}{show_bytes(round(abs(sent)))}, from {source}")
            )
    return lines + [text for _, text in sorted(found, key=lambda pair: -pair[0])]


def _memory(kept: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    lines = []
    for name in sorted({*kept, *now}):
        before, after = kept.get(name, 0), now.get(name, 0)
        if _apart(before, after):
            change = f"{_change(after - before)}{show_bytes(abs(after - before))}"
            lines.append(f"memory, {name}: {change} ({show_bytes(before)} → {show_bytes(after)})")
    return lines


def _apart(before: float, after: float) -> bool:
    return abs(after - before) > TOLERANCE * max(abs(before), abs(after))


def _change(difference: float) -> str:
    return "+" if difference >= 0 else "−"


def _load(file: Path) -> dict[str, Any]:
    remedy = f"Remedy: remove {file} and run again to write it anew, or name another file."
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"golden file {file}: it is not JSON ({error}). {remedy}") from error
    form = kept.get("form") if isinstance(kept, dict) else None
    if form != FORM:
        raise ConfigError(f"golden file {file}: its form is {form!r}, but {FORM} is wanted. {remedy}")
    wanted = ("topology", "mesh", "versions", "certain", "memory", "collectives", *_EXACT)
    missing = [name for name in wanted if name not in kept]
    if missing:
        raise ConfigError(f"golden file {file}: it lacks {', '.join(missing)}. {remedy}")
    return dict(kept)


def _show(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
