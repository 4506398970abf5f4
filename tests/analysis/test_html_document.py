"""Reports as HTML pages: in a browser at the widths of a phone and a desktop, nothing overflows and nothing fails."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

import jaxpar as jp
from jaxpar.analysis.html_document import document

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SIZES = "<script>document.title = document.documentElement.scrollWidth + ' of ' + window.innerWidth</script>"


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
    # A window of Chromium is at least 500 pixels wide, so the page is shown in a frame of the width.
    file.write_text(page().replace("</body>", f"{SIZES}</body>"), encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe id="f" src="page.html" style="width:{width}px;height:800px;border:0"></iframe>'
        "<script>f.onload = () => { document.title = f.contentDocument.title }</script>",
        encoding="utf-8",
    )
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--window-size=1400,900",
    ]
    command = [
        str(BROWSER),
        *options,
        "--enable-logging=stderr",
        "--virtual-time-budget=2000",
        "--dump-dom",
        frame.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<title>(\d+) of (\d+)</title>", done.stdout)
    assert found is not None and int(found[1]) <= int(found[2]) == width
    assert "CONSOLE" not in done.stderr
