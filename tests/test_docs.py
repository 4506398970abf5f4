"""Links between pages lead somewhere, and docs/README.md lists every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    text = re.sub(r"^\s*```.*?^\s*```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dangling(page: Path) -> list[str]:
    """The links of a page to a file or a heading that does not exist."""
    found = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_a_page_and_a_heading(page: Path) -> None:
    assert dangling(page) == []


@pytest.mark.parametrize("contents", [DOCS / "README.md", DOCS / "decisions" / "README.md"], ids=["docs", "decisions"])
def test_the_contents_list_every_page_once(contents: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+\.md)\)", contents.read_text(encoding="utf-8"))
    pages = {page.relative_to(contents.parent).as_posix() for page in contents.parent.rglob("*.md")}
    if contents.parent == DOCS:
        pages = {page for page in pages if not page.startswith("decisions/")} | {"decisions/README.md"}
    assert sorted(links) == sorted(pages - {"README.md"})


def test_a_dangling_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One: `two`\n[a](#one-two) [b](#three) [c](other.md) [d](https://e.f)\n", encoding="utf-8")
    assert dangling(page) == ["#three", "other.md"]
