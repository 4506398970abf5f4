"""Layers in two copies against one: values, gradients, bytes sent, every mesh axis, pipelines, and errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from flax import nnx
from one_step import BOUND, LLAMA_RULES, check_grads, layout_of, one_step
from profiles import few

import jaxpar as jp
from jaxpar.app.config import Loaded, RunConfig
from jaxpar.app.job import make_job
from jaxpar.errors import ConfigError, LayoutError, ModelError
from jaxpar.models import llama
from jaxpar.models.llama.pipeline import staged_next_token_loss
from jaxpar.models.losses import next_token_loss
from jaxpar.parallel.overlap.interleave import cut, join, order_of_halves
from jaxpar.utils.yaml_config import build

QUICK = {"xla_backend_optimization_level": 0}
ROWS, SEQ = 8, 32
RULES = LLAMA_RULES
HOW = {"layers": 2, "vocab": 64, "embed": 32, "heads": 8, "kv_heads": 4, "head_dim": 8, "mlp": 48}
ONE = llama.make_llama(llama.preset("tiny", **HOW))
Found = tuple[float, Any, Any]


def run(
    sizes: dict[str, int],
    copies: int,
    *,
    staged: bool = False,
    pipeline: Any = None,
    packed: bool = False,
    **config: Any,
) -> Found:
    """Loss, gradients and the audit of one step of a small Llama."""
    model, layout = llama.preset("tiny", copies=copies, **HOW, **{"remat": "full", **config}), layout_of(RULES, sizes)
    keys = enumerate(("tokens", "targets"))
    batch = {name: jax.random.randint(jax.random.key(n), (ROWS, SEQ), 0, 64) for n, name in keys}
    if packed:
        batch["segment_ids"] = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 4, (ROWS, SEQ))))
    loss = staged_next_token_loss(model) if staged else next_token_loss
    metrics, grads, compiled = one_step(layout, loss, llama.make_llama(model), batch, ONE, pipeline=pipeline)
    return metrics["loss"], grads, jp.audit(compiled, mesh=layout.mesh)


@pytest.fixture(scope="module")
def one_copy() -> Found:
    return run({"data": 2, "model": 2}, 1)


@pytest.fixture(scope="module")
def two_copies() -> Found:
    return run({"data": 2, "model": 2}, 2)


def check_same(got: Found, want: Found) -> None:
    assert got[0] == pytest.approx(want[0], rel=2e-6)
    check_grads(got[1], want[1], BOUND)


@pytest.mark.slow
def test_two_copies_give_what_one_gives(two_copies: Found, one_copy: Found) -> None:
    check_same(two_copies, one_copy)


@pytest.mark.slow
def test_weights_are_gathered_once_and_nothing_more_is_sent(two_copies: Found, one_copy: Found) -> None:
    gathers = [audit.wire_bytes("all-gather", "data") for *_, audit in (two_copies, one_copy)]
    assert 0 < gathers[0] <= gathers[1]
    assert two_copies[2].wire_bytes() <= one_copy[2].wire_bytes()


def test_sequences_and_sums_cross_by_permutes(two_copies: Found) -> None:
    permutes = two_copies[2].wire_bytes("collective-permute", "model")
    # Each layer and half runs 2 gathers and 2 scatters in each of forward, recomputation and backward; the
    # recomputation leaves out the last one. Each sends 16 tokens of 32 numbers for 2 rows.
    half_piece = 2 * 16 * 32 * 4
    assert permutes >= 2 * 2 * (4 + 4 + 4 - 1) * half_piece
    assert two_copies[2].count("all-to-all", "model") == 0


@pytest.mark.parametrize("axis", few(["context", "ulysses"], 0))
def test_another_policy_of_recomputation_beside_a_ring_and_an_exchange_of_heads(axis: str, one_copy: Found) -> None:
    check_same(run({axis: 2, "model": 2}, 2, remat="save_outputs"), one_copy)


@pytest.mark.slow
def test_copies_inside_of_a_pipeline(one_copy: Found) -> None:
    pipeline = jp.Pipeline(jp.pipeline.schedule("1f1b", stages=2, microbatches=2))
    got = run({"pipeline": 2, "data": 2, "model": 2}, 2, staged=True, pipeline=pipeline)
    check_same(got, one_copy)


@pytest.fixture(scope="module")
def halves() -> Found:
    return run({"data": 2, "model": 2}, 2, copies_dim="seq")


@pytest.mark.slow
def test_halves_of_sequences_give_what_one_copy_gives(halves: Found, one_copy: Found) -> None:
    check_same(halves, one_copy)
    # Halves of sequences send no more bytes than one copy.
    assert halves[2].wire_bytes() <= one_copy[2].wire_bytes()
    assert halves[2].wire_bytes("collective-permute", "model") > 0


@pytest.mark.slow
def test_halves_of_packed_sequences_of_one_row_inside_of_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over more devices of a torus: in a ring, pieces from the far end arrive in halves from both sides."""
    monkeypatch.setattr("jaxpar.parallel.overlap.interleave.MAX_DIRECT", 2)
    monkeypatch.setattr(
        "jaxpar.parallel.overlap.interleave.links_of", lambda *_: SimpleNamespace(torus=True, rings=lambda axes: (4,))
    )
    pipeline = jp.Pipeline(jp.pipeline.schedule("1f1b", stages=2, microbatches=ROWS))
    got = run(
        {"pipeline": 2, "model": 4},
        2,
        staged=True,
        pipeline=pipeline,
        packed=True,
        copies_dim="seq",
        remat="save_outputs",
    )
    check_same(got, run({"data": 2, "model": 2}, 1, packed=True))


@pytest.mark.slow
def test_logits_of_halves_come_in_the_order_of_the_tokens() -> None:
    """In fp64, so that a logit near zero can be compared relative to its own size."""
    layout = layout_of(RULES, {"data": 2, "model": 2})
    how: dict[str, Any] = {"layers": 1, "vocab": 64, "embed": 32, "head_dim": 8, "mlp": 48}
    how |= {"dtype": "float64", "param_dtype": "float64"}
    with layout, jax.enable_x64(True):
        tokens = jax.random.randint(jax.random.key(0), (ROWS, SEQ), 0, 64)
        whole, halved = (llama.preset("tiny", **how, **more) for more in ({}, {"copies": 2, "copies_dim": "seq"}))
        made = [jax.eval_shape(llama.make_llama(config), jax.random.key(1)) for config in (whole, halved)]
        rng = np.random.default_rng(0)
        weights = [rng.normal(size=leaf.shape) / 4 for leaf in jax.tree.leaves(made[0])]
        logits = [
            jax.jit(lambda model: model(tokens))(jax.tree.unflatten(jax.tree.structure(model), weights))
            for model in made
        ]
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-9, atol=1e-12)


def layer(block: Any, x: jax.Array, side: Any) -> jax.Array:
    return x + jnp.tanh(x @ block["w"] + side["at"])


def test_a_layer_of_ones_own() -> None:
    """In fp64, because a gradient sums 256 tokens and some of them cancel."""
    layout = layout_of(RULES, {"data": 2, "context": 2, "model": 2})

    def loss(w: jax.Array, x: jax.Array, run: Any) -> jax.Array:
        return jnp.sum(run({"w": w}, x, side) ** 2)

    with jax.enable_x64(True), layout:
        w = jax.random.normal(jax.random.key(0), (8, 8)) / 3
        x = jax.random.normal(jax.random.key(1), (ROWS, SEQ, 8))
        side = {"at": jax.random.normal(jax.random.key(2), (ROWS, SEQ, 1)), "scale": jnp.ones(())}
        in_two = jax.jit(
            jax.value_and_grad(lambda w, x: loss(w, x, jp.overlap.interleave_batches(layer)), argnums=(0, 1))
        )
        compiled = in_two.lower(w, jp.shard_array(layout, x, "batch", "seq", None)).compile(compiler_options=QUICK)
        got = compiled(w, jp.shard_array(layout, x, "batch", "seq", None))
    with jax.enable_x64(True):
        want = jax.value_and_grad(lambda w, x: loss(w, x, layer), argnums=(0, 1))(w, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
    # Only both copies' gradients of w and the loss are communicated.
    assert jp.audit(compiled, mesh=layout.mesh).wire_bytes() <= 2 * (8 * 8 + 2) * 8


def test_cutting_moves_no_byte() -> None:
    layout = layout_of(RULES, {"data": 2, "context": 2, "model": 2})
    with layout:
        x = jp.shard_array(layout, jnp.arange(ROWS * SEQ).reshape(ROWS, SEQ), "batch", "seq")
        halves = jax.jit(cut).lower(x).compile()
        again = jax.jit(lambda x: join(cut(x))).lower(x).compile()
        assert [half.tolist()[0][0] // SEQ for half in halves(x)] == [0, 2]  # each device cuts its own rows
        assert again(x).tolist() == x.tolist()
    assert [jp.audit(c, mesh=layout.mesh).count() for c in (halves, again)] == [0, 0]


def test_each_copy_on_each_device_draws_its_own() -> None:
    def noisy(block: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        return x + jax.random.normal(key, x.shape)

    layout = layout_of(RULES, {"data": 2, "context": 2})
    with layout:
        x = jp.shard_array(layout, jnp.zeros((ROWS, SEQ, 4)), "batch", "seq", None)
        drawn = np.asarray(jax.jit(jp.overlap.interleave_batches(noisy))(None, x, jax.random.key(0)))
    assert len(np.unique(drawn)) == drawn.size


def test_what_copies_cannot_do() -> None:
    x, block = jnp.ones((ROWS, SEQ, 8)), {"w": jnp.ones((8, 8))}
    run = jp.overlap.interleave_batches(layer)
    with raises(ConfigError, "overlap.ways", "got 3"):
        jp.overlap.interleave_batches(layer, 3)
    plain = jp.Rules(batch="data", seq=None, residual_seq=None, embed=None)
    with layout_of(plain, {"data": 2, "model": 2}), raises(ConfigError, "overlap.ways", "'residual_seq'"):
        run(block, x, None)
    with layout_of(RULES, {"data": 2, "context": 2}):
        with raises(ConfigError, "overlap.ways", "3 rows"):
            run(block, x[:6], None)
        with raises(LayoutError, "interleave_batches()"):
            run(block, x, {"at": jnp.ones((5, SEQ))})
        with raises(ModelError, "interleave_batches()"):
            jp.overlap.interleave_batches(layer)(nnx.BatchNorm(8, rngs=nnx.Rngs(0)), x, None)


def test_what_halves_of_sequences_cannot_do() -> None:
    with raises(ConfigError, "interleave_batches()"):
        jp.overlap.interleave_batches(layer, dim="seq")
    with raises(ConfigError, "overlap.dim", "sequence"):
        jp.overlap.interleave_batches(layer, dim="sequence")  # type: ignore[arg-type]
    with layout_of(RULES, {"data": 2, "model": 2}), raises(ConfigError, "overlap.ways", "15"):
        order_of_halves(30)
    with layout_of(RULES, {"context": 2, "model": 2}), raises(ConfigError, "overlap.ways", "shard 'seq'"):
        order_of_halves(32)
    with raises(ConfigError, "overlap.dim", "parallel.context.load_balance"):
        llama.preset("tiny", copies=2, copies_dim="seq", context=jp.context.Context(load_balance="zigzag"))


def job_of(**parallel: Any) -> Any:
    data = {"model": {"family": "llama"}, "layout": "", "parallel": parallel}
    return make_job(Loaded(build(RunConfig, data, "run"), {"mesh": {"data": -1}, "rules": {}}, "run"))


def test_the_configuration_of_a_run() -> None:
    assert job_of(overlap={"ways": 2}).model.copies == 2
    assert job_of(overlap={"ways": 2, "dim": "seq"}).model.copies_dim == "seq"
    with raises(ConfigError, "parallel.overlap.dim"):
        job_of(overlap={"dim": "seq"})
    with raises(ConfigError, "parallel.overlap.ways", "1 or"):
        job_of(overlap={"ways": 0})
    with raises(ConfigError, "parallel.overlap.ways", "reshard_after_forward"):
        job_of(overlap={"ways": 2}, reshard_after_forward=2)
    with raises(ConfigError, "parallel.overlap.ways", "parallel.offload.parameters"):
        job_of(overlap={"ways": 2}, offload={"parameters": "host", "optimizer": "host"})
