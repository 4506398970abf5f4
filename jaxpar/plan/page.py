"""``page``: a checkup as one HTML file."""

from __future__ import annotations

import html

from jaxpar.plan.checkup import Checkup


def page(found: Checkup, title: str) -> str:
    """The checkup as a page."""
    return f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><pre>{html.escape(str(found))}</pre>"
