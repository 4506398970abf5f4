"""The names that are found in models of many kinds, and what is said where a found name does not fit the rules."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.errors import LayoutError, RulesError
from jaxpar.training.model import leaves_with_paths, show
from tests.planning.names import models
from tests.planning.names.pooling_models import CASES
from tests.planning.names.test_annotate import both_steps
from tests.profiles import few

QKV = ("embed", "heads", "head_dim")
EXPECTED: dict[str, dict[str, tuple[str | None, ...]]] = {
    "mixer": {
        "tokens_up_*/kernel": ("positions", "mlp"),
        "tokens_down_*/kernel": ("mlp", "positions"),
        "up_*/kernel": ("embed", "mlp"),
        "head/kernel": ("embed", "vocab"),
        "patch/kernel": (None, None, "channels", "embed"),
    },
    "pooled": {
        "pool/query/kernel": ("features", "heads", "head_dim"),
        "pool/key/kernel": QKV,
        "pool/out/kernel": ("heads", "head_dim", "embed"),
        "attention_*/query/kernel": QKV,
        "pool_up/kernel": ("embed", "mlp"),
    },
    "pooled without layers": {
        "pool/key/kernel": ("features", "heads", "head_dim"),
        "pool/value/kernel": ("features", "heads", "head_dim"),
        "pool/out/kernel": ("heads", "head_dim", "embed"),
        "pool_up/kernel": ("embed", "mlp"),
        "pool_down/kernel": ("mlp", "embed"),
    },
    "pooling written out": {
        "q/kernel": ("features", "heads", "head_dim"),
        "k/kernel": QKV,
        "v/kernel": QKV,
        "pool_up/kernel": ("embed", "mlp"),
    },
    "pooling with parameters": {"probe": ("features", "heads", "head_dim"), "k/kernel": QKV, "v/kernel": QKV},
    "perceiver": {
        "latents": (None, "positions", "embed"),
        "cross/query/kernel": QKV,
        "cross/key/kernel": QKV,
        "self/value/kernel": QKV,
        "layer_up/kernel": ("embed", "mlp"),
    },
    "detr": {
        "queries": (None, "positions", "embed"),
        "self/query/kernel": QKV,
        "cross/key/kernel": QKV,
        "decoder_up/kernel": ("embed", "mlp"),
        "classes/kernel": ("embed", "vocab"),
    },
    "graph": {"embed/kernel": ("features", "embed"), "tasks/kernel": ("embed", "features")},
    "tables": {"table_*/embedding": ("vocab", "features"), "up/kernel": ("fused_features", "embed")},
}
"""Parameters by their path below ``params``."""


@pytest.mark.parametrize("case", few(CASES, 5))
def test_dims_are_found(case: str) -> None:
    arrays = jp.annotate(*CASES[case]()).arrays
    names = {re.sub(r"\d+(?=/|$)", "*", array.path).removeprefix("params/"): array.names for array in arrays}
    assert {path: names[path] for path in EXPECTED[case]} == EXPECTED[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["pooling written out", "pooled", "detr", "mixer", "perceiver"])
def test_an_annotated_step_equals_the_users_loss_on_one_device(case: str) -> None:
    outcomes = [metrics["grads"] for _, metrics in both_steps(CASES[case](), "fsdp x tensor")]
    largest = max(float(np.max(np.abs(x))) for x in jax.tree.leaves(outcomes[0]))
    for (path, right), (_, own) in zip(*map(leaves_with_paths, outcomes), strict=True):
        np.testing.assert_allclose(np.asarray(own), np.asarray(right), atol=2e-6 * largest, err_msg=show(path))


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"mpl": "model"}, "residual_seq"),
    ],
)
def test_a_rule_for_a_name_that_nothing_has_is_refused(rules: dict[str, Any], text: str) -> None:
    make_model = models.weights(up=(8, 32), down=(32, 8))
    loss_fn = lambda p, batch: ((batch["x"] + jax.nn.relu(batch["x"] @ p["up"]) @ p["down"]) ** 2).mean()
    annotation = jp.annotate(make_model, loss_fn, {"x": models.floats(16, 8)})
    assert annotation.rules(batch="data", params={"embed": "data"}, indivisible={"mlp": "replicate"}) == jp.Rules(
        batch="data", embed=None, mlp=None, params={"embed": "data"}, indivisible={"mlp": "replicate"}
    )
    with raises(RulesError, text):
        annotation.rules(batch="data", **rules)


@pytest.mark.parametrize("found", [True, False])
def test_where_a_name_was_found_an_error_says_that_it_may_be_wrong(found: bool) -> None:
    make_model = models.weights(up=(8, 32), down=(32, 8))
    loss_fn = lambda p, batch: ((batch["x"] + jax.nn.relu(batch["x"] @ p["up"]) @ p["down"]) ** 2).mean()
    names = None if found else {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    annotation = jp.annotate(make_model, loss_fn, {"x": models.floats(16, 8)}, names=names)
    layout = jp.Layout(jp.MeshSpec(model=8).build(), annotation.rules(embed="model", mlp="model"))
    with raises(LayoutError, "params/down"):
        jp.init(layout, annotation.make_model, optax.sgd(0.1))
