"""Tests meshes of ``jax.make_mesh``, whose axes are Explicit, and models that shard by PartitionSpecs of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from error_texts import raises
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.errors import LayoutError

TX = optax.sgd(0.1)
RULES = jp.Rules(batch="data", unannotated="replicate")
TOKENS = np.arange(64, dtype=np.int32).reshape(8, 8) % 16


class Lookup(nn.Module):
    """A lookup in a table, whose sharding JAX cannot derive on Explicit axes, and a constraint."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(16, 8)(tokens)
        return nn.Dense(4)(jax.lax.with_sharding_constraint(x, P("data", None, "model")))


def make_model(key: jax.Array) -> Any:
    return Lookup().init(key, jnp.zeros((1, 4), jnp.int32))  # one row, which data=4 does not divide


def loss_fn(variables: Any, batch: Any) -> jax.Array:
    return jnp.mean(Lookup().apply(variables, batch["tokens"]) ** 2)


def make_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def test_a_layout_uses_explicit_axes_as_auto_axes_and_explain_says_so() -> None:
    layout = jp.Layout(make_mesh(), RULES)
    assert set(layout.mesh.axis_types) == {AxisType.Auto}
    assert layout.converted == ("data", "model")
    assert layout == jp.Layout(layout.mesh, RULES)
    assert set(jp.Layout(make_mesh().abstract_mesh, RULES).mesh.axis_types) == {AxisType.Auto}
    mixed = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))
    assert jp.Layout(mixed, RULES).converted == ("model",)
    kept = jp.Layout(make_mesh(), RULES, explicit=True)
    assert (kept.mesh, kept.converted, kept.on_one_device().explicit) == (make_mesh(), (), True)
    notes = jp.explain(layout, make_model, TX).notes
    assert notes == ("Explicit axes used as Auto axes: data, model (to keep them: Layout(mesh, rules, explicit=True))",)
    assert jp.explain(jp.Layout(layout.mesh, RULES), make_model, TX).notes == ()


def test_a_mesh_of_make_mesh_trains_a_model_with_its_own_constraints() -> None:
    """The batch is sharded over the mesh as it was given, and that mesh is also the ambient one."""
    mesh = make_mesh()
    layout = jp.Layout(mesh, RULES)
    with jax.set_mesh(mesh):
        tokens = jax.device_put(TOKENS, NamedSharding(mesh, P("data", "model")))
        state = jp.init(layout, make_model, TX)
        found = [jp.eval_step(layout, loss_fn)(state, {"tokens": tokens})["loss"]]
        found += [jp.train_step(layout, loss_fn)(state, {"tokens": tokens})[1]["loss"]]
    alone = layout.on_one_device()
    _, metrics = jp.train_step(alone, loss_fn)(jp.init(alone, make_model, TX), {"tokens": TOKENS})
    np.testing.assert_allclose(np.asarray(found), float(metrics["loss"]), rtol=1e-6)


def test_a_constraint_over_an_axis_that_the_step_makes_manual_is_explained() -> None:
    layout = jp.Layout(make_mesh(), RULES)
    state = jp.abstract_state(layout, make_model, TX)
    step = jp.train_step(layout, loss_fn, grad_accum_steps=2)
    with raises(LayoutError, "jax.lax.with_sharding_constraint"):
        step.lower(state, {"tokens": TOKENS})
