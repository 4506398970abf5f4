"""Tests 1-bit Adam: its exchange against NumPy, and its warm-up against optax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from one_bit_case import BLOCK, DECAY, MESHES, RATE, SHAPES, WARMUP, dot, layout_of, make, rows_of
from profiles import examples, few

import jaxpar as jp
from jaxpar.parallel.collectives import one_bit

# ---------------------------------------------------------------------------------------------------------- compression


@examples(25)
@given(
    size=st.sampled_from([(8, 8), (72, 16), (328, 64), (40, 256)]),  # few, because each size compiles a program
    power=st.integers(-30, 30),
    share=st.sampled_from([0.0, 0.1, 0.9, 1.0]),
    seed=st.integers(0, 99),
)
def test_signs_come_back_with_the_mean_of_what_is_live(
    size: tuple[int, int], power: int, share: float, seed: int
) -> None:
    random, (n, block) = np.random.default_rng(seed), size
    x = (random.normal(size=(2, n)) * 2.0**power).astype(np.float32)
    live = random.random((2, n)) < share
    packed = jax.jit(one_bit.pack, static_argnums=2)(x, live, block)
    assert packed.bits.shape == (2, n // 8) and packed.bits.dtype == jnp.uint8
    assert packed.scales.shape == (2, -(-n // block))
    back = np.asarray(jax.jit(one_bit.unpack, static_argnums=1)(packed, block))
    for row in range(2):
        for at in range(0, n, block):
            part = slice(at, at + block)
            counted = np.abs(x[row, part])[live[row, part]]
            scale = counted.mean() if counted.size else 0.0
            np.testing.assert_allclose(back[row, part], np.where(x[row, part] >= 0, scale, -scale), rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = np.ones((2, 64), np.float32)
    x[1, 7] = bad
    back = np.asarray(one_bit.unpack(one_bit.pack(jnp.asarray(x), jnp.ones((2, 64), bool))))
    assert (back[0] == 1).all()
    assert not np.isfinite(back[1]).any()


def sums_of_averages(values: np.ndarray, times: int) -> Callable[[float], np.ndarray]:
    """[times, n]: running sums of averages of ``values`` [8, n], with ``keep`` times the errors fed back."""
    n = values.shape[1]

    def run(values: jax.Array, keep: jax.Array) -> jax.Array:
        def one(carry: Any, _: None) -> Any:
            total, worker, server = carry
            part = one_bit.SignPart(values[0], jnp.ones(n, bool), worker, server)
            (found,) = one_bit.average([part], ("data",), jax.lax.axis_index("data"), BLOCK)
            total = total + found.values
            return (total, found.worker * keep, found.server * keep), total

        start = (jnp.zeros(n), jnp.zeros(n), jnp.zeros(one_bit.chunk_of(n, 8)))
        return jax.lax.scan(one, start, None, length=times)[1]

    with layout_of("8 ways"):
        many = jax.jit(jax.shard_map(run, in_specs=(P("data"), P()), out_specs=P(), check_vma=False))
        return lambda keep: np.asarray(many(values, keep))


def test_with_errors_fed_back_the_sum_of_averages_is_that_of_the_numbers() -> None:
    values, times = np.random.default_rng(0).normal(size=(8, 301)).astype(np.float32), 200
    layout, sums = layout_of("8 ways"), sums_of_averages(values, times)
    true = np.arange(1, times + 1)[:, None] * values.mean(0)
    with layout:
        found = {keep: sums(keep) for keep in (1.0, 0.0)}
    gap, without = (np.linalg.norm(found[k] - true, axis=1) / np.linalg.norm(true, axis=1) for k in (1.0, 0.0))
    # The accumulated error stays bounded, so the error per average falls as 1 / times. Without feedback it never falls.
    assert gap[-1] < 0.05 and gap[-1] < gap[24] / 4
    assert without[-1] > 0.5 and abs(without[-1] / without[24] - 1) < 1e-3


# ----------------------------------------------------------------------------------------- the algorithm, against NumPy


def schedule(count: Any) -> Any:
    return RATE / (count + 1)


@functools.cache
def prepared(mesh: str) -> tuple[jp.TrainState, Callable[..., Any]]:
    """Returns a first state and a step, shared because compiling takes seconds. ``number`` is not compressed."""
    layout = layout_of(mesh)
    tx = jp.one_bit_adam(schedule, weight_decay=DECAY, warmup=WARMUP, block=BLOCK, min_bytes=200)
    return jp.init(layout, make, tx), jp.train_step(layout, dot, donate=False)


class Numpy:
    """1-bit Adam of one array on ``ways`` devices, written from the paper alone."""

    def __init__(self, w: np.ndarray, ways: int, *, warmup: int, decay: float, packs: bool = True):
        self.w, self.ways, self.warmup, self.decay, self.packs, self.count = (
            w.astype(np.float64),
            ways,
            warmup,
            decay,
            packs,
            0,
        )
        self.mu, self.nu = np.zeros(w.size), np.zeros(w.size)
        self.chunk = -(-w.size // (8 * ways)) * 8
        self.worker = [np.zeros(w.size) for _ in range(ways)]
        self.server = [np.zeros(self.chunk) for _ in range(ways)]

    def compress(self, x: np.ndarray) -> np.ndarray:
        """Compresses the values that one device averages, without their padding."""
        found = np.zeros_like(x)
        for at in range(0, x.size, BLOCK):
            part = x[at : at + BLOCK]
            found[at : at + BLOCK] = np.where(part >= 0, 1, -1) * np.abs(part).mean() if part.size else 0
        return found

    def exchange(self, values: list[np.ndarray]) -> np.ndarray:
        cuts = [slice(i * self.chunk, min((i + 1) * self.chunk, self.w.size)) for i in range(self.ways)]
        sent = []
        for i, value in enumerate(values):
            x = value + self.worker[i]
            sent.append([self.compress(x[cut]) for cut in cuts])
            self.worker[i] = x - np.concatenate(sent[i])
        mean = []
        for i in range(self.ways):
            arrived = np.mean([row[i] for row in sent], axis=0)
            x = arrived + self.server[i][: arrived.size]
            mean.append(self.compress(x))
            self.server[i][: arrived.size] = x - mean[i]
        return np.concatenate(mean)

    def step(self, grads: np.ndarray, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> None:
        """Takes one step with gradients ``grads`` of shape [ways, *shape]."""
        grads = grads.reshape(self.ways, -1).astype(np.float64)
        self.count += 1
        settled = self.packs and self.count > self.warmup
        if settled:
            self.mu = self.exchange([b1 * self.mu + (1 - b1) * g for g in grads])
        else:
            self.mu = b1 * self.mu + (1 - b1) * grads.mean(0)
            self.nu = b2 * self.nu + (1 - b2) * grads.mean(0) ** 2
        seen = min(self.count, self.warmup) if self.packs else self.count
        change = (self.mu / (1 - b1**self.count)) / (np.sqrt(self.nu / (1 - b2**seen)) + eps)
        rate = RATE / self.count  # as in ``schedule``
        self.w = self.w - rate * (change.reshape(self.w.shape) + self.decay * self.w)


@pytest.mark.parametrize("mesh", few([mesh for mesh in MESHES if mesh != "2 ways"], 1))
def test_it_is_optax_in_the_warm_up_and_then_the_algorithm_in_numpy(mesh: str) -> None:
    layout, (state, step) = layout_of(mesh), prepared(mesh)
    ways, model = layout.sizes["replica"] * layout.sizes["data"], layout.sizes["model"]
    # Over `model`, each device packs its own shard, here of columns.
    cut = {name: 1 if name == "columns" and model > 1 else None for name in SHAPES}
    parts = lambda name, x, lead=0: [x] if cut[name] is None else np.split(x, model, axis=cut[name] + lead)
    expected = {
        name: [Numpy(w, ways, warmup=WARMUP, decay=DECAY, packs=bool(x.shape)) for w in parts(name, np.asarray(x))]
        for name, x in state.params.items()
    }
    theirs = jax.device_get(state.params)
    adamw = optax.adamw(schedule, weight_decay=DECAY)
    moments = adamw.init(theirs)
    for i in range(6):
        rows = rows_of(i)
        state, metrics = step(state, rows)
        if i < WARMUP:
            updates, moments = adamw.update({name: x.mean(0) for name, x in rows.items()}, moments, theirs)
            theirs = optax.apply_updates(theirs, updates)
            for name in SHAPES:
                np.testing.assert_allclose(state.params[name], theirs[name], rtol=1e-5, atol=1e-5)
        for name, runs in expected.items():
            own = rows[name].reshape(ways, -1, *SHAPES[name]).mean(1)
            for run, part in zip(runs, parts(name, own, 1), strict=True):
                run.step(part)
    for name, runs in expected.items():
        for got, want in (
            (state.params[name], [r.w for r in runs]),
            (state.opt_state.mu[name], [r.mu.reshape(r.w.shape) for r in runs]),
            (state.opt_state.nu[name], [r.nu.reshape(r.w.shape) for r in runs]),
        ):
            for a, b in zip(parts(name, np.asarray(got)), want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
        if name == "number":  # 4 bytes are below min_bytes, so ordinary Adam updates it.
            assert state.opt_state.worker[name] is None
            continue
        for n, run in enumerate(runs):
            worker = parts(name, np.asarray(state.opt_state.worker[name]), 1)[n].reshape(ways, -1)
            np.testing.assert_allclose(worker, run.worker, atol=1e-5 * np.abs(run.worker).max())
            np.testing.assert_allclose(
                state.opt_state.server[name][:, n], run.server, atol=1e-5 * np.abs(run.worker).max()
            )
    norms = [np.sqrt(sum(np.sum(g[i] ** 2) for g in own_rows(rows, ways))) for i in range(ways)]
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(np.mean(np.square(norms))), rtol=1e-5)


def own_rows(rows: dict[str, np.ndarray], ways: int) -> list[np.ndarray]:
    return [x.reshape(ways, -1, *x.shape[1:]).mean(1) for x in rows.values()]


@pytest.mark.slow
def test_microbatches_weigh_what_they_say_on_every_device() -> None:
    """The per-device gradients are chosen so that their plain mean equals the weighted mean."""
    layout, rows = layout_of("2 ways"), rows_of(0)
    weights = np.asarray([1, 2, 0, 1, 5, 3, 1, 1], np.float32)

    def loss(model: Any, batch: Any) -> Any:
        found = sum(jnp.tensordot(batch["weight"], batch[n], 1).ravel() @ w.ravel() for n, w in model.items())
        return found / jnp.sum(batch["weight"]), {"weight": jnp.sum(batch["weight"])}

    state = jp.init(layout, make, jp.one_bit_adam(RATE, warmup=3))
    step = jp.train_step(layout, loss, grad_accum_steps=2, return_grads=True)
    _, metrics = step(state, {**rows, "weight": weights})
    for name, x in rows.items():
        want = np.tensordot(weights, x, 1) / weights.sum()
        np.testing.assert_allclose(metrics["grads"][name], want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_it_comes_near_to_where_adam_comes() -> None:
    layout, random = layout_of("8 ways"), np.random.default_rng(0)
    x, w = random.normal(size=(256, 40)).astype(np.float32), random.normal(size=(40, 24)).astype(np.float32)
    batch = {"x": x, "y": x @ w + 0.1 * random.normal(size=(256, 24)).astype(np.float32)}
    first = lambda key: {"w": jp.tag(jnp.zeros((40, 24)), "embed", "mlp")}
    loss = lambda model, batch: jnp.mean((batch["x"] @ model["w"] - batch["y"]) ** 2)
    rate, losses = optax.cosine_decay_schedule(1e-1, 200), {}
    for name, tx in {"adam": optax.adam(rate), "signs": jp.one_bit_adam(rate, warmup=40, min_bytes=0)}.items():
        state, step, found = jp.init(layout, first, tx), jp.train_step(layout, loss), []
        for _ in range(200):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        losses[name] = found
    start, goal = losses["adam"][0], losses["adam"][-1]
    assert start > 30 and goal < 0.01
    # The frozen variance has a cost, but training continues to improve after the warm-up.
    assert losses["signs"][-1] < losses["signs"][40] / 5
    assert losses["signs"][-1] < goal + 1e-3 * start


def test_what_had_no_gradient_in_the_warm_up_stands_still() -> None:
    state, step = prepared("8 ways")
    before = np.asarray(state.params["odd"])
    for i in range(WARMUP + 2):
        rows = rows_of(i)
        if i < WARMUP:
            rows["odd"][:, 5] = 0
        state, _ = step(state, rows)
    # Weight decay applies as to other parameters.
    shrunk = before * np.prod([1 - schedule(i) * DECAY for i in range(WARMUP + 2)])
    np.testing.assert_allclose(state.params["odd"][5], shrunk[5], rtol=1e-5)
    assert (np.abs(np.asarray(state.params["odd"]) - shrunk)[[4, 6]] > 1e-3).all()
    assert (np.asarray(state.opt_state.worker["odd"])[:, 5] == 0).all()


@pytest.mark.parametrize("bad", [0, WARMUP], ids=["in the warm-up", "after it"])
def test_a_step_that_is_not_finite_changes_nothing_anywhere(bad: int) -> None:
    """The property also holds where only one device sees the value."""
    state, step = prepared("8 ways")
    for i in range(bad):
        state, _ = step(state, rows_of(i))
    rows = rows_of(bad)
    rows["odd"][3, 1, 1] = np.nan
    after, metrics = step(state, rows)
    assert bool(metrics["skipped"]) and int(after.opt_state.count) == bad
    pairs = ((s.params, s.opt_state) for s in (state, after))
    for a, b in zip(*map(jax.tree.leaves, pairs), strict=True):
        for old, new in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(old.data, new.data)
    after, metrics = step(after, rows_of(bad))
    assert not bool(metrics["skipped"]) and int(after.opt_state.count) == bad + 1
