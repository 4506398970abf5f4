"""Tests an optimizer's state on disk: parity with the state in memory, kills, skipped steps, and errors."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from error_texts import raises
from profiles import few

import jaxpar as jp
from jaxpar.errors import ConfigError, DiskError
from jaxpar.training.model import show, to_path
from jaxpar.training.offload.disk_state import is_stored, refusal
from jaxpar.training.state import shape_state

RULES = jp.Rules(batch="data", layers=None, embed=None, mlp=None)
LR = 1e-2


def kept_weights() -> optax.GradientTransformation:
    """An optimizer whose state does not begin at zero: it pulls the weights towards their running mean."""

    def update(g: Any, mean: Any, p: Any) -> Any:
        mean = jax.tree.map(lambda m, p: 0.9 * m + 0.1 * p, mean, p)
        return jax.tree.map(lambda g, m, p: g + 0.1 * (p - m), g, mean, p), mean

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.array, p), update)


def matrices(p: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim == 3, p)


# Optimizer, min_bytes, ZeRO stage, arrays on disk, pieces per step, and the most staged bytes: those of three pieces,
# in shards of at least 64 bytes. With "bf16", mu stays in memory.
RUNS: dict[str, tuple[Callable[[], optax.GradientTransformation], int, int, list[str], int, int]] = {
    "adamw": (
        lambda: optax.adamw(optax.cosine_decay_schedule(LR, 9), weight_decay=0.1, mask=matrices),
        0,
        1,
        ["0/mu/last", "0/mu/up", "0/nu/last", "0/nu/up"],
        4,
        3 * 2 * 8 * 64,
    ),
    "lion": (
        lambda: optax.chain(kept_weights(), optax.lion(LR)),
        0,
        3,
        ["0/last", "0/up", "1/0/mu/last", "1/0/mu/up"],
        4,
        3 * 2 * 8 * 64,
    ),
    "bf16": (
        lambda: optax.inject_hyperparams(optax.adam)(LR, mu_dtype="bfloat16"),
        700,
        0,
        ["inner_state/0/nu/up"],
        3,
        960,
    ),
}


def make(key: jax.Array) -> dict[str, Any]:
    up, last = jax.random.split(key)
    return {
        "up": jp.tag(jax.random.normal(up, (3, 16, 5)) / 4, "layers", "embed", "mlp"),
        "last": jp.tag(jax.random.normal(last, (5, 16)), "mlp", "embed"),
        "scale": jp.tag(jnp.ones(16), "embed"),
    }


def loss(model: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    layer = lambda x, w: (x + jnp.tanh(x @ w) @ model["last"], None)
    return jnp.mean(jax.lax.scan(layer, x, model["up"])[0] ** 2 * model["scale"])


def batch(step: int, bad: int | None = None) -> np.ndarray:
    x = np.random.default_rng(step).normal(size=(8, 16)).astype(np.float32)
    return x * np.float32(np.nan) if step == bad else x


def layout_of(stage: int) -> jp.Layout:
    return jp.Layout(jp.MeshSpec(data=8).build(), jp.Zero(stage=stage, min_bytes=256).rules(RULES))


def begin(path: Path, stage: int = 1, tx: Any = None) -> tuple[jp.Layout, jp.TrainState]:
    layout = layout_of(stage)
    return layout, jp.init(layout, make, jp.offload.to_disk(tx or optax.adam(LR), path=path, min_bytes=0))


def whole(shards: list[np.ndarray], like: jax.Array) -> np.ndarray:
    """Assembles the shards of a moment as the array that it would be in memory."""
    found = np.zeros(like.shape, like.dtype)
    indices = {str(index): index for index in like.sharding.devices_indices_map(like.shape).values()}
    order = sorted(
        indices.values(), key=lambda index: [s.indices(n)[:2] for s, n in zip(index, like.shape, strict=True)]
    )
    for index, shard in zip(order, shards, strict=True):
        found[index] = shard
    return found


@pytest.mark.parametrize("name", few(RUNS, 1))
def test_steps_are_those_of_the_same_optimizer_in_memory(name: str, tmp_path: Path) -> None:
    tx, min_bytes, stage, expected_paths, pieces, most = RUNS[name]
    layout, options = layout_of(stage), {"clip_norm": 0.5, **jp.Zero(stage=stage).step}
    here = jp.init(layout, make, tx())
    away = jp.offload.to_disk(tx(), path=tmp_path, min_bytes=min_bytes)
    there = replace(here, opt_state=away.init(here.params), metadata=replace(here.metadata, tx=away))
    there = jax.tree.map(jnp.copy, there)  # The step in memory donates its own state.
    plain, seen = jp.train_step(layout, loss, **options), []
    with jp.offload.disk_offloaded_train_step(
        layout, loss, there, note=lambda what, _: seen.append(what), **options
    ) as step:
        before = step.traffic[1]
        for i in range(4):
            here, expected = plain(here, batch(i, bad=1))
            there, metrics = step(there, batch(i, bad=1))
            assert metrics.keys() == expected.keys() and bool(metrics["skipped"]) is (i == 1)
            for key, value in expected.items():
                np.testing.assert_allclose(metrics[key], value, rtol=1e-6)
        assert step.traffic[1] - before == 3 * step.bytes_on_disk  # The skipped step writes nothing.
        assert seen.count("written") == seen.count("update") == 3 * pieces
        assert 0 < step.peak_staged <= most
        known = jax.tree_util.tree_leaves_with_path((here.params, here.opt_state))
        found = jax.tree.leaves((there.params, there.opt_state), is_leaf=is_stored)
        on_disk = []
        for (keys, a), b in zip(known, found, strict=True):
            if is_stored(b):
                on_disk.append(show(to_path(keys)[1:]))
                b = whole(step.moments(f"opt_state/{on_disk[-1]}"), a)
            else:
                assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
            # Where rows are updated one by one, the compiler may fuse multiplications and additions differently.
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            np.testing.assert_allclose(a, b, rtol=0, atol=(4e-3 if name == "bf16" else 1e-6) * np.abs(a).max())
        assert on_disk == expected_paths


KILLED = """
import os, signal, sys
import jaxpar as jp
jp.simulate_devices(8)
sys.path[:0] = [{tests!r}, {shared!r}]
import jax, numpy as np
from pathlib import Path
from test_disk_step import batch, begin, loss
from jaxpar.parallel.offload.disk_store import Store
layout, state = begin(Path(sys.argv[1]))
step = jp.offload.disk_offloaded_train_step(layout, loss, state)
write = Store.write
def dying(self, number, row, buffer):
    if int(state.step) == 2 and row == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, number, row, buffer)
Store.write = dying
for i in range(5):
    small = {{f"state{{n}}": x for n, x in enumerate(jax.tree.leaves(state.opt_state))}}
    np.savez(sys.argv[1] + f"/params{{i}}.npz", **state.params, **small)
    state, _ = step(state, batch(i))
"""


def reopen(
    first: jp.offload.disk_offloaded_train_step, layout: jp.Layout, state: jp.TrainState, **options: Any
) -> jp.offload.disk_offloaded_train_step:
    """Opens another step over the same folder and reuses the compiled programs."""
    step = jp.offload.disk_offloaded_train_step(layout, loss, state, donate=False, **options)
    step._gradients, step._updates, step._tail = first._gradients, first._updates, first._tail
    return step


@pytest.mark.slow
def test_a_killed_run_goes_on_byte_for_byte(tmp_path: Path) -> None:
    here = Path(__file__).parent
    run = [sys.executable, "-c", KILLED.format(tests=str(here), shared=str(here.parent)), str(tmp_path / "killed")]
    # It dies while the uninterrupted run continues in this process.
    with subprocess.Popen(run, stderr=subprocess.PIPE, text=True) as killed:
        layout, state = begin(tmp_path / "whole")
        states = [state]
        with jp.offload.disk_offloaded_train_step(layout, loss, state, donate=False) as first:
            for i in range(4):
                states.append(first(states[-1], batch(i))[0])
            expected = result(first, states[4])
            with raises(DiskError, "step 4", "step 3"):
                first(states[3], batch(3))
        # The state is one step old, as after a kill between two checkpoints.
        with reopen(first, layout, states[3]) as step:
            step.snapshot(tmp_path / "three")
            assert same(result(step, step(states[3], batch(3))[0]), expected)
            step(step(states[4], batch(4))[0], batch(5))
        with raises(DiskError, "step 6", "step 0"):
            jp.offload.disk_offloaded_train_step(layout, loss, states[0])
        with reopen(first, layout, states[3], restore=tmp_path / "three") as step:
            full_disk(step, states[3])
            assert same(result(step, step(states[3], batch(3))[0]), expected)
        _, errors = killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL, errors
    (tmp_path / "whole").rename(tmp_path / "done")
    (tmp_path / "killed").rename(tmp_path / "whole")
    with np.load(tmp_path / "whole" / "params2.npz") as saved:
        params = {name: jax.device_put(saved[name], x.sharding) for name, x in state.params.items()}
        leaves, structure = jax.tree.flatten(state.opt_state)
        leaves = [jax.device_put(saved[f"state{i}"], x.sharding) for i, x in enumerate(leaves)]
    resumed = replace(states[2], params=params, opt_state=jax.tree.unflatten(structure, leaves))
    with reopen(first, layout, resumed) as step:
        for i in (2, 3):
            resumed, _ = step(resumed, batch(i))
        assert same(result(step, resumed), expected)


def full_disk(step: jp.offload.disk_offloaded_train_step, state: jp.TrainState) -> None:
    """Fails a step in the middle because the disk is full; the input state stays on disk."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with raises(DiskError, "opt_state/0/mu/last", "step 3"):
            step(state, batch(3))


def result(step: jp.offload.disk_offloaded_train_step, state: jp.TrainState) -> dict[str, np.ndarray]:
    paths = [f"opt_state/0/{moment}/{name}" for moment in ("mu", "nu") for name in ("up", "last")]
    found = {path: np.concatenate([x.ravel() for x in step.moments(path)]) for path in paths}
    return found | {name: np.asarray(x) for name, x in state.params.items()}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return all(found[name].tobytes() == expected[name].tobytes() for name in expected)


@pytest.mark.parametrize(
    ("tx", "said"),
    [
        (
            lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(LR)),
            "(reduce_sum)",
        ),
        (lambda: optax.contrib.muon(LR), "(reshape)"),
    ],
    ids=["clipped", "muon"],
)
def test_optimizers_that_need_all_at_once_are_refused(tx: Any, said: str, tmp_path: Path) -> None:
    shapes = shape_state(layout_of(0), make, jp.offload.to_disk(tx(), path=tmp_path / "new", min_bytes=0))
    with raises(ConfigError, said) as error:
        jp.offload.disk_offloaded_train_step(layout_of(0), loss, shapes)
    assert error.value.args == (refusal(shapes),)
    report = jp.explain(layout_of(0), make, jp.offload.to_disk(tx(), path=tmp_path / "new", min_bytes=0))
    assert report.problems == error.value.args and report.notes == ()
    assert not (tmp_path / "new").exists()


def history(p: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros((4, *x.shape), x.dtype), p)


def test_what_is_no_moment_and_what_does_not_go_together_is_named(tmp_path: Path) -> None:
    layout, away = layout_of(1), {"path": tmp_path / "new", "min_bytes": 0}
    longer = optax.GradientTransformation(history, lambda g, s, p=None: (g, s))
    adam = optax.adam(LR)
    wrong: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: jp.offload.disk_offloaded_train_step(
                layout, loss, shape_state(layout, make, jp.offload.to_disk(longer, **away))
            ),
            "offload: opt_state",
        ),
        (lambda: jp.offload.disk_offloaded_train_step(layout, loss, shape_state(layout, make, adam)), "optimizer's"),
        (
            lambda: jp.offload.disk_offloaded_train_step(
                layout, loss, shape_state(layout, make, jp.offload.to_disk(adam, **away)), ahead=-1
            ),
            "disk_offloaded_train_step: ahead",
        ),
        (
            lambda: jp.train_step(layout, loss).trace(
                shape_state(layout, make, jp.offload.to_disk(adam, **away)), batch(0)
            ),
            "offload",
        ),
    ]
    for call, text in wrong:
        with raises(ConfigError, text):
            call()
    assert not (tmp_path / "new").exists()


def test_explain_counts_what_is_on_disk_for_no_device() -> None:
    x = jp.tag(jax.ShapeDtypeStruct((8, 16), "float32"), "batch", "embed")
    plain, found = (
        jp.explain(
            layout_of(1),
            make,
            tx,
            batch=x,
            loss_fn=loss,
            step={"weight_gather": "per_step", "grad_reduction": "per_step"},
        )
        for tx in (optax.adam(LR), jp.offload.to_disk(optax.adam(LR), path="/fast", min_bytes=0))
    )
    row = found["opt_state/0/mu/up"]
    assert (row.device_bytes, row.disk_bytes, row.bytes) == (0, 120, 960)
    assert row.why[-1] == "on disk in /fast, 120 B per device"
    assert row.spec == plain["opt_state/0/mu/up"].spec and found.problems == ()
    assert found.notes == (
        (
            "on disk in /fast: 4 arrays of the optimizer state, 2.50 KiB, stored in two generations. The step "
            "consists of two kinds of programs. The one estimated or compiled here computes the gradients. The "
            "update then holds, besides parameters and gradients, up to 3 pieces in flight, old and new, of at "
            "most 80 B per device each"
        ),
    )
    assert found.notes[0] in found.to_text(500) and found.notes[0] in found.remarks()
    assert plain.memory is not None and found.memory is not None and found.memory.unknown == ()
    assert plain.memory.parts["optimizer"] - found.memory.parts["optimizer"] == 4 * 80
    # The rest of the memory is the same, because the program differs only by the update.
    assert {**plain.memory.parts, "optimizer": 0} == {**found.memory.parts, "optimizer": 0}
