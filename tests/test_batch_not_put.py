"""A batch that nobody put: a jitted step is handed all of it on every device, and cuts its rows all the same."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar as jp

RULES = jp.Rules(batch="data", embed=None, mlp=None)


def make_model(key: jax.Array) -> dict[str, Any]:
    return {"w": jp.tag(jax.random.normal(key, (64, 32)), "embed", "mlp")}


def loss(params: Any, batch: Any) -> Any:  # without a hint
    return ((batch["x"] @ params["w"]) ** 2).mean()


@pytest.mark.parametrize("train", [True, False])
def test_rows_that_were_not_put_are_computed_once(train: bool) -> None:
    layout = jp.Layout(jp.MeshSpec(data=8).build(), RULES)
    state = jp.init(layout, make_model, optax.sgd(0.1))
    step = jp.train_step(layout, loss, donate=False) if train else jp.eval_step(layout, loss)
    x = np.random.default_rng(0).normal(size=(128, 64)).astype(np.float32)
    flops, losses = [], []
    for batch in (x, jp.put(layout, x, "batch", None)):
        program = step.lower(state, {"x": batch}).compile()
        flops.append(jp.audit(program).matmul_flops)
        found = program(state, {"x": batch})
        losses.append(float((found[1] if train else found)["loss"]))
    assert flops[0] == flops[1] > 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_rows_that_the_axes_do_not_divide_stay_whole() -> None:
    layout = jp.Layout(jp.MeshSpec(data=8).build(), RULES)
    state = jp.init(layout, make_model, optax.sgd(0.1))
    batch = {"x": np.ones((12, 64), np.float32)}
    with layout:
        want = float(loss(state.params, batch))
    assert float(jp.eval_step(layout, loss)(state, batch)["loss"]) == pytest.approx(want, rel=1e-5)
