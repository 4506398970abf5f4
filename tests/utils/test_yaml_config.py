"""Strict configuration: parsing, merging of files and overrides, and rejected input."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from jaxpar import MeshSpec
from jaxpar.errors import ConfigError
from jaxpar.utils.checks import Range
from jaxpar.utils.yaml_config import build, load_yaml, merge, override, parse_yaml

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False)
    | st.text("ab 1:-#", max_size=5)
)
KEYS = st.text("abc", min_size=1, max_size=3)
TREES = st.dictionaries(
    KEYS, st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=4)
)


@dataclass(frozen=True)
class Optimizer:
    rate: float
    stage: Literal[0, 1, 3] = 0


@dataclass(frozen=True)
class Config:
    name: str
    optimizer: Optimizer = Optimizer(1.0)
    mesh: MeshSpec = field(default_factory=MeshSpec)
    steps: int | None = None
    remat: bool | Literal["auto"] = False
    sizes: tuple[int, ...] = ()
    texts: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    extra: Optimizer | str = "none"
    anything: Any = None
    share: Annotated[float, Range(0, 1.0, above=True)] | None = None
    counts: dict[str, Annotated[int, Range(-1, 8)]] = field(default_factory=dict)


def built(**values: Any) -> Config:
    return build(Config, {"name": "a", **values}, "c.yaml")


@examples(20)
@given(TREES)
def test_plain_data_survives_yaml(tree: dict[str, Any]) -> None:
    assert parse_yaml(yaml.safe_dump(tree)) == tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("3E+4", 3e4),
        ("-.5e3", -500.0),
        ("+2_000.5e1", 20005.0),
        ("1e", "1e"),
        ("'1e-3'", "1e-3"),
        ("0x10", 16),
        ("64KiB", "64KiB"),
        ("", None),
    ],
)
def test_numbers_read_as_people_mean_them(text: str, value: object) -> None:
    parsed = parse_yaml(f"key: {text}")["key"]
    assert (parsed, type(parsed)) == (value, type(value))


def test_the_rules_for_numbers_stay_in_our_own_loader() -> None:
    parse_yaml("a: 1e-3")
    assert yaml.safe_load("a: 1e-3") == {"a": "1e-3"}


def test_an_empty_text_is_an_empty_mapping_and_comments_are_no_data() -> None:
    assert parse_yaml("") == parse_yaml("# only a comment\n") == {}


def test_anchors_and_merge_keys_work_and_are_no_duplicates() -> None:
    text = "base: &b {x: 1, y: 1}\nouter: {inner: &i {<<: *b, y: 2}}\nlast: {<<: *i, x: 3}\n"
    assert parse_yaml(text)["outer"] == {"inner": {"x": 1, "y": 2}}
    assert parse_yaml(text)["last"] == {"x": 3, "y": 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: {b: 1, b: 1}", "'b'"),
        ("a: [1", "]"),
        ("a: 1\n---\nb: 2", "2: expected"),
        ("a: *secret", "'...'"),
        ("a: &secret 1\nb: &secret 2", "2: found"),
        ("? [1]\n: 2", "1: while constructing"),
        ("a: !!python/name:os.system", "python/name"),
        ("a: 2024-13-45", "c.yaml"),
        ("a: \x00", "c.yaml: unacceptable"),
        ("- secret", "c.yaml"),
        ("secret", "c.yaml"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, words: str) -> None:
    with raises(ConfigError, words):
        parse_yaml(text, "c.yaml")


def test_load_yaml_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text("über: 1", encoding="utf-8")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xfc")
    assert load_yaml(tmp_path / "fsdp.yaml") == load_yaml(str(tmp_path / "fsdp.yaml")) == {"über": 1}
    with raises(ConfigError, "fdsp.yaml"):
        load_yaml(tmp_path / "fdsp.yaml")
    with raises(ConfigError, "latin.yaml"):
        load_yaml(tmp_path / "latin.yaml")


def test_a_file_extends_another(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("mesh: {data: -1, model: 2}\nrules: {mlp: model, batch: [data]}")
    (tmp_path / "sub/mid.yaml").write_text("extends: ../base.yaml\nmesh: {model: 4}")
    (tmp_path / "top.yaml").write_text("extends: sub/mid.yaml\nrules: {mlp: null, batch: [replica, data]}")
    expected = {"mesh": {"data": -1, "model": 4}, "rules": {"mlp": None, "batch": ["replica", "data"]}}
    assert load_yaml(tmp_path / "top.yaml") == expected


def test_paths_of_an_extended_file_are_relative_to_the_one_that_extends_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("layout: layouts/dp.yaml\nmodel: layouts/dp.yaml")
    (tmp_path / "sub/top.yaml").write_text("extends: ../base.yaml")
    (tmp_path / "sub/own.yaml").write_text("extends: ../base.yaml\nlayout: own.yaml")
    got = load_yaml(tmp_path / "sub/top.yaml", paths=("layout",))
    assert got == {"layout": "../layouts/dp.yaml", "model": "layouts/dp.yaml"}
    assert load_yaml(tmp_path / "sub/own.yaml", paths=("layout",))["layout"] == "own.yaml"


def test_a_long_chain_of_extends_is_refused(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i}.yaml").write_text(f"extends: {i + 1}.yaml")
    (tmp_path / "20.yaml").write_text("a: 1")
    assert load_yaml(tmp_path / "5.yaml") == {"a": 1}
    with raises(ConfigError, "16.yaml"):
        load_yaml(tmp_path / "0.yaml")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "to_loop.yaml").write_text("extends: loop")
    with raises(ConfigError, "/loop"):
        load_yaml(tmp_path / "to_loop.yaml")


def test_a_circle_of_extends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml")
    (tmp_path / "b.yaml").write_text("extends: a.yaml")
    (tmp_path / "c.yaml").write_text("extends: [a.yaml]")
    with raises(ConfigError, "b.yaml"):
        load_yaml(tmp_path / "a.yaml")
    with raises(ConfigError, "a.yaml", "c.yaml"):
        load_yaml(tmp_path / "c.yaml")


@examples(20)
@given(TREES, TREES)
def test_merge_keeps_every_key_and_prefers_the_changes(base: dict[str, Any], changes: dict[str, Any]) -> None:
    merged = merge(base, changes)
    assert set(merged) == set(base) | set(changes)
    assert merge(merged, changes) == merged
    assert merge(base, {}) == base
    assert merge({}, changes) == changes
    assert all(merged[key] == value for key, value in changes.items() if not isinstance(value, dict))


def test_override_sets_what_it_names_and_leaves_its_input_alone() -> None:
    data = {"train": {"steps": 1, "log": {"every": 2}}, "mesh": None}
    changes = ["train.steps=5", "mesh.data=-1", "new.a.b=[1, x]", " name = a=b", "empty="]
    assert override(data, changes) == {
        "train": {"steps": 5, "log": {"every": 2}},
        "mesh": {"data": -1},
        "new": {"a": {"b": [1, "x"]}},
        "name": "a=b",
        "empty": None,
    }
    assert data == {"train": {"steps": 1, "log": {"every": 2}}, "mesh": None}
    assert override({}, ["a=1", "a=2"]) == {"a": 2}


def test_build_fills_nested_dataclasses_with_values_of_their_types() -> None:
    config = built(optimizer={"rate": 1, "stage": 3}, mesh={"data": -1}, sizes=[1, 2], options={"a": {"b": 1}})
    assert config == Config("a", Optimizer(1.0, 3), MeshSpec(data=-1), sizes=(1, 2), options={"a": {"b": 1}})
    assert type(config.optimizer.rate) is float
    assert built() == Config("a")


def test_build_takes_the_option_of_a_union_that_fits() -> None:
    assert built(extra={"rate": 1}).extra == Optimizer(1.0)
    assert built(extra="text").extra == "text"


@pytest.mark.parametrize(
    "values",
    [
        {"steps": None},
        {"steps": 3},
        {"remat": True},
        {"remat": "auto"},
        {"texts": ["a"]},
        {"anything": {"a": [object]}},
        {"mesh": MeshSpec(data=2)},
    ],
)
def test_build_keeps_values_that_fit(values: dict[str, Any]) -> None:
    config = built(**values)
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"steps": True}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"optimizer": {"rate": "1"}}, "optimizer: rate"),
        ({"optimizer": {"rate": False}}, "optimizer: rate"),
        ({"optimizer": {"rate": 1, "stage": True}}, "optimizer: stage"),
        ({"optimizer": None}, "optimizer"),
        ({"optimizer": {}}, "'rate'"),
        ({"remat": "aut"}, "remat"),
        ({"sizes": [1, "2"]}, "sizes[1]"),
        ({"sizes": 1}, "sizes"),
        ({"texts": "abc"}, "texts"),
        ({"options": []}, "options"),
        ({"extra": 3}, "extra"),
        ({"extra": {"rat": 1}}, "'rat'"),
        ({"mesh": {"data": "8"}}, "mesh: data"),
        ({"share": 0}, "share"),
        ({"share": float("nan")}, "share"),
        ({"share": "1"}, "share"),
        ({"counts": {"a": 9}}, "counts: a"),
        ({"counts": {"a": 2**63}}, "counts: a"),
        ({"counts": {"a": 1.5}}, "counts: a"),
        ({"steps": 2**63}, "steps"),
        ({"optimizer": {"rate": float("inf")}}, "optimizer: rate"),
        ({"k" * 999: 1}, "unknown key"),
    ],
)
def test_build_says_what_is_wanted(values: dict[str, Any], name: str) -> None:
    with raises(ConfigError, "c.yaml", name):
        built(**values)
