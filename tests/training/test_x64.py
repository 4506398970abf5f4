"""Under ``jax_enable_x64``, where plain integers have 64 bits, everything runs and equals one device in fp64.

The models are small because every case is a compile. Most cases carry the marker ``slow``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import generators
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_step import LLAMA_RULES, SGD, check_grads, initial, layout_of

import jaxpar as jp
from jaxpar.models.llama import LlamaConfig, make_llama
from jaxpar.models.llama.pipeline import staged_next_token_loss
from jaxpar.models.losses import next_token_loss
from jaxpar.parallel.overlap import sequence_dot

BOUND = 1e-12
CONFIG = LlamaConfig(
    vocab=32, embed=16, layers=4, heads=4, kv_heads=2, head_dim=4, mlp=32, dtype="float64", param_dtype="float64"
)
STAGED, MAKE = staged_next_token_loss(CONFIG), make_llama(CONFIG)
QUICK = {"xla_backend_optimization_level": 0}
RULES = LLAMA_RULES


@pytest.fixture(autouse=True)
def fp64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def batch_of(rows: int = 8, seq: int = 16) -> dict[str, Any]:
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab, (rows, seq + 1))
    return {"tokens": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}


def one(sizes: dict[str, int], loss: Any, config: LlamaConfig = CONFIG, rules: jp.Rules = RULES, **options: Any) -> Any:
    """Returns the loss and the gradients of one step, and the step before it is lowered."""
    layout = layout_of(rules, sizes)
    make = MAKE if config is CONFIG else make_llama(config)
    shapes = jp.abstract_state(layout, make, SGD)
    step = jp.train_step(layout, loss, return_grads=True, donate=False, **options)
    traced = step.trace(shapes, batch_of())
    _, metrics = traced.lower().compile(compiler_options=QUICK)(initial(shapes, make, RULES), batch_of())
    grads = jax.device_get(metrics["grads"])
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype(np.float64)}
    return float(metrics["loss"]), grads, traced.jaxpr


@pytest.fixture(scope="module")
def want() -> Any:
    with jax.enable_x64(True):
        return one({"data": 1}, next_token_loss)


def check(got: Any, want: Any) -> None:
    assert got[0] == pytest.approx(want[0], rel=BOUND)
    check_grads(got[1], want[1], BOUND)


def schedule(name: str, **options: Any) -> Any:
    return jp.pipeline.schedule(name, stages=2, microbatches=4, **options)


PIPELINES: dict[str, Any] = {
    "seq1f1b": jp.Pipeline(schedule("seq1f1b", sequence_chunks=2)),
    "seq1f1b residuals": jp.Pipeline(schedule("seq1f1b", sequence_chunks=2), activation_checkpointing="none"),
    "1f1b": jp.Pipeline(schedule("1f1b"), activation_checkpointing="none", recompute=(1, 0)),
    "before each": jp.Pipeline(schedule("1f1b", fused=False), executor="independent", embedding="per_microbatch"),
    "interleaved": jp.Pipeline(schedule("interleaved", chunks=2), grad_reduction="per_microbatch"),
    "breadth_first": jp.Pipeline(schedule("breadth_first", chunks=2), grad_reduction="per_chunk"),
    "head each": jp.Pipeline(
        schedule("interleaved", chunks=2), grad_reduction="per_chunk", head_grad_reduction="per_microbatch"
    ),
    "zb_h1": jp.Pipeline(schedule("zb_h1"), activation_checkpointing="none", executor="independent"),
    "zb_v": jp.Pipeline(schedule("zb_v"), activation_checkpointing="none"),
}
"""Every kind of program; the other schedules are orders of the same operations, which fp32 tests."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(name: str, want: Any) -> None:
    pipeline = PIPELINES[name]
    over_data = pipeline.executor == "independent" or name == "head each"
    sizes = {"pipeline": 2, "data": 2} if over_data else {"pipeline": 2, "model": 2}
    check(one(sizes, STAGED, pipeline=pipeline), want)


ATTENTION = {
    "flash": ({"data": 2, "model": 2}, {}),
    "dense": ({"data": 2, "model": 2}, {}),
    "gather": ({"context": 2, "data": 2}, {}),
    "ring": ({"context": 4}, {}),
    "ring_self_attention": ({"context": 2}, {}),
    "ulysses": ({"ulysses": 2, "model": 2}, {}),
    "hybrid": ({"context": 2, "ulysses": 2}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("impl", ATTENTION)
def test_attention(impl: Any) -> None:
    """Compares with dense attention on one device: window, segments, dropout and ALiBi together."""
    sizes, options = ATTENTION[impl]
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(2, 16, heads, 4)) for heads in (4, 2, 2))
    more: dict[str, Any] = dict(options)
    more |= {"segment_ids": np.repeat([[0, 1, 2], [0, 0, 1]], [5, 7, 4], 1), "alibi": True}
    more |= {"mask": jp.Mask(causal=True, window=6), "dropout": 0.25, "key": jax.random.key(3)}

    def run(impl: Any, sizes: dict[str, int]) -> Any:
        with layout_of(RULES, sizes):
            loss = lambda q, k, v: jnp.sum(jp.attention(q, k, v, impl=impl, **more) * jnp.cos(q))
            return jax.device_get(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v))

    want, got = run("dense", {"data": 1}), run(impl, sizes)
    assert got[0] == pytest.approx(want[0], rel=BOUND)
    check_grads(got[1], want[1], BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero(stage: int, want: Any) -> None:
    zero = jp.Zero(stage, min_bytes=0)
    rules = zero.rules(jp.Rules(**{dim: rule for dim, rule in RULES.to_dict().items() if dim != "params"}))
    check(one({"data": 4}, next_token_loss, rules=rules, grad_accum_steps=2, **zero.step), want)


@pytest.mark.slow
def test_groups_whose_gradients_and_optimizer_are_sharded_over_all_devices(want: Any) -> None:
    state = {"embed": ("data", "replica")}
    rules = RULES.replace(batch=("replica", "data"), params={"embed": "data"}, gradients=state, optimizer=state)
    check(one({"replica": 2, "data": 4}, next_token_loss, rules=rules), want)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_matmuls_beside_their_collectives(remat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_dot, "platform_of", lambda mesh: "tpu")
    config = replace(CONFIG, kv_heads=4, remat=remat)
    want = one({"data": 1}, next_token_loss, config)
    got = one({"data": 2, "model": 4}, next_token_loss, replace(config, overlap_matmuls=True))
    check(got, want)
    assert "ppermute" in str(got[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("2d", {"x": 2, "y": 4}),
        ("2.5d", {"x": 2, "y": 2, "z": 2}),
        ("3d", {"x": 2, "y": 2, "z": 2}),
    ],
)
def test_tensor_parallelism_in_several_dimensions(kind: Any, sizes: dict[str, int]) -> None:
    config = replace(CONFIG, heads=8, kv_heads=4, remat="full")
    rules = jp.tensor.rules(kind, jp.Rules(**(RULES.to_dict() | {"seq": None, "residual_seq": None, "params": {}})))
    want = one({"data": 1}, next_token_loss, config)
    got = one(sizes, next_token_loss, config, rules)
    check(got, want)
    assert str(got[2]).count("reduce_scatter") >= 4 * config.layers  # of the results of a layer's four matmuls


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2, "context": 2, "model": 2}, {"pipeline": 2, "data": 2}], ids=str)
def test_generation(mesh: dict[str, int]) -> None:
    config = replace(generators.CONFIG, dtype="float64", param_dtype="float64", layers=2)
    made = []
    for built in (
        generators.one_device(),
        jp.MeshSpec(**mesh).build(jax.devices()[: int(np.prod(list(mesh.values())))]),
    ):
        model = generators.generator(built, config=config, sampling=jp.inference.Sampling(1.0, 20, 0.9))
        params = jp.init(model.layout, make_llama(config), optax.identity()).params
        made.append(model.generate(params, generators.PROMPTS, most=5))
    assert made[0] == made[1]
