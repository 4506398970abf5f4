"""Strict configuration: YAML read by ``yaml.safe_load``'s rules into frozen dataclasses, where nothing is ignored.

An unknown key, a duplicate key, a wrong type or a tag that would build an object is a ``ConfigError`` that names the
file, the key and what would be right.
"""

from __future__ import annotations

import dataclasses
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxpar.errors import ConfigError, did_you_mean


class _StrictLoader(yaml.SafeLoader):
    """``yaml.SafeLoader`` that refuses a key written twice, which YAML would resolve silently to the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if isinstance(key, str | int | float | bool) and key in seen:
                raise ConfigError(
                    f"{self.name}: the key {key!r} stands twice, on lines {seen[key]} and {line}. Remedy: keep one."
                )
            if isinstance(key, str | int | float | bool):
                seen[key] = line
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 reads 1e-3 as a string; people who write learning rates mean a number.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def load_yaml(path: str | os.PathLike[str], *, _extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping in a YAML file; a key ``extends: other.yaml`` lays it over that file (see :func:`merge`).

    Raises:
      ConfigError: the file is missing, is not valid YAML, holds a tag that would build an object, repeats a key, or is
        not a mapping.
    """
    file = Path(path)
    if not file.is_file():
        beside = sorted(p.name for p in file.parent.glob("*.yaml")) if file.parent.is_dir() else []
        raise ConfigError(f"{file}: no such file.{did_you_mean(file.name, beside)}")
    data = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    parent = data.pop("extends", None)
    if parent is None:
        return data
    if not isinstance(parent, str):
        raise ConfigError(f"{file}: extends is {_name(parent)}, but the name of a YAML file beside it is wanted.")
    chain = (*_extending, file.resolve())
    source = (file.parent / parent).resolve()
    if source in chain:
        raise ConfigError(f"{file}: extends {parent}, which extends it in turn. Remedy: break the circle.")
    return merge(load_yaml(file.parent / parent, _extending=chain), data)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` laid over it: mappings are merged key by key, anything else is replaced.

    >>> merge({"mesh": {"data": -1}, "rules": {"mlp": None}}, {"rules": {"mlp": "model"}})
    {'mesh': {'data': -1}, 'rules': {'mlp': 'model'}}
    """
    both = {
        key: merge(base[key], value) if isinstance(value, Mapping) and isinstance(base.get(key), Mapping) else value
        for key, value in changes.items()
    }
    return {**base, **both}


def parse_yaml(text: str, name: str = "yaml") -> dict[str, Any]:
    """The mapping in a YAML text; ``name`` stands for the file in errors. Raises as :func:`load_yaml` does.

    >>> parse_yaml("lr: 3e-4")
    {'lr': 0.0003}
    """
    data = _parse(text, name)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: a mapping is wanted at the top, not {type(data).__name__}.")
    return data


def _parse(text: str, name: str) -> Any:
    loader = _StrictLoader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    except yaml.constructor.ConstructorError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(
            f"{name}: line {line}: {error.problem}. Only plain YAML is read: no tag may build an object. Remedy: write "
            f"the value as text, number, list or mapping."
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from error
    finally:
        loader.dispose()


def override(data: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """``data`` with ``a.b=value`` settings applied; each value is read as YAML.

    >>> override({"train": {"steps": 1}}, ["train.steps=5", "mesh.data=-1"])
    {'train': {'steps': 5}, 'mesh': {'data': -1}}

    Raises:
      ConfigError: a setting has no ``=``, or goes through a value that is not a mapping.
    """
    result = dict(data)
    for setting in settings:
        key, eq, value = setting.partition("=")
        if not eq or not key:
            raise ConfigError(f"--set {setting}: written as key=value is wanted, as --set train.steps=100.")
        target = result
        *parents, last = key.split(".")
        for i, part in enumerate(parents):
            child = target.get(part, {})
            if child is not None and not isinstance(child, Mapping):
                raise ConfigError(f"--set {setting}: {'.'.join(parents[: i + 1])} is {child!r}, not a mapping.")
            target[part] = dict(child or {})
            target = target[part]
        target[last] = _parse(value, f"--set {key}")
    return result


def build[T](cls: type[T], data: Mapping[str, Any], where: str) -> T:
    """A (possibly nested) dataclass from plain data; every key must be a field and every value of its type.

    Args:
      cls: the dataclass. Fields of type ``dict`` are taken as they are.
      data: the mapping.
      where: what errors call it: the file, then the path of keys.

    Raises:
      ConfigError: unknown key (with a did-you-mean), missing key, wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in data.items():
        if key not in fields:
            raise ConfigError(
                f"{where}: unknown key {key!r}.{did_you_mean(key, fields)} The keys are: {', '.join(fields)}."
            )
        values[key] = _convert(hints[key], value, f"{where}: {key}")
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: the key {name!r} is missing.")
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {_name(value)}, but a mapping is wanted.")
        return build(hint, value, where)  # type: ignore[arg-type]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in args:
            return None
        failures = []
        for option in (arg for arg in args if arg is not types.NoneType):
            try:
                return _convert(option, value, where)
            except ConfigError as error:
                failures.append(error)
        raise failures[0]
    if origin is typing.Literal:
        if value not in args:
            raise ConfigError(
                f"{where} is {value!r}.{did_you_mean(value, args)} The choices are: {', '.join(map(str, args))}."
            )
        return value
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} is {_name(value)}, but a list is wanted.")
        return origin(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    return _plain(origin or hint, value, where)


def _plain(kind: type, value: Any, where: str) -> Any:
    right = isinstance(value, kind) and not (isinstance(value, bool) and kind in (int, float))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not right:
        raise ConfigError(f"{where} is {_name(value)}, but {kind.__name__} is wanted.")
    return dict(value) if kind is dict else value


def _name(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
