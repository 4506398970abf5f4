"""Unannotated models with learned queries, mixed tokens, graphs and tables; as :mod:`tests.planning.names.models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tests.planning.names.models import (
    EMBED,
    HEADS,
    IMAGES,
    MLP,
    SEQ,
    VOCAB,
    Case,
    entropy,
    floats,
    integers,
    labelled,
    linen,
)

TOKENS, CHANNELS, QUERIES, TASKS = 40, 48, 5, 8


def patches(images: jax.Array) -> jax.Array:
    x = nn.Conv(EMBED, (4, 4), (4, 4), name="patch")(images)
    return x.reshape(len(x), -1, EMBED)


def feed_forward(x: jax.Array, name: str) -> jax.Array:
    return nn.Dense(EMBED, name=f"{name}_down")(nn.gelu(nn.Dense(MLP, name=f"{name}_up")(nn.LayerNorm()(x))))


class Mixer(nn.Module):
    """As in MLP-Mixer: one MLP over the tokens, one over the width."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = patches(images)
        for i in range(2):
            y = nn.gelu(nn.Dense(TOKENS, name=f"tokens_up_{i}")(nn.LayerNorm()(x).swapaxes(1, 2)))
            x = x + nn.Dense(x.shape[1], name=f"tokens_down_{i}")(y).swapaxes(1, 2)
            y = nn.gelu(nn.Dense(CHANNELS, name=f"up_{i}")(nn.LayerNorm()(x)))
            x = x + nn.Dense(EMBED, name=f"down_{i}")(y)
        return nn.Dense(10, name="head")(nn.LayerNorm()(x).mean(1))


class Pooled(nn.Module):
    """Layers of attention, and then attention pooling with a learned probe, as in SigLIP."""

    layers: int = 1

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = patches(images)
        for i in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(HEADS, name=f"attention_{i}")(nn.LayerNorm()(x))
            x = x + feed_forward(x, f"layer_{i}")
        probe = jnp.tile(self.param("probe", nn.initializers.normal(0.02), (1, 1, EMBED)), (len(x), 1, 1))
        x = nn.MultiHeadDotProductAttention(HEADS, name="pool")(probe, x)
        return nn.Dense(10, name="head")((x + feed_forward(x, "pool"))[:, 0])


class Written(nn.Module):
    """Attention pooling written out: its queries have no batch dim; ``direct`` ones are parameters themselves."""

    direct: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(EMBED, name="embed")(x)
        shape = (QUERIES, HEADS, 8) if self.direct else (QUERIES, EMBED)
        q = self.param("probe", nn.initializers.normal(0.02), shape)
        q = q if self.direct else nn.DenseGeneral((HEADS, 8), name="q")(q)
        k, v = (nn.DenseGeneral((HEADS, 8), name=name)(x) for name in "kv")
        o = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("qhd,bkhd->bhqk", q, k)), v)
        o = nn.DenseGeneral(EMBED, axis=(-2, -1), name="o")(o)
        return nn.Dense(10, name="head")((o + feed_forward(o, "pool")).mean(1))


class Perceiver(nn.Module):
    """Learned latents attend to the input, and then to each other."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(EMBED, name="embed")(x)
        latents = self.param("latents", nn.initializers.normal(0.02), (1, QUERIES, EMBED))
        z = jnp.broadcast_to(latents, (len(x), QUERIES, EMBED))
        z = z + nn.MultiHeadDotProductAttention(HEADS, name="cross")(nn.LayerNorm()(z), nn.LayerNorm()(x))
        z = z + nn.MultiHeadDotProductAttention(HEADS, name="self")(nn.LayerNorm()(z))
        return nn.Dense(10, name="head")((z + feed_forward(z, "layer")).mean(1))


class DETR(nn.Module):
    """Learned queries attend to each other before they meet the image."""

    @nn.compact
    def __call__(self, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = patches(images)
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="encoder")(nn.LayerNorm()(x))
        q = jnp.tile(self.param("queries", nn.initializers.normal(0.02), (1, QUERIES, EMBED)), (len(x), 1, 1))
        q = q + nn.MultiHeadDotProductAttention(HEADS, name="self")(nn.LayerNorm()(q))
        q = q + nn.MultiHeadDotProductAttention(HEADS, name="cross")(nn.LayerNorm()(q), x)
        q = q + feed_forward(q, "decoder")
        return nn.Dense(7, name="classes")(q), nn.Dense(4, name="boxes")(q)


class Graph(nn.Module):
    """Messages along edges, and several tasks for each graph."""

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        x = nn.Dense(EMBED, name="embed")(batch["nodes"])
        for i in range(2):
            edges = jnp.concatenate([x[batch["senders"]], x[batch["receivers"]]], -1)
            sums = jax.ops.segment_sum(nn.relu(nn.Dense(MLP, name=f"edge_{i}")(edges)), batch["receivers"], len(x))
            x = x + nn.Dense(EMBED, name=f"node_{i}")(jnp.concatenate([x, sums], -1))
        return nn.Dense(TASKS, name="tasks")(jax.ops.segment_sum(x, batch["graph"], len(batch["labels"])))


class Tables(nn.Module):
    """As in DLRM: tables of categories, and the products of their rows."""

    @nn.compact
    def __call__(self, dense: jax.Array, categories: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(EMBED, name="bottom")(dense))
        rows = [nn.Embed(VOCAB, EMBED, name=f"table_{i}")(categories[:, i]) for i in range(3)]
        z = jnp.stack([x, *rows], 1)
        i, j = jnp.triu_indices(4, 1)
        x = jnp.concatenate([x, jnp.einsum("bie,bje->bij", z, z)[:, i, j]], -1)
        return nn.Dense(1, name="top")(nn.relu(nn.Dense(MLP, name="up")(x)))[:, 0]


def seen(out: jax.Array, batch: Any) -> jax.Array:
    """Graphs miss labels of some tasks."""
    known = ~jnp.isnan(batch["labels"])
    return jnp.where(known, (out - jnp.where(known, batch["labels"], 0)) ** 2, 0).sum() / known.sum()


GRAPHS = {"nodes": floats(64, 12), "senders": integers(128), "receivers": integers(128), "graph": integers(64)}
GRAPHS |= {"labels": floats(16, TASKS)}
ROWS = {"x": floats(8, SEQ, 12), "labels": integers(8)}
BOXES = {"images": floats(8, 16, 16, 3), "classes": integers(8, QUERIES), "boxes": floats(8, QUERIES, 4)}
CLICKS = {"dense": floats(8, 13), "categories": integers(8, 3), "clicked": floats(8)}
boxed = lambda out, batch: entropy(out[0], batch["classes"]) + jnp.square(out[1] - batch["boxes"]).mean()
clicked = lambda out, batch: jnp.square(out - batch["clicked"]).mean()
of_images, of_rows = lambda batch: (batch["images"],), lambda batch: (batch["x"],)
CASES: dict[str, Callable[[], Case]] = {
    "mixer": lambda: linen(Mixer(), labelled, IMAGES, of_images),
    "pooled": lambda: linen(Pooled(), labelled, IMAGES, of_images),
    "pooled without layers": lambda: linen(Pooled(0), labelled, IMAGES, of_images),
    "pooling written out": lambda: linen(Written(), labelled, ROWS, of_rows),
    "pooling with parameters": lambda: linen(Written(direct=True), labelled, ROWS, of_rows),
    "perceiver": lambda: linen(Perceiver(), labelled, ROWS, of_rows),
    "detr": lambda: linen(DETR(), boxed, BOXES, of_images),
    "graph": lambda: linen(Graph(), seen, GRAPHS, lambda batch: (batch,)),
    "tables": lambda: linen(Tables(), clicked, CLICKS, lambda batch: (batch["dense"], batch["categories"])),
}
