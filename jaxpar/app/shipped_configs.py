"""The configurations that come with jaxpar, which commands take by name: ``jaxpar train quickstart``."""

from __future__ import annotations

import os.path
from pathlib import Path

from jaxpar.errors import ConfigError, did_you_mean

_FOLDERS = ("bench", "gallery", "recipes")
"""Folders whose files are whole configurations; those in ``layouts`` are parts of one."""


def shipped_folder() -> Path:
    """Returns the folder of the configurations: that of the installed package, or that of a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def shipped_names() -> list[str]:
    """Returns the names that :func:`find_config` finds, such as ``quickstart`` and ``recipes/moe``."""
    folder = shipped_folder()
    files = [*folder.glob("*.yaml"), *(file for name in _FOLDERS for file in (folder / name).glob("*.yaml"))]
    return sorted(file.relative_to(folder).with_suffix("").as_posix() for file in files)


def find_layout(file: Path, layout: str) -> Path:
    """Returns the path of the layout that a configuration names: relative to it, else one that comes with jaxpar.

    Args:
      file: the configuration.
      layout: the path, such as ``layouts/tp.yaml``.

    >>> find_layout(Path("mine/run.yaml"), "layouts/tp.yaml").exists()
    True
    """
    beside = file.parent / layout
    shipped = shipped_folder() / layout
    # Unlike Path.exists, os.path says of a name that is too long for a file that there is none.
    comes_with_jaxpar = layout.startswith("layouts/") and os.path.isfile(shipped) and not os.path.exists(beside)
    return shipped if comes_with_jaxpar else beside


def find_config(path: Path) -> Path:
    """Returns the path of a configuration: the file, or the one of this name that comes with jaxpar.

    Raises:
      ConfigError: it is a name, such as ``quickstart`` (neither a file nor a path with a suffix), that is not known.

    >>> find_config(Path("runs/mine.yaml")).name, find_config(Path("quickstart")).name
    ('mine.yaml', 'quickstart.yaml')
    """
    if path.suffix or os.path.exists(path) or path.is_absolute():
        return path
    names = shipped_names()
    if path.as_posix() in names:
        return shipped_folder() / f"{path}.yaml"
    raise ConfigError(
        f"{path}: no such file, and no configuration of this name comes with jaxpar."
        f"{did_you_mean(path.as_posix(), names)} Remedy: give the path of a YAML file, or one of these names: "
        f"{', '.join(name for name in names if '/' not in name)}, bench/..., gallery/..., recipes/...."
    )
