"""The output of an audit as a table, JSON and HTML."""

from __future__ import annotations

import json
import re

import audit_programs as programs
import jax
import jax.numpy as jnp
import pytest

import jaxpar as jp
from jaxpar.analysis.hlo.audit import Audit


@pytest.fixture(scope="module")
def report(grid_mesh) -> Audit:
    return jp.audit(programs.two_matmuls(grid_mesh, 64, 3).compile(), mesh=grid_mesh)


def test_the_table_says_what_moves_over_which_axes_and_from_where(report):
    lines = str(report).splitlines()
    assert lines[0] == (
        "matmul 2.359e+06 FLOPs, kernels 0 FLOPs, wire 312.00 KiB (312.00 KiB exposed) in 21 executions of collectives"
    )
    assert re.fullmatch(r"collective +axes +count +dtype +results +on the wire +notes +from", lines[1])
    assert re.fullmatch(
        r"reduce-scatter \(all-reduce \+ slice\) +data +3 +f32 +24\.00 KiB +144\.00 KiB +2 arrays +two_matmuls\.\S+ "
        r"\(audit_programs\.py:\d+\)",
        lines[2],
    )
    assert any(re.match(r"all-gather +data +6 .*: up$", line) for line in lines)
    assert len(lines) == 2 + len(report.rows())


def test_the_largest_come_first_and_nothing_is_lost(report):
    sent = [
        sum(c.total_wire_bytes for c in report.collectives if c.kind == kind) for kind in ("all-gather", "all-reduce")
    ]
    assert sent == [144 * 1024, 24 * 1024]
    counts = [int(row[2]) for row in report.rows()]
    assert sum(counts) == report.count() == 21


def test_json_holds_the_totals_by_kind_and_by_axis(report):
    data = json.loads(report.to_json())
    assert data["matmul_flops"] == report.matmul_flops == 3 * 6 * 2 * 64 * 64 * 128 // 8
    assert data["wire_bytes"] == {
        "total": 312 * 1024,
        "by_kind": {"all-gather": 144 * 1024, "all-reduce": 24 * 1024, "reduce-scatter": 144 * 1024},
        "by_axis": {"data": 288 * 1024, "model": 24 * 1024},
    }
    assert data["certain"] is True and data["unknown_loops"] == [] and data["silent_kernels"] == []
    assert data["mesh"]["data"] == 4
    assert {"argument", "temp", "peak", "host"} <= data["memory"].keys()
    gather = next(c for c in data["collectives"] if c["kind"] == "all-gather")
    assert gather["axes"] == ["data"] and gather["count"] == 3 and gather["tensor"] in ("up", "down")


def test_a_collective_over_two_axes_counts_once_in_the_json(grid_mesh):
    place = jax.NamedSharding(grid_mesh, jax.P(("data", "model")))
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=place)
    report = jp.audit(jax.jit(lambda x: x.sum(0)).lower(x).compile(), mesh=grid_mesh)
    data = json.loads(report.to_json())["wire_bytes"]
    assert data["by_axis"] == {"data+model": data["total"]}
    assert report.wire_bytes(axis="data") == report.wire_bytes(axis="model") == data["total"] == 2 * 7 / 8 * 32 * 4


def test_html_is_escaped_and_holds_every_row(report):
    html = report._repr_html_()
    assert html.startswith("<div><b>matmul 2.359e+06 FLOPs")
    assert html.count("<tr>") == 1 + len(report.rows())
    assert "<th>collective</th>" in html and "<td>reduce-scatter (all-reduce + slice)</td>" in html
    assert "two_matmuls.&lt;locals&gt;" in html and "<locals>" not in html


def test_memory_is_the_executables_own(grid_mesh):
    compiled = programs.two_matmuls(grid_mesh, 64, 3).compile()
    stats = compiled.memory_analysis()
    memory = jp.audit(compiled, mesh=grid_mesh).memory
    assert memory["argument"] == stats.argument_size_in_bytes > 0
    assert memory["temp"] == stats.temp_size_in_bytes > 0
    assert memory["host"] == 0
    assert jp.audit(compiled.as_text(), mesh=grid_mesh).memory == {}
