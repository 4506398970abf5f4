"""Tests the names that ``annotate`` finds, what it reports, and that its steps compute what one device computes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from flax import linen as nn
from flax import nnx

import jaxpar as jp
from jaxpar.analysis.divergence import first_nonfinite
from jaxpar.errors import AnnotationError
from jaxpar.models import LlamaConfig, ViTConfig, make_llama, make_vit, next_token_loss, vit_loss
from jaxpar.planning.names.annotation import Annotation
from jaxpar.training.model import leaves_with_paths, read, show
from tests.one_step import SGD, initial
from tests.planning.names import models
from tests.profiles import few


def found_in(case: str) -> dict[str, tuple[str | None, ...]]:
    """The names of a case's arrays, with numbers in their paths as ``*``."""
    return {re.sub(r"\d+(?=/|$)", "*", a.path): a.names for a in annotated(case).arrays}


@functools.cache
def annotated(case: str) -> Annotation:
    return jp.annotate(*models.CASES[case]())


EXPECTED = {
    "gpt": {
        "params/blocks/*/attention/query/kernel": ("embed", "heads", "head_dim"),
        "params/blocks/*/attention/out/kernel": ("heads", "head_dim", "embed"),
        "params/blocks/*/up/kernel": ("embed", "mlp"),
        "params/positions/embedding": ("positions", "embed"),
        "params/head/kernel": ("embed", "vocab"),
        "batch/tokens": ("batch", "seq"),
    },
    "gpt scanned": {
        "params/blocks/attention/value/kernel": ("layers", "embed", "heads", "head_dim"),
        "params/blocks/down/kernel": ("layers", "mlp", "embed"),
        "params/tokens/embedding": ("vocab", "embed"),
    },
    "gpt tied": {"params/tokens/embedding": ("vocab", "embed"), "params/blocks/*/up/bias": ("mlp",)},
    "fused qkv": {
        "params/qkv": ("embed", "fused_heads"),
        "params/out": ("heads", "embed"),
        "params/up": ("embed", "mlp"),
        "params/down": ("mlp", "embed"),
    },
    "grouped queries": {
        "params/q": ("embed", "heads"),
        "params/k": ("embed", "kv_heads"),
        "params/v": ("embed", "kv_heads"),
        "params/o": ("heads", "embed"),
    },
    "multi-query": {"params/q": ("embed", "heads", "head_dim"), "params/k": ("embed", "head_dim")},
    "experts": {
        "params/router": ("embed", "experts"),
        "params/up": ("experts", "embed", "mlp"),
        "params/down": ("experts", "mlp", "embed"),
    },
    "resnet": {
        "params/Conv_*/kernel": (None, None, "channels", "channels_2"),
        "params/Dense_*/kernel": ("channels_2", "vocab"),
        "variables/batch_stats/BatchNorm_*/mean": ("channels_2",),
        "batch/images": ("batch", "height", "width", "channels_2"),
    },
    "vit": {
        "params/patch/kernel": (None, None, "channels", "embed"),
        "params/positions": (None, "positions", "embed"),
        "params/token": (None, None, "embed"),
        "params/MultiHeadDotProductAttention_*/value/kernel": ("embed", "heads", "head_dim"),
        "params/classify/kernel": ("embed", "vocab"),
    },
    "t5": {
        "params/Embed_*/embedding": ("vocab", "embed"),
        "params/MultiHeadDotProductAttention_*/key/kernel": ("embed", "heads", "head_dim"),
        "batch/source": ("batch", "seq"),
        "batch/target": ("batch", "seq"),
    },
    "mamba": {
        "params/decay": ("mlp", "features"),
        "params/Conv_*/kernel": (None, None, "mlp"),
        "params/RMSNorm_*/scale": ("embed",),
    },
    "lstm": {"params/Dense_*/kernel": ("embed", "vocab"), "params/LSTMCell_*/hf/kernel": ("embed", None)},
    "unet": {"batch/images": ("batch", "height", "width", "channels_2")},
    "diffusion transformer": {
        "params/Conv_*/kernel": (None, None, "channels", "embed"),
        "params/LayerNorm_*/scale": ("embed",),
        "batch/time": ("batch",),
    },
}


@pytest.mark.parametrize("case", few(models.CASES, 6))
def test_dims_are_found(case: str) -> None:
    found = found_in(case)
    assert {path: found[path] for path in EXPECTED[case]} == EXPECTED[case]


@pytest.mark.parametrize("case", few(models.CASES, 6))
def test_no_array_has_a_name_twice(case: str) -> None:
    annotation = annotated(case)
    for array in annotation.arrays:
        names = [name for name in array.names if name is not None]
        assert len(names) == len(set(names)), array
    assert not annotation.unknown


def without_names(make_model: Any) -> Any:
    """The model without its annotations."""

    def made(key: jax.Array) -> Any:
        model = make_model(key)
        if not isinstance(model, nnx.Module):
            return nn.unbox(model)
        for _, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.Variable) and "logical_dims" in variable.get_metadata():
                variable.set_metadata("logical_dims", None)
        return model

    return made


def by_hand(make_model: Any, layout: jp.Layout) -> dict[str, tuple[str | None, ...]]:
    names: dict[str, tuple[str | None, ...]] = {}

    def collect(key: jax.Array) -> jax.Array:
        names.update({show(path): dims for path, dims in read(make_model(key)).dims})
        return jnp.zeros(())

    with layout:
        jax.eval_shape(collect, jax.random.key(0))
    return names


LLAMA, VIT = LlamaConfig(layers=2), ViTConfig(layers=2)
OURS = {
    "llama": (make_llama(LLAMA), next_token_loss, models.TEXT),
    "vit": (make_vit(VIT), vit_loss(VIT), {"images": models.floats(8, 16, 16, 3), "labels": models.integers(8)}),
}


@pytest.mark.parametrize("name", few(OURS, 1))
def test_our_models_without_their_names_are_named_as_by_hand(name: str) -> None:
    make_model, loss_fn, batch = OURS[name]
    rules = dict.fromkeys(("batch", "seq", "residual_seq", "embed", "mlp", "vocab", "norm", "heads", "layers"))
    expected = by_hand(make_model, jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), jp.Rules(**rules)))
    found = {array.path: array.names for array in jp.annotate(without_names(make_model), loss_fn, batch).arrays}
    pairs = [
        (own, "embed" if hand == "norm" else hand)
        for path, names in expected.items()
        for own, hand in zip(found[path], names, strict=True)
    ]
    right = sum(own == hand for own, hand in pairs)
    assert len(pairs) == {"llama": 34, "vit": 55}[name] and right / len(pairs) >= 0.95


RULES: dict[str, dict[str, Any]] = {
    "fsdp": {"batch": "data", "params": {"embed": "data"}},
    "fsdp x tensor": {
        "batch": "data",
        "heads": "model",
        "mlp": "model",
        "vocab": "model",
        "params": {"embed": "data"},
    },
    "sequence": {"batch": "data", "seq": "model"},
}


def layout_for(annotation: Annotation, rules: str) -> jp.Layout:
    table = dict.fromkeys(annotation.names)
    table |= {name: axis for name, axis in RULES[rules].items() if name in table}
    overlay = {name: axis for name, axis in RULES[rules].get("params", {}).items() if name in table}
    mesh = jp.MeshSpec(data=4, model=2).build()
    dims = {name: "replicate" for name in table}
    return jp.Layout(mesh, jp.Rules(**table, params=overlay, indivisible=dims))


def numbers(batch: dict[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 10, x.shape).astype(x.dtype)
        if np.issubdtype(x.dtype, np.integer)
        else rng.normal(size=x.shape).astype(x.dtype)
        for name, x in batch.items()
    }


def both_steps(case: models.Case, rules: str) -> list[tuple[Any, dict[str, Any]]]:
    """State and metrics after a step of the user's loss on one device, and of the annotated one in a layout."""
    make_model, loss_fn, shapes = case
    annotation, batch = jp.annotate(make_model, loss_fn, shapes), numbers(shapes)
    layout, results = layout_for(annotation, rules), []
    for here, loss in ((layout.on_one_device(), loss_fn), (layout, annotation.loss_fn)):
        abstract = jp.abstract_state(here, annotation.make_model, SGD)
        step = jp.train_step(here, loss, return_grads=True, donate=False).lower(abstract, batch).compile()
        results.append(step(initial(abstract, annotation.make_model, layout.rules), batch))
    return results


STEPS: list[tuple[str, Callable[[], models.Case], str]] = [
    ("gpt", lambda: models.gpt(layers=1), "fsdp x tensor"),
    *((name, models.CASES[name], "fsdp") for name in ("gpt scanned", "resnet")),
    ("experts", models.CASES["experts"], "fsdp x tensor"),
]


@pytest.mark.parametrize(("name", "case", "rules"), few(STEPS, keep=1, names=3))
def test_an_annotated_step_equals_the_users_loss_on_one_device(
    name: str, case: Callable[[], models.Case], rules: str
) -> None:
    (after, right), (own_after, own) = both_steps(case(), rules)
    np.testing.assert_allclose(float(own["loss"]), float(right["loss"]), rtol=1e-6)
    largest = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(right["grads"]))
    for (path, a), (_, b) in zip(leaves_with_paths(right["grads"]), leaves_with_paths(own["grads"]), strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), atol=2e-6 * largest, err_msg=show(path))
    for a, b in zip(jax.tree.leaves(after.variables), jax.tree.leaves(own_after.variables), strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-5, atol=1e-6)


def test_names_given_by_patterns_are_kept_and_name_the_same_dims_elsewhere() -> None:
    make_model, loss_fn, batch = models.gpt()
    names = {"blocks/*/up/kernel": ("width", "ffn"), "head/kernel": (None, "words")}
    annotation = jp.annotate(make_model, loss_fn, batch, names=names)
    found = {array.path: array for array in annotation.arrays}
    assert found["params/blocks/1/down/kernel"].names == ("ffn", "width")
    assert found["params/blocks/0/attention/query/kernel"].names == ("width", "heads", "head_dim")
    assert found["params/head/kernel"].names == (None, "words")
    up = found["params/blocks/0/up/kernel"]
    assert {dim.reason for dim in up.dims} == {"given by the pattern 'blocks/*/up/kernel'"}


def test_the_table_lists_what_each_pattern_names() -> None:
    make_model, loss_fn, batch = models.gpt()
    names = {"blocks/*/up/kernel": ("embed", "ffn"), "head/*": (None, "words"), "**/up/kernel": ("embed", "mlp")}
    annotation = jp.annotate(make_model, loss_fn, batch, names=names)
    assert annotation.matched == {
        "blocks/*/up/kernel": ("params/blocks/0/up/kernel", "params/blocks/1/up/kernel"),
        "head/*": ("params/head/kernel",),
        "**/up/kernel": (),
    }
    *_, head, first, second, third = str(annotation).split("\n\n")[2].splitlines()
    assert head.split("  ")[0] == "parameters named by a pattern"
    assert first.split() == ["params/blocks/*/up/kernel", "(2)", "blocks/*/up/kernel"]
    assert second.split() == ["params/head/kernel", "head/*"]
    assert third == "none: patterns before it name them  **/up/kernel"


def test_a_class_twice_in_an_array_is_reported() -> None:
    make_model = models.weights(w=(8, 8))

    def loss_fn(p: Any, batch: Any) -> jax.Array:
        return (jnp.tanh(batch["x"] @ p["w"]) @ p["w"] - batch["x"]).sum()

    annotation = jp.annotate(make_model, loss_fn, {"x": models.floats(16, 8)})
    (w,) = (array for array in annotation.arrays if array.path == "params/w")
    assert w.twice == (w.names[0],) and w.names[1] is None
    text = f"note: params/w has {w.names[0]!r} in two dims: a mesh axis can shard only the first"
    assert text in str(annotation).splitlines()


def test_custom_derivatives_and_manual_code_run_as_they_are() -> None:
    @jax.custom_vjp
    def scaled(x: jax.Array) -> jax.Array:
        return x

    scaled.defvjp(lambda x: (x, None), lambda _, g: (3.0 * g,))  # not the derivative, so that it is told apart
    spec = jax.P("data")

    def double(x: jax.Array) -> jax.Array:
        return jax.shard_map(lambda x: 2.0 * x, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    def loss_fn(p: Any, batch: Any) -> jax.Array:
        return (scaled(double(batch["x"] @ p["up"])) @ p["down"]).mean()

    make_model, mesh = models.weights(up=(16, 32), down=(32, 16)), jp.MeshSpec(data=8).build()
    names = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    annotation, tx = jp.annotate(make_model, loss_fn, {"x": models.floats(24, 16)}, names=names), optax.sgd(0.1)
    rules = dict.fromkeys(annotation.names) | {"batch": "data", "params": {"embed": "data"}}
    layout, batch = jp.Layout(mesh, jp.Rules(**rules)), numbers({"x": models.floats(24, 16)})
    state = jp.init(layout, annotation.make_model, tx)
    _, found = jp.train_step(layout, annotation.loss_fn, return_grads=True, donate=False)(state, batch)
    w = jax.tree.map(np.asarray, state.params)
    up, x = w["up"], batch["x"]
    ones = np.full((24, 16), 1 / (24 * 16))
    right = {"up": x.T @ (3 * 2 * (ones @ w["down"].T)), "down": (2 * x @ up).T @ ones}
    for name, expected in right.items():
        np.testing.assert_allclose(np.asarray(found["grads"][name]), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"block/*/up/kernel": ("embed", "mlp")}, "block/*/up/kernel"),
        ({"**/up/*": ("embed", "mlp")}, "/up/*"),
        ({"head/kernel": "embed"}, "head/kernel"),
    ],
)
def test_a_pattern_that_does_not_fit_is_named(names: Any, text: str) -> None:
    with raises(AnnotationError, text):
        jp.annotate(*models.gpt(), names=names)


def test_a_primitive_through_which_nothing_is_followed_is_named() -> None:
    make_model = models.weights(table=(16, 8), w=(8, 8))

    def loss_fn(p: Any, batch: Any) -> jax.Array:
        return jnp.linalg.qr(p["table"][batch["tokens"]] @ p["w"])[1].sum()

    annotation = jp.annotate(make_model, loss_fn, {"tokens": models.integers(8, 8)})
    assert dict(annotation.unknown) == {"qr": 1}
    assert "dims are not followed through 'qr (1)': what only they connect has names of its own" in str(annotation)


def test_tags_of_the_batch_and_a_key_are_kept() -> None:
    make_model, loss_fn, _ = models.gpt()
    batch = {
        name: jp.tag(jax.ShapeDtypeStruct((8, models.SEQ), "int32"), "rows", "time") for name in ("tokens", "targets")
    }

    def noisy(model: Any, batch: Any, key: jax.Array) -> jax.Array:
        return loss_fn(model, batch) + 0 * jax.random.normal(key)

    annotation = jp.annotate(make_model, noisy, batch)
    assert annotation.batch_dims == {"tokens": ("rows", "time"), "targets": ("rows", "time")}
    assert "rows" in annotation.names and "batch" not in annotation.names
    assert annotation.tagged(batch)["tokens"].dims == ("rows", "time")
    with raises(AnnotationError, "mask"):
        annotation.tagged(batch | {"mask": jax.ShapeDtypeStruct((8, 4), "bool")})


def test_a_batch_may_be_one_array() -> None:
    x = jax.ShapeDtypeStruct((8, 16), "float32")
    annotation = jp.annotate(models.weights(w=(16, 4)), lambda p, x: (x @ p["w"]).sum(), x)
    summed = next(a.names[0] for a in annotation.arrays if a.path == "params/w")
    assert summed is not None and annotation.tagged(x).dims == ("batch", summed)


@pytest.mark.slow
@pytest.mark.parametrize("stage", few([1, 2, 3], keep=1))
def test_an_annotated_loss_runs_with_zero(stage: int) -> None:
    make_model, loss_fn, shapes = models.gpt(layers=1)
    annotation, batch, tx = jp.annotate(make_model, loss_fn, shapes), numbers(shapes), optax.adam(1e-2)
    zero, mesh = jp.Zero(stage), jp.MeshSpec(data=8).build()
    layout = jp.Layout(mesh, zero.rules(jp.Rules(**dict.fromkeys(annotation.names) | {"batch": "data"})))
    losses = []
    for here, loss, options in ((layout.on_one_device(), loss_fn, {}), (layout, annotation.loss_fn, zero.step)):
        state, step = jp.init(here, annotation.make_model, tx), jp.train_step(here, loss, **options)
        state, _ = step(state, batch)
        losses.append(float(step(state, batch)[1]["loss"]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.slow
def test_the_first_number_that_is_not_finite_in_an_annotated_step_is_looked_for() -> None:
    make_model, loss_fn, shapes = models.CASES["gpt"]()
    annotation, batch = (
        jp.annotate(make_model, lambda model, batch: loss_fn(model, batch) * jnp.nan, shapes),
        numbers(shapes),
    )
    layout = layout_for(annotation, "fsdp")
    state = jp.init(layout, annotation.make_model, optax.sgd(0.1))
    assert first_nonfinite(layout, state, batch, annotation.loss_fn) == "the loss; every activation is finite"
