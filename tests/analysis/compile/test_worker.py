"""The compiling process: what it writes of a program, and the errors that it hands on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import in_process_compiler
import jax
import jax.numpy as jnp
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.analysis.compile.ahead_of_time import aim, compile_program
from jaxpar.errors import CompileError, MeshError
from jaxpar.sharding.hardware.topology import Topology

TOPOLOGY = Topology.parse("v5e:2x2")


def compiled(*, rows: int = 12) -> Any:
    """The mean of squares of a sharded array, which is given back too, in its memory."""
    layout = aim(jp.Layout(jp.MeshSpec(data=4).abstract(), jp.Rules(batch="data")), TOPOLOGY)
    x = jax.ShapeDtypeStruct((rows, 5), "float32", sharding=layout.sharding(("batch", None)))
    return compile_program(TOPOLOGY, layout, lambda x: (x + 1, jnp.square(x).mean()), (x,), donated=1)


def test_a_program_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = in_process_compiler.use(monkeypatch, tmp_path, 4)
    first, second = (compiled() for _ in range(2))  # on one line: what is cached knows the lines of a program
    assert (first.cached, second.cached, asked) == (False, True, ["v5e:2x2"])
    assert second.text == first.as_text() and "all-reduce" in first.text and "f32[3,5]" in first.text
    rows = 4 * 3 * 5
    assert first.memory["argument"] == first.memory["alias"] == rows
    assert rows + 4 <= first.memory["output"] <= rows + 32  # and the table of a tuple
    assert (first.topology, first.device_kind, first.warnings) == ("v5e:2x2", "cpu", ())
    assert first.compile_cpu_seconds >= 0 and not list(tmp_path.glob("tmp*"))
    compiled(rows=16)
    assert len(asked) == 2


def test_the_compilers_error_is_quoted_and_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = in_process_compiler.use(monkeypatch, tmp_path, 4)
    monkeypatch.setattr(jax.export, "deserialize", lambda program: 1 / 0)
    for _ in range(2):
        with raises(CompileError, "v5e:2x2"):
            compiled()
    assert len(asked) == 2


def test_devices_that_cannot_form_the_mesh_are_an_error_of_the_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process_compiler.use(monkeypatch, tmp_path, 4)
    text = "the mesh data=4 does not fit"

    def refuse(*_: Any) -> None:
        raise MeshError(text)

    monkeypatch.setattr("jaxpar.analysis.compile.worker._arranged", refuse)
    with raises(MeshError, "data=4"):
        compiled()
