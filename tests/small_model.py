"""Three matrices in place of the Llama of a configuration, whose compilation takes most of the time of some commands.

Sines keep activations finite however large the matrices are, but gradients grow with each matrix.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpar as jp
from jaxpar.app import job
from jaxpar.app.train import verify

VOCAB, EMBED = 256, 8


def make_model(key: jax.Array) -> dict[str, Any]:
    words, middle, head = (
        jax.random.normal(key, shape) / 3 for shape in ((VOCAB, EMBED), (EMBED, EMBED), (EMBED, VOCAB))
    )
    return {
        "words": jp.tag(words, "vocab", "embed"),
        "up": jp.tag(middle, "embed", "mlp"),
        "head": jp.tag(head, "mlp", None),
    }


def up(model: Any, x: jax.Array) -> jax.Array:
    return jnp.sin(x / 10 @ model["up"])


def loss(model: Any, batch: Any) -> jax.Array:
    x = jp.hint(jnp.sin(jax.nn.one_hot(batch["tokens"], VOCAB) @ model["words"]), "batch", "seq", "embed")
    logits = jp.hint(up(model, x), "batch", "seq", "mlp") / 1e4 @ model["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def make_words(key: jax.Array, width: int = EMBED) -> dict[str, Any]:
    """Two matrices that learn bigrams, for ``model: {factory: small_model:make_words, loss: small_model:bigrams}``."""
    return {
        "words": jp.tag(jax.random.normal(key, (VOCAB, width)), "vocab", "embed"),
        "head": jp.tag(jnp.zeros((width, VOCAB)), "embed", "vocab"),
    }


def bigrams(model: Any, batch: Any) -> jax.Array:
    x = jp.hint(jax.nn.one_hot(batch["tokens"], VOCAB) @ model["words"], "batch", "seq", "embed")
    return optax.softmax_cross_entropy_with_integer_labels(x @ model["head"], batch["targets"]).mean()


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later command runs its configuration with this model."""
    for module, name in ((job, "make_job"), (verify, "in_fp32")):
        made = getattr(module, name)
        with_this = lambda *args, made=made: replace(made(*args), make_model=make_model, loss_fn=loss)
        monkeypatch.setattr(module, name, with_this)
