"""``page``: a checkup as one self-contained HTML file, with figures."""

from __future__ import annotations

import html

from jaxpar.analysis.checkup.checkup import Checkup
from jaxpar.analysis.checkup.figures import memory_picture, overlap_picture, wire_picture
from jaxpar.analysis.checkup.imbalance import COLUMNS
from jaxpar.analysis.html_document import document
from jaxpar.analysis.units import html_table


def page(found: Checkup, title: str, layout: str = "") -> str:
    """Returns a checkup as HTML: whether it fits, findings, figures (if matplotlib is installed), tables.

    Args:
      found: the checkup.
      title: of the page, such as the name of the run.
      layout: HTML to append, such as the report of ``explain``.

    >>> from jaxpar.analysis.checkup.findings import Finding
    >>> large = Finding("does not fit", "activations", "4 GiB too much", "a smaller batch", 0.0, 4 * 2**30, 1.25)
    >>> about = Checkup("v5e:2x2", {"data": 4}, None, None, None, None, (large,), ())
    >>> "<h1>a &lt; b</h1>" in page(about, "a < b")
    True
    """
    parts = [
        f'<p class="{"fits" if found.fits else "not"}"><b>{html.escape(found.headline())}</b></p>',
        _findings(found),
        *_pictures(found),
    ]
    if found.largest():
        parts.append("<h2>Largest tensors at the peak</h2>" + html_table(found.largest()))
    for heading, value in (("What it sends", found.audit), ("How long it takes", found.roofline)):
        if value is not None:
            parts.append(f"<h2>{heading}</h2>{value._repr_html_()}")
    if found.imbalance is not None:
        parts.append(f"<h2>If the load is imbalanced</h2><p>{html.escape(found.imbalance.headline())}</p>")
        parts.append(html_table(found.imbalance.rows(), COLUMNS) if found.imbalance.loads else "")
    if found.refused:
        parts.append(f"<h2>The compiler's words</h2><pre>{html.escape(found.refused)}</pre>")
    if layout:
        parts.append(f"<h2>How every tensor is sharded</h2>{layout}")
    return document(title, "".join(parts))


def _findings(found: Checkup) -> str:
    items = "".join(
        f"<li><b>{html.escape(f.kind)}</b>: {html.escape(f.text)}<br>"
        f'<span class="note">from {html.escape(f.where)}</span><br>Remedy: {html.escape(f.remedy)}</li>'
        for f in found.findings
    )
    return f"<h2>What to change, the worst first</h2><ol>{items}</ol>" if items else "<p>Nothing found to change.</p>"


def _pictures(found: Checkup) -> list[str]:
    rows = [(name, f"{size:,} bytes") for name, size in found.categories()]
    if found.memory is None or found.audit is None or found.roofline is None:
        return ["<h2>What the step is given, on one device</h2>" + html_table(rows) if rows else ""]
    exact = "Parameters, optimizer and batch are exact; the rest is read from the buffers alive at the peak."
    model = "A model, not a measurement, and sorted rather than in the order of the program."
    memory = f'<h2>Memory of one device</h2><p class="note">{exact}</p>'
    try:
        return [
            memory + memory_picture(found.memory),
            f"<h2>Bytes that one device sends in a step, by mesh axes</h2>{wire_picture(found.audit)}",
            f'<h2>What runs beside what</h2><p class="note">{model}</p>{overlap_picture(found.roofline)}',
        ]
    except ImportError as error:  # of a package that is missing or broken
        return [f'<p class="note">No figures: {html.escape(str(error))}</p>{memory}{html_table(rows)}']
