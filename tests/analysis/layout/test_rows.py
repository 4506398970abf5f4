"""Equal rows of numbered layers are shown as one; totals and JSON hold every tensor."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jax
import optax

import jaxpar as jp
from jaxpar.analysis.layout.rows import Row, fold

ROW = Row("params", "", (8, 8), "float32", ("embed", "mlp"), ((), ()), 256, 256, (), (), ())


def listed(layers: int) -> Any:
    """A pytree whose layers are a list, all equal but for the last, which is wider."""

    def make(key: jax.Array) -> Any:
        widths = [16] * (layers - 1) + [32]
        return {"blocks": [{"up": jp.tag(jax.random.normal(key, (8, n)), "embed", "mlp")} for n in widths]}

    return make


def report(layers: int, rules: jp.Rules) -> Any:
    layout = jp.Layout(jp.MeshSpec(data=4).abstract(), rules)
    return jp.explain(layout, listed(layers), optax.sgd(0.1, momentum=0.9))


def test_listed_layers_are_one_row_and_the_totals_stay() -> None:
    found = report(26, jp.Rules(embed="data", mlp=None))
    text, page = found.to_text(), found._repr_html_()
    for shown in (text, page):
        assert "params/blocks/0-24/up (25 x)" in shown and "params/blocks/25/up" in shown
        assert "opt_state/0/trace/blocks/0-24/up (25 x)" in shown and "params/blocks/3/" not in shown
    assert len(text.splitlines()) < 30
    assert found.total("params").tensors == 26 and found.total("params").bytes == 4 * 8 * (25 * 16 + 32)
    assert [row["path"] for row in json.loads(found.to_json())["rows"]] == [row.path for row in found.rows]
    assert found["params/blocks/3/up"].device_bytes == 4 * 2 * 16


def test_equal_problems_fold_and_name_the_layers() -> None:
    found = report(4, jp.Rules(embed="data"))
    assert "params/blocks/0-2/up (3 x)" in found.to_text()
    assert "ERROR params/blocks/0-2/up [8, 16] (embed, mlp): " in found.to_text()
    assert len(found.problems) == 4


def paths(*given: str | Row) -> list[str]:
    rows = [replace(ROW, path=one) if isinstance(one, str) else one for one in given]
    return [folded.cells()[0] for folded in fold(rows)]


def test_numbers_of_layers_fold_and_other_numbers_do_not() -> None:
    layers = range(12)
    assert paths(*(f"params/block_{i}/attn/q" for i in layers)) == ["params/block_*/attn/q (12 x)"]
    assert paths(*(f"params/h{i}/mlp/{j}/w" for i in layers for j in range(2))) == ["params/h*/mlp/*/w (24 x)"]
    assert paths("params/mlp/w1", "params/mlp/w3") == ["params/mlp/w1", "params/mlp/w3"]
    assert paths("params/ws/0", "params/ws/1", "params/a") == ["params/ws/* (2 x)", "params/a"]
    # A layer with one bias more must not make "Dense_*" a product that does not exist.
    rows = [f"params/block_{i}/Dense_{j}/w" for i in range(2) for j in range(2) if (i, j) != (1, 1)]
    assert paths(*rows) == ["params/block_*/Dense_0/w (2 x)", "params/block_0/Dense_1/w"]


def test_a_row_that_differs_keeps_its_own_line() -> None:
    other = replace(ROW, path="params/blocks/1/w", dtype="bfloat16")
    shown = paths("params/blocks/0/w", other, "params/blocks/2/w")
    assert shown == ["params/blocks/0,2/w (2 x)", "params/blocks/1/w"]
    for change in ({"shape": (8, 4)}, {"dims": (None, "mlp")}, {"spec": (("data",), ())}, {"rules": ("a",)}):
        assert len(paths("params/blocks/0/w", replace(ROW, path="params/blocks/1/w", **change))) == 2
