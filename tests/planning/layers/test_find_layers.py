"""The repeated layers of models that nobody wrote for jaxpar: where each begins and ends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpar as jp
from jaxpar.planning.layers.remat import TracedLayers
from jaxpar.training.loss import loss_program
from jaxpar.training.model import build_shapes
from tests.app import own_models
from tests.planning.names import models


def traced(make_model: Any, loss_fn: Any, batch: Any, **extra: Any) -> TracedLayers:
    parts = build_shapes(make_model)
    with jp.unsharded():
        return TracedLayers.of(loss_program(loss_fn, parts.kind, {}), (parts.params, parts.variables, batch, extra))


def names_in(found: TracedLayers, span: tuple[int, int]) -> list[str]:
    return [eqn.primitive.name for eqn in found.jaxpr.eqns[slice(*span)]]


def test_layers_in_a_list_end_at_the_residual_stream() -> None:
    found = traced(*models.gpt(layers=4))
    (layers,) = found.layers
    assert (layers.path, layers.count, layers.stacked) == ("params/blocks/*", 4, False)
    first, *others = (names_in(found, span) for span in layers.spans)
    assert all(other == first for other in others) and first.count("dot_general") == 8 and first[-1] == "add"


def test_layers_in_a_scan() -> None:
    found = traced(*models.gpt(layers=4, scanned=True))
    (layers,) = found.layers
    assert (str(layers), names_in(found, layers.spans[0])) == ("4 layers in a scan", ["scan"])


def test_layers_that_linen_writes_into_one_module() -> None:
    tokens = {"tokens": jax.ShapeDtypeStruct((8, 8), "int32")}
    key = jax.eval_shape(lambda: jax.random.key(0))
    found = traced(own_models.make_encoder, own_models.copy_loss, tokens, key=key)
    (layers,) = found.layers
    assert str(layers) == "2 layers params/MultiHeadDotProductAttention_*"


def _loss(order: list[str]) -> Any:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for name in order:
            bias = params["blocks"]["0"].mean() if "shared" in params else 0.0
            x = x + jnp.tanh(x @ params["blocks"][name] + bias)
        return (x**2).mean()

    return loss


@pytest.mark.parametrize(
    ("order", "params", "count"),
    [
        (["0", "1", "2"], {}, 3),
        (["2", "0", "1"], {}, 3),
        (["0", "1", "0", "1"], {}, 0),  # shared layers do not run one after the other
        (["0"], {}, 0),
        (["0", "1", "2"], {"shared": jnp.ones(())}, 0),  # all use a weight of the first
    ],
)
def test_separate_layers_run_one_after_the_other(order: list[str], params: Any, count: int) -> None:
    make_model = lambda key: {"blocks": {str(i): jnp.eye(4) for i in range(3)}, **params}
    found = traced(make_model, _loss(order), {"x": jax.ShapeDtypeStruct((8, 4), "float32")})
    assert sum(layers.count for layers in found.layers) == count


def test_a_table_of_the_first_layer_that_all_use_is_none_of_its_weights() -> None:
    """As T5's relative positions."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x, table = batch["x"], params["blocks"]["0"]["table"]
        for i in range(3):
            x = x + jnp.tanh(x @ params["blocks"][str(i)]["w"] + table)
        return (x**2).mean()

    block = lambda i: {"w": jnp.eye(4)} | ({"table": jnp.ones(4)} if i == 0 else {})
    make_model = lambda key: {"blocks": {str(i): block(i) for i in range(3)}}
    (layers,) = traced(make_model, loss, {"x": jax.ShapeDtypeStruct((8, 4), "float32")}).layers
    assert layers.count == 3
