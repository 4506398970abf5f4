"""Every layout computes what one device computes: initial parameters bitwise, then every loss and every gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.inspect.compare import gradient_gaps
from jaxpar.models.llama import LlamaConfig, make_llama
from jaxpar.models.losses import next_token_loss
from jaxpar.models.vit import ViTConfig, make_vit, vit_loss

STEPS = 20
TOLERANCE = 1e-5
# At a rate of 1e-2 these narrow models amplify the last bit of their initial parameters to 3e-4 of a gradient within 20
# steps, on one device as on eight; at 1e-3 they do not.
TX = optax.adamw(1e-3)


@dataclass(frozen=True)
class Task:
    """A model, its loss and its inputs. Every size is as awkward as the layouts permit."""

    make_model: Callable[[jax.Array], Any]
    loss_fn: Callable[..., Any]
    inputs: Callable[[np.random.Generator], dict[str, np.ndarray]]

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        return (self.inputs(rng) for _ in range(STEPS))


def llama(seq: int, **more: Any) -> Task:
    """Grouped queries, heads of three pairs, a vocabulary and an MLP of twice an odd number."""
    config = LlamaConfig(vocab=106, embed=24, layers=2, heads=4, kv_heads=2, head_dim=6, mlp=54, **more)
    inputs = lambda rng: dict(zip(("tokens", "targets"), rng.integers(0, config.vocab, (2, 8, seq)), strict=True))
    return Task(make_llama(config), next_token_loss, inputs)


def vit(side: int) -> Task:
    config = ViTConfig(image=4 * side, patch=4, classes=10, embed=24, heads=4, mlp=54)
    inputs = lambda rng: {
        "images": rng.normal(size=(8, config.image, config.image, 3)).astype(np.float32),
        "labels": rng.integers(0, config.classes, 8),
    }
    return Task(make_vit(config), vit_loss(config), inputs)


# Sequence parallelism splits the sequence in two; every other layout gets an odd one (15 tokens, 5 × 5 patches).
TASKS = {
    ("llama", False): llama(15),
    ("llama", True): llama(14),
    ("llama", "context"): llama(16),
    ("vit", False): vit(5),
    ("vit", True): vit(6),
}


@dataclass(frozen=True)
class Run:
    """What a training run went through, on the host."""

    params: Any
    losses: list[float]
    gradients: list[Any]


def run(layout: jp.Layout, task: Task) -> Run:
    with jax.default_matmul_precision("highest"):
        state = jp.init(layout, task.make_model, TX)
        params = jax.device_get(state.params)
        step = jp.train_step(layout, task.loss_fn, keep_grads=True)
        losses, gradients = [], []
        for batch in task.batches():
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            gradients.append(jax.device_get(metrics["grads"]))
    return Run(params, losses, gradients)


@pytest.fixture(scope="session")
def on_one_device(layout_of: Any) -> Callable[..., Run]:
    """The reference of each task, run once."""
    return functools.cache(lambda *key: run(layout_of("dp", jax.devices()[:1]), TASKS[key]))


def assert_equal(got: Run, want: Run) -> None:
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)
    np.testing.assert_allclose(got.losses, want.losses, rtol=TOLERANCE, atol=0)
    for step, (theirs, ours) in enumerate(zip(want.gradients, got.gradients, strict=True), 1):
        # Relative to each tensor's largest entry, but at least to a thousandth of the model's largest: a gradient that is
        # zero by nature, as of attention's key biases, holds nothing but rounding.
        assert {path: gap for path, gap in gradient_gaps(theirs, ours).items() if gap > TOLERANCE} == {}, f"step {step}"


@pytest.mark.parametrize("name", ["dp", "fsdp", "hsdp", "tp", "tp_sp", "fsdp_tp"])
@pytest.mark.parametrize("model", ["llama", "vit"])
def test_a_layout_equals_one_device(model: str, name: str, layout_of: Any, on_one_device: Any) -> None:
    key = model, name == "tp_sp"
    assert_equal(run(layout_of(name), TASKS[key]), on_one_device(*key))


def test_a_split_sequence_equals_one_device(layout_of: Any, on_one_device: Any) -> None:
    """A ring over pairs that exchange heads: tokens in zigzag from the first layer to the loss."""
    task = llama(16, context=jp.Context("hybrid"), remat="save_attention")
    assert_equal(run(layout_of("hybrid"), task), on_one_device("llama", "context"))


def test_a_mesh_on_the_last_four_devices_equals_one_device(layout_of: Any, on_one_device: Any) -> None:
    mesh = jp.MeshSpec(data=2, model=2).build(jax.devices()[4:])
    layout = jp.Layout(mesh, layout_of("fsdp_tp").rules)
    assert_equal(run(layout, TASKS["llama", False]), on_one_device("llama", False))


def test_rules_over_axes_of_size_1_change_no_bit(layout_of: Any, on_one_device: Any) -> None:
    layout = jp.Layout(jp.MeshSpec().build(jax.devices()[3:4]), layout_of("fsdp_tp").rules)
    got, want = run(layout, TASKS["llama", False]), on_one_device("llama", False)
    assert_equal(got, want)
    assert got.losses == want.losses
