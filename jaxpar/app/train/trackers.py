"""``open_trackers``: a run's metrics in Weights & Biases and trackio, beside TensorBoard and ``metrics.jsonl``."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxpar.app.config import RunConfig
from jaxpar.errors import ConfigError, MissingExtraError


class Tracker:
    """Sends records to a package with the functions ``init``, ``log`` and ``finish`` of Weights & Biases.

    A service that fails does not end the run: the failure is reported once, and nothing is sent from then on.

    Args:
      name: the package, such as ``wandb``.
      options: the arguments of its ``init``.
      tell: called with each message for the user.
    """

    def __init__(self, name: str, options: Mapping[str, Any], tell: Callable[[str], None]):
        try:
            self._package: Any = importlib.import_module(name)
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == name
            why = "is not installed" if missing else f"cannot be imported ({type(error).__name__}: {error})"
            raise MissingExtraError(
                f"trackers: the package {name!r} {why}. Remedy: pip install --upgrade {name}, or leave it out."
            ) from error
        self._name, self._tell, self._works = name, tell, True
        self._project = options.get("project")
        self._run = self._try(self._package.init, **options)

    @property
    def link(self) -> str:
        """Where the run can be seen: its address if the service gives one, else the command that shows it."""
        url = getattr(self._run, "url", None)
        local = f"trackio show --project {self._project}" if self._name == "trackio" else self._name
        return str(url or local)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        self._try(self._package.log, dict(values), step=step)

    def finish(self) -> None:
        """Send what is pending, and end the tracker's run."""
        self._try(self._package.finish)

    def _try(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not self._works:
            return None
        try:
            return call(*args, **options)
        except Exception as error:  # noqa: BLE001 (any failure of a service; the run goes on)
            self._works = False
            self._tell(f"metrics: {self._name} failed ({type(error).__name__}: {error}); nothing more is sent to it.")
            return None


def open_trackers(config: RunConfig, name: str, tell: Callable[[str], None]) -> list[Tracker]:
    """Start the trackers that a configuration names; their project is ``jaxpar`` unless it names another one.

    Args:
      config: the configuration, which the trackers record too.
      name: the name of the run.
      tell: called with each message for the user.

    Raises:
      MissingExtraError: a tracker's package is not installed.
      ConfigError: an option that the run sets itself.
    """
    found = []
    for tracker, options in config.trackers.items():
        if "config" in options:
            raise ConfigError(f"trackers: {tracker}: config is the run's own configuration. Remedy: leave the key out.")
        own = {"project": "jaxpar", "name": name, "config": dataclasses.asdict(config)}
        found.append(Tracker(tracker, {**own, **options}, tell))
    return found
