"""The documentation site: Sphinx with MyST over the pages of this folder (see docs/README.md).

The pages stay readable on GitHub. Two things are added while the site is built: the lists of docs/README.md become the
tables of contents of the sections, and a link to a file outside this folder becomes a link to the repository.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.absolute()
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

# Autodoc imports jaxpar: it must not look for an accelerator.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")
warnings.filterwarnings("ignore", category=DeprecationWarning)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]

project = "jaxpar"
author = copyright = "the jaxpar authors"
version = release = PROJECT["version"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "index"
exclude_patterns = ["reports"]
language = "en"
show_warning_types = True

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# A page on GitHub names a file of code by its path alone.
suppress_warnings = ["myst.header"]
nb_execution_mode = "off"  # the notebooks are committed with their outputs; tests/test_notebooks.py runs them
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures in the source name their types; pages of long signatures are hard to read
autodoc_default_options = {"show-inheritance": False}
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True
WHEN = (
    "immediately",
    "when called",
    "when initialized",
    "when the model is built",
    "when the step is traced",
    "when traced",
)
napoleon_custom_sections = [(f"Raises {when}", "params_style") for when in WHEN]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "sphinx_book_theme"
html_title = "jaxpar"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {
    "repository_url": REPOSITORY,
    "repository_branch": "main",
    "path_to_docs": "docs",
    "use_repository_button": True,
    "use_source_button": True,
    "use_download_button": False,
    "show_navbar_depth": 1,
    "collapse_navbar": True,  # the whole tree on each of 200 pages would double the time of a build
    "show_toc_level": 2,
}


def copy_notebooks(app: Any) -> None:
    """Copies the notebooks below this folder, where Sphinx finds pages; git ignores the copies."""
    shutil.rmtree(DOCS / "notebooks", ignore_errors=True)
    shutil.copytree(ROOT / "notebooks", DOCS / "notebooks", ignore=shutil.ignore_patterns("*.py", ".*", "__pycache__"))


def section(title: str) -> list[str]:
    """The lines of one section of docs/README.md, without its heading."""
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"docs/README.md has no section {title!r}")
    return found[1].strip().splitlines()


def contents(title: str, page: Path) -> str:
    """The list of one section, with a table of contents of its pages, as a page of the site shows it.

    Args:
      title: the heading of the section in docs/README.md.
      page: the file of the page, to which the links become relative.
    """
    lines, names = [], []
    for line in section(title):
        caption = line if line and not line.startswith(("-", " ")) else ""
        lines.append(f"## {caption}" if caption else line)
        names += [name for _, name in re.findall(r"\[([^\]]*)\]\(([^)#]+\.(?:md|ipynb))\)", line)]
    text = "\n".join(lines)
    text = re.sub(r"\]\((?!https?:)([^)]+)\)", lambda link: f"]({relative(link[1], page)})", text)
    elsewhere = {"decisions/README.md"}  # a section of its own
    return text + toctree(inside(DOCS / name).rsplit(".", 1)[0] for name in names if name not in elsewhere)


def toctree(names: Iterable[str]) -> str:
    """A table of contents that only the navigation shows."""
    return "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(f"/{name}" for name in names) + "\n```\n"


def relative(link: str, page: Path) -> str:
    """A link of docs/README.md, relative to another page."""
    return os.path.relpath(DOCS / link, page.parent)


def inside(path: Path) -> str:
    """A file as Sphinx finds it below this folder, where the notebooks are copied to."""
    return os.path.relpath(os.path.normpath(path), DOCS).removeprefix("../")


def site_link(link: str, page: Path) -> str:
    """A relative link of a page, as the site has it: to a page of the site, or to a file in the repository."""
    name, hash_, anchor = link.partition("#")
    target = Path(os.path.normpath(page.resolve().parent / name))
    if target.is_relative_to(ROOT / "notebooks") and target.suffix == ".ipynb":
        target = DOCS / "notebooks" / target.name
    if target.is_relative_to(DOCS) and target.is_file() and "reports" not in target.parts:
        return os.path.relpath(target, page.parent) + hash_ + anchor
    kind = "tree" if target.is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{target.relative_to(ROOT).as_posix()}{hash_}{anchor}"


def read_source(app: Any, docname: str, source: list[str]) -> None:
    """Sphinx calls this with the text of every page before it is parsed."""
    page = Path(app.env.doc2path(docname))
    if "<!-- contents: " in source[0]:
        app.env.note_dependency(str(DOCS / "README.md"), docname=docname)
    text = re.sub(r"^<!-- contents: (.+) -->$", lambda mark: contents(mark[1], page), source[0], flags=re.MULTILINE)
    if docname == "decisions/README":
        text += toctree("decisions/" + name for name in re.findall(r"\]\((\d+[^)]*)\.md\)", text))
    source[0] = re.sub(
        r"(?<=\]\()(?!https?:|#|/)([^)\s]+)(?=\))", lambda link: site_link(link[1].replace("\\", ""), page), text
    )


def rename_sections(app: Any, kind: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Before napoleon: it does not take a heading with brackets, such as ``Raises (when traced):``, for a section."""
    lines[:] = [re.sub(r"^(\s*Raises) \((.+)\):$", r"\1 \2:", line) for line in lines]


def setup(app: Any) -> None:
    """Sphinx calls this first."""
    app.connect("builder-inited", copy_notebooks, priority=100)
    app.connect("autodoc-process-docstring", rename_sections, priority=100)
    app.connect("source-read", read_source)
