"""Every layout computes what one device computes: bitwise equal initial parameters, then loss, gradients and update.

One device trains for ``STEPS`` steps. Each layout takes some of these steps (``COMPARED``) from the same states. The
test never compares two trajectories: AdamW amplifies the last bit of a gradient, so their distance depends on the
processor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import pytest
from covers import covering

import jaxpar as jp
from jaxpar.analysis.compare import gradient_gaps
from jaxpar.models.llama import LlamaConfig, make_llama
from jaxpar.models.losses import next_token_loss
from jaxpar.models.vit import ViTConfig, make_vit, vit_loss

STEPS = 20
COMPARED = (1, 2, 5, 10, 20)
TOLERANCE = 1e-5
TX = optax.adamw(1e-3)


@dataclass(frozen=True)
class Task:
    """A model, its loss and its inputs. The sizes are as irregular as the layouts permit."""

    make_model: Callable[[jax.Array], Any]
    loss_fn: Callable[..., Any]
    inputs: Callable[[np.random.Generator], dict[str, np.ndarray]]

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        return (self.inputs(rng) for _ in range(STEPS))


def llama(seq: int, **more: Any) -> Task:
    """Grouped queries, three rotary pairs per head, and vocabulary and MLP sizes that are twice an odd number."""
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


# Sequence parallelism splits the sequence in two. Every other layout gets an odd length (15 tokens, 5 × 5 patches).
TASKS = {
    ("llama", False): llama(15),
    ("llama", True): llama(14),
    ("llama", "context"): llama(16),
    ("vit", False): vit(5),
    ("vit", True): vit(6),
}


@dataclass(frozen=True)
class Step:
    """One training step on the host: batch, state before, loss and gradients, and state after."""

    batch: dict[str, np.ndarray]
    before: jp.TrainState
    loss: float
    grads: Any
    after: jp.TrainState


class Trainer:
    """The initial state of a task and its step in one layout."""

    def __init__(self, layout: jp.Layout, task: Task) -> None:
        with jax.default_matmul_precision("highest"):
            self.state = jp.init(layout, task.make_model, TX)
        self.step = jp.train_step(layout, task.loss_fn, return_grads=True, donate=False)

    def take(self, before: jp.TrainState, batch: dict[str, np.ndarray]) -> Step:
        """Takes one step from a state on the host."""
        own, tree = jax.tree.flatten(self.state)
        placed = jax.device_put(jax.tree.leaves(before), [x.sharding for x in own])
        with jax.default_matmul_precision("highest"):
            after, metrics = self.step(jax.tree.unflatten(tree, placed), batch)
        return Step(batch, before, float(metrics["loss"]), *jax.device_get((metrics["grads"], after)))


@pytest.fixture(scope="session")
def on_one_device(layout_of: Any) -> Callable[..., list[Step]]:
    """Returns the reference steps of a task, the steps ``COMPARED`` of one training run, and caches them."""

    @functools.cache
    def run(*key: Any) -> list[Step]:
        trainer = Trainer(layout_of("dp", jax.devices()[:1]), TASKS[key])
        steps: list[Step] = []
        for batch in TASKS[key].batches():
            steps.append(trainer.take(steps[-1].after if steps else jax.device_get(trainer.state), batch))
        return [steps[number - 1] for number in COMPARED]

    return run


@jax.jit
def updated(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
    """Returns parameters and optimizer state after an update on one device."""
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def assert_equal(layout: jp.Layout, task: Task, reference: list[Step]) -> list[Step]:
    """Takes each reference step in ``layout`` from the same state, and compares loss, gradients and update.

    The update is compared with one device's update from the same gradients. Adam's first steps have full length however
    small a gradient is, so a difference in the last bit can become twice the learning rate.
    """
    trainer = Trainer(layout, task)
    first = zip(jax.tree.leaves(trainer.state.params), jax.tree.leaves(reference[0].before.params), strict=True)
    for a, b in first:
        np.testing.assert_array_equal(jax.device_get(a), b)
    steps = [trainer.take(step.before, step.batch) for step in reference]
    for number, got, want in zip(COMPARED, steps, reference, strict=True):
        np.testing.assert_allclose(got.loss, want.loss, rtol=TOLERANCE, atol=0, err_msg=f"step {number}")
        # The bound is relative to each tensor's largest entry, but at least to a thousandth of the model's largest: a
        # gradient that is analytically zero, such as that of attention's key biases, consists of rounding errors.
        gaps = gradient_gaps(want.grads, got.grads)
        worst = max(gaps, key=lambda path: gaps[path])
        assert gaps[worst] <= TOLERANCE, f"{worst}, step {number}"
        after = jax.device_get(updated(want.before.params, want.before.opt_state, got.grads))
        found = jax.tree.leaves((got.after.params, got.after.opt_state))
        for a, b in zip(found, jax.tree.leaves(after), strict=True):
            # The gradients are equal. A parameter or a moment is a sum of two terms, each rounded a few times (eps is
            # 1.2e-7), and the quotient in Adam's step differs by a few eps of the learning rate.
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max(initial=0), err_msg=f"step {number}")
    return steps


@pytest.mark.parametrize(
    ("name", "model"), covering(["tp_sp", "fsdp_tp", "hsdp", "fsdp", "tp", "dp"], ["llama", "vit"], keep=1, strength=1)
)
def test_a_layout_equals_one_device(name: str, model: str, layout_of: Any, on_one_device: Any) -> None:
    key = model, name == "tp_sp"
    assert_equal(layout_of(name), TASKS[key], on_one_device(*key))


@pytest.mark.slow
def test_a_split_sequence_equals_one_device(layout_of: Any, on_one_device: Any) -> None:
    """Ring attention over Ulysses pairs; tokens stay in zigzag order from the first layer to the loss."""
    task = llama(16, context=jp.context.Context("hybrid"), remat="save_attention")
    assert_equal(layout_of("hybrid"), task, on_one_device("llama", "context"))


@pytest.mark.slow
def test_a_mesh_on_the_last_four_devices_equals_one_device(layout_of: Any, on_one_device: Any) -> None:
    mesh = jp.MeshSpec(data=2, model=2).build(jax.devices()[4:])
    layout = jp.Layout(mesh, layout_of("fsdp_tp").rules)
    assert_equal(layout, TASKS["llama", False], on_one_device("llama", False))


@pytest.mark.slow
def test_rules_over_axes_of_size_1_change_no_bit(layout_of: Any, on_one_device: Any) -> None:
    layout = jp.Layout(jp.MeshSpec().build(jax.devices()[3:4]), layout_of("fsdp_tp").rules)
    want = on_one_device("llama", False)
    got = assert_equal(layout, TASKS["llama", False], want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.loss == theirs.loss
        for a, b in zip(*(jax.tree.leaves((step.grads, step.after.params)) for step in (ours, theirs)), strict=True):
            np.testing.assert_array_equal(a, b)
