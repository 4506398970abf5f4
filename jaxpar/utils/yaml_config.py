"""Strict configuration: YAML, by the rules of ``yaml.safe_load``, read into frozen dataclasses. Nothing is ignored.

An unknown key, a duplicate key, a wrong type, or a tag that would build an object is a ``ConfigError`` that names the
file, the key and the valid values. Texts that would take long to read or need much memory are errors too: bytes, depth,
digits, values and chains of files are bounded, and every alias counts with all values that it stands for. A path in a
configuration may name any file, so an error about a file that is no configuration shows its keys at most.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml

from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.utils.checks import INT64, Range, shown

_MOST_BYTES, _MOST_VALUES, _MOST_DEPTH, _MOST_DIGITS, _MOST_FILES = 1 << 18, 20_000, 32, 100, 16
_PATH_REMEDY = "Remedy: the path of a YAML file."
"""Limits of a configuration: bytes in a file, values with aliases expanded, nesting depth, characters of a number, and
files that extend each other."""
_LIMITS = {int: Range(-INT64 - 1, INT64), float: Range(-sys.float_info.max, sys.float_info.max)}
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Refusal(yaml.MarkedYAMLError):
    """An error of ours about a text."""


class _StrictLoader(yaml.SafeLoader):
    """``yaml.SafeLoader`` with limits, and an error for a duplicate key, of which YAML silently uses the last."""

    def __init__(self, text: str | bytes):
        super().__init__(text)
        self._values = self._depth = self._deepest = 0
        # The number of values and the depth of each anchored node, once it is complete.
        self._anchored: dict[str, tuple[int, int]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self._anchored:
                values, depth = self._anchored[event.anchor]
                self._add(values, self._depth + depth, event.start_mark)
            elif event.anchor in self.anchors:
                self._refuse(f"the alias {event.anchor!r} refers to a value that contains it", event.start_mark)
            return super().compose_node(parent, index)
        values, deepest = self._values, self._deepest
        self._depth += 1
        self._deepest = self._depth
        self._add(1, self._depth, event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None:
            self._anchored[event.anchor] = (self._values - values, self._deepest - self._depth)
        self._deepest = max(deepest, self._deepest)
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if node.tag in _NUMBERS and len(node.value) > _MOST_DIGITS:
            self._refuse(
                f"a number has {len(node.value):,} characters. Remedy: use at most {_MOST_DIGITS}", node.start_mark
            )
        if re.search("[\0\ud800-\udfff]", node.value):  # no name of a file can have them
            self._refuse("a text has a null byte or half a character. Remedy: write it without", node.start_mark)
        return node

    def _add(self, values: int, depth: int, mark: Any) -> None:
        self._values += values
        self._deepest = max(self._deepest, depth)
        if self._values > _MOST_VALUES:
            text = (
                f"more than {_MOST_VALUES:,} values with aliases expanded. Remedy: use fewer aliases or a shorter file"
            )
            self._refuse(text, mark)
        if depth > _MOST_DEPTH:
            self._refuse(f"values are nested more than {_MOST_DEPTH} levels deep. Remedy: use a flatter file", mark)

    def _refuse(self, text: str, mark: Any) -> None:
        raise _Refusal(None, None, text, mark)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in lines:
                    first = lines[key.tag, key.value]
                    self._refuse(
                        f"duplicate key {key.value!r}, first on line {first}. Remedy: keep one", key.start_mark
                    )
                lines[key.tag, key.value] = key.start_mark.line + 1
        return node

    def refuse_tag(self, node: yaml.Node) -> None:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        text = f"the tag {tag!r} would build an object. Remedy: write plain text, numbers, lists or mappings"
        self._refuse(text, node.start_mark)


_StrictLoader.add_constructor(None, _StrictLoader.refuse_tag)
# YAML 1.1 reads 1e-3 as a string, but a learning rate written so is meant as a number.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def load_yaml(
    path: str | os.PathLike[str], *, paths: Sequence[str] = (), _extending: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """Returns the mapping in a YAML file. A key ``extends: other.yaml`` merges it over that file (see :func:`merge`).

    Args:
      path: the file.
      paths: top-level keys whose values are paths relative to the file that holds them. A value that comes from another
        file by ``extends`` is returned relative to ``path``.

    Raises:
      ConfigError: the file is missing, is not valid YAML, has a tag that would build an object, repeats a key, is not a
        mapping, or exceeds the limits on size and depth.
    """
    file = Path(path)
    try:
        if not file.is_file():
            beside = sorted(p.name for p in file.parent.glob("*.yaml")) if file.parent.is_dir() else []
            what = "it is no regular file." if file.exists() else f"no such file.{did_you_mean(file.name, beside)}"
            raise ConfigError(f"{file}: {what} {_PATH_REMEDY}")
        with file.open("rb") as f:
            text = f.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file!s:.200}: cannot be read: {error.strerror}. {_PATH_REMEDY}") from error
    data = parse_yaml(text, str(file))
    parent = data.pop("extends", None)
    if parent is None:
        return data
    if not isinstance(parent, str):
        raise ConfigError(
            f"{file}: extends must be the path of a YAML file relative to this file, got {_name(parent)}."
        )
    # Unlike `Path.resolve`, `realpath` raises nothing for a link that leads to itself.
    chain = (*_extending, Path(os.path.realpath(file)))
    source = Path(os.path.realpath(file.parent / parent))
    if source in chain:
        raise ConfigError(f"{file}: extends {parent}, which in turn extends this file. Remedy: break the cycle.")
    if len(chain) == _MOST_FILES:
        raise ConfigError(
            f"{file}: extends {parent}, but {_MOST_FILES} files already extend each other, the limit. Remedy: write "
            "the keys of some of them into one file."
        )
    base = load_yaml(file.parent / parent, paths=paths, _extending=chain)
    for key in paths:
        if isinstance(base.get(key), str):
            base[key] = os.path.relpath(source.parent / base[key], os.path.realpath(file.parent))
    return merge(base, data)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``base`` updated by ``changes``: mappings are merged key by key, any other value is replaced.

    >>> merge({"mesh": {"data": -1}, "rules": {"mlp": None}}, {"rules": {"mlp": "model"}})
    {'mesh': {'data': -1}, 'rules': {'mlp': 'model'}}
    """
    both = {
        key: merge(base[key], value) if isinstance(value, Mapping) and isinstance(base.get(key), Mapping) else value
        for key, value in changes.items()
    }
    return {**base, **both}


def parse_yaml(text: str | bytes, name: str = "yaml") -> dict[str, Any]:
    """Returns the mapping in a YAML text; an empty text gives ``{}``.

    Args:
      text: the YAML.
      name: the name of the text in errors.

    Raises:
      ConfigError: as :func:`load_yaml`.

    >>> parse_yaml("lr: 3e-4")
    {'lr': 0.0003}
    """
    data = _parse(text, name)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{name} must be a mapping, got {_KINDS.get(type(data), type(data).__name__)}.")
    return data


def _parse(text: str | bytes, name: str) -> Any:
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{name}: more than {_MOST_BYTES:,} bytes, the limit for a configuration.")
    try:
        return _StrictLoader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        problem = ", ".join(filter(None, (error.context, error.problem)))
        if not isinstance(error, _Refusal):
            problem = re.sub(r"'\w[^']*'", "'...'", problem)  # the name of an alias or of an anchor
        raise ConfigError(f"{name}: line {line}: {problem}.") from error
    except yaml.YAMLError as error:  # bytes that are not text
        raise ConfigError(f"{name}: {str(error).partition(chr(10))[0]}.") from error
    except (ValueError, AttributeError, LookupError, OverflowError) as error:
        # A date such as 2024-13-45, `!!int ""` or `!!bool x`; the texts of these errors quote the file.
        raise ConfigError(f"{name}: a value has the form or the tag of another type. Remedy: quote it.") from error


def override(data: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Returns ``data`` with settings such as ``a.b=value`` applied; each value is read as YAML.

    >>> override({"train": {"steps": 1}}, ["train.steps=5", "mesh.data=-1"])
    {'train': {'steps': 5}, 'mesh': {'data': -1}}

    Raises:
      ConfigError: a setting is not ``key=value``, or goes through a value that is not a mapping.
    """
    result = dict(data)
    for setting in settings:
        key, eq, value = setting.partition("=")
        *parents, last = path = key.strip().split(".")
        if not eq or not all(path):
            raise ConfigError(f"--set {setting!r}: the setting must be key=value, such as --set train.steps=100.")
        target = result
        for i, part in enumerate(parents):
            child = target.get(part, {})
            if child is not None and not isinstance(child, Mapping):
                raise ConfigError(f"--set {setting!r}: {'.'.join(parents[: i + 1])} is {_name(child)}, not a mapping.")
            target[part] = dict(child or {})
            target = target[part]
        target[last] = _parse(value, f"--set {key}")
    return result


def build[T](cls: type[T], data: Mapping[str, Any], where: str) -> T:
    """Returns a (possibly nested) dataclass built from plain data, of which every key and type is checked.

    Args:
      cls: the dataclass.
      data: the mapping.
      where: the beginning of error texts: the file, then the path of keys.

    Raises:
      ConfigError: an unknown key (with a suggestion), a missing key, a value of the wrong type, or a number outside of
        the range of its field, ``Annotated[int, Range(1, 8)]``, or of 64 bits.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls, include_extras=True)
    for key in data:  # before any value: a file of another kind shows none of its values
        if key not in fields:
            raise ConfigError(
                f"{where}: unknown key {shown(key)}.{did_you_mean(key, fields)} The keys are: {', '.join(fields)}."
            )
    values = {key: convert(hints[key], value, f"{where}: {key}") for key, value in data.items()}
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: the key {name!r} is missing. The keys are: {', '.join(fields)}.")
    return cls(**values)


def convert(hint: Any, value: Any, where: str, numbers: Range | None = None) -> Any:
    """Returns a value of plain data in the type of a field.

    Args:
      hint: the field's type, such as ``Annotated[float, Range(0, 1)] | None``.
      value: the value.
      where: the beginning of error texts.
      numbers: the range of a number; by default that of 64 bits.

    Raises:
      ConfigError: as :func:`build`.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(hint, value, where)  # type: ignore[arg-type]
    if origin is Annotated:
        return convert(args[0], value, where, args[1])
    if origin in (types.UnionType, typing.Union):
        options = [arg for arg in args if arg is not types.NoneType]
        if value is None and len(options) < len(args):
            return None
        # If only one option can accept the value, its own error is raised: it names the key inside or the range.
        kinds = [option for option in options if dataclasses.is_dataclass(option) and isinstance(value, Mapping)]
        kinds += [option for option in options if typing.get_origin(option) is Annotated and type(value) is int]
        if len(options) == 1 or kinds:
            return convert((kinds or options)[0], value, where)
        for option in options:
            with contextlib.suppress(ConfigError):
                return convert(option, value, where)
    elif origin is typing.Literal:
        if any(value == arg and type(value) is type(arg) for arg in args):
            return value
        raise ConfigError(f"{where} must be {_expected(hint)}, got {shown(value)}.{did_you_mean(value, args)}")
    elif origin in (tuple, list) and isinstance(value, list | tuple):
        return origin(convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    elif origin is dict and isinstance(value, Mapping):
        return {convert(args[0], k, f"{where}: a key"): convert(args[1], v, f"{where}: {k}") for k, v in value.items()}
    elif hint is Any:
        return value
    elif type(value) is int and hint in (int, float) or type(value) is hint is float:
        numbers = numbers or _LIMITS[hint]
        if value in numbers:
            return hint(value)
        raise ConfigError(
            f"{where} must be {numbers}, got {shown(value)}. Remedy: use a number in this range, or leave the key out."
        )
    elif isinstance(value, origin or hint) and hint is not int:
        return dict(value) if isinstance(value, dict) else value
    raise ConfigError(f"{where} must be {_expected(hint)}, got {_name(value)}.")


def _expected(hint: Any) -> str:
    kind = typing.get_origin(hint) or hint
    if kind is Annotated:
        return _expected(typing.get_args(hint)[0])
    if kind in (types.UnionType, typing.Union):
        return " or ".join(_expected(arg) for arg in typing.get_args(hint) if arg is not types.NoneType)
    if kind is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    if dataclasses.is_dataclass(kind) or issubclass(kind, Mapping):
        return "a mapping"
    return _KINDS.get(kind, kind.__name__)


_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", list: "a list", tuple: "a list"}


def _name(value: Any) -> str:
    return f"{shown(value)} ({type(value).__name__})"
