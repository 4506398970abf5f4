"""Documents packed into rows have the losses and gradients that they have alone in padded rows, in every layout."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from one_step import check_grads, layout_of, one_step

import jaxpar as jp
from jaxpar.data.packing import DocumentRows
from jaxpar.models import make_decoder
from jaxpar.models.llama import LlamaConfig
from jaxpar.models.llama.pipeline import staged_next_token_loss
from jaxpar.models.losses import next_token_loss
from jaxpar.parallel.attention.context import Context

SEQ = 32
CONFIG = LlamaConfig(vocab=64, embed=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48)
RULES = jp.Rules(
    batch="data",
    **dict.fromkeys(("seq", "residual_seq"), "context"),
    **dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "model"),
    **dict.fromkeys(("embed", "norm", "head_dim")),
    layers="pipeline",
)


def rows_of(*, alone: bool) -> DocumentRows:
    """Documents that fill most rows, and one that is longer than two rows."""
    lengths = [9, 23, 16, 16, 30, 2, 20, 12, 5, 27, 11, 21, 6, 26, 2 * SEQ + 8, 3]
    tokens = np.random.default_rng(0).integers(1, CONFIG.vocab, sum(lengths) + len(lengths))
    return DocumentRows(tokens, np.cumsum([0, *(n + 1 for n in lengths)]), SEQ, alone)


def batch_of(*, alone: bool) -> dict[str, np.ndarray]:
    """All documents, with empty rows up to a multiple of 4."""
    rows = rows_of(alone=alone)
    return rows.read(rows.spread(-(-(rows.count + 1) // 4) * 4, 1))


def losses_of_documents(layout: jp.Layout, config: LlamaConfig, *, alone: bool) -> dict[tuple[int, ...], float]:
    """The training loss of each piece by its tokens: of batches in which no other target counts."""
    batch, found = batch_of(alone=alone), {}
    with jax.default_matmul_precision("highest"):
        state = jp.init(layout, make_decoder(config), optax.identity())
        step = jp.eval_step(layout, next_token_loss)
        for row in range(len(batch["tokens"])):
            for segment in np.unique(batch["segment_ids"][row][batch["loss_mask"][row] == 1]):
                at = np.zeros_like(batch["loss_mask"])
                at[row] = batch["segment_ids"][row] == segment
                metrics = step(state, {**batch, "loss_mask": at})
                assert int(metrics["weight"]) == at.sum()
                found[tuple(batch["tokens"][row][at[row] == 1].tolist())] = float(metrics["loss"])
    return found


@functools.cache
def padded_losses() -> dict[tuple[int, ...], float]:
    return losses_of_documents(layout_of(RULES, {"data": 1}), CONFIG, alone=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "context"),
    [
        pytest.param({"data": 2, "model": 2}, Context(), marks=pytest.mark.slow),
        ({"data": 2, "context": 2}, Context(impl="ring")),
        pytest.param({"context": 4}, Context(impl="ring", load_balance="zigzag"), marks=pytest.mark.slow),
        pytest.param({"ulysses": 2, "data": 2}, Context(impl="ulysses"), marks=pytest.mark.slow),
    ],
)
def test_each_document_has_the_loss_that_it_has_alone(sizes: dict[str, int], context: Context) -> None:
    rules = RULES if "ulysses" not in sizes else RULES.replace(seq="ulysses", residual_seq="ulysses")
    packed = losses_of_documents(layout_of(rules, sizes), replace(CONFIG, context=context), alone=False)
    padded = padded_losses()
    assert packed.keys() == padded.keys() and len(padded) == 18
    differences = [abs(packed[document] - padded[document]) for document in padded]
    assert max(differences) <= 1e-5
    assert len({round(loss, 3) for loss in padded.values()}) > 10


def gradients(sizes: dict[str, int], *, alone: bool, loss: Any = next_token_loss, **options: Any) -> Any:
    metrics, grads, _ = one_step(layout_of(RULES, sizes), loss, make_decoder(CONFIG), batch_of(alone=alone), **options)
    return metrics, grads


@functools.cache
def padded_gradients() -> Any:
    return gradients({"data": 1}, alone=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["microbatches", "pipeline"])
def test_parts_of_a_batch_with_different_numbers_of_targets_have_the_gradient_of_the_batch(kind: str) -> None:
    sizes, loss, options = {"data": 2, "model": 2}, next_token_loss, {"grad_accum_steps": 2}
    if kind == "pipeline":
        schedule = jp.pipeline.schedule("1f1b", 2, 2)
        sizes, loss = {"pipeline": 2, "data": 2}, staged_next_token_loss(CONFIG)
        options = {"pipeline": jp.Pipeline(schedule)}
    metrics, grads = gradients(sizes, alone=False, loss=loss, **options)
    padded = padded_gradients()
    counts = batch_of(alone=False)["loss_mask"].reshape(2, -1).sum(1)
    assert counts[0] != counts[1] and metrics["weight"] == counts.sum() == padded[0]["weight"]
    assert metrics["loss"] == pytest.approx(padded[0]["loss"], abs=1e-5)
    check_grads(grads, padded[1], 2e-5)
