"""The errors for a wrong mesh, rules table, layout, configuration or model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from flax import linen as nn
from jax.sharding import AxisType, Mesh

from jaxpar import Layout, MeshSpec, Rules, constrain, first_of, over, shard_array, tag
from jaxpar.errors import AnnotationError, ConfigError, LayoutError, MeshError, ModelError, NoLayoutError, RulesError
from jaxpar.training.model import read
from jaxpar.training.model.pytree import TreeKind
from jaxpar.utils.yaml_config import build, override, parse_yaml

RULES = Rules(
    batch=("replica", "data"), embed=None, heads="model", mlp="model", kv_heads=first_of(("data", "model"), "model")
)


@dataclasses.dataclass(frozen=True)
class Train:
    steps: int
    rate: float = 1.0


def case(what: str, act: Callable[[], Any], name: str) -> Any:
    return pytest.param(act, name, id=what)


def spec(path: str, names: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules = RULES, **options: Any) -> Any:
    """The spec of a tensor on eight devices, with a replica axis of size 2."""
    mesh = MeshSpec(replica=2, data=2, model=2).abstract()
    return Layout(mesh, rules).spec(names, shape, path=path, **options)


def layout_of() -> Layout:
    return Layout(MeshSpec(replica=2, data=4).build(), RULES)


def mesh_of(*kinds: AxisType) -> Mesh:
    """A mesh of eight devices with these axis types."""
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=kinds)


MESHES = [
    case("product", lambda: MeshSpec(data=4, model=4).build(), "data=4"),
    case("product that no single axis mends", lambda: MeshSpec(data=3, model=5).build(), "data=3"),
    case("no sizes on several devices", lambda: MeshSpec().build(), "data=1"),
    case("-1 that cannot be filled", lambda: MeshSpec(data=-1, context=2, model=3).build(), "context=2"),
    case("-1 and too few devices", lambda: MeshSpec(data=-1, model=2).build(jax.devices()[:1]), "model=2 does"),
    case("two -1", lambda: MeshSpec(data=-1, model=-1), "axes 'data'"),
    case("no devices", lambda: MeshSpec(data=-1).build([]), "one device"),
    case("size that is no size", lambda: MeshSpec(data=0), "axis 'data'"),
    case("unknown axis", lambda: MeshSpec.from_dict({"modle": 2}), "modle"),
    case(
        "list",
        lambda: MeshSpec.from_dict([8]),  # type: ignore[arg-type]
        "got [8]",
    ),
    case("abstract without a number", lambda: MeshSpec(data=-1, model=2).abstract(), "abstract()"),
]


@pytest.mark.parametrize(("act", "name"), MESHES)
def test_mesh(act: Callable[[], Any], name: str) -> None:
    with raises(MeshError, name):
        act()


RULE_TABLES = [
    case("overlay for a dim not in the base table", lambda: Rules(embed=None, params={"embd": "data"}), "embd"),
    case(
        "indivisible for a dim not in the base table",
        lambda: Rules(embed=None, indivisible={"vocab": "replicate"}),
        "names 'vocab'",
    ),
    case("axis twice in a rule", lambda: Rules(batch=("data", "replica", "data")), "'replica'"),
    case("no rule", lambda: Rules(params={"mlp": 5}, mlp=None), "params: mlp"),
    case("misspelt role", lambda: Rules(embed=None, parms={"embed": "data"}), "parms"),
    case("over for a dim", lambda: Rules(optimiser=over("data")), "optimiser"),
    case("axis for a role", lambda: Rules(params="data"), "'data'"),
    case("choice of indivisible", lambda: Rules(vocab="model", indivisible={"vocab": "pad"}), "pad"),
    case("choice of unannotated", lambda: Rules(unannotated="ignore"), "unannotated"),
    case("None before the last option", lambda: first_of(None, "model"), "first_of(None, 'model')"),
    case(
        "option that is no axis",
        lambda: first_of("model", 3),  # type: ignore[arg-type]
        "3",
    ),
    case("min_bytes", lambda: over("data", "64kb"), "64kb"),
    case("over without an axis", lambda: over(()), "over((), 65536)"),
    case("first_of in YAML", lambda: Rules.from_dict({"heads": {"first_of": "model"}}), "heads"),
    case("over in YAML", lambda: Rules.from_dict({"optimizer": {"over": "data", "min_byte": 0}}), "'min_byte'"),
    case(
        "name in YAML",
        lambda: Rules.from_dict({True: "model"}),  # type: ignore[dict-item]
        "{True: 'model'}",
    ),
    case(
        "list",
        lambda: Rules.from_dict(["embed"]),  # type: ignore[arg-type]
        "['embed']",
    ),
]


@pytest.mark.parametrize(("act", "name"), RULE_TABLES)
def test_rules(act: Callable[[], Any], name: str) -> None:
    with raises(RulesError, name):
        act()


LAYOUTS = [
    case("unknown dim", lambda: spec("params/attn/q", ("embed", "hedas"), (64, 8), role="params"), "hedas"),
    case("empty table", lambda: spec("params/mlp/kernel", ("embed", None), (64, 8), Rules()), "rules table"),
    case("rank of an activation", lambda: spec("constrain()", ("batch",), (8, 128)), "constrain()"),
    case(
        "rank of a parameter",
        lambda: spec("params/blocks/mlp/kernel", ("embed", "mlp"), (4, 8, 16), role="params"),
        "params/blocks/mlp/kernel",
    ),
    case("indivisible", lambda: spec("params/mlp/kernel", ("embed", "mlp"), (64, 31), role="params"), "model=2"),
    case(
        "axis claimed by two dims", lambda: spec("params/attn/q", ("heads", "mlp"), (8, 64), role="params"), "'heads'"
    ),
    case(
        "axis claimed by one name",
        lambda: spec("params/square", ("mlp", "mlp"), (8, 8), role="params"),
        "params/square",
    ),
    case("no option fits", lambda: spec("params/attn/k", ("kv_heads",), (3,), role="params"), "params/attn/k"),
    case("batch", lambda: shard_array(layout_of(), np.ones((6, 4)), "batch", "embed", path="batch/x"), "batch/x"),
    case(
        "put on an abstract mesh",
        lambda: shard_array(Layout(MeshSpec(data=8).abstract(), RULES), np.ones(8), "batch"),
        "batch: shard_array",
    ),
    case(
        "axis that does not exist",
        lambda: Layout(MeshSpec().abstract(), Rules(embed=None, params={"embed": "dta"})),
        "params: embed",
    ),
    case("two problems", lambda: Layout(MeshSpec().abstract(), Rules(x="first", y="second")), "'first'"),
    case(
        "Auto axes, although explicit is set",
        lambda: Layout(mesh_of(AxisType.Auto, AxisType.Explicit), Rules(), explicit=True),
        "data=Auto",
    ),
    case("manual axes", lambda: Layout(mesh_of(AxisType.Manual, AxisType.Manual), Rules()), "data=Manual"),
    case(
        "MeshSpec for a mesh",
        lambda: Layout(MeshSpec(data=8), {}),  # type: ignore[arg-type]
        "Layout()",
    ),
]


@pytest.mark.parametrize(("act", "name"), LAYOUTS)
def test_layout(act: Callable[[], Any], name: str) -> None:
    with raises(LayoutError, name):
        act()


def test_no_active_layout() -> None:
    with raises(NoLayoutError, "constrain()"):
        constrain(jnp.ones(8), "batch")


CONFIGS = [
    case("unknown key", lambda: build(Train, {"stesp": 1}, "c.yaml: train"), "stesp"),
    case("missing key", lambda: build(Train, {"rate": 1}, "c.yaml: train"), "key 'steps'"),
    case("wrong type", lambda: build(Train, {"steps": "100"}, "c.yaml: train"), "'100'"),
    case("unknown key of a layout", lambda: Layout.from_dict({"mesh": {}, "rulse": {}}), "rulse"),
    case(
        "duplicate key",
        lambda: parse_yaml("mesh: {data: 1}\nrules:\n  mlp: model\n  embed: null\n  mlp: null\n", "c.yaml"),
        "mlp",
    ),
    case("not a mapping", lambda: parse_yaml("just text", "c.yaml"), "c.yaml"),
    case("setting without a value", lambda: override({}, ["train.steps"]), "'train.steps'"),
    case("setting with an empty key", lambda: override({}, ["train..steps=1"]), "train..steps=1"),
    case(
        "setting through a value", lambda: override({"train": {"steps": 5}}, ["train.steps.max=1"]), "train.steps.max"
    ),
    case("setting that is not YAML", lambda: override({}, ["train.steps=[1"]), "flow sequence"),
]


@pytest.mark.parametrize(("act", "name"), CONFIGS)
def test_config(act: Callable[[], Any], name: str) -> None:
    with raises(ConfigError, name):
        act()


def test_a_tag_builds_no_object(tmp_path: Path) -> None:
    source = f"a: 1\nb: !!python/object/apply:os.system ['touch {tmp_path}/executed']"
    with raises(ConfigError, "!!python/object/apply:os.system"):
        parse_yaml(source, "c.yaml")
    assert not list(tmp_path.iterdir())


MODELS = [
    case("Linen module", lambda: read(nn.Dense(3)), "Dense"),
    case("no parameters", lambda: read({"params": {}}), "returned dict"),
    case("unknown collections", lambda: TreeKind(True).carried(None, {"cache": 1}, {"batch_stats": 1}), "batch_stats"),
    case("updates that are no collections", lambda: TreeKind(True).carried(None, {"cache": 1}, 3), "got int"),
]


@pytest.mark.parametrize(("act", "name"), MODELS)
def test_model(act: Callable[[], Any], name: str) -> None:
    with raises(ModelError, name):
        act()


ANNOTATIONS = [
    case(
        "name that is no string",
        lambda: tag(np.ones((2, 3)), "batch", 3),  # type: ignore[arg-type]
        "tag()",
    ),
    case("tag around a tree", lambda: read({"mlp": tag({"kernel": 1, "bias": 2}, "embed")}), "params/mlp"),
]


@pytest.mark.parametrize(("act", "name"), ANNOTATIONS)
def test_annotation(act: Callable[[], Any], name: str) -> None:
    with raises(AnnotationError, name):
        act()
