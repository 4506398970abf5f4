"""Compiled programs that several of the auditor's tests share: stored ones, and ones that are compiled once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import pytest
from stored import facts as read_facts
from stored import text as read_text

import jaxpar as jp
from jaxpar.analysis.hlo.audit import Audit

_text, _facts = cache(read_text), cache(read_facts)


@cache
def _audit(name: str) -> Audit:
    return jp.audit(_text(name), mesh=_facts(name)["mesh"])


@pytest.fixture(scope="session")
def stored_text() -> Callable[[str], str]:
    """``stored_text(name)``: the HLO text of a fixture."""
    return _text


@pytest.fixture(scope="session")
def facts() -> Callable[[str], dict[str, Any]]:
    """``facts(name)``: the known facts of a fixture's program."""
    return _facts


@pytest.fixture(scope="session")
def stored() -> Callable[[str], Audit]:
    """``stored(name)``: the audit of a fixture."""
    return _audit


@pytest.fixture(scope="session")
def line_mesh() -> jax.sharding.Mesh:
    """Eight devices on ``data``; every other axis has one."""
    return jp.MeshSpec(data=8).build()


@pytest.fixture(scope="session")
def grid_mesh() -> jax.sharding.Mesh:
    """Four devices on ``data`` × two on ``model``."""
    return jp.MeshSpec(data=4, model=2).build()


def compiled_text(lowered: jax.stages.Lowered) -> str:
    return str(lowered.compile().as_text())


@pytest.fixture(scope="session")
def text_of() -> Callable[[jax.stages.Lowered], str]:
    """``text_of(lowered)``: the HLO text of a program from the CPU compiler."""
    return compiled_text
