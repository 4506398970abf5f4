"""Matmuls that overlap with the gather or scatter of a sequence, against one device; and where they apply."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from profiles import few

import jaxpar as jp
from jaxpar.analysis.compare import gradient_gaps
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.errors import ConfigError
from jaxpar.models.llama import LlamaConfig, make_llama
from jaxpar.models.llama.config import GemmaConfig
from jaxpar.models.losses import next_token_loss
from jaxpar.parallel.overlap import sequence_dot

RULES = jp.Rules(
    batch="data", seq=None, residual_seq="model", embed=None, heads="model", head_dim=None, mlp="model",
    params={"embed": "data"},
)  # fmt: skip
TWO_AXES = {"seq": "context", "residual_seq": ("context", "model")}
TWO_SHARDS = {"embed": ("replica", "data")}
HEADS = ("embed", "heads", "head_dim")


@pytest.fixture
def as_on_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_dot, "platform_of", lambda mesh: "tpu")
    monkeypatch.setattr(sequence_dot, "MOST_DEVICES", 8)
    # Of the gathers of `branch`, the gradients of one come last.
    monkeypatch.setattr(sequence_dot, "_hides_pieces", lambda columns, dtype: columns > 6)


def branch(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A branch with every kind of product: joined matrices, heads side by side, and two ways back."""
    x = jp.hint(x, "batch", "residual_seq", "embed")
    gate, up = jp.overlap.gather_dot(x, (weights["gate"], ("embed", "mlp")), (weights["up"], ("embed", "mlp")))
    q, k = jp.overlap.gather_dot(x, (weights["q"], HEADS), (weights["k"], HEADS), joined=False)
    y = jp.overlap.dot_scatter(jnp.tanh(gate) * up, (weights["down"], ("mlp", "embed")))
    return y + jp.overlap.dot_scatter(jnp.sin(q) * k, (weights["o"], ("heads", "head_dim", "embed")), summed=2)


def arrays(batch: int, seq: int, embed: int, shards: int) -> tuple[dict[str, jax.Array], jax.Array]:
    heads, mlp = shards, 3 * shards
    shapes = {
        "gate": (embed, mlp), "up": (embed, mlp), "down": (mlp, embed),
        "q": (embed, heads, 5), "k": (embed, heads, 5), "o": (heads, 5, embed),
    }  # fmt: skip
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)
    return {name: draw(*shape) for name, shape in shapes.items()}, draw(batch, seq, embed)


def results(layout: jp.Layout, weights: Any, x: jax.Array) -> tuple[Any, Any]:
    """The output, gradients of all inputs, and the compiled program."""

    def loss(weights: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = branch(weights, x)
        return jnp.sum(jnp.cos(y)), y

    def run(weights: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(weights, x)
        return y, grads

    with layout, jax.default_matmul_precision("highest"):
        program = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0}).lower(weights, x).compile()
    return jax.device_get(program(weights, x)), program


@pytest.mark.parametrize(
    ("data", "model", "seq", "embed"),
    few(
        [(2, 4, 20, 6), (2, 4, 20, 7), (4, 2, 6, 12), (1, 8, 24, 3), (1, 3, 15, 5), (2, 4, 4, 6), (1, 5, 35, 2)],
        1,
        names=4,
    ),
)
def test_values_and_gradients_equal_one_device(data: int, model: int, seq: int, embed: int, as_on_tpus: None) -> None:
    """Pieces of an even and an odd number of tokens, rings of an even and an odd number of devices."""
    weights, x = arrays(2 * data, seq, embed, model)
    rules = RULES if embed % data == 0 else RULES.replace(params={"embed": None})
    mesh = jp.MeshSpec(data=data, model=model)
    (want, want_grads), _ = results(jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), rules), weights, x)
    layout = jp.Layout(mesh.build(jax.devices()[: data * model]), rules)
    (got, grads), program = results(layout, weights, x)
    assert max(gradient_gaps({"y": want}, {"y": got}).values()) <= 1e-6
    assert max(gradient_gaps({"w": want_grads}, {"w": grads}).values()) <= 1e-6
    report = jp.audit(program, mesh=layout.mesh)
    assert report.count("collective-permute", "model") + report.count("all-gather", "model") > 0
    assert "all-gather" not in {c.kind for c in report.select(axis="model") if "ring" not in c.form}, report.table()
    if embed % data == 0:  # gradients go around a ring
        reduced = [c for c in report.select(axis="data") if c.kind in ("all-reduce", "reduce-scatter")]
        assert [c for c in reduced if "ring" not in c.form] == [], report.table()


@pytest.mark.parametrize(
    ("mesh", "topology", "changes", "does"),
    [
        ({"data": 4, "model": 4}, "v5e:4x4", {}, True),
        ({"data": 2, "model": 4}, "h100:8", {}, False),
        ({"data": 2, "model": 8}, "v5e:4x4", {}, False),
        ({"data": 4, "model": 4}, "v5e:4x4", {"residual_seq": None}, False),
        ({"data": 2, "model": 4, "context": 2}, "v5e:4x4", TWO_AXES, False),
        ({"data": 4, "model": 4}, "v5e:4x4", {"mlp": None}, False),
    ],
)  # fmt: skip
def test_the_ring_is_used_where_the_sequence_and_the_columns_share_an_axis_of_a_tpu(
    mesh: dict[str, int], topology: str, changes: dict[str, Any], does: bool
) -> None:
    layout = jp.Layout(jp.MeshSpec(**mesh).on(topology), RULES.replace(**changes))
    w, x = jax.ShapeDtypeStruct((16, 48), jnp.float32), jax.ShapeDtypeStruct((8, 32, 16), jnp.float32)
    with layout:
        run = lambda x, w: jp.overlap.gather_dot(x, (w, ("embed", "mlp")))[0]
        assert ("ppermute" in str(jax.make_jaxpr(run)(x, w))) is does
        odd = jax.ShapeDtypeStruct((8, 30, 16), jnp.float32)
        if does:  # 30 tokens cannot be split over 4 devices
            assert sequence_dot._ring_axes(odd, [(w, ("embed", "mlp"))], 1, {}) is None


def test_gradients_of_wide_weights_come_last() -> None:
    """On a v5e, a bfloat16 piece travels for as long as a product with 3,940 columns takes."""
    with jp.Layout(jp.MeshSpec(data=4, model=4).on("v5e:4x4"), RULES):
        found = {n: sequence_dot._hides_pieces(n, jnp.bfloat16) for n in (1536, 2954, 2956, 3584)}
        assert found == {1536: False, 2954: False, 2956: True, 3584: True}
        assert not sequence_dot._hides_pieces(3584, jnp.float32)
    with jp.Layout(jp.MeshSpec(data=4, model=4).abstract(), RULES):
        assert not sequence_dot._hides_pieces(10**6, jnp.bfloat16)


@pytest.mark.parametrize(
    ("mesh", "changes", "does"),
    [
        ({"data": 4, "model": 4}, {}, True),
        ({"data": 8, "model": 2}, {}, False),
        ({"data": 4, "model": 4}, {"params": {"embed": None}}, False),
        ({"data": 4, "model": 4}, {"gradients": {"embed": None}}, False),
        ({"replica": 2, "data": 2, "model": 4}, {"batch": ("replica", "data")}, False),
        ({"replica": 2, "data": 2, "model": 4}, {"batch": ("replica", "data"), "params": TWO_SHARDS}, True),
    ],
)
def test_gradients_go_around_a_ring_of_the_devices_of_a_batch(
    mesh: dict[str, int], changes: dict[str, Any], does: bool
) -> None:
    layout = jp.Layout(jp.MeshSpec(**mesh).on("v5e:4x4"), RULES.replace(**changes))
    w, x = jax.ShapeDtypeStruct((16, 48), jnp.float32), jax.ShapeDtypeStruct((8, 32, 16), jnp.float32)
    with layout:
        run = lambda w, x: jp.overlap.gather_dot(x, (w, ("embed", "mlp")))[0].sum()
        text = str(jax.make_jaxpr(jax.grad(run))(w, x))
    assert "ppermute" in text
    axes = set(re.findall(r"ppermute\[\s*axis_name=\(([^)]*)\)", text))
    assert (len(axes) == 2) is does, axes


def test_the_option_of_a_run_sets_that_of_the_model() -> None:
    assert make_job(load_run("configs/bench/1b_fsdp4_tp4_matmuls.yaml")).llama.overlap_matmuls
    assert not make_job(load_run("configs/bench/1b_fsdp4_tp4.yaml")).llama.overlap_matmuls
    assert make_job(load_run("configs/bench/mix_ep4_matmuls.yaml")).llama.overlap_matmuls


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: LlamaConfig(overlap_matmuls=True, copies=2), "overlap.ways"),
        (lambda: LlamaConfig(overlap_matmuls=True, gemma=GemmaConfig(query_scalar=32)), "Gemma"),
    ],
)
def test_models_without_such_matmuls_refuse_the_option(make: Any, why: str) -> None:
    with raises(ConfigError, why):
        make()


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_llama_with_a_sharded_residual_stream_equals_one_device(remat: str, layout_of: Any, as_on_tpus: None) -> None:
    from one_step import SGD, initial

    config = LlamaConfig(
        vocab=64, embed=24, layers=3, heads=4, kv_heads=4, head_dim=6, mlp=20, dtype="float32", remat=remat,
        overlap_matmuls=True,
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 64, (4, 20), dtype=np.int32)
    batch, found = {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}, []
    rules = layout_of("fsdp_tp_sp", 8).rules
    for mesh, devices in ((jp.MeshSpec(), 1), (jp.MeshSpec(data=2, model=4), 8)):
        layout = jp.Layout(mesh.build(jax.devices()[:devices]), rules)
        shapes = jp.abstract_state(layout, make_llama(config), SGD)
        step = jp.train_step(layout, next_token_loss, return_grads=True, donate=False)
        with jax.default_matmul_precision("highest"):
            program = step.lower(shapes, batch).compile()
        found.append(jax.device_get(program(initial(shapes, make_llama(config), rules, SGD), batch)[1]))
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-6)
    assert max(gradient_gaps(found[0]["grads"], found[1]["grads"]).values()) <= 2e-6
    assert "ppermute" in str(step.trace(shapes, batch).jaxpr)
