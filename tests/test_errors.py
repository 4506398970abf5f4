"""The full error texts for a wrong mesh, rules table, layout, configuration or model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, Mesh

from jaxpar import Layout, MeshSpec, Rules, constrain, first_of, over, shard_array, tag
from jaxpar.errors import AnnotationError, ConfigError, LayoutError, MeshError, ModelError, NoLayoutError, RulesError
from jaxpar.sharding.mesh import AXES
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


def assert_says(error: type[Exception], text: str, act: Callable[[], Any]) -> None:
    """``act`` raises exactly this error with exactly this text."""
    with pytest.raises(error) as caught:
        act()
    assert type(caught.value) is error
    assert str(caught.value) == text


def case(name: str, act: Callable[[], Any], text: str) -> Any:
    return pytest.param(act, text, id=name)


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
    case(
        "product",
        lambda: MeshSpec(data=4, model=4).build(),
        (
            "the mesh data=4 × model=4 does not fit 8 devices, because its sizes multiply to 16. Remedy: use data=2 or "
            "model=2. To try this mesh on a CPU, call jp.simulate_devices(16) before jax runs anything."
        ),
    ),
    case(
        "product that no single axis mends",
        lambda: MeshSpec(data=3, model=5).build(),
        (
            "the mesh data=3 × model=5 does not fit 8 devices, because its sizes multiply to 15. Remedy: use sizes "
            "that multiply to 8. To try this mesh on a CPU, call jp.simulate_devices(15) before jax runs anything."
        ),
    ),
    case(
        "no sizes on several devices",
        lambda: MeshSpec().build(),
        "the mesh data=1 does not fit 8 devices, because its sizes multiply to 1. Remedy: use data=8.",
    ),
    case(
        "-1 that cannot be filled",
        lambda: MeshSpec(data=-1, context=2, model=3).build(),
        (
            "the mesh data=-1 × context=2 × model=3 does not fit 8 devices, because 8 is not a multiple of 6. Remedy: "
            "use other sizes that multiply to 1 or 2 or 4 or 8."
        ),
    ),
    case(
        "-1 and too few devices",
        lambda: MeshSpec(data=-1, model=2).build(jax.devices()[:1]),
        (
            "the mesh data=-1 × model=2 does not fit 1 devices, because 1 is not a multiple of 2. Remedy: use other "
            "sizes that multiply to 1. To try this mesh on a CPU, call jp.simulate_devices(8) before jax runs anything."
        ),
    ),
    case(
        "two -1",
        lambda: MeshSpec(data=-1, model=-1),
        "the mesh axes 'data', 'model' are -1, but only one can be. Remedy: give the others a size.",
    ),
    case(
        "no devices",
        lambda: MeshSpec(data=-1).build([]),
        "a mesh needs at least one device, but the number of devices is 0.",
    ),
    case(
        "size that is no size",
        lambda: MeshSpec(data=0),
        "the size of the mesh axis 'data' must be a positive integer or -1, got 0.",
    ),
    case(
        "unknown axis",
        lambda: MeshSpec.from_dict({"modle": 2}),
        "unknown mesh axis 'modle'. Did you mean 'model'? The axes are: pipeline, replica, data, expert, "
        "context, ulysses, model, x, y, z.",
    ),
    case(
        "list",
        lambda: MeshSpec.from_dict([8]),  # type: ignore[arg-type]
        "a mesh must be a mapping of axes to sizes such as {data: -1}, got [8].",
    ),
    case(
        "abstract without a number",
        lambda: MeshSpec(data=-1, model=2).abstract(),
        "abstract() of the mesh data=-1 × model=2 requires a number of devices, such as abstract(4096).",
    ),
]


@pytest.mark.parametrize(("act", "text"), MESHES)
def test_mesh(act: Callable[[], Any], text: str) -> None:
    assert_says(MeshError, text, act)


RULE_TABLES = [
    case(
        "overlay for a dim not in the base table",
        lambda: Rules(embed=None, params={"embd": "data"}),
        (
            "params names 'embd', which is not in the base table. Did you mean 'embed'? Remedy: correct the name, or "
            "add it to the base table."
        ),
    ),
    case(
        "indivisible for a dim not in the base table",
        lambda: Rules(embed=None, indivisible={"vocab": "replicate"}),
        (
            "indivisible names 'vocab', which is not in the base table. Remedy: correct the name, or add it to the "
            "base table."
        ),
    ),
    case(
        "axis twice in a rule",
        lambda: Rules(batch=("data", "replica", "data")),
        "batch = ('data', 'replica', 'data') names an axis twice. Remedy: name each axis once.",
    ),
    case(
        "no rule",
        lambda: Rules(params={"mlp": 5}, mlp=None),
        "params: mlp must be an axis, a tuple of axes (major to minor) or None, got 5.",
    ),
    case(
        "misspelt role",
        lambda: Rules(embed=None, parms={"embed": "data"}),
        "parms must be an axis, a tuple of axes (major to minor) or None, got {'embed': 'data'}. "
        "Did you mean 'params'?",
    ),
    case(
        "over for a dim",
        lambda: Rules(optimiser=over("data")),
        (
            "optimiser must be an axis, a tuple of axes (major to minor) or None, got over(data, min_bytes=65536). Did "
            "you mean 'optimizer'?"
        ),
    ),
    case(
        "axis for a role",
        lambda: Rules(params="data"),
        "params must be a mapping of dims to rules, or over(axis), got 'data'.",
    ),
    case(
        "choice of indivisible",
        lambda: Rules(vocab="model", indivisible={"vocab": "pad"}),
        "indivisible must be a mapping such as {'vocab': 'replicate'}, got {'vocab': 'pad'}.",
    ),
    case(
        "choice of unannotated",
        lambda: Rules(unannotated="ignore"),
        "unannotated must be 'error' (the default) or 'replicate', got 'ignore'.",
    ),
    case(
        "None before the last option",
        lambda: first_of(None, "model"),
        "first_of(None, 'model'): at least one option is required, and None may only be the last one.",
    ),
    case(
        "option that is no axis",
        lambda: first_of("model", 3),  # type: ignore[arg-type]
        "an option of first_of must be an axis, a tuple of axes (major to minor) or None, got 3.",
    ),
    case(
        "min_bytes",
        lambda: over("data", "64kb"),
        "over('data', '64kb') requires an axis and a size, such as over('data', '64KiB').",
    ),
    case(
        "over without an axis",
        lambda: over(()),
        "over((), 65536) requires an axis and a size, such as over('data', '64KiB').",
    ),
    case(
        "first_of in YAML",
        lambda: Rules.from_dict({"heads": {"first_of": "model"}}),
        "heads must be written as {first_of: [axis, ..., null]}, got {'first_of': 'model'}.",
    ),
    case(
        "over in YAML",
        lambda: Rules.from_dict({"optimizer": {"over": "data", "min_byte": 0}}),
        "optimizer must be written as {over: axis, min_bytes: 64KiB}, got {'over': 'data', 'min_byte': 0}.",
    ),
    case(
        "name in YAML",
        lambda: Rules.from_dict({True: "model"}),  # type: ignore[dict-item]
        "rules must be a mapping of names to axes such as {batch: data}, got {True: 'model'}.",
    ),
    case(
        "list",
        lambda: Rules.from_dict(["embed"]),  # type: ignore[arg-type]
        "rules must be a mapping of names to axes such as {batch: data}, got ['embed'].",
    ),
]


@pytest.mark.parametrize(("act", "text"), RULE_TABLES)
def test_rules(act: Callable[[], Any], text: str) -> None:
    assert_says(RulesError, text, act)


LAYOUTS = [
    case(
        "unknown dim",
        lambda: spec("params/attn/q", ("embed", "hedas"), (64, 8), role="params"),
        (
            "params/attn/q [64, 8] (embed, hedas): unknown logical dim 'hedas'. Did you mean 'heads'? The rules know "
            "'batch', 'embed', 'heads', 'kv_heads', 'mlp'. Remedy: correct the annotation, or add 'hedas' to the rules "
            "(as None to leave it unsharded)."
        ),
    ),
    case(
        "empty table",
        lambda: spec("params/mlp/kernel", ("embed", None), (64, 8), Rules()),
        "params/mlp/kernel [64, 8] (embed, None): the dim is named 'embed', but the rules table is empty. "
        "Remedy: give Rules a rule for 'embed'.",
    ),
    case(
        "rank of an activation",
        lambda: spec("constrain()", ("batch",), (8, 128)),
        "constrain() [8, 128] (batch): the tensor has rank 2, but 1 dim names. Remedy: give each dim a name or None.",
    ),
    case(
        "rank of a parameter",
        lambda: spec("params/blocks/mlp/kernel", ("embed", "mlp"), (4, 8, 16), role="params"),
        (
            "params/blocks/mlp/kernel [4, 8, 16] (embed, mlp): the tensor has rank 3, but 2 dim names. Remedy: give "
            "each dim a name or None. For stacked layers, see jaxpar.nnx.stacked() or, in Linen, nn.PARTITION_NAME."
        ),
    ),
    case(
        "indivisible",
        lambda: spec("params/mlp/kernel", ("embed", "mlp"), (64, 31), role="params"),
        (
            "params/mlp/kernel [64, 31] (embed, mlp): the dim 'mlp' has size 31, which is not a multiple of model=2 "
            "(rule mlp = model). Remedy: change the size, the rule or the mesh, or leave such dims unsharded: "
            "indivisible={'mlp': 'replicate'} (YAML: indivisible: {mlp: replicate})."
        ),
    ),
    case(
        "axis claimed by two dims",
        lambda: spec("params/attn/q", ("heads", "mlp"), (8, 64), role="params"),
        (
            "params/attn/q [8, 64] (heads, mlp): the axis 'model' is claimed by the dims 'heads' and 'mlp' (rule mlp = "
            "model). Remedy: give one of the two another axis or None, possibly in one role only (activations, params, "
            "...)."
        ),
    ),
    case(
        "axis claimed by one name",
        lambda: spec("params/square", ("mlp", "mlp"), (8, 8), role="params"),
        (
            "params/square [8, 8] (mlp, mlp): the axis 'model' is claimed by the dims 'mlp' and 'mlp' (rule mlp = "
            "model). Remedy: give one of the two another name, with its own rule."
        ),
    ),
    case(
        "no option fits",
        lambda: spec("params/attn/k", ("kv_heads",), (3,), role="params"),
        (
            "params/attn/k [3] (kv_heads): the dim 'kv_heads' has size 3, which is not a multiple of data=2 × model=2 "
            "= 4; the dim 'kv_heads' has size 3, which is not a multiple of model=2 (rule kv_heads = first_of((data, "
            "model), model)). Remedy: add None as the last option, to leave the dim unsharded."
        ),
    ),
    case(
        "batch",
        lambda: shard_array(layout_of(), np.ones((6, 4)), "batch", "embed", path="batch/x"),
        (
            "batch/x [6, 4] (batch, embed): the dim 'batch' has size 6, which is not a multiple of replica=2 × data=4 "
            "= 8 (rule batch = (replica, data)). Remedy: change the size, the rule or the mesh, or leave such dims "
            "unsharded: indivisible={'batch': 'replicate'} (YAML: indivisible: {batch: replicate})."
        ),
    ),
    case(
        "put on an abstract mesh",
        lambda: shard_array(Layout(MeshSpec(data=8).abstract(), RULES), np.ones(8), "batch"),
        "batch: shard_array() needs devices, but the mesh is abstract. Remedy: MeshSpec.build().",
    ),
    case(
        "axis that does not exist",
        lambda: Layout(MeshSpec().abstract(), Rules(embed=None, params={"embed": "dta"})),
        "the rule for 'params: embed' names the mesh axis 'dta', which does not exist. Did you mean 'data'? The "
        "mesh has "
        f"{', '.join(map(repr, AXES))}. Remedy: correct the rule, or build a mesh with that axis.",
    ),
    case(
        "two problems",
        lambda: Layout(MeshSpec().abstract(), Rules(x="first", y="second")),
        "2 problems:\n"
        "1. the rule for 'x' names the mesh axis 'first', which does not exist. The mesh has "
        f"{', '.join(map(repr, AXES))}. Remedy: correct the rule, or build a mesh with that axis.\n"
        "2. the rule for 'y' names the mesh axis 'second', which does not exist. The mesh has "
        f"{', '.join(map(repr, AXES))}. Remedy: correct the rule, or build a mesh with that axis.",
    ),
    case(
        "Auto axes, although explicit is set",
        lambda: Layout(mesh_of(AxisType.Auto, AxisType.Explicit), Rules(), explicit=True),
        "the mesh must have Explicit axes only, because explicit is set, got data=Auto, model=Explicit. Remedy: use "
        "Layout(MeshSpec(...).build(), rules).",
    ),
    case(
        "manual axes",
        lambda: Layout(mesh_of(AxisType.Manual, AxisType.Manual), Rules()),
        "the mesh must have no Manual axes, got data=Manual, model=Manual. Remedy: use "
        "Layout(MeshSpec(...).build(), rules).",
    ),
    case(
        "MeshSpec for a mesh",
        lambda: Layout(MeshSpec(data=8), {}),  # type: ignore[arg-type]
        "Layout() requires a Mesh and Rules, got MeshSpec and dict. Remedy: use Layout(MeshSpec(...).build(), rules).",
    ),
]


@pytest.mark.parametrize(("act", "text"), LAYOUTS)
def test_layout(act: Callable[[], Any], text: str) -> None:
    assert_says(LayoutError, text, act)


def test_no_active_layout() -> None:
    text = (
        "no active layout, but constrain() and hint() need one. Remedy: run inside 'with layout:', or call the model "
        "through train_step(layout, ...); or, to run the model as plain JAX, inside 'with jp.unsharded():'."
    )
    assert_says(NoLayoutError, text, lambda: constrain(jnp.ones(8), "batch"))


CONFIGS = [
    case(
        "unknown key",
        lambda: build(Train, {"stesp": 1}, "c.yaml: train"),
        "c.yaml: train: unknown key 'stesp'. Did you mean 'steps'? The keys are: steps, rate.",
    ),
    case(
        "missing key",
        lambda: build(Train, {"rate": 1}, "c.yaml: train"),
        "c.yaml: train: the key 'steps' is missing. The keys are: steps, rate.",
    ),
    case(
        "wrong type",
        lambda: build(Train, {"steps": "100"}, "c.yaml: train"),
        "c.yaml: train: steps must be an integer, got '100' (str).",
    ),
    case(
        "unknown key of a layout",
        lambda: Layout.from_dict({"mesh": {}, "rulse": {}}),
        "layout: unknown key 'rulse'. Did you mean 'rules'? The keys are: mesh, rules, rings.",
    ),
    case(
        "duplicate key",
        lambda: parse_yaml("mesh: {data: 1}\nrules:\n  mlp: model\n  embed: null\n  mlp: null\n", "c.yaml"),
        "c.yaml: line 5: duplicate key 'mlp', first on line 3. Remedy: keep one.",
    ),
    case(
        "not a mapping",
        lambda: parse_yaml("just text", "c.yaml"),
        "c.yaml must be a mapping, got a string.",
    ),
    case(
        "setting without a value",
        lambda: override({}, ["train.steps"]),
        "--set 'train.steps': the setting must be key=value, such as --set train.steps=100.",
    ),
    case(
        "setting with an empty key",
        lambda: override({}, ["train..steps=1"]),
        "--set 'train..steps=1': the setting must be key=value, such as --set train.steps=100.",
    ),
    case(
        "setting through a value",
        lambda: override({"train": {"steps": 5}}, ["train.steps.max=1"]),
        "--set 'train.steps.max=1': train.steps is 5 (int), not a mapping.",
    ),
    case(
        "setting that is not YAML",
        lambda: override({}, ["train.steps=[1"]),
        "--set train.steps: line 1: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'.",
    ),
]


@pytest.mark.parametrize(("act", "text"), CONFIGS)
def test_config(act: Callable[[], Any], text: str) -> None:
    assert_says(ConfigError, text, act)


def test_a_tag_builds_no_object(tmp_path: Path) -> None:
    text = (
        "c.yaml: line 2: the tag '!!python/object/apply:os.system' would build an object. Remedy: write plain text, "
        "numbers, lists or mappings."
    )
    source = f"a: 1\nb: !!python/object/apply:os.system ['touch {tmp_path}/executed']"
    assert_says(ConfigError, text, lambda: parse_yaml(source, "c.yaml"))
    assert not list(tmp_path.iterdir())


MODELS = [
    case(
        "Linen module",
        lambda: read(nn.Dense(3)),
        "make_model returned the Linen module Dense, which holds no arrays. Remedy: return its variables, as in "
        "make_model = lambda key: module.init(key, example_input).",
    ),
    case(
        "no parameters",
        lambda: read({"params": {}}),
        "make_model returned dict with no parameters. Remedy: return an nnx.Module, Linen variables or a pytree "
        "of arrays.",
    ),
    case(
        "unknown collections",
        lambda: TreeKind(True).carried(None, {"cache": 1}, {"batch_stats": 1}),
        "the third value that loss_fn returns must be a dict of the carried collections ('cache'), got a dict of "
        "'batch_stats'. Remedy: return the collections that apply(..., mutable=[...]) returns in addition to the "
        "output.",
    ),
    case(
        "updates that are no collections",
        lambda: TreeKind(True).carried(None, {"cache": 1}, 3),
        "the third value that loss_fn returns must be a dict of the carried collections ('cache'), got int. Remedy: "
        "return the collections that apply(..., mutable=[...]) returns in addition to the output.",
    ),
]


@pytest.mark.parametrize(("act", "text"), MODELS)
def test_model(act: Callable[[], Any], text: str) -> None:
    assert_says(ModelError, text, act)


ANNOTATIONS = [
    case(
        "name that is no string",
        lambda: tag(np.ones((2, 3)), "batch", 3),  # type: ignore[arg-type]
        "tag(): the logical dims must be a string or None for each dim, such as ('embed', 'mlp'), got ('batch', 3).",
    ),
    case(
        "tag around a tree",
        lambda: read({"mlp": tag({"kernel": 1, "bias": 2}, "embed")}),
        "params/mlp: a tag must contain one array, got dict.",
    ),
]


@pytest.mark.parametrize(("act", "text"), ANNOTATIONS)
def test_annotation(act: Callable[[], Any], text: str) -> None:
    assert_says(AnnotationError, text, act)
