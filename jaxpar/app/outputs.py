"""The files that a command writes: whether that is possible is checked before it starts, and one place writes them."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from jaxpar.errors import ConfigError
from jaxpar.utils.durable import refuse_address, write_atomically

type OutputKind = Literal["file", "folder", "picture"]
"""What an option names: a file that is written or replaced, a folder that is created, or a file of a figure."""


def check_output(option: str, path: Path, kind: OutputKind) -> None:
    """Raise an error unless what an option names can be written; it leaves nothing behind.

    Args:
      option: as in the command line, such as ``--json``.
      path: its value.
      kind: what it names.

    Raises:
      ConfigError: it names the option, the path, and why it cannot be written.
      MissingExtraError: of a picture: matplotlib is not installed.
    """
    if kind == "picture":
        _check_format(option, path)
    try:
        refuse_address(path)
        _probe(Path(os.path.realpath(path)), kind)
    except OSError as error:
        raise _refusal(option, path, error) from error


def write_output(option: str, path: Path | None, content: Callable[[], str | bytes]) -> None:
    """Write a text or bytes to the file that an option names, if it names one.

    A file that exists is replaced when the new one is complete, so that a full disk does not lose it.

    Raises:
      ConfigError: the file cannot be written.
    """
    if path is None:
        return
    data = content()
    try:
        _write(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise _refusal(option, path, error) from error


def write_figure(option: str, path: Path | None, figure: Callable[[], Any]) -> None:
    """Write a figure of matplotlib as :func:`write_output`; the path's suffix selects the format."""

    def drawn() -> bytes:
        out = io.BytesIO()
        figure().savefig(out, format=_format_of(path or Path()))
        return out.getvalue()

    write_output(option, path, drawn)


def _refusal(option: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{option} {path!s:.200}: {error.strerror}. Remedy: a path in a writable folder.")


def _probe(path: Path, kind: OutputKind) -> None:
    """Create what is to be created, and delete it."""
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "folder":
            path.mkdir(exist_ok=True)
            missing = [path, *missing]
        elif not path.exists() or stat.S_ISREG(path.stat().st_mode) or path.is_dir():
            new = not path.exists()
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
            if new:
                path.unlink(missing_ok=True)  # another process may look at the same time
    finally:
        for folder in missing:
            with suppress(OSError):  # only an empty folder is deleted
                folder.rmdir()


def _write(path: Path, data: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):  # a pipe or a device
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return
    # Its own name: a long one may have no room for a suffix, and another process may write the same file.
    write_atomically(path, data, mode=None, new=f".jaxpar-{os.getpid()}.new")


def _format_of(path: Path) -> str:
    return path.suffix[1:].lower() or "png"


def _check_format(option: str, path: Path) -> None:
    """Raise an error unless matplotlib is installed and writes the format of a path's suffix."""
    from jaxpar.utils.plotting import new_figure

    formats = new_figure(f"drawing {option} {path}").canvas.get_supported_filetypes()
    if _format_of(path) not in formats:
        raise ConfigError(
            f"{option} {path!s:.200}: no picture has the format {path.suffix!r}. Remedy: a name that ends in "
            f"{', '.join(f'.{one}' for one in formats)}."
        )
