"""What the batch and the metrics of ``jp.annotate`` may hold."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.errors import DataError, ModelError

X = np.ones((16, 8), np.float32)


def make_model(key: Any) -> Any:
    return {"w": jnp.ones((8, 8))}


def loss_fn(params: Any, batch: Any) -> Any:
    rows = batch[0] if isinstance(batch, list) else batch["x"]
    scale = 1 if isinstance(batch, list) else batch.get("scale", 1)
    return ((rows @ params["w"]) ** 2).mean() * scale


@pytest.mark.parametrize("more", [{}, {"scale": 2.0}, {"scale": 2}, {"scale": np.float32(2)}, {"empty": None}])
def test_numbers_are_scalars(more: dict[str, Any]) -> None:
    found = jp.annotate(make_model, loss_fn, {"x": X, **more})
    assert found.batch_dims["x"][0] == "batch" and found.batch_dims.get("scale", ()) == ()


def test_a_list_of_arrays() -> None:
    assert jp.annotate(make_model, loss_fn, [X]).batch_dims["0"][0] == "batch"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "batch/more/1"),
        (b"a", "batch/more/1"),
        (np.array(["a"] * 16), "<U1"),
        (X.tolist(), "16"),
        (len, "builtin_function_or_method"),
    ],
)
def test_what_is_no_array_is_named(value: Any, text: str) -> None:
    with raises(DataError, text):
        jp.annotate(make_model, loss_fn, {"x": X, "more": [X, value]})


def test_a_metric_that_is_a_text() -> None:
    with raises(ModelError, "loss_fn", "name/run"):
        jp.annotate(make_model, lambda params, batch: (loss_fn(params, batch), {"name": {"run": "a"}}), {"x": X})
