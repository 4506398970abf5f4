"""What XLA's partitioner computes wrongly, and that a step computes it as one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from one_step import SGD, initial

import jaxpar as jp
from jaxpar.parallel.partitioner.programs import PROGRAMS, present
from jaxpar.parallel.partitioner.repair import Repaired, noting_repairs

KNOWN = ["wrong"] * 8 + ["fails"] + ["aborts"] * 2


def test_the_installed_xla_has_the_faults_of_the_table() -> None:
    """If this fails, a new JAX mends a fault or has it in another form: correct the table and docs/facts.md."""
    results = present()
    assert [results[number] for number in range(len(PROGRAMS))] == KNOWN


@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=lambda n: PROGRAMS[n].fault.name)
def test_what_runs_instead_is_right(number: int) -> None:
    assert PROGRAMS[number].error(avoid=True) < 1e-6


class Stranger(nnx.Module):
    """A plain Flax model: convolutions with strides, groups and channels of their own, and no names."""

    def __init__(self, rngs: nnx.Rngs):
        make = lambda *channels, **options: nnx.Conv(
            *channels, (3, 3), param_dtype=jax.dtypes.canonicalize_dtype(float), rngs=rngs, **options
        )
        self.first, self.deep = make(3, 8, padding="VALID"), make(8, 8, feature_group_count=8, strides=2)
        self.head = nnx.Linear(8, 4, rngs=rngs, param_dtype=jax.dtypes.canonicalize_dtype(float))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.gelu(self.first(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))))
        return self.head(nnx.gelu(self.deep(x)).mean((1, 2)))


class LinenStranger(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = lambda *args, **options: linen.Conv(*args, param_dtype=jax.dtypes.canonicalize_dtype(float), **options)
        x = linen.gelu(conv(8, (3, 3))(x))
        x = linen.gelu(conv(8, (3, 3), feature_group_count=8, strides=2)(x))
        return linen.Dense(4, param_dtype=jax.dtypes.canonicalize_dtype(float))(x.mean((1, 2)))


def nnx_loss(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def linen_loss(model: Any, batch: Any) -> jax.Array:
    return nnx_loss(lambda x: LinenStranger().apply(model, x), batch)


MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "nnx": (lambda key: Stranger(nnx.Rngs(key)), nnx_loss),
    "linen": (lambda key: LinenStranger().init(key, jnp.zeros((1, 16, 16, 3))), linen_loss),
}
SHARDED = {"batch": "data", "height": "context"}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "rows": ({"data": 2, "context": 2, "model": 2}, SHARDED),
    "batch": ({"data": 4, "model": 2}, {"batch": "data", "height": None}),
    "rows and fsdp": ({"data": 2, "context": 2, "model": 2}, {**SHARDED, "params": jp.over("data", min_bytes=0)}),
}
"""Meshes with an axis that shards neither batch nor space."""


def gradients(layout: jp.Layout, kind: str) -> tuple[list[np.ndarray], bool]:
    """Loss and gradients of a step from the same parameters in every layout, and whether something is repaired."""
    make_model, loss = MODELS[kind]
    random = np.random.default_rng(0)
    dims = {"x": ("batch", "height", None, None), "y": ("batch",)}
    batch = {"x": random.normal(size=(8, 16, 16, 3)), "y": random.integers(0, 4, 8)}
    placed = {name: jp.shard_array(layout, value, *dims[name]) for name, value in batch.items()}
    shapes = jp.abstract_state(layout, make_model, SGD)
    with noting_repairs() as repaired:
        step = jp.train_step(layout, loss, return_grads=True, donate=False).lower(shapes, placed).compile()
    _, metrics = step(initial(shapes, make_model, WHOLE), placed)
    return jax.device_get([metrics["loss"], *jax.tree.leaves(metrics["grads"])]), bool(repaired)


WHOLE = jp.Rules(batch="data", height=None, unannotated="replicate")


@functools.cache
def on_one_device(kind: str) -> list[np.ndarray]:
    expected, repaired = gradients(jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), WHOLE), kind)
    assert not repaired
    return expected


@pytest.mark.parametrize(
    ("kind", "sharding", "explicit"),
    [
        ("nnx", "rows and fsdp", False),
        ("nnx", "batch", True),
        *(
            pytest.param(*case, False, marks=pytest.mark.slow)
            for case in (("nnx", "rows"), ("nnx", "batch"), ("linen", "batch"))
        ),
    ],
)
def test_a_model_that_nobody_here_wrote(kind: str, sharding: str, explicit: bool) -> None:
    """Loss and gradients of plain convolutions are those of one device; only the batch that is passed is sharded."""
    mesh, rules = LAYOUTS[sharding]
    with jax.enable_x64(True):
        types = (jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto,) * len(mesh)
        devices = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=types)
        layout = jp.Layout(devices, jp.Rules(**rules, unannotated="replicate"), explicit=explicit)
        values, repaired = gradients(layout, kind)
        pairs = zip(values, on_one_device(kind), strict=True)
    assert repaired
    for got, expected in pairs:
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13 * max(1.0, np.abs(expected).max()))


def test_a_grouped_kernel_that_is_sharded_along_its_window() -> None:
    """Its gradient was the sum over the batch times the size of that axis, although the batch was on all axes."""
    random = np.random.default_rng(0)
    kernel, x = random.normal(size=(2, 2, 8)), random.normal(size=(8, 8, 8))

    def loss(model: Any, batch: Any) -> jax.Array:
        numbers = ("NWC", "WIO", "NWC")
        y = jax.lax.conv_general_dilated(
            batch["x"], model["kernel"], (2,), [(1, 1)], dimension_numbers=numbers, feature_group_count=4
        )
        return (y**2).sum()

    with jax.enable_x64(True):
        layout = jp.Layout(jp.MeshSpec(data=2, model=4).build(), jp.Rules(batch=None, window="data"))
        make = lambda key: {"kernel": jp.tag(jnp.asarray(kernel), "window", None, None)}
        step = jp.train_step(layout, loss, return_grads=True)
        _, metrics = step(jp.init(layout, make, optax.sgd(0.1)), {"x": x})
        expected = jax.grad(loss)({"kernel": jnp.asarray(kernel)}, {"x": jnp.asarray(x)})["kernel"]
        np.testing.assert_allclose(metrics["grads"]["kernel"], expected, rtol=1e-12)


def test_explain_tells_what_runs_instead() -> None:
    layout = jp.Layout(jp.MeshSpec(data=4, model=2).abstract(), jp.Rules(batch="data", unannotated="replicate"))
    shape = lambda *sizes, dtype="float32": jp.tag(
        jax.ShapeDtypeStruct(sizes, dtype), "batch", *[None] * len(sizes[1:])
    )
    batch = {"x": shape(8, 16, 16, 3), "y": shape(8, dtype="int32")}
    make_model, loss = MODELS["nnx"]
    notes = jp.explain(layout, make_model, optax.sgd(0.1), batch=batch, loss_fn=loss).notes
    (note,) = (note for note in notes if note.startswith("wrong in XLA"))
    assert note == (
        "wrong in XLA, right here: kernel gradient of a grouped convolution: it is multiplied by the sizes of the axes "
        "that shard neither batch nor space if the batch is sharded, and there are such axes. The step runs it slice "
        "by slice: Stranger.__call__ (test_faults.py:47) over data"
    )


def test_programs_that_are_right_stay_as_they_are() -> None:
    """A Llama's step over all its axes, and convolutions of which batch and rows take every axis."""
    with noting_repairs() as repaired:
        layout = jp.Layout(jp.MeshSpec(data=4, context=2).build(), jp.Rules(**SHARDED, unannotated="replicate"))
        step = jp.train_step(layout, MODELS["nnx"][1])
        state = jp.abstract_state(layout, MODELS["nnx"][0], optax.sgd(0.1))
        sharding = layout.sharding(("batch", "height", None, None))
        x = jax.ShapeDtypeStruct((8, 16, 16, 3), jnp.float32, sharding=sharding)
        step.trace(state, {"x": x, "y": jax.ShapeDtypeStruct((8,), jnp.int32, sharding=layout.sharding(("batch",)))})
    assert not repaired


def test_a_repair_names_line_shapes_and_axes() -> None:
    fault = PROGRAMS[0].fault
    shown = str(Repaired("Stranger.__call__ (model.py:7)", ((4, 8, 8, 4), (3, 3, 4, 8)), fault, ("y",), "runs it"))
    assert shown == (
        "convolution of slices in Stranger.__call__ (model.py:7), [4, 8, 8, 4] and [3, 3, 4, 8], over y: runs it"
    )
