"""Exact error texts for input that is no compiled program, is incomplete, or belongs to another mesh."""

from __future__ import annotations

import re

import audit_programs as programs
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import jaxpar as jp
from jaxpar.errors import AuditError


@pytest.fixture(scope="module")
def text(line_mesh, text_of) -> str:
    return text_of(programs.nested_loops(line_mesh, 3, 5))


def message(program: object, mesh: object = None) -> str:
    with pytest.raises(AuditError) as error:
        jp.audit(program, mesh=mesh)
    return str(error.value)


def test_text_that_is_no_hlo():
    assert message("module @jit_f attributes {}") == (
        "this is not HLO text: it begins with 'module @jit_f attributes {}'. Remedy: pass the compiled program, "
        "jitted.lower(...).compile(), or its as_text()."
    )
    assert message("").startswith("this is not HLO text: it begins with ''.")


def test_a_program_that_was_lowered_but_not_compiled():
    lowered = jax.jit(jnp.sin).lower(1.0)
    assert message(lowered).startswith("this is not HLO text: it begins with 'module @jit_sin")


def test_a_value_that_is_no_program():
    assert message([1, 2]) == (
        "audit() takes a compiled program or its HLO text, not a list. Remedy: pass jitted.lower(...).compile()."
    )


class WithoutText:
    """An executable of a runtime that keeps no HLO."""

    def __init__(self, error: Exception | None = None):
        self.error = error

    def as_text(self) -> str | None:
        if self.error is not None:
            raise self.error
        return None


def test_an_executable_without_text():
    remedy = "Remedy: audit the program where it is compiled, not one that was loaded or deserialized."
    assert message(WithoutText()) == f"this executable has no HLO text. {remedy}"
    unimplemented = WithoutText(NotImplementedError("compiled HLO text is not available"))
    assert message(unimplemented) == (f"this executable has no HLO text: compiled HLO text is not available. {remedy}")


def test_text_that_is_cut_short_in_a_computation(text):
    entry = re.search(r"^ENTRY %(\S+) ", text, re.MULTILINE)
    assert message(text[: text.rindex("\n", 0, text.rindex("}"))]) == (
        f"the HLO text is truncated: the computation {entry[1]!r} has no end. Remedy: pass the full compiled.as_text()."
    )


def test_text_that_is_cut_short_between_computations(text):
    assert message(text[: text.index("ENTRY ")]) == (
        "the HLO text is truncated: it has no ENTRY computation. Remedy: pass the full compiled.as_text()."
    )


def test_text_that_is_cut_short_in_an_instruction(text):
    start = text.index("all-reduce(")
    where = re.findall(r"^%?(\S+) .*\{$", text[:start], re.MULTILINE)[-1]
    line = text[text.rindex("\n", 0, start) : start + len("all-reduce(")].strip()
    assert message(text[: start + len("all-reduce(")]) == (
        f"the HLO text is truncated in computation {where!r}: {line[:80]!r} has no end."
    )


def test_text_that_lost_a_computation(text):
    body = re.search(r"body=%(\S+),", text)[1]
    start = text.index(f"\n%{body} (") + 1
    assert message(text[:start] + text[text.index("\n}\n", start) + 3 :], {"data": 8}) == (
        f"the HLO text is malformed: it calls the computation {body!r}, but does not define it."
    )


def test_text_that_lost_an_instruction(text):
    """The auditor reports that text is missing instead of a number."""
    line = re.search(r"\n  (%\S+) = [^\n]* all-reduce\([^\n]*", text)
    broken = message(text.replace(line[0], ""), {"data": 8})
    assert re.fullmatch(
        r"the HLO text is malformed: the computation '\S+' uses '\S+', but does not define it\.", broken
    )


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
        with pytest.raises(AuditError, match=r"^the HLO text is truncated"):
            jp.audit(whole[:end], mesh={"data": 8})


def _program() -> str:
    if not _KEPT:
        mesh = jp.MeshSpec(data=8).build()
        _KEPT.append(str(programs.nested_loops(mesh, 3, 5).compile().as_text()))
    return _KEPT[0]


_KEPT: list[str] = []


def test_matmuls_that_do_not_say_what_they_multiply(stored_text, facts):
    text, mesh = stored_text("tpu_nested"), facts("tpu_nested")["mesh"]
    assert re.fullmatch(
        r"\S+: the convolution does not specify its dims \(dim_labels\)\.",
        message(re.sub(r", dim_labels=[^,]*", "", text), mesh),
    )
    text, mesh = stored_text("gpu_library_matmuls"), facts("gpu_library_matmuls")["mesh"]
    assert re.fullmatch(
        r"custom-call\S*: the call of __cublas\$lt\$matmul does not specify its contracting dims\.",
        message(text.replace("lhs_contracting_dimensions", "contracting"), mesh),
    )


def test_a_mesh_of_another_size(text, grid_mesh):
    assert message(text, {"data": 4, "model": 4}) == (
        "the program runs on 8 devices, but the mesh has 16 (data=4, model=4). Remedy: pass the mesh that the "
        "program was compiled for."
    )
    assert message(text, jp.MeshSpec().build(jax.devices()[:1])).startswith(
        "the program runs on 8 devices, but the mesh has 1 (one device)."
    )
    # The same number of devices in another arrangement only changes names.
    assert jp.audit(text, mesh=grid_mesh).count(axis="model") == 15


def test_a_program_of_several_slices(stored_text):
    text, mesh = stored_text("tpu_slices_every_collective"), {"replica": 2, "data": 4, "model": 2}
    assert message(text, {"data": 4}) == (
        "the program runs on 4 devices of each of 4 slices, but the mesh has 4 (data=4). Remedy: pass the mesh that "
        "the program was compiled for."
    )
    for wrong in ({"data": 32}, {"data": 18}):
        assert message(text, wrong).startswith("the program runs on 4 devices of each of 4 slices, but the mesh has ")
    assert re.fullmatch(
        (
            r"send\S*: a transfer between slices of type SHOUT is not supported\. Remedy: audit the "
            r"program for one slice\."
        ),
        message(text.replace("ALL_TO_ALL", "SHOUT"), mesh),
    )
    assert re.fullmatch(
        (
            r"send\S*: a transfer between slices of type unknown is not supported\. Remedy: audit the "
            r"program for one slice\."
        ),
        message(text.replace("_xla_megascale_transfer_type", "_type"), mesh),
    )
    assert re.fullmatch(
        (
            r"send\S*: unsupported notation _xla_megascale_target=\{\{1,2\S*\. Remedy: audit the "
            r"program for one slice\."
        ),
        message(text.replace("{{100000,", "{{1,2},{100000,"), mesh),
    )


def test_an_unknown_kind_or_axis(text):
    report = jp.audit(text, mesh={"data": 8, "model": 1})
    with pytest.raises(AuditError) as error:
        report.wire_bytes(kind="allreduce")
    assert str(error.value) == (
        "unknown collective kind 'allreduce'. Did you mean 'all-reduce'? Kinds: 'all-reduce', 'all-gather', "
        "'reduce-scatter', 'all-to-all', 'collective-permute', 'collective-broadcast'."
    )
    with pytest.raises(AuditError) as error:
        report.count(axis="modle")
    assert str(error.value) == "the mesh has no axis 'modle'. Did you mean 'model'? Axes: 'data', 'model'."
