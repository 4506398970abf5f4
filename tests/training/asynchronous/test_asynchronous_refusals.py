"""What an asynchronous pipeline refuses, and what a check says of it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from exact_model import LOSS, ROWS, RULES, WORDS, batch_of, make_model, stepping

import jaxpar as jp
from jaxpar.errors import ConfigError, LayoutError, ScheduleError

TWO = {"pipeline": jp.pipeline.Asynchronous("pipedream_2bw", stages=2, microbatches=2)}
EACH = {"pipeline": jp.pipeline.Asynchronous("pipedream", stages=2, microbatches=2)}


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "grad_accum_steps": (
        {**TWO, "grad_accum_steps": 2},
        ConfigError,
        (
            "asynchronous pipeline: grad_accum_steps is 2, but the 2 microbatches of 'pipedream_2bw' already "
            "accumulate gradients. Remedy: leave grad_accum_steps out, or set microbatches=4."
        ),
    ),
    "scale": (
        {**TWO, "precision": {"compute": "fp16", "scale": {}}},
        ConfigError,
        (
            "asynchronous pipeline: precision scales the loss, but 'pipedream_2bw' has gradients of two steps, with "
            "two scales, in flight together. Remedy: compute in bf16, which requires no loss scale, or use "
            "jp.pipeline.schedule('1f1b')."
        ),
    ),
    "norm": (
        {**EACH, "clip_norm": 1.0},
        ConfigError,
        (
            "asynchronous pipeline: clip_norm is 1, but under 'pipedream' each stage updates on its own, so the norm "
            "of all gradients is not known. Remedy: set clip_norm=None, or use 'pipedream_2bw'."
        ),
    ),
    "stages": (
        {"pipeline": jp.pipeline.Asynchronous("pipedream", stages=3, microbatches=4)},
        ConfigError,
        (
            "pipeline: the schedule 'pipedream' has 3 stages, but the mesh's axis 'pipeline' has 2 devices. Remedy: "
            "set stages=2, or mesh {pipeline: 3}."
        ),
    ),
    "optimizer": (
        {**TWO, "tx": jp.offload.to_host(optax.adam(0.1), min_bytes=0)},
        ConfigError,
        (
            "asynchronous pipeline: parameters or optimizer state in host memory cannot be used, because "
            "'pipedream_2bw' keeps versions of the weights on the devices. Remedy: leave it out, or use "
            "jp.pipeline.schedule('1f1b')."
        ),
    ),
    "reducing optimizer": (
        {**TWO, "tx": jp.one_bit_adam(1e-3, warmup=2)},
        ConfigError,
        (
            "asynchronous pipeline: an optimizer that reduces gradients itself (one_bit_adam) cannot be used, because "
            "'pipedream_2bw' keeps versions of the weights on the devices. Remedy: leave it out, or use "
            "jp.pipeline.schedule('1f1b')."
        ),
    ),
    "pieces": (
        {"pipeline": jp.pipeline.Asynchronous("pipedream", stages=2, microbatches=2, layers_per_stage=(4, 1))},
        ConfigError,
        (
            "pipeline: layers_per_stage is [4, 1], 5 layers in 2 pieces, but blocks has 6 layers and the schedule has "
            "2 pieces of at least one layer each. Remedy: give 2 numbers that sum to 6."
        ),
    ),
    "reduce": (
        {"pipeline": jp.pipeline.Asynchronous("pipedream", stages=2, microbatches=2, grad_reduction="per_microbatch")},
        ConfigError,
        (
            "asynchronous pipeline: grad_reduction is 'per_microbatch', but 'pipedream' updates with every microbatch "
            "and reduces its gradients once. Remedy: leave grad_reduction out, or use 'pipedream_2bw'."
        ),
    ),
    "layers elsewhere": (
        {**EACH, "rules": jp.Rules(**{**RULES.to_dict(), "layers": None})},
        ConfigError,
        (
            "asynchronous pipeline: the layers of blocks are replicated, but 'pipedream' requires each stage to hold "
            "its own layers. Remedy: set the rule layers: pipeline."
        ),
    ),
    "rows": (
        {"pipeline": jp.pipeline.Asynchronous("pipedream_2bw", stages=2, microbatches=3)},
        LayoutError,
        (
            "batch/targets [8, 2, 12], batch/tokens [8, 2] cannot be split into the 3 microbatches of the pipeline "
            "over 1 devices: their first dims are not multiples of 3. Remedy: use a batch of a multiple of 3 rows, or "
            "a schedule of fewer microbatches."
        ),
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_is_named(case: str) -> None:
    asked, error, text = ERRORS[case]
    with pytest.raises(error, match=f"^{re.escape(text)}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # On CPU devices, device memory is host memory.
        options = dict(asked)
        rules, tx = options.pop("rules", RULES), options.pop("tx", stepping())
        layout = jp.Layout(jp.MeshSpec(pipeline=2).build(jax.devices()[:2]), rules)
        step = jp.pipeline.pipedream_train_step(layout, LOSS, **options)
        jax.eval_shape(step.start, jp.abstract_state(layout, make_model, tx), batch_of(0))


def test_a_state_without_microbatches_in_flight_is_named() -> None:
    layout = jp.Layout(jp.MeshSpec(pipeline=2).build(jax.devices()[:2]), RULES)
    step = jp.pipeline.pipedream_train_step(layout, LOSS, **TWO)
    with pytest.raises(ConfigError) as error:
        jax.eval_shape(step, jp.abstract_state(layout, make_model, stepping()), batch_of(0))
    assert str(error.value) == (
        "asynchronous pipeline: the state has no buffers for microbatches in flight. Remedy: state = step.start(state, "
        "batch)."
    )


def test_names_sizes_and_places_for_them_are_told() -> None:
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (
            lambda: jp.pipeline.Asynchronous("pipedream_2bw", stages=4, microbatches=5),
            ScheduleError,
            (
                "schedule 'pipedream_2bw': 5 microbatches are fewer than 6: with 4 stages, a microbatch's gradient "
                "arrives 6 ticks after its forward pass, and the gradient of a batch must be complete before the "
                "batch after the next one begins. Remedy: use 6 or more."
            ),
        ),
        (
            lambda: jp.pipeline.Asynchronous("2bw", stages=4, microbatches=8),
            ConfigError,
            "asynchronous pipeline: name must be 'pipedream' or 'pipedream_2bw', got '2bw'.",
        ),
        (
            lambda: jp.pipeline.Asynchronous("pipedream", stages=0, microbatches=8),
            ConfigError,
            "asynchronous pipeline: stages must be a positive integer, got 0.",
        ),
        (
            lambda: jp.pipeline.schedule("pipedream", stages=2, microbatches=4),
            ScheduleError,
            (
                "schedule 'pipedream' is asynchronous: its microbatches begin in one step and end in the next, so it "
                "is not a schedule of one step. Remedy: use jp.pipeline.pipedream_train_step(..., "
                "pipeline=jp.pipeline.Asynchronous('pipedream', stages=2, microbatches=4))."
            ),
        ),
        (
            lambda: jp.train_step(jp.Layout(jp.MeshSpec().abstract(1), RULES), LOSS, **TWO),
            ConfigError,
            (
                "pipeline: 'pipedream_2bw' carries microbatches from step to step, which train_step does not support. "
                "Remedy: use jp.pipeline.pipedream_train_step, or jp.pipeline.schedule('1f1b')."
            ),
        ),
    ]
    for make, error, text in cases:
        with pytest.raises(error, match=f"^{re.escape(text)}"):
            make()


def test_a_check_says_that_memory_is_known_only_when_compiled() -> None:
    """No synchronous step can run the schedule, and this is no problem of the layout."""
    layout = jp.Layout(jp.MeshSpec(pipeline=2, data=2, model=2).abstract(), RULES)
    words = jp.tag(jax.ShapeDtypeStruct((ROWS, 2), jnp.int32), "batch", "seq")
    targets = jp.tag(jax.ShapeDtypeStruct((ROWS, 2, WORDS), jnp.float64), "batch", "seq", "vocab")
    step = {"pipeline": jp.pipeline.Asynchronous("pipedream_2bw", stages=2, microbatches=4)}
    batch = {"tokens": words, "targets": targets}
    report = jp.check(layout, make_model, optax.adam(1e-3), batch=batch, loss_fn=LOSS, step=step, strict=False)
    assert report.memory is not None
    assert report.memory.reason == "memory is not estimated: an asynchronous pipeline is known only when it is compiled"
