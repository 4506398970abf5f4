"""Reports as HTML pages: in a browser at the widths of a phone and a desktop, nothing overflows and nothing fails."""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest
from browser import BROWSER, look_at

import jaxpar as jp
from jaxpar.analysis.html_document import document


def page() -> str:
    layout = jp.Layout(jp.MeshSpec(data=4, model=2).abstract(), jp.Rules(embed="data", mlp="model"))
    name = "/".join(["a_long_name_of_a_module"] * 5)
    make = lambda key: {name: jp.tag(jnp.zeros((8, 16)), "embed", "mlp")}
    return document("x" * 200, jp.explain(layout, make, optax.adam(1e-3))._repr_html_())


def test_a_page_stands_by_itself() -> None:
    text = page()
    assert text.startswith("<!doctype html>") and "<style>" in text and 'name="viewport"' in text
    assert text.index("<h4>totals") < text.index("<h4>params")
    assert not re.search(r"(src|href)=", text)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows_in_a_browser(width: int, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(), encoding="utf-8")
    seen = look_at(file, width, tmp_path)
    assert seen.content <= seen.window == width and seen.console == []
