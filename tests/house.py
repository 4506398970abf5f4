"""What a machine can hold of the package's structure: who imports whom, circles, sizes, purposes, names of types."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FLOORS = (
    ("errors",),
    ("utils",),
    ("sharding", "data"),
    ("nnx", "linen"),
    ("parallel",),
    ("training",),
    ("checkpoint", "analysis"),
    ("inference", "testing", "planning"),
    ("pipeline", "context", "moe", "offload", "overlap", "lora", "compression", "optimizers", "spatial", "tensor"),
    ("models",),
    ("interop", "parameter_server"),
    ("app",),
)
"""The entries of the package, the lowest first. An entry imports only from lower floors."""

LONGEST = 500

type Modules = Mapping[str, Path]
type Arrows = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Package:
    """A package's files: ``modules`` by dotted name below the package (``""`` is the package).

    ``arrows`` are their imports, and ``types`` the names of the classes and type aliases that each defines.
    """

    modules: Modules
    arrows: Arrows
    types: Mapping[str, Sequence[str]]


def read(root: Path, name: str = "jaxpar") -> Package:
    """All modules below ``root``, and every import between them: lazy ones and those under ``TYPE_CHECKING`` count."""
    modules = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    arrows, types = {}, {}
    for module, file in modules.items():  # reading a file as syntax takes most of the time
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        arrows[module] = frozenset(_imports(nodes, modules, name)) - {module}
        types[module] = list(_types(nodes))
    return Package(modules, arrows, types)


def _types(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.TypeAlias) and isinstance(node.name, ast.Name):
            yield node.name.id


def _imports(nodes: Iterable[ast.AST], modules: Modules, name: str) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name[len(name) + 1 :] for alias in node.names if alias.name.split(".")[0] == name)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield f"a relative import of {node.module}"
        elif isinstance(node, ast.ImportFrom) and (node.module == name or (node.module or "").startswith(f"{name}.")):
            base = (node.module or "")[len(name) + 1 :]
            for alias in node.names:
                inner = f"{base}.{alias.name}".strip(".")
                yield inner if inner in modules else base


def upward(package: Package) -> list[str]:
    """Imports that do not go down. A public name, taken from the package itself, counts only below ``models``."""
    floors = {entry: level for level, entries in enumerate(FLOORS) for entry in entries}
    public = floors["models"]
    found = []
    for module, targets in package.arrows.items():
        entry = module.split(".")[0]
        if not entry:
            continue
        if entry not in floors:
            found.append(f"{module}: {entry} has no floor")
            continue
        for target in sorted(targets):
            to = target.split(".")[0]
            if not to:
                if floors[entry] < public:
                    found.append(f"{module} imports a public name from the package")
            elif to not in floors:
                found.append(f"{module} imports {target}, which has no floor")
            elif to != entry and floors[to] >= floors[entry]:
                found.append(f"{module} imports {target}, which is not on a lower floor")
    return found


def circles(package: Package) -> list[str]:
    """Circles of imports: of files, and at every depth of the files and folders that stand side by side."""
    graphs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module, targets in package.arrows.items():
        if not module:
            continue
        for target in targets:
            if target:
                graphs["files"][module].add(target)
                parent, a, b = _side_by_side(package, module, target)
                graphs[parent][a].add(b)
    return [f"{name}: {' → '.join(circle)}" for name, graph in graphs.items() for circle in _strong(graph)]


def _side_by_side(package: Package, module: str, target: str) -> tuple[str, str, str]:
    """The folder that holds both, and the entries of it that lead to each."""
    paths = [package.modules[name].relative_to(package.modules[""].parent).parts for name in (module, target)]
    depth = 0
    while paths[0][depth] == paths[1][depth]:
        depth += 1
    return "/".join(paths[0][:depth]) or "jaxpar", paths[0][depth], paths[1][depth]


def _strong(graph: Mapping[str, Iterable[str]]) -> Iterator[list[str]]:
    """The strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    yield from found


def too_long(files: Iterable[Path]) -> list[str]:
    counts = {file: file.read_text(encoding="utf-8").count("\n") for file in files}
    return [f"{file}: {count} lines" for file, count in counts.items() if count > LONGEST]


def purposeless(root: Path) -> list[str]:
    """Folders whose ``__init__.py`` does not begin with one line that says what the folder is for."""
    found = []
    for folder in sorted({file.parent for file in root.rglob("*.py")}):
        init = folder / "__init__.py"
        text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) if init.is_file() else None
        if not text or not text.splitlines()[0].endswith("."):
            found.append(folder.relative_to(root.parent).as_posix())
    return found


def types_twice(package: Package) -> dict[str, list[str]]:
    """Names of types (classes, type aliases) that are defined more than once, and where."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, names in package.types.items():
        for name in names:
            places[name].append(module)
    return {name: sorted(modules) for name, modules in places.items() if len(modules) > 1}


def wide_lines(files: Iterable[Path], most: int = 120) -> list[str]:
    """Lines of more than 120 characters, except tables, lines with a link, and code blocks of pages."""
    found = []
    for file in files:
        fenced = False
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            fenced ^= file.suffix == ".md" and line.startswith("```")
            if (
                not fenced
                and len(line) > most
                and not line.lstrip().startswith("|")
                and "](" not in line
                and "://" not in line
            ):
                found.append(f"{file}:{number}")
    return found


def resolves(name: str) -> bool:
    """Whether a dotted name is that of a module, or of something that one defines."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            fields = getattr(value, "__dataclass_fields__", {})
            if not hasattr(value, part) and part not in fields:
                return False
            value = getattr(value, part, None)
        return True
    return False


def tree(root: Path) -> str:
    """The package's entries as text, the highest floor first, each with its purpose."""
    lines = []
    for entries in reversed(FLOORS):
        for entry in entries:
            lines += _described(root, entry, 0)
    return "\n".join(lines)


def _described(root: Path, entry: str, depth: int) -> Iterator[str]:
    folder = root / entry
    file = folder / "__init__.py" if folder.is_dir() else root / f"{entry}.py"
    purpose = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()[0].replace("``", "")
    name = f"{'  ' * depth}{Path(entry).name}{'/' if folder.is_dir() else '.py'}"
    yield f"{name:<18}{purpose}"
    if folder.is_dir() and depth < 1:
        for inner in sorted(f.name for f in folder.iterdir() if (f / "__init__.py").is_file()):
            yield from _described(root, f"{entry}/{inner}", depth + 1)


MOST_WORDS = 3
"""The most words of a name. A test outside of ``tests/errors`` that expects more of an error pins its wording."""


def pins(files: Iterable[Path]) -> list[str]:
    """Places of tests that pin the wording of an error: a ``match`` of a sentence, or ``str(error.value)``."""
    places = set()
    for file in files:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        looks = {
            f"str({item.optional_vars.id}.value)"
            for node in nodes
            if isinstance(node, ast.With)
            for item in node.items
            if isinstance(item.optional_vars, ast.Name) and _called(item.context_expr) in ("raises", "warns")
        }
        named = {  # "name" in str(error.value)
            id(node.comparators[0])
            for node in nodes
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn) and _is_name(node.left)
        }
        for node in nodes:
            if isinstance(node, ast.Call) and _called(node) in ("raises", "warns"):
                if not all(_is_name(option.value) for option in node.keywords if option.arg == "match"):
                    places.add(f"{file}:{node.lineno}")
            elif _called(node) == "str" and ast.unparse(node) in looks and id(node) not in named:
                places.add(f"{file}:{node.lineno}")
    return sorted(places)


def _called(node: ast.AST) -> str:
    name = node.func if isinstance(node, ast.Call) else node
    return name.attr if isinstance(name, ast.Attribute) else name.id if isinstance(name, ast.Name) else ""


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) <= MOST_WORDS
