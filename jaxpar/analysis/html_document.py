"""``document``: an HTML page of its own from a part of one, with the style of every report."""

from __future__ import annotations

import html

_STYLE = """
:root { color-scheme: light }
body { font: 14px/1.45 sans-serif; max-width: 1500px; margin: 1.5em auto; padding: 0 1em }
body { color: #222; background: #fff }
h1 { font-size: 1.4em; overflow-wrap: anywhere } h2 { font-size: 1.1em; margin-top: 2em }
h4 { font-size: 1em; margin: 1.4em 0 .3em }
p, li, b { overflow-wrap: anywhere }
.table { overflow-x: auto }
table { border-collapse: collapse; font-size: 12px }
td, th { padding: 2px 10px 2px 0; text-align: left; vertical-align: top; min-width: 5em }
td:first-child { white-space: nowrap }
tr:nth-child(even) { background: #f6f6f6 }
pre { overflow-x: auto }
svg, img { max-width: 100%; height: auto }
.fits { color: #060 } .not { color: #b00 } .note { color: #666 } li { margin-bottom: .8em }
"""


def document(title: str, body: str) -> str:
    """Returns a self-contained HTML page.

    Args:
      title: plain text, shown as the heading too.
      body: HTML.

    >>> document("a < b", "<p>text</p>").endswith("<h1>a &lt; b</h1><p>text</p></body></html>")
    True
    """
    name = html.escape(title)
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f"{meta}<title>{name}</title><style>{_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{name}</h1>{body}</body></html>'
