"""``OutputFolder``: the folder of a run's output, which can be written, and which no other run writes to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from jaxpar.errors import ConfigError, LaunchError
from jaxpar.utils.durable import Lock, is_permanent, refuse_address

NAME = "run.lock"
"""The file that is locked; the folder of the checkpoints, which may be the same, has a lock of its own."""


class OutputFolder(AbstractContextManager["OutputFolder"]):
    """Creates a run's output folder and locks it; a context manager that releases it.

    One process of a run holds it: its supervisor, or else process 0. The lock ends with that process, also with a kill.
    A disk that is full or fails does not end the run, which keeps its metrics in memory; it then has no lock.

    Args:
      folder: the run's ``output``.
      tell: called with each message for the user.

    Raises:
      ConfigError: the folder can never be written to.
      LaunchError: another run writes to it, or its lock is no regular file.
    """

    def __init__(self, folder: str, tell: Callable[[str], None] = print):
        self._lock: Lock | None = None
        try:
            refuse_address(folder)
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._lock = Lock(Path(folder), LaunchError, LaunchError, NAME)
        except OSError as error:
            if is_permanent(error) or isinstance(error, PermissionError):
                raise ConfigError(
                    f"output: {folder:.200}: {error.strerror}. Remedy: --set output=FOLDER, a folder that can be "
                    "written to."
                ) from error
            tell(f"output: {folder} cannot be locked: {error.strerror}. Another run may write to it, too.")

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()
