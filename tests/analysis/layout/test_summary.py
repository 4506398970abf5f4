"""The summary of a report: totals first, then a line for each parameter, and every name in full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import jaxpar as jp
from jaxpar.analysis.layout.rows import Row

RULES = jp.Rules(embed=None, mlp="model", params={"embed": "data"})


def report(tx: optax.GradientTransformation, rules: jp.Rules = RULES, size: int = 16) -> Any:
    layout = jp.Layout(jp.MeshSpec(data=4, model=2).abstract(), rules)
    make = lambda key: {"up": jp.tag(jnp.zeros((8, size)), "embed", "mlp"), "norm": jp.tag(jnp.zeros(8), None)}
    return jp.explain(layout, make, tx)


def test_moments_that_follow_their_parameter_have_no_lines() -> None:
    assert report(optax.adam(1e-3)).summary() == (
        "mesh: data 4 × model 2 = 8 devices\n"
        "\n"
        "part       tensors     bytes  bytes/device  replicated  copies\n"
        "params           2     544 B          96 B       5.88%    1.41\n"
        "opt_state        5  1.07 KiB         196 B       6.23%    1.44\n"
        "other            2      12 B          12 B     100.00%    8.00\n"
        "\n"
        "parameter  shape  sharded               bytes/device\n"
        "norm       8      replicated                    32 B\n"
        "up         8×16   embed=data mlp=model          64 B\n"
        "\n"
        "optimizer: mu, nu are sharded as their parameters\n"
    )


def test_moments_that_differ_are_listed_once() -> None:
    rules = jp.Rules(embed=None, mlp="model", optimizer=jp.over("data", min_bytes=0))
    text = report(optax.adam(1e-3), rules).summary()
    assert "up         8×16   mlp=model          256 B" in text
    assert "mu, nu of up               8×16   embed=data mlp=model          64 B" in text


def test_other_tensors_of_the_optimizer_are_listed() -> None:
    text = report(optax.adafactor(1e-3, min_dim_size_to_factor=4)).summary(100)
    assert "optimizer, other tensors" in text and "v_row/up" in text


def row(path: str, **changes: Any) -> Row:
    return replace(
        Row("params", path, (8, 8), "float32", ("embed", None), (("data",), ("model",)), 256, 32, (), (), ()), **changes
    )


@pytest.mark.parametrize("length", [8, 60, 79, 120])
def test_names_are_never_cut(length: int) -> None:
    name = "n" * length
    found = replace(report(optax.sgd(0.1)), rows=(row(f"params/{name}"), row("params/x", problems=("wrong",))))
    lines = found.summary().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(name))
    detail = lines[at] + lines[at + 1]
    assert "embed=data dim 1=model" in detail and "32 B" in detail
    assert max(len(line) for line in lines) <= max(80, length)
    assert any("ERROR" in line for line in lines)


def test_the_representation_is_one_line() -> None:
    assert repr(report(optax.sgd(0.1))) == "Report(mesh: data 4 × model 2 = 8 devices; 4 tensors, 96 B a device)"
