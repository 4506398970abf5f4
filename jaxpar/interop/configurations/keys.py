"""``ConfigKeys``: reads the configuration of another system, and records what becomes of each of its keys."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.interop.configurations.report import ImportReport, KeyRow, KeyStatus
from jaxpar.utils.checks import INT32, is_count, shown

type ValueKind = Literal["count", "natural", "integer", "number", "bool", "text", "list", "mapping"]
type NeutralKeys = tuple[tuple[str, tuple[Any, ...], str], ...]
"""Keys, separated by spaces; the values that change nothing; and the reason why others are refused."""

_MOST = 2**24
"""The largest count. Lists have as many items as there are stages or layers."""


def _remedy(value: Any) -> str:
    """What to write instead of a value that stands for another one."""
    if value == "auto":
        return "the value that another program fills in"
    unknown = re.search(r"\$([A-Za-z_0-9]+)", value) if isinstance(value, str) else None
    return "" if unknown is None else f"--variable {unknown[1]}=VALUE"


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; ``true`` and ``false`` are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "count": ("a positive integer", is_count),
    "natural": ("a non-negative integer", lambda value: is_count(value, 0)),
    "integer": ("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "number": ("a number", is_number),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("a text", lambda value: isinstance(value, str)),
    "list": ("a list", lambda value: isinstance(value, list)),
    "mapping": ("a mapping", lambda value: isinstance(value, dict)),
}


@dataclass(frozen=True)
class ImportOptions:
    """What the caller of an import knows beyond the file.

    Attributes:
      source: the name of the file, for errors and the report.
      devices: the number of devices; by default the product of the sizes in the file.
      steps: the number of training steps, where the file does not say it.
      ignore: keys to leave out although they have no counterpart.
      base: the family of the model that the result gets, if the file has none.
    """

    source: str
    devices: int | None = None
    steps: int | None = None
    ignore: frozenset[str] = frozenset()
    base: str | None = None


class ConfigKeys:
    """The keys of a configuration, by dotted path. Every key gets one row of the report.

    Args:
      data: the configuration, with nested mappings.
      options: of the import.
    """

    def __init__(self, data: Mapping[str, Any], options: ImportOptions):
        self.data, self.options = data, options
        self._rows: dict[str, KeyRow] = {}

    def raw(self, path: str) -> Any:
        """Returns the value at a path, or ``None`` if there is none."""
        value: Any = self.data
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def has(self, path: str) -> bool:
        """Whether the file has a key. A key with an empty value counts as missing."""
        return self.raw(path) is not None

    def get(self, path: str, kind: ValueKind, default: Any = None) -> Any:
        """Returns the value at a path, or ``default``.

        Raises:
          ConfigError: the value is not of this kind.
        """
        value = self.raw(path)
        if value is None:
            return default
        what, fits = _KINDS[kind]
        if not fits(value):
            raise self.error(path, f"must be {what}, got {shown(value)}", _remedy(value))
        if kind == "count" and value > _MOST:
            raise self.error(path, f"must be at most {_MOST:,}, got {shown(value)}")
        return value

    def first(self, paths: Sequence[str]) -> str:
        """Returns the path, of several names of one setting, that the file has; the first one if it has none.

        Raises:
          ConfigError: the file has several, with different values.
        """
        found = [path for path in paths if self.has(path)]
        for path in found[1:]:
            if self.raw(path) != self.raw(found[0]):
                raise self.error(
                    path,
                    f"is {shown(self.raw(path))}, but {found[0]}, another name for it, is {shown(self.raw(found[0]))}",
                    "leave one of them out",
                )
        return (found or [*paths])[0]

    def take(self, path: str, kind: ValueKind, default: Any, target: str, note: str = "") -> Any:
        """Returns the value at a path like :meth:`get`, and records that it becomes ``target``."""
        value = self.get(path, kind, default)
        self.translate(path, target, note)
        return value

    def translate(self, path: str, target: str, note: str = "") -> None:
        """Records that a key becomes ``target``, if the file has it."""
        self._record(path, "translated", target, note)

    def ignore(self, path: str, reason: str) -> None:
        """Records that a key is left out without an effect on the run, if the file has it."""
        self._record(path, "ignored", "", reason)

    def ignore_each(self, paths: Iterable[str], reason: str) -> None:
        """Records several ignored keys of one reason."""
        for path in paths:
            self.ignore(path, reason)

    def refuse(self, path: str, reason: str, *, default: bool = False) -> None:
        """Records that a key has no counterpart. With ``default``, a value that the file leaves out is meant."""
        if path in self.options.ignore:
            self._rows[path] = KeyRow(path, self.raw(path), "ignored", "", f"--ignore; {reason}")
        elif default and not self.has(path):
            self._rows[path] = KeyRow(path, None, "refused", "", reason)
        else:
            self._record(path, "refused", "", reason)

    def neutral(self, path: str, values: Collection[Any], reason: str) -> None:
        """Ignores a key whose value changes nothing, and refuses any other value with ``reason``."""
        value = self.raw(path)
        if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in values):
            self.ignore(path, "off, or the value that always applies here")
        else:
            self.refuse(path, reason)

    def neutral_all(self, table: NeutralKeys, prefix: str = "") -> None:
        """Ignores or refuses several keys as :meth:`neutral` does."""
        for keys, values, reason in table:
            for key in keys.split():
                self.neutral(f"{prefix}{key}", values, reason)

    def ignore_all(self, reasons: Mapping[str, str], prefix: str = "") -> None:
        """Records several ignored keys: reason → its keys, separated by spaces."""
        for key, reason in by_key(reasons).items():
            self.ignore(f"{prefix}{key}", reason)

    def error(self, path: str, problem: str, remedy: str = "") -> ConfigError:
        """Returns the error that a key has a wrong value."""
        return ConfigError(f"{self.options.source}: {path} {problem}.{f' Remedy: {remedy}.' if remedy else ''}")

    def report(self, known: Collection[str] = ()) -> ImportReport:
        """Returns the report; a key that nothing recorded is unknown, and refused.

        Args:
          known: names of keys, to suggest one for a misspelt key.

        Raises:
          ConfigError: a key to ignore would not be refused.
        """
        paths = dict(_paths(self.data, ""))
        for path, value in paths.items():
            if (isinstance(value, Mapping) and value) or self._covered(path):
                continue
            status: KeyStatus = "refused"
            reason = f"an unknown key.{did_you_mean(path.rpartition('.')[2], known)}"
            if value is None or path in self.options.ignore:
                status, reason = "ignored", "has no value" if value is None else f"--ignore; {reason}"
            self._rows[path] = KeyRow(path, value, status, "", reason)
        order = {path: at for at, path in enumerate(paths)}
        rows = sorted(self._rows.values(), key=lambda row: order.get(row.key, len(order)))
        used = {row.key for row in rows if row.note.startswith("--ignore")}
        if unused := next((key for key in sorted(self.options.ignore) if key not in used), None):
            refused = [row.key for row in rows if row.status == "refused"]
            raise ConfigError(
                f"{self.options.source}: --ignore {unused} has no effect: the file has no such key, or the key is not "
                f"refused.{did_you_mean(unused, refused)} Remedy: leave it out."
            )
        return ImportReport(self.options.source, rows)

    def _record(self, path: str, status: KeyStatus, target: str, note: str) -> None:
        if self.has(path):
            self._rows[path] = KeyRow(path, self.raw(path), status, target, note)

    def _covered(self, path: str) -> bool:
        parts = path.split(".")
        return any(".".join(parts[: i + 1]) in self._rows for i in range(len(parts)))


def _paths(data: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Every key by path, those of mappings before the keys in them."""
    for key, value in data.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


def by_key(*tables: Mapping[str, str]) -> dict[str, str]:
    """Returns key → reason, from tables of reason → its keys.

    >>> by_key({"for the profiler": "profile mstx"})
    {'profile': 'for the profiler', 'mstx': 'for the profiler'}
    """
    return {key: reason for reasons in tables for reason, keys in reasons.items() for key in keys.split()}


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Sets the value at a dotted path of nested dicts.

    >>> config = {}
    >>> put(config, "mesh.data", 2)
    >>> config
    {'mesh': {'data': 2}}
    """
    *parents, last = path.split(".")
    for part in parents:
        config = config.setdefault(part, {})
    config[last] = value


def token_sources(value: Any) -> dict[str, Any]:
    """Returns ``data`` of a run for Megatron's token files: one path, or weights and paths in turn; else ``{}``.

    >>> token_sources(["1", "books_document", 2, "code_document"])["blend"][1]
    {'source': 'code_document', 'weight': 2.0}
    """
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in items):
        return {}
    texts = [str(item) for item in items]
    if any("$" in text or not text for text in texts):
        return {}
    if len(texts) == 1:
        return {"source": texts[0]}
    weights = [text for text in texts[::2] if re.fullmatch(r"\d+\.?\d*|\.\d+", text) and float(text) > 0]
    if len(texts) % 2 or len(weights) != len(texts) // 2:
        return {}
    if len(texts) == 2:
        return {"source": texts[1]}
    return {"blend": [{"source": p, "weight": float(w)} for w, p in zip(texts[::2], texts[1::2], strict=True)]}


def fixed_scale(value: float) -> dict[str, float]:
    """Returns a loss scale that never changes: it neither grows nor shrinks below its first value."""
    return {"initial": value, "minimum": value, "interval": INT32}
