"""``jaxpar.testing`` asserts a layout's communication in a test."""

from __future__ import annotations

import audit_programs as programs
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.errors import AuditError, VerificationError
from jaxpar.testing import assert_collectives, assert_no_collective_in_conditional, assert_wire_bytes

WHOLE = 8 * 256 * 4
EVERY = {
    ("all-reduce", "data"): 1,
    ("all-gather", "data"): 1,
    ("reduce-scatter", ("data",)): 1,
    ("all-to-all", "data"): 1,
    ("collective-permute", "data"): 1,
}


@pytest.fixture(scope="module")
def program(line_mesh) -> object:
    return programs.every_collective(line_mesh).compile()


@pytest.fixture(scope="module")
def branching(line_mesh) -> object:
    return programs.branches(line_mesh).compile()


def test_wire_bytes_hold(program, line_mesh):
    report = assert_wire_bytes(program, line_mesh, (2 + 3) * 7 / 8 * WHOLE + WHOLE)
    assert_wire_bytes(program, line_mesh, 2 * 7 / 8 * WHOLE, kind="all-reduce")
    assert_wire_bytes(program, line_mesh, 0, axis="model")
    assert_wire_bytes(report, None, 7 / 8 * WHOLE * 1.009, kind="all-gather", axis="data", rtol=0.01)


def test_wire_bytes_differ(program, line_mesh):
    with raises(VerificationError, "every_collective", "8000") as error:
        assert_wire_bytes(program, line_mesh, 8000, kind="all-reduce", axis="data")
    assert isinstance(error.value, AssertionError)
    with raises(VerificationError, "44032 bytes"):
        assert_wire_bytes(program, line_mesh, 44_100)


def test_no_number_of_bytes_is_nan(program, line_mesh):
    with pytest.raises(VerificationError, match="expected nan"):
        assert_wire_bytes(program, line_mesh, float("nan"))


def test_wire_bytes_of_an_unknown_axis(program, line_mesh):
    with raises(AuditError, "datum"):
        assert_wire_bytes(program, line_mesh, 0, axis="datum")


def test_collectives_hold(program, line_mesh):
    assert assert_collectives(program, line_mesh, EVERY).count() == 5
    large = {("all-reduce", "data"): 1, ("all-gather", "data"): 1, ("all-to-all", "data"): 1}
    assert_collectives(program, line_mesh, {**large, ("collective-permute", "data"): 1}, min_bytes=WHOLE)


def test_collectives_differ(program, line_mesh):
    fewer = {key: count for key, count in EVERY.items() if key[0] != "all-to-all"}
    with raises(VerificationError, "every_collective", "differ"):
        assert_collectives(
            program, line_mesh, {**fewer, ("all-reduce", "data"): 3, ("all-gather", ("data", "model")): 1}
        )


def test_collectives_of_an_unknown_kind_or_axis(program, line_mesh):
    with raises(AuditError, "gather"):
        assert_collectives(program, line_mesh, {("gather", "data"): 1})
    with raises(AuditError, "modell"):
        assert_collectives(program, line_mesh, {("all-gather", ("data", "modell")): 1})


def test_a_loop_of_unknown_length_proves_nothing(line_mesh):
    loop = programs.until_it_converges(line_mesh).compile()
    for check in (lambda: assert_wire_bytes(loop, line_mesh, 896), lambda: assert_collectives(loop, line_mesh, {})):
        with raises(VerificationError, "while"):
            check()


def test_collectives_in_no_branch(program, line_mesh):
    assert assert_no_collective_in_conditional(program, line_mesh).count() == 5


@pytest.mark.parametrize("name", ["here", "tpu_branches", "gpu_branches"])
def test_collectives_in_either_branch(name, branching, line_mesh, stored):
    """The permute is in the arm that sends less, which no total counts; it deadlocks all the same."""
    report = jp.audit(branching, mesh=line_mesh) if name == "here" else stored(name)
    with raises(VerificationError, "branches."):
        assert_no_collective_in_conditional(report, line_mesh)


def test_a_long_list_is_cut(stored):
    with pytest.raises(VerificationError) as error:
        assert_wire_bytes(stored("tpu_fsdp"), None, 1)
    (text,) = error.value.args
    assert text.count("\n") == 12 + 1
