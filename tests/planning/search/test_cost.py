"""The cost of a plan in closed form, against sums by hand."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxpar as jp
from jaxpar.analysis.compile.gathers import GATHER_OPTIONS
from jaxpar.planning.search.calibration import Calibration
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.traced import workload
from jaxpar.planning.search.workload import Workload
from jaxpar.sharding.hardware.topology import Topology

ROWS, EMBED, MLP, LAYERS = 96, 24, 72, 6


@functools.cache
def stack() -> Workload:
    """Layers of two matmuls, scanned, in fp32 with Adam."""

    def make_model(key: jax.Array) -> dict[str, jp.tag]:
        up, down = jax.random.split(key)
        return {
            "up": jp.tag(jax.random.normal(up, (LAYERS, EMBED, MLP)), "layers", "embed", "mlp"),
            "down": jp.tag(jax.random.normal(down, (LAYERS, MLP, EMBED)), "layers", "mlp", "embed"),
        }

    def loss_fn(model: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w[0]) @ w[1], None

        out, _ = jax.lax.scan(layer, batch["x"], (model["up"], model["down"]))
        return (out**2).mean()

    batch = {"x": jp.tag(jax.ShapeDtypeStruct((ROWS, EMBED), jnp.float32), "batch", "embed")}
    return workload(make_model, loss_fn, batch, optax.adam(1e-3))


def model(topology: str = "v5e:2x4") -> CostModel:
    return CostModel(stack(), Topology.parse(topology))


def test_the_workload_has_the_layers_matmuls() -> None:
    work = stack()
    assert [(m.layered, m.weight, m.times) for m in work.matmuls] == [(True, True, LAYERS)] * 2
    assert work.model_flops == 3 * 2 * 2 * LAYERS * ROWS * EMBED * MLP
    assert work.param_count == 2 * LAYERS * EMBED * MLP and work.param_bytes == 4 * work.param_count
    assert work.sizes == {"batch": ROWS, "embed": EMBED, "mlp": MLP, "layers": LAYERS}
    assert work.state_bytes == pytest.approx(2, rel=1e-3)  # two moments, and a count
    assert work.compute_bytes == 4


def test_one_device_does_all_flops_and_sends_nothing() -> None:
    cost = model().cost(Plan())
    # The first layer's input needs no gradient outside of a scan; inside, all layers are the same program.
    assert cost.compute == pytest.approx(stack().model_flops / Topology.parse("v5e:1x1").accelerator.rate("bf16"))
    assert cost.wire_bytes == 0 == cost.exposed


@given(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
def test_devices_share_flops_and_state(replica: int, data: int, model_size: int) -> None:
    devices, tensor = replica * data * model_size, ("mlp",) if model_size > 1 else ()
    costs = model(f"v5e:1x{devices}")
    plan = Plan(replica=replica, data=data, model=model_size, tensor=tensor)
    alone = costs.cost(Plan())
    assert costs.cost(plan).compute * devices == pytest.approx(alone.compute)
    assert costs.cost(plan).memory["parameters"] * model_size == pytest.approx(stack().param_bytes)
    sharded = costs.cost(Plan(replica=replica, data=data, model=model_size, tensor=tensor, zero=3))
    assert sharded.memory["optimizer"] * model_size * data == pytest.approx(2 * stack().param_bytes, rel=1e-3)


def test_data_parallelism_sends_each_gradient_twice() -> None:
    cost = model().cost(Plan(data=8))
    assert cost.wire_bytes == pytest.approx(2 * 7 / 8 * 4 * stack().param_count)


def test_fsdp_gathers_twice_and_reduces_once() -> None:
    cost = model().cost(Plan(data=8, zero=3))
    assert cost.wire_bytes == pytest.approx(3 * 7 / 8 * 4 * stack().param_count)
    again = model().cost(Plan(data=8, zero=3, grad_accum_steps=2))
    assert again.wire_bytes == pytest.approx(2 * cost.wire_bytes)


def test_tensor_parallelism_sends_activations() -> None:
    cost = model().cost(Plan(data=2, model=4, tensor=("mlp",)))
    local = ROWS // 2 * EMBED * 4
    layers = 2 * LAYERS * 2 * 3 / 4 * local  # one all-reduce in the forward pass, one in the backward pass
    gradients = 2 * 1 / 2 * 4 * stack().param_count / 4
    assert cost.wire_bytes == pytest.approx(layers + gradients)


def test_a_pipeline_waits_for_its_first_microbatch() -> None:
    few, many = (model().cost(Plan(pipeline=2, data=4, microbatches=n)) for n in (2, 12))
    assert few.compute / many.compute == pytest.approx((3 / 2) / (13 / 12))


def weights_sent(plan: Plan) -> dict[str, float]:
    sent = {t.what: t.wire_bytes for t in model().cost(plan).transfers if t.wire_bytes}
    return {what: pytest.approx(size) for what, size in sent.items() if what.startswith(("gather", "scatter"))}


def test_chunks_scatter_once_for_as_many_microbatches_as_stages_and_all_but_the_last_beside_a_backward() -> None:
    plan = Plan(pipeline=2, data=4, zero=3, microbatches=8, virtual_stages=3)
    once = 3 / 4 * 4 * stack().param_count / 2
    assert weights_sent(plan) == {
        "gather in chunks": once * 2 / 3,
        "gather in step": once / 3,
        "scatter in chunks": (8 / 2 - 1 / 3) * once,
        "scatter in step": once / 3,
    }
    whole = model().cost(replace(plan, virtual_stages=1))
    assert weights_sent(replace(plan, virtual_stages=1)) == {"gather in step": once, "scatter in step": once}
    assert model().cost(plan).memory["gradients"] < whole.memory["gradients"]


def test_chunks_pass_through_main_memory_in_each_tick_and_their_layers_move_to_their_stage() -> None:
    plan = Plan(pipeline=2, data=4, zero=3, microbatches=8, virtual_stages=3)
    costs, plain = (CostModel(stack(), model().topology, Calibration(chunk_traffic=each)) for each in (10.0, 0.0))
    more = (costs.cost(plan).hbm - plain.cost(plan).hbm) * costs.topology.accelerator.hbm_bandwidth
    assert more == pytest.approx(10 * (8 + 1 / 3) * stack().param_count / 2)  # a third of the weights in 25 ticks
    whole = replace(plan, virtual_stages=1)
    assert costs.cost(whole).hbm == plain.cost(whole).hbm
    moved = {
        p.virtual_stages: [t.wire_bytes for t in costs.cost(p).transfers if t.what == "layers"] for p in (plan, whole)
    }
    assert moved == {3: [pytest.approx(1 / 2 * (4 + 4) * stack().param_count / 8)], 1: []}


def attend(model: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Causal attention whose scores are one array."""
    x = model["w"][batch["tokens"]]
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, model[name]) for name in ("q", "k", "v"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return (jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v) ** 2).mean()


def test_flops_are_those_of_the_compiled_program_and_its_mfu_halves_causal_attention() -> None:
    batch, seq, embed, heads, size = 3, 26, 20, 2, 8
    dims = {"w": ("vocab", "embed"), **dict.fromkeys("qkv", ("embed", "heads", "head_dim"))}
    shapes = {"w": (50, embed), **dict.fromkeys("qkv", (embed, heads, size))}
    make_model = lambda key: {name: jp.tag(jax.random.normal(key, shapes[name]), *dims[name]) for name in shapes}
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    work = workload(make_model, attend, {"tokens": jp.tag(tokens, "batch", "seq")}, optax.adam(1e-3))
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    program = jax.jit(jax.grad(attend)).lower(weights, {"tokens": tokens}).compile()
    flops, topology = jp.audit(program).matmul_flops, Topology.parse("v5e:1x1")
    cost = CostModel(work, topology).cost(Plan())
    assert cost.compute * topology.accelerator.rate("bf16") == pytest.approx(flops)
    projections, attention = 3 * 2 * batch * seq * embed * heads * size, 2 * 2 * batch * heads * seq * seq * size
    assert flops == 3 * (projections + attention)
    assert work.model_flops == 3 * projections + 1.5 * attention


@pytest.mark.parametrize(("chips", "alone"), [("v5e:2x4", False), ("v6e:2x4", True), ("v5p:2x2x2", True)])
def test_gathers_of_weights_beside_compute(chips: str, alone: bool) -> None:
    """A compiler that leaves gathers alone exposes them, until its options are set."""
    topology, plan = Topology.parse(chips), Plan(data=8, zero=3)
    options = dict.fromkeys(GATHER_OPTIONS.get(topology.accelerator.kind, ()), True)
    told = CostModel(replace(stack(), compiler_options={"tpu": options}), topology).cost(plan)
    cost = CostModel(stack(), topology).cost(plan)
    gathers = sum(t.seconds for t in cost.transfers if t.what == "gather in layer")
    assert gathers > 0 and (cost.exposed - told.exposed >= gathers if alone else cost == told)
