"""What an asynchronous pipeline refuses, and what a check says of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from error_texts import raises
from exact_model import LOSS, ROWS, RULES, WORDS, batch_of, make_model, stepping

import jaxpar as jp
from jaxpar.errors import ConfigError, LayoutError, ScheduleError

TWO = {"pipeline": jp.pipeline.Asynchronous("pipedream_2bw", stages=2, microbatches=2)}
EACH = {"pipeline": jp.pipeline.Asynchronous("pipedream", stages=2, microbatches=2)}


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "grad_accum_steps": ({**TWO, "grad_accum_steps": 2}, ConfigError, "grad_accum_steps"),
    "scale": ({**TWO, "precision": {"compute": "fp16", "scale": {}}}, ConfigError, "but 'pipedream_2bw'"),
    "norm": ({**EACH, "clip_norm": 1.0}, ConfigError, "clip_norm"),
    "stages": ({"pipeline": jp.pipeline.Asynchronous("pipedream", stages=3, microbatches=4)}, ConfigError, "mesh's"),
    "optimizer": ({**TWO, "tx": jp.offload.to_host(optax.adam(0.1), min_bytes=0)}, ConfigError, "pipedream_2bw"),
    "reducing optimizer": ({**TWO, "tx": jp.one_bit_adam(1e-3, warmup=2)}, ConfigError, "one_bit_adam"),
    "pieces": (
        {"pipeline": jp.pipeline.Asynchronous("pipedream", stages=2, microbatches=2, layers_per_stage=(4, 1))},
        ConfigError,
        "pipeline: layers_per_stage",
    ),
    "reduce": (
        {"pipeline": jp.pipeline.Asynchronous("pipedream", stages=2, microbatches=2, grad_reduction="per_microbatch")},
        ConfigError,
        "per_microbatch",
    ),
    "layers elsewhere": (
        {**EACH, "rules": jp.Rules(**{**RULES.to_dict(), "layers": None})},
        ConfigError,
        "'pipedream' requires",
    ),
    "rows": (
        {"pipeline": jp.pipeline.Asynchronous("pipedream_2bw", stages=2, microbatches=3)},
        LayoutError,
        "batch/targets",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_is_named(case: str) -> None:
    asked, error, text = ERRORS[case]
    with raises(error, text), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # On CPU devices, device memory is host memory.
        options = dict(asked)
        rules, tx = options.pop("rules", RULES), options.pop("tx", stepping())
        layout = jp.Layout(jp.MeshSpec(pipeline=2).build(jax.devices()[:2]), rules)
        step = jp.pipeline.pipedream_train_step(layout, LOSS, **options)
        jax.eval_shape(step.start, jp.abstract_state(layout, make_model, tx), batch_of(0))


def test_a_state_without_microbatches_in_flight_is_named() -> None:
    layout = jp.Layout(jp.MeshSpec(pipeline=2).build(jax.devices()[:2]), RULES)
    step = jp.pipeline.pipedream_train_step(layout, LOSS, **TWO)
    with raises(ConfigError, "asynchronous pipeline", "buffers"):
        jax.eval_shape(step, jp.abstract_state(layout, make_model, stepping()), batch_of(0))


def test_names_sizes_and_places_for_them_are_told() -> None:
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: jp.pipeline.Asynchronous("pipedream_2bw", stages=4, microbatches=5), ScheduleError, "5"),
        (lambda: jp.pipeline.Asynchronous("2bw", stages=4, microbatches=8), ConfigError, "'2bw'"),
        (lambda: jp.pipeline.Asynchronous("pipedream", stages=0, microbatches=8), ConfigError, "0"),
        (lambda: jp.pipeline.schedule("pipedream", stages=2, microbatches=4), ScheduleError, "schedule 'pipedream'"),
        (
            lambda: jp.train_step(jp.Layout(jp.MeshSpec().abstract(1), RULES), LOSS, **TWO),
            ConfigError,
            "pipeline: 'pipedream_2bw'",
        ),
    ]
    for make, error, text in cases:
        with raises(error, text):
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
