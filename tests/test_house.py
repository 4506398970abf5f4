"""The house rules that a machine can hold: lint, format, types, imports, sizes, names."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import error_texts
import house
import pytest

from jaxpar.errors import MeshError, RulesError

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "jaxpar").rglob("*.py"))
SCRIPTS = sorted(file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py"))


@pytest.fixture(scope="module")
def package() -> house.Package:
    return house.read(ROOT / "jaxpar")


@pytest.mark.parametrize(
    "command", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)], ids=" ".join
)
def test_lint_format_and_types_are_clean(command: tuple[str, ...]) -> None:
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_imports_only_go_down(package: house.Package) -> None:
    assert house.upward(package) == []


def test_there_are_no_circles_of_imports(package: house.Package) -> None:
    assert house.circles(package) == []


def test_files_stay_small() -> None:
    assert house.too_long([*SOURCES, *SCRIPTS]) == []


def test_every_folder_says_what_it_is_for() -> None:
    assert house.purposeless(ROOT / "jaxpar") == []


def test_a_type_name_is_defined_once(package: house.Package) -> None:
    assert house.types_twice(package) == {}


def test_no_two_test_files_have_the_same_name() -> None:
    """Pytest imports a test file by its name alone, so a run of all tests leaves one of two namesakes out."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_file_uses_private_jax() -> None:
    assert [str(file) for file in SOURCES if "jax._src" in file.read_text(encoding="utf-8")] == []


PLANTED = {
    "upward": ({"sharding/mesh.py": "from jaxpar.training import step"}, house.upward),
    "upward, lazily": ({"sharding/mesh.py": "def f():\n    import jaxpar.training.step"}, house.upward),
    "upward, for types": (
        {
            "sharding/mesh.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from jaxpar.training.step import x"
        },
        house.upward,
    ),
    "the same floor": (
        {
            "checkpoint/__init__.py": "",
            "checkpoint/save.py": "from jaxpar.analysis import audit",
            "analysis/audit.py": "",
        },
        house.upward,
    ),
    "no floor": ({"room/__init__.py": "", "room/a.py": "from jaxpar.sharding import mesh"}, house.upward),
    "a public name": ({"parallel/__init__.py": "", "parallel/a.py": "from jaxpar import Layout"}, house.upward),
    "the package itself": ({"parallel/__init__.py": "", "parallel/a.py": "import jaxpar as jp"}, house.upward),
    "a relative import": ({"training/a.py": "from ..sharding import mesh"}, house.upward),
    "a circle of files": (
        {
            "training/a.py": "from jaxpar.training import b",
            "training/b.py": "def f():\n    from jaxpar.training.a import x",
        },
        house.circles,
    ),
    "a circle of folders": (
        {
            "parallel/__init__.py": "",
            "parallel/one/__init__.py": "",
            "parallel/two/__init__.py": "",
            "parallel/one/a.py": "from jaxpar.parallel.two.b import x",
            "parallel/two/b.py": "",
            "parallel/two/c.py": "from jaxpar.parallel.one.d import x",
            "parallel/one/d.py": "",
        },
        house.circles,
    ),
    "a type twice": ({"training/a.py": "class Name: ...", "sharding/b.py": "type Name = int"}, house.types_twice),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(name: str, tmp_path: Path) -> None:
    files, rule = PLANTED[name]
    root = tmp_path / "jaxpar"
    clean = {"__init__.py": "", "sharding/__init__.py": "", "sharding/mesh.py": ""}
    clean |= {"training/__init__.py": "", "training/step.py": "from jaxpar.sharding import mesh"}

    def found(files: dict[str, str], rule: Callable[[house.Package], object]) -> object:
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        return rule(house.read(root))

    assert not found(clean, rule)
    assert found(files, rule)


def test_a_long_file_is_found(tmp_path: Path) -> None:
    files = [tmp_path / "test_short.py", tmp_path / "test_long.py"]
    for file, lines in zip(files, (500, 501), strict=True):
        file.write_text("x = 1\n" * lines, encoding="utf-8")
    assert house.too_long(files) == [f"{files[1]}: 501 lines"]


def test_a_folder_without_a_purpose_and_a_wide_line_are_found(tmp_path: Path) -> None:
    root = tmp_path / "jaxpar"
    (root / "room").mkdir(parents=True)
    (root / "__init__.py").write_text('"""A purpose."""\n', encoding="utf-8")
    (root / "room" / "a.py").write_text(f"# {'x' * 120}\n| {'x' * 120}\n# {'x' * 120} https://a.b\n", encoding="utf-8")
    assert house.purposeless(root) == ["jaxpar/room"]
    assert house.wide_lines([root / "room" / "a.py"]) == [f"{root / 'room' / 'a.py'}:1"]


def test_the_diagram_of_the_architecture_is_true(pytestconfig: pytest.Config) -> None:
    page = ROOT / "docs" / "architecture.md"
    text = page.read_text(encoding="utf-8")
    start, end = text.index("<!-- tree -->"), text.index("<!-- end of the tree -->")
    want = f"<!-- tree -->\n```\n{house.tree(ROOT / 'jaxpar')}\n```\n"
    if pytestconfig.getoption("--update-golden"):
        page.write_text(text[:start] + want + text[end:], encoding="utf-8")
    else:
        assert text[start:end] == want, "pytest tests/test_house.py --update-golden"


def test_the_page_about_the_architecture_is_short() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 80


def test_lines_are_not_wide() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    configs = (ROOT / "configs").rglob("*.yaml")
    assert house.wide_lines([*SOURCES, *SCRIPTS, *pages, *configs]) == []


def test_references_in_docstrings_resolve() -> None:
    found = {
        (file.relative_to(ROOT).as_posix(), name)
        for file in SOURCES
        for name in re.findall(r":(?:func|class|mod|meth|data|attr):`~?(jaxpar[\w.]*)`", file.read_text("utf-8"))
    }
    assert found and [(file, name) for file, name in sorted(found) if not house.resolves(name)] == []


def test_paths_in_pages_exist() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    path = r"(?<![\w/.])((?:jaxpar|tests|benchmarks|configs)/[\w/]+\.(?:py|yaml|json))"
    named = {(page.name, name) for page in pages for name in re.findall(path, page.read_text("utf-8"))}
    assert named and [(page, name) for page, name in sorted(named) if not (ROOT / name).exists()] == []


def test_one_module_creates_all_user_contexts() -> None:
    """A context that is created while jax traces makes the next call compile again: ``jaxpar/utils/contexts.py``."""
    creators = [
        file.relative_to(ROOT).as_posix() for file in SOURCES if "make_user_context(" in file.read_text("utf-8")
    ]
    assert creators == ["jaxpar/utils/contexts.py"]


def code_lines(file: Path) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    text = file.read_text(encoding="utf-8")
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for number, line in lines if number not in docs and line.strip() and not line.strip().startswith("#"))


def test_the_sharding_layer_stays_small() -> None:
    """All of ``sharding/`` but ``hardware/``, and nothing of it is left out of the count."""
    sizes = {file.stem: code_lines(file) for file in sorted((ROOT / "jaxpar" / "sharding").glob("*.py"))}
    assert sum(sizes.values()) <= 600, sizes


def test_the_wording_of_an_error_is_pinned_in_the_tables_alone() -> None:
    assert house.pins(SCRIPTS) == []


def test_each_text_of_an_error_stands_once() -> None:
    tables = {file.name: file.read_text(encoding="utf-8").splitlines() for file in error_texts.TEXTS.iterdir()}
    assert {name: lines == sorted(lines) for name, lines in tables.items()} == dict.fromkeys(tables, True)
    assert {name: len(lines) for name, lines in tables.items() if len(lines) > 300} == {}
    assert [line for line, count in Counter(itertools.chain(*tables.values())).items() if count > 1] == []


@pytest.mark.parametrize(
    "test",
    [
        'with pytest.raises(E, match="a text of four"): f()',
        "with pytest.raises(E, match=text): f()",
        'with pytest.raises(E, match=f"{text} is"): f()',
        "with pytest.raises(E) as error: f()\nassert str(error.value) == text",
        "with raises(E, name) as error: f()\nassert str(error.value).startswith(text)",
        'with raises(E, name) as error: f()\nassert "a text of four" in str(error.value)',
        "def said():\n    with raises(E, name) as error: f()\n    return str(error.value)",
    ],
)
def test_a_pinned_sentence_is_found(test: str, tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(f'{test}\n\nwith raises(E, "a") as other, pytest.raises(E, match="up to three"): f()\n')
    assert len(house.pins([file])) == 1
    file.write_text('with raises(E, name) as error: f()\nassert "name" not in str(error.value)\n')
    assert house.pins([file]) == []


WORDED = "the mesh axes 'data', 'model' are -1, but only one can be. Remedy: give the others a size."


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (MeshError(WORDED.replace("give", "Give")), ["'data'"]),
        (RulesError(WORDED), ["'data'"]),
        (MeshError(WORDED), ["'data'", "'context'"]),
        (MeshError(WORDED), ["the others a size"]),
        (MeshError(WORDED), []),
        (MeshError(f"{WORDED}\n"), ["'data'"]),
    ],
    ids=["words", "class", "name", "sentence", "no name", "end"],
)
def test_an_error_of_another_text_class_or_name_is_found(error: Exception, names: list[str]) -> None:
    error_texts.check(MeshError(WORDED), "'data'", "'model'")
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        error_texts.check(error, *names)


def test_a_marker_stands_for_its_part_alone() -> None:
    line = error_texts.pattern("E: <tmp>/a has <number> bytes (<rest>). Remedy: copy it.")
    assert line.fullmatch("E: /tmp/x-0/test_it0/a has 1,024 bytes (gone). Remedy: copy it.")
    assert not line.fullmatch("E: /tmp/x-0/test_it0/a has no bytes (gone). Remedy: copy it.")
    assert not line.fullmatch("E: /tmp/x-0/test_it0/a has 1,024 bytes (gone). Remedy: copy it again.")
