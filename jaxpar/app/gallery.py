"""``jaxpar gallery``: recipes for models and chips, with the figures of their compiled steps. Needs no jax."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from tyro.conf import Positional, arg

from jaxpar.analysis.units import aligned, show_bytes
from jaxpar.app.arguments import Flag
from jaxpar.app.shipped_configs import shipped_folder
from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.utils.yaml_config import load_yaml, merge

FIGURES = "figures.json"
_CHIPS = "# Chips: "
_UNHASHED = ("output",)


@dataclass(frozen=True)
class Figures:
    """What the step of a recipe takes, on its chips.

    Attributes:
      recipe: the digest of the recipe that was measured.
      source: ``compiled``: from the program that the chips' compiler made; ``estimated``: by the planner's cost model,
        where there is no compiler.
      fits: whether the step fits into the memory of a device.
      step_seconds: seconds of a step by the roofline.
      wire_bytes: bytes that a device sends in a step.
      peak_bytes: bytes of a device at the peak.
      memory_bytes: bytes of a device that a program may use.
      model_flops_utilization: FLOPs of the model by those that the chips could do in that time; 0 if unknown.
      versions: of the compiler, such as ``{"jax": "0.12.0.1"}``.
    """

    recipe: str
    source: Literal["compiled", "estimated"]
    fits: bool
    step_seconds: float
    wire_bytes: float
    peak_bytes: float
    memory_bytes: float
    model_flops_utilization: float
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Recipe:
    """A recipe of the gallery.

    Attributes:
      name: the file's name without suffix.
      file: its YAML file.
      sentence: what it is for.
      chips: the topology that it is meant for, such as ``v5e:4x4``.
      figures: those of this recipe; ``None`` if they were measured before it was last changed, or never.
    """

    name: str
    file: Path
    sentence: str
    chips: str
    figures: Figures | None


def gallery_folder() -> Path:
    """Returns the folder of the recipes: that of the installed package, or that of a checkout."""
    return shipped_folder() / "gallery"


def read_recipes(folder: Path | None = None) -> list[Recipe]:
    """Returns the recipes of the gallery, by name.

    Args:
      folder: the folder of the recipes; by default that of this package.

    Raises:
      ConfigError: the folder does not exist, a recipe does not begin with a sentence and its chips, or the figures are
        not as :class:`Figures` says.

    >>> [recipe.chips for recipe in read_recipes() if recipe.name == "pretrain_8b_v5e"]
    ['v5e:4x4']
    """
    folder = gallery_folder() if folder is None else folder
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder. Remedy: install jaxpar with its configurations.")
    measured = read_figures(folder)
    return [_read_recipe(file, measured) for file in sorted(folder.glob("*.yaml"))]


def find_recipe(name: str, recipes: Iterable[Recipe]) -> Recipe:
    """Returns the recipe with this name.

    Raises:
      ConfigError: there is none.
    """
    by_name = {recipe.name: recipe for recipe in recipes}
    if name not in by_name:
        raise ConfigError(
            f"unknown recipe {name!r}.{did_you_mean(name, by_name)} Remedy: `jaxpar gallery` lists the recipes."
        )
    return by_name[name]


def read_figures(folder: Path) -> dict[str, Figures]:
    """Returns the measured figures: name of a recipe → figures.

    Raises:
      ConfigError: the file is not as :class:`Figures` says.
    """
    file = folder / FIGURES
    if not file.exists():
        return {}
    names = {field.name for field in fields(Figures)}
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        wrong = next((name for name, row in rows.items() if set(row) != names), None)
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{file}: no figures of recipes: {error}. Remedy: measure them again.") from error
    if wrong is not None:
        raise ConfigError(f"{file}: {wrong} must have the keys {', '.join(sorted(names))}. Remedy: measure it again.")
    return {name: Figures(**row) for name, row in rows.items()}


def write_figures(folder: Path, measured: Mapping[str, Figures]) -> None:
    """Write the figures of recipes, sorted by name."""
    rows = {name: asdict(measured[name]) for name in sorted(measured)}
    (folder / FIGURES).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def merged(file: Path) -> dict[str, Any]:
    """Returns a recipe with all that it extends, and with its layout's mesh and rules, as plain data."""
    data = load_yaml(file, paths=("layout",))
    layout = data.pop("layout", None)
    own = {} if layout is None else load_yaml(file.parent / layout)
    tables = {key: merge(own.get(key) or {}, data.pop(key, None) or {}) for key in ("mesh", "rules")}
    return {"model": data.pop("model", None), **tables, **data}


def digest(file: Path) -> str:
    """Returns a digest of all values of a recipe that its step depends on; comments and file names change nothing."""
    data = {key: value for key, value in merged(file).items() if key not in _UNHASHED}
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _read_recipe(file: Path, measured: Mapping[str, Figures]) -> Recipe:
    lines = file.read_text(encoding="utf-8").splitlines()
    at = next((i for i, line in enumerate(lines) if line.startswith(_CHIPS)), 0)
    head = lines[:at]
    if not head or not all(line.startswith("# ") for line in head):
        raise ConfigError(
            f"{file}: a recipe begins with a sentence and its chips. Remedy: '# Pretrain 1B parameters.' and then "
            f"'{_CHIPS}v5e:4x4'."
        )
    sentence, chips = " ".join(line[2:].strip() for line in head), lines[at].removeprefix(_CHIPS).strip()
    figures = measured.get(file.stem)
    current = figures if figures is not None and figures.recipe == digest(file) else None
    return Recipe(file.stem, file, sentence, chips, current)


def listed(recipes: Iterable[Recipe]) -> str:
    """Returns the recipes as text of at most 80 columns: two lines each."""
    rows = [("recipe", "chips", "fits, peak", "step", "sent")]
    sentences = []
    for recipe in recipes:
        rows.append((recipe.name, recipe.chips, *_cells(recipe.figures)))
        sentences.append(f"  {recipe.sentence}")
    head, *lines = aligned(rows)
    text = [head, *(line for pair in zip(lines, sentences, strict=True) for line in pair), ""]
    text += [
        "fits, peak: whether a step fits into a device's memory, and its peak in bytes",
        "step: by the roofline of the program that the chips' compiler made; sent: bytes",
        "that a device sends in a step.  ~: estimated, not compiled.",
        "jaxpar gallery NAME shows a recipe and the commands that run it.",
    ]
    return "\n".join(text) + "\n"


def _cells(figures: Figures | None) -> tuple[str, str, str]:
    if figures is None:
        return ("not measured", "", "")
    mark = "~" if figures.source == "estimated" else ""
    fits = ("yes, " if figures.fits else "NO, ") + mark + show_bytes(round(figures.peak_bytes))
    return fits, mark + show_seconds(figures.step_seconds), mark + show_bytes(round(figures.wire_bytes))


def show_seconds(seconds: float) -> str:
    """Returns seconds as text.

    >>> show_seconds(0.1544), show_seconds(14.43)
    ('154.4 ms', '14.43 s')
    """
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def shown(recipe: Recipe, *, full: bool = False) -> str:
    """Returns a recipe as YAML that runs, with its figures and commands as comments.

    Args:
      recipe: the recipe.
      full: with everything that it extends, so that the text needs no other file.
    """
    text = recipe.file.read_text(encoding="utf-8")
    if full:
        comments = "".join(line + "\n" for line in text.splitlines() if line.startswith("#"))
        text = comments + yaml.safe_dump(merged(recipe.file), sort_keys=False, default_flow_style=None, width=120)
    name = f"gallery/{recipe.name}"
    commands = [
        (f"jaxpar explain {name} --topology {recipe.chips}", "how each tensor is sharded, and why"),
        (f"jaxpar check {name} --topology {recipe.chips}", "compile it without the chips (extra tpu or gpu)"),
        (f"jaxpar train {name}", "on those chips"),
    ]
    lines = ["", *_figure_lines(recipe), *(line for text, why in commands for line in (f"# {why}:", f"#   {text}"))]
    if merged(recipe.file)["data"].get("source") == "synthetic":
        lines += ["# on text of your own, add", "#   --set data.source=FOLDER --set data.tokenizer=tokenizer.json"]
    return text + "\n".join(lines) + "\n"


def _figure_lines(recipe: Recipe) -> list[str]:
    found = recipe.figures
    if found is None:
        return [f"# {recipe.chips}: not measured"]
    fits, step, wire = _cells(found)
    how = "compiled" if found.source == "compiled" else "estimated, not compiled"
    memory = show_bytes(round(found.memory_bytes))
    return [f"# {recipe.chips}, {how}:", f"#   fits: {fits} of {memory}; step {step}; a device sends {wire}"]


@dataclass(frozen=True)
class GalleryCommand:
    """List recipes for models and chips, with the memory, time and bytes of a step. Needs neither devices nor jax.

    Attributes:
      name: show this recipe, and the commands that run it
      full: with NAME: a recipe that needs no other file, to be copied
      json: print JSON
    """

    name: Annotated[str | None, Positional, arg(metavar="NAME", help_behavior_hint="")] = None
    full: Flag = False
    json: Flag = False

    def run(self) -> int:
        recipes = read_recipes()
        if self.name is not None:
            recipes = [find_recipe(self.name, recipes)]
        if self.json:
            rows = [asdict(recipe) | {"file": str(recipe.file)} for recipe in recipes]
            print(json.dumps(rows, indent=1))
        else:
            print(listed(recipes) if self.name is None else shown(recipes[0], full=self.full), end="")
        return 0
