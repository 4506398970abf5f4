"""What a step of a pipeline refuses: schedules, losses, layers and batches that do not fit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from one_step import SGD, layout_of
from small_stages import LOSS, ONE_F_ONE_B, RULES, layer, make_model, run

import jaxpar as jp
from jaxpar.errors import ConfigError, LayoutError, ModelError
from jaxpar.models.losses import next_token_loss

ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no pieces": (
        {"loss": next_token_loss},
        ConfigError,
        (
            "pipeline: loss_fn is 'next_token_loss', which does not define the layers. Remedy: use "
            "jaxpar.pipeline.PipelineLoss(layers=..., embed=..., layer=..., head=...), which defines the stack of "
            "layers and the parts before and after it."
        ),
    ),
    "stages": (
        {"sizes": {"pipeline": 4}},
        ConfigError,
        (
            "pipeline: the schedule '1f1b' has 2 stages, but the mesh's axis 'pipeline' has 4 devices. Remedy: set "
            "stages=4, or mesh {pipeline: 2}."
        ),
    ),
    "no backwards": (
        {"pipeline": jp.pipeline.schedule("circular", stages=2, microbatches=4)},
        ConfigError,
        "pipeline: the schedule 'circular' has no backward passes, so it cannot train. Remedy: use '1f1b'.",
    ),
    "grad_accum_steps": (
        {"grad_accum_steps": 2},
        ConfigError,
        (
            "pipeline: grad_accum_steps is 2, but the schedule's 4 microbatches already accumulate gradients. Remedy: "
            "leave grad_accum_steps out, or use a schedule of 8 microbatches."
        ),
    ),
    "reduce": (
        {"grad_reduction": "per_microbatch", "pipeline": jp.Pipeline(ONE_F_ONE_B, executor="independent")},
        ConfigError,
        (
            "pipeline: executor is 'independent', which allows no collectives in a stage's layers, but grad_reduction "
            "is 'per_microbatch', which scatters gradients layer by layer. Remedy: set grad_reduction='per_step' or "
            "executor='lockstep'."
        ),
    ),
    "axes inside of layers": (
        {"sizes": {"pipeline": 2, "model": 2}, "pipeline": jp.Pipeline(ONE_F_ONE_B, executor="independent")},
        ConfigError,
        (
            "pipeline: executor is 'independent', in which each stage runs loops of its own length, but the mesh has "
            "model 2: layers contain collectives over these axes, so some stages would wait for others forever. "
            "Remedy: set executor='lockstep', or use a mesh of only pipeline and the axes of the batch."
        ),
    ),
    "rows": (
        {"pipeline": jp.pipeline.schedule("1f1b", stages=2, microbatches=5)},
        LayoutError,
        (
            "batch/targets [16, 6], batch/tokens [16, 6] cannot be split into the 5 microbatches of the pipeline over "
            "1 devices: their first dims are not multiples of 5. Remedy: use a batch of a multiple of 5 rows, or a "
            "schedule of fewer microbatches."
        ),
    ),
    "layers": (
        {"pipeline": jp.pipeline.schedule("interleaved", stages=2, microbatches=4, chunks=3)},
        ConfigError,
        (
            "pipeline: the 8 layers of blocks cannot be split into 6 equal pieces. Remedy: set layers_per_stage=(2, 2, "
            "1, 1, 1, 1), one number per piece (YAML: layers_per_stage: [2, 2, 1, 1, 1, 1]), or use a schedule with a "
            "number of stages and chunks that divides 8."
        ),
    ),
    "numbers of layers": (
        {"pipeline": jp.Pipeline(ONE_F_ONE_B, layers_per_stage=(5, 4))},
        ConfigError,
        (
            "pipeline: layers_per_stage is [5, 4], 9 layers in 2 pieces, but blocks has 8 layers and the schedule has "
            "2 pieces of at least one layer each. Remedy: give 2 numbers that sum to 8."
        ),
    ),
    "path": (
        {"loss": replace(LOSS, layers="decoder")},
        ModelError,
        (
            "PipelineLoss(layers='decoder'): the model has no 'decoder'. Remedy: give the path of its stack of layers; "
            "the model has 'blocks', 'head', 'words'."
        ),
    ),
    "sequence": (
        {"sizes": {"pipeline": 2, "context": 4}},
        LayoutError,
        (
            "batch/targets [16, 6]: in a pipeline the rule for 'seq' shards the second dim of the batch's arrays over "
            "4 devices, but 4 does not divide 6. Remedy: use sequences whose length is a multiple of 4, or remove "
            "those axes from the rule for 'seq'."
        ),
    ),
    "dtype of layers": (
        {"loss": replace(LOSS, layer=lambda block, x, side: layer(block, x, side).astype(jnp.bfloat16))},
        ModelError,
        (
            "pipeline: a layer changed x from float32[4, 6, 8] to bfloat16[4, 6, 8] (one device's microbatch), but "
            "layers must keep its shape and dtype. Remedy: use a PipelineLoss(layer=...) that returns x in the shape "
            "and dtype that it received, or an embed that returns bfloat16[4, 6, 8]."
        ),
    ),
    "vector metric": (
        {"loss": replace(LOSS, head=lambda model, x, batch: (jnp.mean(x), {"all": x[:, 0, 0]}))},
        ModelError,
        (
            "PipelineLoss(head=...) returned the metric 'all' of shape (4,), but metrics are averaged over "
            "microbatches and must be scalars. Remedy: return its mean."
        ),
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_is_named(case: str) -> None:
    asked, error, text = ERRORS[case]
    options = {"sizes": {"pipeline": 2}, "pipeline": ONE_F_ONE_B, **asked}
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        run(**options)


def test_carried_state_is_named() -> None:
    def make(key: jax.Array) -> Any:
        return {"params": make_model(key), "statistics": {"mean": jnp.zeros(3)}}

    text = (
        "pipeline: the model carries variables/statistics/mean, but microbatches pass the stages in an order of their "
        "own, so no state can be carried from one to the next. Remedy: use a model without carried state (LayerNorm "
        "or RMSNorm instead of BatchNorm)."
    )
    with pytest.raises(ModelError, match=f"^{re.escape(text)}"):
        run({"pipeline": 2}, ONE_F_ONE_B, make=make)


def test_where_gradients_are_reduced_is_one_of_three_places() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^pipeline: grad_reduction must be 'per_step', 'per_chunk' or 'per_microbatch', got 'never'\.$",
    ):
        jp.Pipeline(ONE_F_ONE_B, grad_reduction="never")  # type: ignore[arg-type]


def test_what_comes_before_the_layers_is_done_once_or_each_time() -> None:
    with pytest.raises(
        ConfigError, match=r"^pipeline: embedding must be 'per_step' or 'per_microbatch', got 'never'\.$"
    ):
        jp.Pipeline(ONE_F_ONE_B, embedding="never")  # type: ignore[arg-type]


def test_gradients_of_the_head_are_reduced_once_or_each_time() -> None:
    with pytest.raises(
        ConfigError, match=r"^pipeline: head_grad_reduction must be 'per_step' or 'per_microbatch', got 'never'\.$"
    ):
        jp.Pipeline(ONE_F_ONE_B, head_grad_reduction="never")  # type: ignore[arg-type]


def test_what_is_kept_is_one_of_two_things() -> None:
    with pytest.raises(
        ConfigError, match=r"^pipeline: activation_checkpointing must be 'full' or 'none', got 'all'\.$"
    ):
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
    with pytest.raises(LayoutError) as error:
        jp.abstract_state(few, make_model, SGD)
    assert str(error.value).endswith("Remedy: use a number of stages that divides 8 (1, 2, 4, 8).")
