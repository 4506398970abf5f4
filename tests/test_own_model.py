"""docs/guides/own_model.md is one program: it trains a custom Flax model, runs it in a pipeline, and generates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from error_texts import raises
from flax import nnx

import jaxpar as jp
from jaxpar.errors import LayoutError, ModelError

PAGE = (Path(__file__).parent.parent / "docs" / "guides" / "own_model.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), names)  # noqa: S102 (our own page)
    return names


def shapes(page: dict[str, Any]) -> Any:
    """An abstract batch, tagged for ``check``."""
    (batch,) = page["batches"](1)
    return {name: jp.tag(jax.ShapeDtypeStruct(x.shape, x.dtype), *page["dims"][name]) for name, x in batch.items()}


def test_it_fits_and_every_rule_is_used(page: dict[str, Any]) -> None:
    layout = page["layout"]
    report = jp.check(layout, page["make_model"], page["tx"], batch=shapes(page), loss_fn=page["loss"])
    assert report.total("params").replicated < 0.05
    assert "ring" in str(report) or "ulysses" in str(report)  # the implementations that attention selects over context


def test_it_goes_through_a_pipeline_and_generates(page: dict[str, Any]) -> None:
    staged = page["staged"]
    state = jp.abstract_state(staged, page["make_model"], page["tx"])
    batch = {name: np.zeros((8, 16), np.int32) for name in page["dims"]}
    _, metrics = page["pipeline"].eval_shape(state, batch)
    assert metrics["loss"].shape == ()
    generator = page["generator"]
    found = jax.eval_shape(generator.decode, generator.params, generator.abstract)
    assert jax.tree.leaves(found)


def test_parameters_without_names_are_one_problem_and_zero_splits_them(page: dict[str, Any]) -> None:
    bare = lambda key: nnx.MultiHeadAttention(num_heads=4, in_features=64, decode=False, rngs=nnx.Rngs(key))
    mesh = jp.MeshSpec(data=8).abstract(8)
    text = (
        "8 parameters have no logical dims: params/key/bias [4, 16], params/key/kernel [64, 4, 16], params/out/bias "
        "[64], params/out/kernel [4, 16, 64] and 4 more. Remedy: annotate them (jaxpar.nnx.axes, jaxpar.linen.axes, "
        "jp.tag), or allow replication with unannotated='replicate' in the rules; over(axis) and jp.Zero then still "
        "shard them."
    )
    for ask in (jp.check, jp.abstract_state):
        with raises(LayoutError, "params/key/kernel"):
            ask(jp.Layout(mesh, jp.Rules(batch="data")), bare, page["tx"])
    report = jp.explain(jp.Layout(mesh, jp.Rules(batch="data")), bare, page["tx"])
    assert report.problems == (text,)
    assert str(report).count("Remedy") == 1
    split = jp.Zero(3, min_bytes=0).rules(jp.Rules(batch="data", unannotated="replicate"))
    assert jp.check(jp.Layout(mesh, split), bare, page["tx"]).total("params").replicated == 0


def test_a_model_that_carries_keys_does_not_generate(page: dict[str, Any]) -> None:
    def dropping(key: jax.Array) -> Any:
        model = page["make_model"](key)
        model.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(key))
        return model

    with raises(ModelError, "variables/dropout/rngs/count"):
        jp.Generator(page["layout"], dropping, page["cached"], batch=2, slots=32)


def test_a_model_may_make_functions_as_it_is_built() -> None:
    def make(key: jax.Array) -> nnx.MultiHeadAttention:
        plain = lambda q, k, v, **_: jp.attention(q, k, v)
        return nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=plain, rngs=nnx.Rngs(key))

    rules = jp.Rules(batch="data", seq=None, heads=None, kv_heads=None, head_dim=None, unannotated="replicate")
    layout = jp.Layout(jp.MeshSpec(data=8).build(), rules)
    state = jp.init(layout, make, optax.sgd(0.1))
    step = jp.train_step(layout, lambda model, x: (model(x) ** 2).mean())
    _, metrics = jax.eval_shape(step, state, jax.ShapeDtypeStruct((8, 4, 8), np.float32))
    assert metrics["loss"].shape == ()
