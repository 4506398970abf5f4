"""Exact error texts for input that is no compiled program, is incomplete, or belongs to another mesh."""

from __future__ import annotations

import re

import audit_programs as programs
import jax
import jax.numpy as jnp
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import jaxpar as jp
from jaxpar.errors import AuditError


@pytest.fixture(scope="module")
def text(line_mesh, text_of) -> str:
    return text_of(programs.nested_loops(line_mesh, 3, 5))


def message(program: object, mesh: object = None, *, name: str) -> None:
    with raises(AuditError, name):
        jp.audit(program, mesh=mesh)


def test_text_that_is_no_hlo():
    message("module @jit_f attributes {}", name="jit_f")
    message("", name="HLO")


def test_a_program_that_was_lowered_but_not_compiled():
    lowered = jax.jit(jnp.sin).lower(1.0)
    message(lowered, name="jit_sin")


def test_a_value_that_is_no_program():
    message([1, 2], name="audit()")


class WithoutText:
    """An executable of a runtime that keeps no HLO."""

    def __init__(self, error: Exception | None = None):
        self.error = error

    def as_text(self) -> str | None:
        if self.error is not None:
            raise self.error
        return None


def test_an_executable_without_text():
    message(WithoutText(), name="HLO")
    unimplemented = WithoutText(NotImplementedError("compiled HLO text is not available"))
    message(unimplemented, name="HLO")


def test_text_that_is_cut_short_in_a_computation(text):
    entry = re.search(r"^ENTRY %(\S+) ", text, re.MULTILINE)
    message(text[: text.rindex("\n", 0, text.rindex("}"))], name=entry[1])


def test_text_that_is_cut_short_between_computations(text):
    message(text[: text.index("ENTRY ")], name="HLO")


def test_text_that_is_cut_short_in_an_instruction(text):
    start = text.index("all-reduce(")
    where = re.findall(r"^%?(\S+) .*\{$", text[:start], re.MULTILINE)[-1]
    message(text[: start + len("all-reduce(")], name=where)


def test_text_that_lost_a_computation(text):
    body = re.search(r"body=%(\S+),", text)[1]
    start = text.index(f"\n%{body} (") + 1
    message(text[:start] + text[text.index("\n}\n", start) + 3 :], {"data": 8}, name=body)


def test_text_that_lost_an_instruction(text):
    """The auditor reports that text is missing instead of a number."""
    line = re.search(r"\n  (%\S+) = [^\n]* all-reduce\([^\n]*", text)
    message(text.replace(line[0], ""), {"data": 8}, name=line[1].removeprefix("%"))


@examples(60)
@given(st.floats(0, 0.999))
def test_wherever_it_is_cut_the_audit_says_so(share):
    whole = _program()
    cut = whole[: int(share * len(whole.rstrip()[:-1]))]
    with pytest.raises(AuditError):
        jp.audit(cut, mesh={"data": 8})


def test_an_attribute_is_cut_where_it_opens():
    whole = _program()
    opens = [found.end() for found in re.finditer(r"metadata=\{", whole)]
    for end in (opens[0], opens[-1]):
        with raises(AuditError, "truncated"):
            jp.audit(whole[:end], mesh={"data": 8})


def _program() -> str:
    if not _KEPT:
        mesh = jp.MeshSpec(data=8).build()
        _KEPT.append(str(programs.nested_loops(mesh, 3, 5).compile().as_text()))
    return _KEPT[0]


_KEPT: list[str] = []


def test_matmuls_that_do_not_say_what_they_multiply(stored_text, facts):
    text, mesh = stored_text("tpu_nested"), facts("tpu_nested")["mesh"]
    message(re.sub(r", dim_labels=[^,]*", "", text), mesh, name="convolution.3")
    text, mesh = stored_text("gpu_library_matmuls"), facts("gpu_library_matmuls")["mesh"]
    message(text.replace("lhs_contracting_dimensions", "contracting"), mesh, name="custom-call.3")


def test_a_mesh_of_another_size(text, grid_mesh):
    message(text, {"data": 4, "model": 4}, name="data=4")
    message(text, jp.MeshSpec().build(jax.devices()[:1]), name="one device")
    # The same number of devices in another arrangement only changes names.
    assert jp.audit(text, mesh=grid_mesh).count(axis="model") == 15


def test_a_program_of_several_slices(stored_text):
    text, mesh = stored_text("tpu_slices_every_collective"), {"replica": 2, "data": 4, "model": 2}
    message(text, {"data": 4}, name="data=4")
    for wrong in ({"data": 32}, {"data": 18}):
        message(text, wrong, name=f"data={wrong['data']}")
    message(text.replace("ALL_TO_ALL", "SHOUT"), mesh, name="send.2")
    message(text.replace("_xla_megascale_transfer_type", "_type"), mesh, name="send")
    message(text.replace("{{100000,", "{{1,2},{100000,"), mesh, name="xla_megascale_target")


def test_an_unknown_kind_or_axis(text):
    report = jp.audit(text, mesh={"data": 8, "model": 1})
    with raises(AuditError, "allreduce"):
        report.wire_bytes(kind="allreduce")
    with raises(AuditError, "modle"):
        report.count(axis="modle")
