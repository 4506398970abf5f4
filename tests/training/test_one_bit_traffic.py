"""Tests 1-bit Adam: what it sends, where its errors are placed, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from one_bit_case import RATE, SHAPES, dot, layout_of, make, rows_of

import jaxpar as jp
from jaxpar.errors import ConfigError, JaxparError, LayoutError, ModelError
from jaxpar.parallel.collectives import one_bit
from jaxpar.training.one_bit_adam import State, without_signs
from jaxpar.training.state import abstract_state, shape_state

BIG = 512


def big(key: jax.Array) -> dict[str, Any]:
    return {"w": jp.tag(jax.random.normal(key, (BIG, BIG)), "embed", "mlp"), "b": jp.tag(jnp.zeros((BIG,)), "mlp")}


def test_of_a_number_one_bit_is_sent_and_its_share_of_a_scale() -> None:
    layout = layout_of("8 ways")
    state = abstract_state(layout, big, jp.one_bit_adam(RATE, warmup=2))
    loss = lambda model, x: jnp.mean((x @ model["w"] + model["b"]) ** 2)
    batch = np.ones((8, BIG), np.float32)
    report = jp.audit(jp.train_step(layout, loss).lower(state, batch).compile(), mesh=layout.mesh)
    reduced = [c for c in report.collectives if c.conditional]
    share = 7 / 8
    assert {(c.kind, c.dtype) for c in reduced} == {("all-reduce", "f32")}
    whole = sum(c.total_wire_bytes for c in reduced)
    assert whole == 2 * share * 4 * BIG * BIG
    after = report.through_other_arms()
    sent = {(c.kind, c.dtype): c.total_wire_bytes for c in after.collectives if c.conditional}
    bits, scales = share * BIG * BIG / 8, share * 4 * BIG * BIG / one_bit.BLOCK
    assert sent == {
        (kind, dtype): size for kind in ("all-to-all", "all-gather") for dtype, size in (("u8", bits), ("f32", scales))
    }
    assert sum(sent.values()) <= whole / 25
    # The rest is the same in both arms: the bias, the loss, the norm and the weight.
    rest = after.wire_bytes() - sum(sent.values())
    assert rest == report.wire_bytes() - whole
    assert 2 * share * 4 * BIG <= rest <= 2 * share * 4 * (BIG + 8)
    said = "; other arms of branches, not counted, send 63.00 KiB (f32 7.00 KiB, u8 56.00 KiB)"
    assert report.headline().endswith(said)


def test_explain_says_why_each_error_lies_where_it_does() -> None:
    layout = layout_of("two axes, beside tensor parallelism")
    batch = {n: jp.tag(jax.ShapeDtypeStruct((8, *s), "float32"), "batch", *(None,) * len(s)) for n, s in SHAPES.items()}
    report = jp.explain(layout, make, jp.one_bit_adam(RATE, warmup=2, min_bytes=200), batch=batch, loss_fn=dot)
    rows = {row.path: row for row in report.rows}
    assert report.problems == () and report.memory is not None and report.memory.unknown == ()
    worker, server = rows["opt_state/worker/columns"], rows["opt_state/server/columns"]
    assert worker.spec == (("replica", "data"), (), ("model",)) and worker.device_bytes == 4 * 24 * 10 // 2
    assert worker.why[0] == "batch: each device keeps the error of its own signs"
    assert server.shape == (4, 2, 32) and server.spec == (("replica", "data"), ("model",), ())
    assert server.why == (
        "batch: each device keeps the error of the average's signs, for its part",
        "dim 1: one per shard of the parameter",
        "dim 2: the elements that one device averages, rounded up to full bytes of signs",
    )
    assert "opt_state/worker/number" not in rows


STEP: dict[str, tuple[dict[str, Any], str]] = {
    "clip_norm": ({"clip_norm": 1.0}, "clip_norm"),
    "stage 1": ({"weight_gather": "per_step", "grad_reduction": "per_step"}, "weight_gather"),
    "each": ({"grad_reduction": "per_microbatch"}, "grad_reduction"),
    "int8": ({"precision": {"reduce": "int8"}}, "precision: reduce"),
    "groups": ({"fusion": jp.overlap.CollectiveFusion(reduce=(1,))}, "fusion: reduce"),
}


@pytest.mark.parametrize("name", STEP)
def test_what_a_step_may_not_ask_beside_it(name: str) -> None:
    options, text = STEP[name]
    layout = layout_of("2 ways")
    state = shape_state(layout, make, jp.one_bit_adam(RATE, warmup=2))
    with raises(ConfigError, text):
        jp.train_step(layout, dot, **options).trace(state, rows_of(0))


ARGUMENTS: dict[str, tuple[Callable[[], Any], type[JaxparError], str]] = {
    "warmup": (lambda: jp.one_bit_adam(RATE, warmup=0), ConfigError, "one_bit_adam: warmup"),
    "block": (lambda: jp.one_bit_adam(RATE, warmup=1, block=12), ConfigError, "one_bit_adam: block"),
    "b2": (lambda: jp.one_bit_adam(RATE, b2=1.0, warmup=1), ConfigError, "one_bit_adam: b2"),
    "min_bytes": (lambda: jp.one_bit_adam(RATE, warmup=1, min_bytes="some"), ConfigError, "one_bit_adam: min_bytes"),
    "chain": (
        lambda: jp.init(layout_of("2 ways"), make, optax.chain(jp.one_bit_adam(RATE, warmup=1))),
        ConfigError,
        "optax.chain",
    ),
    "complex": (
        lambda: jp.init(
            layout_of("2 ways"),
            lambda key: {"w": jp.tag(jnp.zeros(4, "complex64"), None)},
            jp.one_bit_adam(RATE, warmup=1),
        ),
        ModelError,
        "complex64",
    ),
    "sharded": (
        lambda: jp.init(
            jp.Layout(
                jp.MeshSpec(data=2).build(jax.devices()[:2]),
                jp.Rules(batch="data", embed=None, mlp=None, optimizer={"mlp": "data"}),
            ),
            lambda key: {"w": jp.tag(jnp.zeros((4, 6)), "embed", "mlp")},
            jp.one_bit_adam(RATE, warmup=1),
        ),
        LayoutError,
        "[4",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_does_not_go_is_said_with_its_remedy(name: str) -> None:
    run, kind, text = ARGUMENTS[name]
    with raises(kind, text):
        run()


def test_a_state_of_other_devices_is_refused() -> None:
    state = shape_state(layout_of("2 ways"), make, jp.one_bit_adam(RATE, warmup=2, min_bytes=200))
    with raises(LayoutError, "opt_state/worker/columns"):
        jp.train_step(layout_of("8 ways"), dot).trace(state, rows_of(0))


def test_without_signs_it_is_as_it_was_or_warms_up_for_longer() -> None:
    adam, signed = optax.adam(RATE), jp.one_bit_adam(RATE, warmup=2)
    assert without_signs(adam, 9) is adam and without_signs(signed, 2) is signed
    assert without_signs(signed, 9).settings.warmup == 9
    assert isinstance(shape_state(layout_of("2 ways"), make, without_signs(signed, 9)).opt_state, State)
