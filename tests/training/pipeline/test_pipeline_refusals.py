"""What a step of a pipeline refuses: schedules, losses, layers and batches that do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from error_texts import raises
from one_step import SGD, layout_of
from small_stages import LOSS, ONE_F_ONE_B, RULES, layer, make_model, run

import jaxpar as jp
from jaxpar.errors import ConfigError, LayoutError, ModelError
from jaxpar.models.losses import next_token_loss

ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no pieces": ({"loss": next_token_loss}, ConfigError, "pipeline: loss_fn"),
    "stages": ({"sizes": {"pipeline": 4}}, ConfigError, "mesh's"),
    "no backwards": ({"pipeline": jp.pipeline.schedule("circular", stages=2, microbatches=4)}, ConfigError, "circular"),
    "grad_accum_steps": ({"grad_accum_steps": 2}, ConfigError, "pipeline: grad_accum_steps"),
    "reduce": (
        {"grad_reduction": "per_microbatch", "pipeline": jp.Pipeline(ONE_F_ONE_B, executor="independent")},
        ConfigError,
        "grad_reduction",
    ),
    "axes inside of layers": (
        {"sizes": {"pipeline": 2, "model": 2}, "pipeline": jp.Pipeline(ONE_F_ONE_B, executor="independent")},
        ConfigError,
        "'independent', in",
    ),
    "rows": ({"pipeline": jp.pipeline.schedule("1f1b", stages=2, microbatches=5)}, LayoutError, "batch/tokens"),
    "layers": (
        {"pipeline": jp.pipeline.schedule("interleaved", stages=2, microbatches=4, chunks=3)},
        ConfigError,
        "pipeline: the 8",
    ),
    "numbers of layers": (
        {"pipeline": jp.Pipeline(ONE_F_ONE_B, layers_per_stage=(5, 4))},
        ConfigError,
        "pipeline: layers_per_stage",
    ),
    "path": ({"loss": replace(LOSS, layers="decoder")}, ModelError, "decoder"),
    "sequence": ({"sizes": {"pipeline": 2, "context": 4}}, LayoutError, "seq"),
    "dtype of layers": (
        {"loss": replace(LOSS, layer=lambda block, x, side: layer(block, x, side).astype(jnp.bfloat16))},
        ModelError,
        "float32[4",
    ),
    "vector metric": (
        {"loss": replace(LOSS, head=lambda model, x, batch: (jnp.mean(x), {"all": x[:, 0, 0]}))},
        ModelError,
        "PipelineLoss(head=...)",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_is_named(case: str) -> None:
    asked, error, text = ERRORS[case]
    options = {"sizes": {"pipeline": 2}, "pipeline": ONE_F_ONE_B, **asked}
    with raises(error, text):
        run(**options)


def test_carried_state_is_named() -> None:
    def make(key: jax.Array) -> Any:
        return {"params": make_model(key), "statistics": {"mean": jnp.zeros(3)}}

    with raises(ModelError, "variables/statistics/mean"):
        run({"pipeline": 2}, ONE_F_ONE_B, make=make)


def test_where_gradients_are_reduced_is_one_of_three_places() -> None:
    with raises(ConfigError, "pipeline: grad_reduction", "never"):
        jp.Pipeline(ONE_F_ONE_B, grad_reduction="never")  # type: ignore[arg-type]


def test_what_comes_before_the_layers_is_done_once_or_each_time() -> None:
    with raises(ConfigError, "pipeline: embedding", "per_step"):
        jp.Pipeline(ONE_F_ONE_B, embedding="never")  # type: ignore[arg-type]


def test_gradients_of_the_head_are_reduced_once_or_each_time() -> None:
    with raises(ConfigError, "pipeline: head_grad_reduction"):
        jp.Pipeline(ONE_F_ONE_B, head_grad_reduction="never")  # type: ignore[arg-type]


def test_what_is_kept_is_one_of_two_things() -> None:
    with raises(ConfigError, "pipeline: activation_checkpointing"):
        jp.Pipeline(ONE_F_ONE_B, activation_checkpointing="all")  # type: ignore[arg-type]


def test_layers_that_stages_do_not_divide_are_one_problem() -> None:
    """Parameters and moments are grouped in ``init`` and in ``explain``; other problems are reported separately."""
    text = (
        "params/blocks/down [8, 16, 8] and 1 more: the dim 'layers' has size 8, which is not a multiple of pipeline=3 "
        "(rule layers = pipeline). Remedy: use a number of stages that divides 8 (1, 2, 4, 8); or use stages of "
        "different sizes, where every stage stores all layers of every stack: Rules(indivisible={'layers': "
        "'replicate'}) and jp.Pipeline(schedule, layers_per_stage=(3, 3, 2)), one number for each piece of the "
        "model; in YAML rules: {indivisible: {layers: replicate}} and parallel: {pipeline: {layers_per_stage: "
        "[3, 3, 2]}}."
    )
    rules = RULES.replace(vocab=None)
    layout = layout_of(rules, {"pipeline": 3})
    with pytest.raises(LayoutError) as error:
        jp.init(layout, make_model, optax.adam(0.1))
    assert error.value.problems == (text,)
    assert jp.explain(layout, make_model, optax.adam(0.1)).problems == (text,)
    with pytest.raises(LayoutError) as error:
        jp.abstract_state(layout_of(RULES, {"pipeline": 3}), make_model, SGD)
    assert error.value.problems[0] == text and len(error.value.problems) == 3
    assert "'vocab' has size 16" in error.value.problems[1]
    few = jp.Layout(jp.MeshSpec(pipeline=9).abstract(9), rules)
    with raises(LayoutError, "params/blocks/down"):
        jp.abstract_state(few, make_model, SGD)
