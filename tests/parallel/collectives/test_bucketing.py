"""A step runs the configured number of collectives, and its numbers do not depend on that number."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from one_step import SGD, initial
from profiles import few

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.sharding.hardware.topology import Topology

DEEP = jp.Rules(batch="data", layers=None, embed=None, mlp=None, unannotated="replicate")
LAYERS = 4


def make(key: jax.Array) -> dict[str, Any]:
    """A stack with awkward sizes: when packed, no tensor fills complete rows of 1024."""
    keys = jax.random.split(key, 4)
    return {
        "up": jp.tag(jax.random.normal(keys[0], (LAYERS, 16, 24)) / 4, "layers", "embed", "mlp"),
        "down": jp.tag(jax.random.normal(keys[1], (LAYERS, 24, 16)) / 5, "layers", "mlp", "embed"),
        "scale": jp.tag(jax.random.normal(keys[2], (LAYERS, 3)), "layers", None),
        "last": jp.tag(jax.random.normal(keys[3], (16, 5)), "embed", None),
    }


def loss(model: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    layer = lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1] * w[2][1], None)
    x, _ = jax.lax.scan(layer, x, (model["up"], model["down"], model["scale"]))
    return jnp.mean((x @ model["last"]) ** 2)


def found(stage: int, make: Any = make, **asked: Any) -> tuple[Any, dict[str, int]]:
    """The gradients, and how often each collective runs."""
    zero = jp.Zero(stage=stage, min_bytes=512)
    layout = jp.Layout(jp.MeshSpec(data=8).build(), zero.rules(DEEP))
    ways = zero.step or {"grad_reduction": "per_step"}
    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        shapes, fusion = jp.abstract_state(layout, make, SGD), jp.overlap.CollectiveFusion(**asked)
        step = jp.train_step(layout, loss, return_grads=True, donate=False, fusion=fusion, **ways)
        step = step.lower(shapes, x).compile()
        metrics = step(initial(shapes, make, DEEP), x)[1]
    report = jp.audit(step, mesh=layout.mesh)
    kinds = ("all-reduce", "all-gather", "reduce-scatter")
    return jax.device_get(metrics["grads"]), {kind: report.count(kind) for kind in kinds}


without = functools.cache(found)


CASES: list[tuple[int, dict[str, Any], dict[str, int]]] = [
    (0, {"reduce": (2,)}, {"all-reduce": 2}),
    (0, {"reduce": (1, 2, 3)}, {"all-reduce": 4}),
    (1, {"gather": (2,)}, {"all-gather": 2}),
    (1, {"scatter": (1, 3)}, {"reduce-scatter": 3}),
    (1, {"scatter": (1, 2, 3), "gather": (1, 2, 3)}, {"all-gather": 4, "reduce-scatter": 4}),
]


@pytest.mark.parametrize(("stage", "asked", "counts"), few(CASES[::-1], 1, names=3), ids=str)
def test_groups_of_layers_are_a_collective_each(stage: int, asked: dict[str, Any], counts: dict[str, int]) -> None:
    plain, before = without(stage)
    grads, after = found(stage, **asked)
    for kind, count in counts.items():
        # The loss is part of the first all-reduce or has a separate one.
        assert after[kind] in ((count, count + 1) if kind == "all-reduce" else (count,)), (before, after)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def on(topology: str) -> jp.Layout:
    target = Topology.parse(topology)
    mesh = jp.MeshSpec(data=target.devices).abstract().update(abstract_device=target.abstract_device)
    return jp.Layout(mesh, DEEP)


def test_a_size_is_each_compilers_own_option() -> None:
    asked = jp.overlap.CollectiveFusion(reduce="64MiB", gather=1024)
    assert asked.compiler_options(on("v5e:2x4")) == {
        "xla_jf_crs_combiner_threshold_in_bytes": 64 << 20,
        "xla_jf_crs_combiner_threshold_count": 2**30,
        "xla_all_gather_latency_bound_threshold_in_bytes": 1024,
        "xla_all_gather_combiner_threshold_count": 2**30,
    }
    gpu = jp.overlap.CollectiveFusion(reduce="64MiB", gather=1024, scatter="8MiB").compiler_options(on("h100:8"))
    assert gpu == {
        "xla_gpu_all_reduce_combine_threshold_bytes": 64 << 20,
        "xla_gpu_all_gather_combine_threshold_bytes": 1024,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 1 << 20,
    }
    assert jp.overlap.CollectiveFusion().compiler_options(on("v5e:2x4")) == {}


ERRORS = {
    "a word": (lambda: jp.overlap.CollectiveFusion(reduce="much"), "64MiB"),
    "layers that fall": (lambda: jp.overlap.CollectiveFusion(scatter=(4, 2)), "[4"),
    "layers that are not there": (lambda: found(0, reduce=(2, 4)), "4]"),
    "a compiler without sizes": (lambda: found(0, reduce="1MiB"), "1048576"),
    "scatters on TPU": (lambda: jp.overlap.CollectiveFusion(scatter=0).compiler_options(on("v5e:2x4")), "is 0"),
    "gradients reduced by the compiler": (lambda: found(2, scatter=(2,)), "[2], but here"),
    "nothing to scatter": (lambda: found(0, scatter=(2,)), "[2], but nothing"),
    "no layers": (
        lambda: found(
            0, lambda key: {name: x if name == "last" else x.value for name, x in make(key).items()}, reduce=(2,)
        ),
        "fusion: groups",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_put_together_so_is_refused(case: str) -> None:
    wrong, name = ERRORS[case]
    with raises(ConfigError, name):
        wrong()
