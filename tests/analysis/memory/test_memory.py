"""The memory estimate against the compiler's figures for many steps, against small steps by hand, and where it refuses
to guess."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from memory_cases import LAYOUT, MIB, explained, rows, square
from profiles import few

import jaxpar as jp
from jaxpar.analysis.memory.estimate import PARTS, Memory, estimate
from jaxpar.analysis.memory.jaxpr import Reader
from jaxpar.analysis.memory.walk import MemoryWalk
from jaxpar.models.llama import LlamaConfig, make_llama
from jaxpar.models.losses import next_token_loss
from jaxpar.models.vit import ViTConfig, make_vit, vit_loss

ROOT = Path(__file__).parents[3]
POINTS = [
    p for p in json.loads((ROOT / "tests/analysis/memory/memory_points.json").read_text())["points"] if "compiled" in p
]
SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "memory" / "estimate.py"))


MISSED = {
    "a_full_fsdp_v5e:2x4_tie_embeddingsTrue": 0.25,
    "a_dots_fsdp_tp_v5e:4x4": 0.2,
    "c_full_fsdp_v5e:4x4": 0.2,
    "vit_large_hsdp_v5e:2x4": 0.2,
    "d_full_fsdp_tp_sp_v5e:2x2": 0.15,
    "b_save_outputs_fsdp_tp_sp_v5e:2x4": 0.15,
}
"""Points that the estimate misses by more than a tenth, each with a bound on the error; docs/measured/memory.md
explains them."""

PADDED = "vit_base_fsdp_tp_sp_v5e:2x4"
"""Here the compiler gives the images, three channels wide, almost twice their size: padding to tiles is not
estimated."""


def test_at_least_thirty_points_are_within_a_tenth() -> None:
    assert len(POINTS) - len(MISSED) >= 30 and MISSED.keys() <= {point["name"] for point in POINTS}


@pytest.mark.parametrize("point", few(POINTS, 2), ids=lambda point: point["name"])
def test_the_estimate_is_within_a_tenth_of_the_compiler(point: dict[str, Any]) -> None:
    memory: Memory = SCRIPT["estimate_of"](point)
    assert memory.unknown == () and memory.total is not None
    exact = sum(memory.parts[part] for part in PARTS[:3])
    if point["name"] == PADDED:
        assert 0 < point["compiled"]["argument"] - exact < memory.parts["batch and rest"]
    else:
        assert exact == pytest.approx(point["compiled"]["argument"], rel=0.01)
    assert memory.total == pytest.approx(point["compiled"]["peak"], rel=MISSED.get(point["name"], 0.1))


def test_the_docs_have_a_row_of_every_point() -> None:
    text = (ROOT / "docs" / "measured" / "memory.md").read_text(encoding="utf-8")
    for point in POINTS:
        assert f"| {' | '.join(SCRIPT['words'](point))} |" in text, "benchmarks/memory/estimate.py --write"


def test_two_matmuls_by_hand() -> None:
    def loss(model: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(jnp.tanh(batch @ model["w"]) @ model["w"]) ** 2)

    memory = explained(square, loss, rows(2048, 512))
    # Each device has 512 rows, so every activation is 1 MiB, like the weight, its moment, its gradient and the batch.
    assert {part: memory.parts[part] / MIB for part in PARTS[:3]} == pytest.approx(
        {"parameters": 1, "optimizer": 1, "batch and rest": 1}, abs=1e-3
    )
    # Two activations of the forward pass, the gradient of one, and the memory of the first of two weight gradients.
    assert memory.total is not None and 6 * MIB <= memory.total <= 7.1 * MIB


def test_state_in_host_memory_takes_none_of_the_devices() -> None:
    loss = lambda model, batch: jnp.mean((batch @ model["w"]) ** 2)
    tx = jp.offload.to_host(optax.sgd(0.1, momentum=0.9), min_bytes=0)
    hosted = jp.explain(LAYOUT, square, tx, batch=rows(2048, 512), loss_fn=loss).memory
    on_device = explained(square, loss, rows(2048, 512))
    assert hosted is not None and hosted.unknown == on_device.unknown == ()
    assert (hosted.parts["optimizer"], on_device.parts["optimizer"]) == (0, MIB)
    assert hosted.parts["parameters"] == on_device.parts["parameters"] == MIB


def test_a_scan_saves_what_its_backward_pass_reads_and_remat_saves_the_carry() -> None:
    def loss(model: Any, batch: jax.Array, remat: bool) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(jnp.tanh(x @ w) @ w), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer) if remat else layer, batch, model["w"])[0])

    def make(key: jax.Array) -> dict[str, Any]:
        return {"w": jp.tag(jax.random.normal(key, (8, 512, 512)), None, "embed", "mlp")}

    kept = explained(make, lambda m, b: loss(m, b, False), rows(2048, 512))
    again = explained(make, lambda m, b: loss(m, b, True), rows(2048, 512))
    assert again.parts["saved activations"] == 8 * MIB
    assert kept.parts["saved activations"] > 2 * again.parts["saved activations"]
    assert again.parts["gradients"] == kept.parts["gradients"] == 8 * MIB


@pytest.mark.parametrize(("reshard_after_forward", "share"), few([(4, 4), (True, 0), (False, 1)], 1, names=2))
def test_gathered_weights_that_are_kept_are_a_part_of_their_own(reshard_after_forward: Any, share: int) -> None:
    """The kept weights are all of the layers' matrices in 16 bits, or a part of them within groups; otherwise the
    estimate has no such line."""
    sizes = {"embed": 1024, "heads": 8, "kv_heads": 8, "head_dim": 128, "mlp": 4096, "vocab": 2048, "layers": 3}
    config = LlamaConfig(**sizes, dtype="bfloat16", remat="full", reshard_after_forward=reshard_after_forward)
    layout = jp.Layout(
        jp.MeshSpec(data=16).abstract(), jp.Layout.from_yaml("configs/layouts/fsdp.yaml", devices=16).rules
    )
    tokens = jp.tag(jax.ShapeDtypeStruct((64, 512), "int32"), "batch", "seq")
    batch = {"tokens": tokens, "targets": tokens}
    memory = jp.explain(layout, make_llama(config), optax.sgd(1e-3), batch=batch, loss_fn=next_token_loss).memory
    assert memory is not None and memory.unknown == ()
    matrices = 2 * (config.matmul_params - config.embed * config.vocab)
    assert memory.parts["kept weights"] == (matrices // share if share else 0)
    assert (("kept weights (by reshard_after_forward)", f"{matrices // max(share, 1)}") in memory.cells(str)) == bool(
        share
    )


@pytest.mark.parametrize(("rows_of_all", "fits"), [(4 * 4096, True), (4 * 65536, False)])
def test_what_fits_into_vector_memory_takes_no_main_memory_inside_a_loop(rows_of_all: int, fits: bool) -> None:
    """A v5e has 128 MiB of vector memory: a layer of 4,096 rows works on 8 MiB arrays, one of 65,536 rows on 128
    MiB."""

    def loss(model: Any, batch: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(jnp.tanh(x @ w) @ w), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), batch, model["w"])[0])

    def make(key: jax.Array) -> dict[str, Any]:
        return {"w": jp.tag(jax.random.normal(key, (8, 512, 512)), None, "embed", "mlp")}

    there = jp.Layout(jp.MeshSpec(data=4).on("v5e:2x2"), LAYOUT.rules)
    batch = rows(rows_of_all, 512)
    near, plain = (explained(make, loss, batch, layout) for layout in (there, LAYOUT))
    assert (near.total != plain.total) == fits
    if fits:
        assert near.parts["working"] < 1024 < plain.parts["working"]
        assert near.parts["saved activations"] == plain.parts["saved activations"]


def test_what_cannot_be_followed_is_named_and_taken_as_replicated() -> None:
    def loss(model: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.abs(jnp.fft.fft(batch @ model["w"])))

    def along(model: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.cumsum(batch @ model["w"], axis=0))

    def odd(model: Any, batch: jax.Array) -> jax.Array:
        parts = jax.lax.reduce_window(batch @ model["w"], 0.0, jax.lax.add, (1, 2), (1, 2), "VALID")
        return jnp.mean(parts)

    assert explained(square, loss, rows(4096, 512)).assumed == ()
    assert explained(square, along, rows(4096, 512)).assumed == ("cumsum",)
    memory = explained(square, odd, rows(4096, 512))
    assert memory.assumed == ("reduce_window_sum",) and memory.unknown == ()
    # The window's sums are [4096, 256], and the estimate assumes that every device holds all of them.
    assert memory.total is not None and memory.total >= sum(memory.parts[part] for part in PARTS[:3]) + 4 * MIB
    assert memory.cells(str)[-1] == ("total, at most", str(memory.total))

    @jax.custom_batching.custom_vmap
    def closed(x: jax.Array) -> jax.Array:
        return x * 2

    @closed.def_vmap
    def _(size: int, batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        return x * 2, batched[0]

    def hidden(model: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean(batch @ model["w"]) + jax.lax.stop_gradient(closed(batch)).mean()

    memory = explained(square, hidden, rows(4096, 512))
    assert memory.assumed == () and memory.total is not None, "the program inside is read as if it stood outside"


def test_a_step_that_does_not_trace_is_a_reason_not_an_exception(mlp: Any) -> None:
    batch = jp.tag(jax.ShapeDtypeStruct((8, 16), np.float32), "batch", None)

    def endless(model: Any, batch: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda loss: loss < 0, lambda loss: loss + 1, mlp.loss(model, batch))

    explanation = jp.explain(mlp.layout(), mlp.make, optax.sgd(0.1), batch=batch, loss_fn=endless)
    memory = explanation.memory
    assert memory is not None and memory.unknown[0].startswith(
        "the step cannot be traced: Reverse-mode differentiation does not work for lax.while"
    )
    assert memory.total is None
    for text, width in ((explanation.summary(80), 80), (explanation.to_text(120), 120)):
        lines = text.splitlines()
        (last,) = (i for i, line in enumerate(lines) if line.split() == ["total", "not", "estimated"])
        assert len(lines[last]) <= 80, "the reason is no cell of the table"
        assert lines[last + 1].startswith("memory is not estimated: the step cannot be traced: Reverse-mode")
        assert max(map(len, lines)) <= width
    assert "<p>memory is not estimated: the step cannot be traced" in explanation._repr_html_()
    bad = jp.tag(jax.ShapeDtypeStruct((6, 16), np.float32), "batch", None)
    report = jp.explain(mlp.layout(), mlp.make, optax.sgd(0.1), batch=bad, loss_fn=mlp.loss)
    assert report.memory == Memory("", {}, ("the layout has problems",))


@pytest.mark.parametrize("name", few(["dp", "fsdp", "tp", "fsdp_tp_sp"], 1))
def test_a_linen_model_is_estimated_too(name: str, layout_of: Any) -> None:
    config = ViTConfig()
    images = jp.tag(jax.ShapeDtypeStruct((1024, 16, 16, 3), np.float32), "batch", None, None, None)
    labels = jp.tag(jax.ShapeDtypeStruct((1024,), np.int32), "batch")
    memory = explained(make_vit(config), vit_loss(config), {"images": images, "labels": labels}, layout_of(name, 8))
    assert memory.unknown == () and memory.total is not None
    assert memory.total > 2 * sum(memory.parts[part] for part in PARTS[:3])


def test_the_report_shows_it_in_text_html_and_json(mlp: Any) -> None:
    batch = jp.tag(jax.ShapeDtypeStruct((8, 16), np.float32), "batch", None)
    on = jp.Layout(jp.MeshSpec(data=4).on("v5e:2x2"), mlp.rules)
    report = jp.explain(on, mlp.make, optax.sgd(0.1), batch=batch, loss_fn=mlp.loss)
    assert report.memory is not None and report.memory.target == "TPU v5 lite"
    assert "memory at the peak of a step on a TPU v5 lite, estimated\n" in report.to_text()
    assert "<h4>memory at the peak of a step on a TPU v5 lite, estimated</h4>" in report._repr_html_()
    data = json.loads(report.to_json())["memory"]
    assert data["total"] == report.memory.total == sum(data["parts"].values())
    assert json.loads(jp.explain(on, mlp.make, optax.sgd(0.1)).to_json())["memory"] is None


def test_estimate_takes_the_step_s_options(mlp: Any) -> None:
    from jaxpar.analysis.layout.explain import _batch
    from jaxpar.training.state import place, shape_state

    batch = jp.tag(jax.ShapeDtypeStruct((8, 16), np.float32), "batch", None)
    state = shape_state(mlp.layout(), mlp.make, optax.sgd(0.1))
    inputs, plain = _batch(mlp.layout(), batch)
    tensors = [*place(mlp.layout(), state), *inputs]
    plain_step = estimate(mlp.layout(), mlp.loss, state, plain, tensors)
    kept = estimate(mlp.layout(), mlp.loss, state, plain, tensors, return_grads=True)
    assert (kept.total or 0) >= (plain_step.total or 0) > 0


def test_sums_that_begin_with_zeros_lie_as_their_loop_leaves_them() -> None:
    def summed(x: jax.Array, times: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, total: total + x, jnp.zeros_like(x))

    jaxpr = jax.make_jaxpr(summed)(jnp.ones((8, 4)), 3).jaxpr
    program = Reader({"data": 4}).read(jaxpr, [(("data",), ()), None])
    assert [value.spec for value in program.results] == [(("data",), ())]


def test_a_stages_own_weights_without_their_leading_dims_are_no_copy() -> None:
    """A shard in a loop loses its leading dims of 1, which moves no data."""

    def loop(w: jax.Array, x: jax.Array) -> Any:
        def tick(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            mine = w.reshape(w.shape[2:])
            return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ mine[i]), x), None

        return jax.lax.scan(tick, x, length=2)[0]

    jaxpr = jax.make_jaxpr(loop)(jnp.ones((1, 1, 3, 512, 512)), jnp.ones((8, 512))).jaxpr
    program = Reader({"data": 4}).read(jaxpr, [((),) * 5, ((), ())])
    held = MemoryWalk(program).peak().held
    assert held and not [h for h in held if h.value.bytes >= 3 * MIB]


def test_zeros_of_a_shard_map_lie_along_other_axes_as_their_loop_leaves_them() -> None:
    def summed(x: jax.Array) -> jax.Array:
        zeros = lambda: jnp.zeros((1, 2**20))
        start = jax.shard_map(zeros, in_specs=(), out_specs=PartitionSpec("data"), axis_names={"data"}, check_vma=False)
        return jax.lax.scan(lambda total, _: (total + x, None), start(), length=3)[0]

    spec = (("data",), ("model",))
    with jax.set_mesh(jp.MeshSpec(data=2, model=2).build(jax.devices()[:4])):
        jaxpr = jax.make_jaxpr(summed)(jnp.ones((2, 2**20))).jaxpr
    program = Reader({"data": 2, "model": 2}).read(jaxpr, [spec])
    assert [value.spec for value in program.results] == [spec]
    assert {h.value.bytes for h in MemoryWalk(program).peak().held} == {2 * MIB}
