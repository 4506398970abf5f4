"""Trip counts of loops: annotated by the compiler, traced through the program, nested, unrolled by two, or unknown."""

from __future__ import annotations

import operator
import re

import audit_programs as programs
import pytest

import jaxpar as jp
from jaxpar.analysis.hlo.dataflow import Flow
from jaxpar.analysis.hlo.parser import parse
from jaxpar.analysis.hlo.trip_counts import trip_count

ONCE = 2 * 7 / 8 * 4 * 32 * 4  # an all-reduce of [4, 32] fp32 over eight devices


def without_notes(text: str) -> str:
    """The program without annotated trip counts, as the TPU compilers print it."""
    assert "known_trip_count" in text
    return re.sub(r',?"known_trip_count":\{"n":"\d+"\}', "", text)


def mirrored(text: str) -> str:
    """The program with the two sides of every comparison exchanged, and without annotated trip counts."""
    other = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}
    swap = r"compare\((%\S+), (%\S+)\), direction=(\w\w)"
    assert re.search(swap, text)
    return re.sub(swap, lambda m: f"compare({m[2]}, {m[1]}), direction={other[m[3]]}", without_notes(text))


@pytest.mark.parametrize("read", [str, without_notes, mirrored])
@pytest.mark.parametrize(
    ("start", "bound", "holds", "step", "runs"),
    [
        (0, 7, operator.lt, lambda i: i + 1, 7),
        (0, 7, operator.le, lambda i: i + 1, 8),
        (0, 7, lambda i, n: n >= i, lambda i: i + 3, 3),
        (2, 9, operator.lt, lambda i: 2 + i, 4),
        (7, 0, operator.gt, lambda i: i - 1, 7),
        (7, 1, operator.ge, lambda i: i - 2, 4),
        (3, 11, operator.ne, lambda i: i + 4, 2),
    ],
)
def test_a_counted_loop(read, start, bound, holds, step, runs, line_mesh, text_of):
    report = jp.audit(read(text_of(programs.counted_loop(line_mesh, start, bound, holds, step))), mesh=line_mesh)
    assert report.certain
    assert report.count("all-reduce", "data") == runs
    assert report.wire_bytes() == runs * ONCE


@pytest.mark.parametrize("read", [str, without_notes], ids=["noted", "traced"])
def test_weights_of_nested_loops_multiply(read, line_mesh, text_of):
    report = jp.audit(read(text_of(programs.nested_loops(line_mesh, 3, 5))), mesh=line_mesh)
    assert report.count("all-reduce", "data") == 15
    assert report.matmul_flops == 15 * 2 * 4 * 32 * 32
    assert report.wire_bytes() == 15 * ONCE


def test_nested_loops_compiled_for_tpu(stored, stored_text):
    assert "known_trip_count" not in stored_text("tpu_nested")
    report = stored("tpu_nested")
    assert (report.certain, report.count("all-reduce", "data")) == (True, 15)
    assert report.matmul_flops == 15 * 2 * 4 * 32 * 32


@pytest.mark.parametrize("read", [str, without_notes], ids=["noted", "traced"])
@pytest.mark.parametrize("length", [6, 7])
def test_a_loop_unrolled_by_two(read, length, line_mesh, text_of):
    report = jp.audit(read(text_of(programs.unrolled_by_two(line_mesh, length))), mesh=line_mesh)
    assert report.certain
    assert report.count("all-reduce", "data") == length
    assert report.matmul_flops == length * 2 * 4 * 32 * 32


def test_the_compiler_unrolls_windowed_einsums_by_two(stored_text):
    """A ring over 16 devices in both directions takes eight steps; each iteration of the loop does two."""
    module = parse(stored_text("tpu_fsdp"))
    flow = Flow(module)
    loops = [(i, where) for where in module.computations.values() for i in where if i.opcode == "while"]
    windows = [(i, where) for i, where in loops if "windowed_dot_general_body" in i.called("body")[0]]
    assert len(windows) == 16  # forward, seven weights gathered; backward, one gathered and eight scattered
    assert {trip_count(i, where, flow) for i, where in windows} == {4}
    for loop, _ in windows:
        condition = module[loop.called("condition")[0]]
        assert "8" in [i.arguments for i in condition if i.opcode == "constant"]


def test_a_loop_of_unknown_length_is_named_and_marks_the_totals(line_mesh):
    report = jp.audit(programs.until_it_converges(line_mesh).compile(), mesh=line_mesh)
    assert not report.certain
    assert len(report.unknown_loops) == 1
    assert re.fullmatch(r"while\.\d+ from until_it_converges\S* \(audit_programs.py:\d+\)", report.unknown_loops[0])
    assert [(c.count, c.certain) for c in report.collectives] == [(1, False)]
    assert "LOWER BOUNDS" in report.headline() and "in a loop with an unknown trip count" in str(report)


def test_an_unknown_loop_compiled_for_tpu(stored):
    report = stored("tpu_unknown_loop")
    assert not report.certain and len(report.unknown_loops) == 1
    assert not any(c.certain for c in report.collectives)


def test_a_counter_that_is_multiplied_is_not_guessed_at(line_mesh, text_of):
    text = text_of(programs.counted_loop(line_mesh, 1, 64, operator.lt, lambda i: i * 2))
    assert jp.audit(text, mesh=line_mesh).count("all-reduce") == 6  # the compiler annotated it
    report = jp.audit(without_notes(text), mesh=line_mesh)
    assert not report.certain


def test_what_stands_outside_an_unknown_loop_stays_certain(grid_mesh):
    """A known loop next to an unknown one keeps its own count."""
    import jax
    import jax.numpy as jnp

    def body(x: jax.Array) -> jax.Array:
        x = jax.lax.fori_loop(0, 4, lambda i, x: jnp.tanh(jax.lax.psum(x, "model")), x)
        return jax.lax.while_loop(lambda x: x.max() > 1, lambda x: jax.lax.psum(x, "data") / 9, x)

    mapped = jax.shard_map(body, mesh=grid_mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    report = jp.audit(jax.jit(mapped).lower(jnp.ones((8, 8))).compile(), mesh=grid_mesh)
    assert {(c.axes, c.count, c.certain) for c in report.collectives} == {(("model",), 4, True), (("data",), 1, False)}
