"""``benchmarks/gpu.py`` runs end to end with tiny sizes, and its table holds every row."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str
) -> tuple[int, dict[str, list[dict[str, object]]]]:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--json", str(folder / "out.json"), *arguments])
    status = gpu.main()
    rows: dict[str, list[dict[str, object]]] = json.loads((folder / "out.json").read_text())["rows"]
    return status, rows


def test_a_part_that_fails_is_reported_and_ends_with_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(gpu.PARTS, "offload", lambda scale, device: iter([1 / 0]))  # type: ignore[arg-type, list-item]
    status, rows = run(monkeypatch, tmp_path, "--parts", "offload")
    assert status == 1
    assert rows["offload"][0]["error"] == "ZeroDivisionError: division by zero"


def test_a_part_that_would_start_too_late_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, rows = run(monkeypatch, tmp_path, "--parts", "offload", "--budget", "-1")
    assert (status, rows["offload"]) == (1, [{"skipped": "-1 s are over"}])


@pytest.mark.slow
def test_every_part_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.md"
    status, rows = run(monkeypatch, tmp_path, "--table", str(table))
    assert status == 0 and list(rows) == [*gpu.PARTS]
    assert table.read_text() in capsys.readouterr().out
    ours = [row for row in rows["attention"] if row["attention"] == "jaxpar"]
    assert [row["pass"] for row in ours] == ["forward", "both"]
    assert all(isinstance(row["ms"], float) and row["ms"] > 0 for row in ours)
    assert [row["offload"] for row in rows["offload"]] == ["to host", "to device"]
    assert rows["initialization"][0]["bitwise_equal"] is True
    assert [row["step"] for row in rows["train"]] == ["jaxpar", "by hand"]
    assert [row["matmuls"] for row in rows["fp8"]] == ["bf16", "fp8"]
    assert [row["decode"] for row in rows["decode"]] == ["float32", "int8"]
