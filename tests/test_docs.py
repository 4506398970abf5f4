"""Links between pages and names of our API lead somewhere, and docs/README.md lists every page."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import jaxpar as jp

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


def test_links_lead_to_a_page_and_a_heading() -> None:
    found = {page.relative_to(ROOT).as_posix(): dangling(page) for page in PAGES}
    assert {page: links for page, links in found.items() if links} == {}


PUBLIC = (
    "analysis|compression|context|data|errors|inference|interop|linen|lora|models|nnx|offload|overlap|pipeline|testing"
)


def deep_imports(text: str) -> list[str]:
    """The imports, and the names in code spans, that reach below the public modules."""
    names = re.findall(r"(?:from|import|`)\s*(jaxpar(?:\.\w+)+)", text)
    names = [name for name in names if not re.fullmatch(rf"jaxpar(\.[A-Za-z]\w*)?|jaxpar\.({PUBLIC})\.\w+", name)]
    return [name for name in names if name.rsplit(".", 1)[-1] not in ("py", "yaml")]


def test_no_page_tells_a_user_to_import_from_a_deeper_path() -> None:
    scripts = sorted((ROOT / "notebooks").glob("*.py"))
    pages = [page for page in PAGES if page.parent.name != "decisions"]
    found = {file.name: deep_imports(file.read_text(encoding="utf-8")) for file in (*pages, *scripts)}
    assert {name: names for name, names in found.items() if names} == {}
    assert deep_imports("from jaxpar.sharding.rules import Rules; from jaxpar.models import preset") == [
        "jaxpar.sharding.rules"
    ]


def missing_names(text: str) -> list[str]:
    """The names of our API, such as ``jp.Rules``, that do not exist."""
    return [name for name in re.findall(r"\bjp(?:\.[A-Za-z_]\w*)+", text) if not is_public(name)]


def is_public(name: str) -> bool:
    value: Any = jp
    for part in name.split(".")[1:]:
        if hasattr(value, part):
            value = getattr(value, part)
        elif hasattr(value, "__path__") and importlib.util.find_spec(f"{value.__name__}.{part}"):
            value = importlib.import_module(f"{value.__name__}.{part}")
        else:
            return part in getattr(value, "__annotations__", ())  # a field of a dataclass
    return True


def test_every_name_of_our_api_exists_in_pages_and_in_remedies() -> None:
    files = [*PAGES, *(ROOT / "jaxpar").rglob("*.py")]
    found = {file.relative_to(ROOT).as_posix(): missing_names(file.read_text(encoding="utf-8")) for file in files}
    assert {name: names for name, names in found.items() if names} == {}
    assert missing_names("jp.Rules, `jp.testing.nothing`, jp.Layout.rules, jp.nothing()") == [
        "jp.testing.nothing",
        "jp.nothing",
    ]


@pytest.mark.parametrize("contents", [DOCS / "README.md", DOCS / "decisions" / "README.md"], ids=["docs", "decisions"])
def test_the_contents_list_every_page_once(contents: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+\.md)\)", contents.read_text(encoding="utf-8"))
    pages = {page.relative_to(contents.parent).as_posix() for page in contents.parent.rglob("*.md")}
    if contents.parent == DOCS:
        pages = {page for page in pages if not page.startswith("decisions/")} | {"decisions/README.md"}
    site = {
        "index.md",
        "notebooks.md",
        *(page for page in pages if page.endswith("/index.md")),
    }  # built from the contents
    assert sorted(links) == sorted(pages - site - {"README.md"})


def test_a_dangling_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One: `two`\n[a](#one-two) [b](#three) [c](other.md) [d](https://e.f)\n", encoding="utf-8")
    assert dangling(page) == ["#three", "other.md"]
