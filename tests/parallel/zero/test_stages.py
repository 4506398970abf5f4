"""ZeRO stages: what each one stores, sends and computes, with any optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from covers import covering
from error_texts import raises
from one_step import initial
from profiles import few

import jaxpar as jp
from jaxpar.analysis.compare import gradient_gaps
from jaxpar.errors import MeshError, RulesError

RULES = jp.Rules(batch=("replica", "data"), embed=None, mlp=None)
LR = 1e-3
STEPS = 20
# For trajectories in fp64. In fp32, optimizers amplify the last bits of gradients, by an amount that depends on the
# processor.
TOLERANCE = 1e-9


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim == 2, params)


def others(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim != 2, params)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(LR),
    "adafactor": lambda: optax.adafactor(LR, min_dim_size_to_factor=8, momentum=0.9),
    "muon": lambda: optax.contrib.muon(LR),
    "a chain of masks": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.adam(LR), matrices),
        optax.masked(optax.sgd(LR), others),
    ),
    "lion": lambda: optax.lion(LR),
    "sgd": lambda: optax.sgd(LR, momentum=0.9),
}


@functools.cache
def optimizer(name: str) -> optax.GradientTransformation:
    return OPTIMIZERS[name]()


def sharded(zero: jp.Zero, mlp: Any, devices: int = 8) -> jp.Layout:
    mesh = zero.mesh(jp.MeshSpec(data=-1), devices).build(jax.devices()[:devices])
    return mlp.layout(zero.rules(RULES), mesh)


def run(layout: jp.Layout, mlp: Any, name: str, **options: Any) -> tuple[list[float], list[Any]]:
    with jax.enable_x64(True):
        tx = optimizer(name)
        shapes = jp.abstract_state(layout, mlp.make, tx)
        lowered = jp.train_step(layout, mlp.loss, return_grads=True, donate=False, **options).lower(shapes, mlp.batch())
        step = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})  # compiles in half the time
        state = initial(shapes, mlp.make, mlp.rules, tx)
        losses, grads = [], []
        for i in range(STEPS):
            state, metrics = step(state, mlp.batch(i))
            losses.append(float(metrics["loss"]))
            grads.append(jax.device_get(metrics["grads"]))
    return losses, grads


@pytest.fixture(scope="session")
def on_one_device(mlp: Any) -> Callable[[str], tuple[list[float], list[Any]]]:
    return functools.cache(lambda name: run(mlp.one_device, mlp, name))


@pytest.mark.parametrize(("name", "stage"), covering(OPTIMIZERS, [1, 2, 3], keep=1, strength=1))
def test_every_stage_with_any_optimizer_equals_one_device(
    name: str, stage: int, mlp: Any, on_one_device: Callable[[str], Any]
) -> None:
    zero = jp.Zero(stage, min_bytes=256)
    losses, grads = run(sharded(zero, mlp), mlp, name, **zero.step)
    want_losses, want_grads = on_one_device(name)
    np.testing.assert_allclose(losses, want_losses, rtol=TOLERANCE, atol=0)
    for theirs, ours in zip(want_grads, grads, strict=True):
        assert max(gradient_gaps(theirs, ours).values()) <= TOLERANCE


@pytest.mark.parametrize("stage", few([1, 2, 3], 1))
def test_groups_that_replicate_across_one_another_equal_one_device(
    stage: int, mlp: Any, on_one_device: Callable[[str], Any]
) -> None:
    zero = jp.Zero(stage, min_bytes=256, fsdp_group_size=4)
    layout = sharded(zero, mlp)
    assert (layout.sizes["replica"], layout.sizes["data"]) == (2, 4)
    losses, _ = run(layout, mlp, "adamw", **zero.step)
    np.testing.assert_allclose(losses, on_one_device("adamw")[0], rtol=TOLERANCE, atol=0)


EXPERTS = jp.Rules(batch="data", rows="data", embed=None, mlp=None, experts="expert")


def experts(key: jax.Array) -> dict[str, Any]:
    """A router and the two weights of four experts."""
    shapes = {"router": ("embed", "experts"), "up": ("experts", "embed", "mlp"), "down": ("experts", "mlp", "embed")}
    sizes = {"experts": 4, "embed": 16, "mlp": 32}
    keys = dict(zip(shapes, jax.random.split(key, 3), strict=True))
    return {
        name: jp.tag(jax.random.normal(keys[name], tuple(sizes[dim] for dim in dims)), *dims)
        for name, dims in shapes.items()
    }


def mixture(model: Any, x_BE: jax.Array) -> jax.Array:
    """The mean square of each row's sum over experts, weighted by the router."""
    gates_BX = jax.nn.softmax(x_BE @ model["router"])
    hidden_BXM = jp.hint(jnp.tanh(jnp.einsum("BE,XEM->BXM", x_BE, model["up"])), "rows", "experts", None)
    return jnp.mean(jnp.einsum("BXM,XME,BX->BE", hidden_BXM, model["down"], gates_BX) ** 2)


def routed(zero: jp.Zero, rules: jp.Rules, devices: int) -> tuple[list[float], Any, list[str]]:
    """Losses of three steps, the last step's gradients, and the specs of the experts' optimizer state."""
    mesh = jp.MeshSpec(data=-1, expert=2) if devices > 1 else jp.MeshSpec(data=1)
    layout = jp.Layout(mesh.build(jax.devices()[:devices]), zero.rules(rules))
    with jax.enable_x64(True):
        tx = optimizer("adamw")
        shapes = jp.abstract_state(layout, experts, tx)
        state, losses = initial(shapes, experts, rules, tx), list[float]()
        step = jp.train_step(layout, mixture, return_grads=True, donate=False, **zero.step)
        step = step.lower(shapes, np.zeros((32, 16), np.float32)).compile()
        for i in range(3):
            state, metrics = step(state, np.random.default_rng(i).normal(size=(32, 16)).astype(np.float32))
            losses.append(float(metrics["loss"]))
    lies = [str(x.sharding.spec) for x in jax.tree.leaves(state.opt_state) if x.ndim == 3]
    return losses, jax.device_get(metrics["grads"]), lies


@pytest.fixture(scope="module")
def mixed_on_one_device() -> Any:
    return routed(jp.Zero(0), EXPERTS, 1)


@pytest.mark.slow
@pytest.mark.parametrize("stage", few([1, 2, 3], 1))
def test_every_stage_beside_experts_equals_one_device(stage: int, mixed_on_one_device: Any) -> None:
    """The batch is sharded over ``data``; from stage 2 on also over both axes, as expert parallelism shards it."""
    for rules in (EXPERTS, EXPERTS.replace(batch=("data", "expert"))) if stage > 1 else (EXPERTS,):
        losses, grads, lies = routed(jp.Zero(stage, min_bytes=256), rules, 8)
        assert len(lies) == 4 and all("expert" in spec and "data" in spec for spec in lies), lies
        np.testing.assert_allclose(losses, mixed_on_one_device[0], rtol=TOLERANCE, atol=0)
        assert max(gradient_gaps(mixed_on_one_device[1], grads).values()) <= TOLERANCE


def square(key: jax.Array) -> dict[str, Any]:
    """Two weights whose bytes divide evenly: 2 × 64 × 64 parameters."""
    return {name: jp.tag(jax.random.normal(key, (64, 64)), "embed", "mlp") for name in ("up", "down")}


def squares(model: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(batch @ model["up"]) @ model["down"]) ** 2)


@functools.cache
def compiled(zero: jp.Zero, batch: int = 64, **options: Any) -> tuple[Any, jp.Layout]:
    layout = jp.Layout(zero.mesh(jp.MeshSpec(data=-1), 8).build(), zero.rules(RULES))
    state = jp.abstract_state(layout, square, optax.adam(LR))
    data = jp.shard_array(layout, np.ones((batch, 64), np.float32), "batch", None)
    return jp.train_step(layout, squares, **{**zero.step, **options}).lower(state, data).compile(), layout


COUNTERS = 4 + 8 + 4  # the step, the key, Adam's count
PARAMETERS = 2 * 64 * 64


@pytest.mark.parametrize(
    ("zero", "bytes_each"),
    few(
        [
            (jp.Zero(1, min_bytes=0), 12 * PARAMETERS // 8),
            (jp.Zero(0), 12 * PARAMETERS),
            (jp.Zero(2, min_bytes=0), 12 * PARAMETERS // 8),
            (jp.Zero(3, min_bytes=0), 12 * PARAMETERS // 8),
            (jp.Zero(3, min_bytes=0, fsdp_group_size=2), 12 * PARAMETERS // 2),
            (jp.Zero(1, min_bytes=64 * 64 * 4 + 1), 12 * PARAMETERS),
        ],
        2,
        names=2,
    ),
    ids=str,
)
def test_arguments_are_of_the_formulas_bytes(zero: jp.Zero, bytes_each: int) -> None:
    """12 bytes per parameter (fp32, with two moments), divided exactly by the devices that share them."""
    step, _ = compiled(zero)
    batch = 64 * 64 * 4 // 8
    assert step.memory_analysis().argument_size_in_bytes == bytes_each + COUNTERS + batch


def test_stages_1_and_2_gather_each_weight_once() -> None:
    """Stage 1 also scatters its gradients once, which is the minimum."""
    whole = PARAMETERS * 4 * 7 // 8
    for stage in (1, 2):
        step, layout = compiled(jp.Zero(stage, min_bytes=0))
        assert jp.audit(step, mesh=layout.mesh).wire_bytes("all-gather") == whole
    step, layout = compiled(jp.Zero(1, min_bytes=0))
    report = jp.audit(step, mesh=layout.mesh)
    assert report.wire_bytes("reduce-scatter") == whole
    assert report.wire_bytes() - 2 * whole < 64, report.table()  # only norm and loss


@pytest.mark.slow
@pytest.mark.parametrize("stage", few([0, 1], 1))
def test_microbatches_do_not_reduce_once_more(stage: int) -> None:
    """Eight microbatches reduce one microbatch's gradient bytes; per-microbatch reduction sends eight times as many."""

    def reduced(**options: Any) -> float:
        step, layout = compiled(jp.Zero(stage, min_bytes=0), **options)
        report = jp.audit(step, mesh=layout.mesh)
        return report.wire_bytes() - report.wire_bytes("all-gather")

    once = PARAMETERS * 4 * 7 / 8 * (1 if stage else 2)
    scalars = 256  # loss, norm, and their parts that every round sums
    assert reduced() == pytest.approx(once, abs=scalars)
    assert reduced(grad_accum_steps=8) == pytest.approx(once, abs=scalars)
    assert reduced(grad_accum_steps=8, grad_reduction="per_microbatch") >= 8 * once


@pytest.mark.parametrize(
    ("size", "whole"), [(63 * 1024, True), (65 * 1024, False)], ids=["63 KiB stay whole", "65 KiB are split"]
)
def test_small_tensors_stay_whole(size: int, whole: bool) -> None:
    layout = jp.Layout(jp.MeshSpec(data=8).abstract(), jp.Zero(1).rules(RULES))
    make = lambda key: {"w": jp.tag(jnp.zeros((size // 32, 8)), "embed", "mlp")}
    state = jp.abstract_state(layout, make, optax.adam(LR))
    for leaf in (state.params["w"], state.opt_state[0].mu["w"]):
        assert leaf.size * leaf.dtype.itemsize == size
        assert leaf.sharding.is_fully_replicated is whole
    report = jp.explain(layout, make, optax.adam(LR))
    (row,) = [row for row in report.rows if row.path == "params/w"]
    assert (f"the tensor has {size} bytes" in "".join(row.why)) is whole


def test_a_table_that_shards_parameters_by_name_keeps_doing_so() -> None:
    rules = jp.Zero(3).rules(RULES.replace(params={"embed": "data"}))
    assert rules.to_dict()["params"] == {"embed": "data"}
    assert rules.to_dict()["gradients"] == rules.to_dict()["optimizer"] == {"over": "data", "min_bytes": 65536}


def test_stage_0_changes_nothing() -> None:
    zero = jp.Zero(0, fsdp_group_size=4)
    assert zero.rules(RULES) is RULES
    assert zero.mesh(jp.MeshSpec(data=8), 8) == jp.MeshSpec(data=8)
    assert zero.step == {}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"stage": 4}, "optimizer: stage"),
        ({"fsdp_group_size": 0}, "0"),
        ({"fsdp_group_size": 4, "axis": "model"}, "model"),
        ({"min_bytes": "64kb"}, "64kb"),
    ],
)
def test_what_is_no_zero(options: dict[str, Any], name: str) -> None:
    with raises(RulesError, name):
        jp.Zero(**options)


def test_a_group_that_does_not_divide() -> None:
    with raises(MeshError, "fsdp_group_size=3", "size 8"):
        jp.Zero(1, fsdp_group_size=3).mesh(jp.MeshSpec(data=-1, model=2), 16)


def test_groups_that_would_all_compute_the_same() -> None:
    with raises(RulesError, "replica", "fsdp_group_size=4"):
        jp.Zero(1, fsdp_group_size=4).rules(jp.Rules(batch="data", embed=None))


SPLIT = jp.Rules(
    batch="data", seq=("context", "ulysses"), embed=None, heads=None, kv_heads=None, head_dim=None, projections=None
)


def attending(key: jax.Array) -> dict[str, Any]:
    """Grouped queries: 4 query heads of 8, and one matrix with 2 key and 2 value heads."""
    q, kv, out = jax.random.split(key, 3)
    return {
        "q": jp.tag(jax.random.normal(q, (16, 4, 8)) / 4, "embed", "heads", "head_dim"),
        "kv": jp.tag(jax.random.normal(kv, (16, 2, 2, 8)) / 4, "embed", "projections", "kv_heads", "head_dim"),
        "out": jp.tag(jax.random.normal(out, (4, 8, 16)) / 6, "heads", "head_dim", "embed"),
    }


def train_attention(layout: jp.Layout, impl: Any, **options: Any) -> tuple[list[float], list[Any]]:
    """Losses and gradients of two steps, and the parameters after them."""

    def loss(model: Any, x_BSD: jax.Array) -> jax.Array:
        x = jp.hint(x_BSD, "batch", "seq", "embed")
        k, v = (jnp.einsum("bsd,dhk->bshk", x, model["kv"][:, n]) for n in range(2))
        o = jp.attention(jnp.einsum("bsd,dhk->bshk", x, model["q"]), k, v, impl=impl)
        return jnp.mean((jnp.einsum("bshk,hkd->bsd", o, model["out"]) - x[..., ::-1]) ** 2)

    x = np.random.default_rng(0).normal(size=(8, 16, 16)).astype(np.float32)
    with jax.enable_x64(True):
        state = jp.init(layout, attending, optax.sgd(0.1, momentum=0.9))
        lowered = jp.train_step(layout, loss, return_grads=True, **options).lower(state, x)
        step = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
        losses, trees = [], []
        for _ in range(2):
            state, metrics = step(state, x)
            losses.append(float(metrics["loss"]))
            trees.append(jax.device_get(metrics["grads"]))
    return losses, [*trees, jax.device_get(state.params)]


@pytest.fixture(scope="module")
def attention_on_one_device() -> tuple[list[float], list[Any]]:
    return train_attention(jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), SPLIT), "dense")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "impl", "sizes"),
    few(
        [
            (jp.Zero(1, min_bytes=256), "gather", {"context": 4}),
            (jp.Zero(2, min_bytes=256), "ulysses", {"ulysses": 4}),
            (jp.Zero(3, min_bytes=256, axis=("data", "context")), "ring", {"context": 4}),
        ],
        1,
        names=3,
    ),
    ids=["stage 1", "stage 2", "stage 3"],
)
def test_every_stage_beside_a_split_sequence_equals_one_device(
    zero: jp.Zero, impl: str, sizes: dict[str, int], attention_on_one_device: Any
) -> None:
    """Losses, gradients and updated parameters are equal, with a sharded optimizer state."""
    layout = jp.Layout(jp.MeshSpec(data=-1, **sizes).build(), zero.rules(SPLIT))
    assert any(layout.spec(("embed", "heads", "head_dim"), (16, 4, 8), role="optimizer"))
    losses, trees = train_attention(layout, impl, **zero.step)
    np.testing.assert_allclose(losses, attention_on_one_device[0], rtol=TOLERANCE, atol=0)
    for theirs, ours in zip(attention_on_one_device[1], trees, strict=True):
        assert max(gradient_gaps(theirs, ours).values()) <= TOLERANCE
