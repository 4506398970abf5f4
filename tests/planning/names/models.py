"""Unannotated models as their users write them: ``(make_model, loss_fn, batch)`` of shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

from jaxpar.training.model import MakeModel

Case = tuple[MakeModel, Callable[..., Any], dict[str, jax.ShapeDtypeStruct]]
VOCAB, SEQ, EMBED, HEADS, MLP = 128, 16, 24, 3, 40


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "int32")


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


TEXT = {"tokens": integers(8, SEQ), "targets": integers(8, SEQ)}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(EMBED, rngs=rngs), nnx.LayerNorm(EMBED, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, EMBED, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(EMBED, MLP, rngs=rngs), nnx.Linear(MLP, EMBED, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(jnp.zeros(x.shape[:2])))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Layers in a list, or scanned and recomputed; the head is the transposed table, or a matrix of its own."""

    def __init__(self, rngs: nnx.Rngs, *, layers: int = 2, scanned: bool = False, tied: bool = False):
        self.tokens, self.positions = nnx.Embed(VOCAB, EMBED, rngs=rngs), nnx.Embed(SEQ, EMBED, rngs=rngs)
        self.scanned = scanned
        if scanned:
            self.blocks = nnx.split_rngs(splits=layers)(nnx.vmap(Block, in_axes=0, out_axes=0))(rngs)
        else:
            self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.head = None if tied else nnx.Linear(EMBED, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        if self.scanned:
            layer = nnx.remat(lambda x, block: block(x))
            x = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        x = self.norm(x)
        logits: jax.Array = self.tokens.attend(x) if self.head is None else self.head(x)
        return logits


def text_loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return entropy(model(batch["tokens"]), batch["targets"])


def gpt(**options: Any) -> Case:
    return lambda key: GPT(nnx.Rngs(key), **options), text_loss, TEXT


def weights(**shapes: tuple[int, ...]) -> MakeModel:
    return lambda key: {name: 0.1 * jax.random.normal(key, shape) for name, shape in shapes.items()}


def fused_qkv() -> Case:
    """As nanoGPT writes it: one matrix for queries, keys and values, and square matrices in the MLP."""

    def loss(p: Any, batch: Any) -> jax.Array:
        x = p["table"][batch["tokens"]]
        b, s, e = x.shape
        q, k, v = (y.reshape(b, s, HEADS, -1) for y in jnp.split(x @ p["qkv"], 3, -1))
        o = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)
        x = x + o.reshape(b, s, e) @ p["out"]
        x = x + jax.nn.relu(x @ p["up"]) @ p["down"]
        return entropy(x @ p["table"].T, batch["targets"])

    e = EMBED
    return weights(table=(VOCAB, e), qkv=(e, 3 * e), out=(e, e), up=(e, e), down=(e, e)), loss, TEXT


def grouped_queries(heads: int = 4, kv_heads: int = 2, size: int = 8) -> Case:
    """Rotary positions, and keys repeated for the queries that share them."""

    def rotate(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, -1)
        angle = (jnp.arange(x.shape[1])[:, None] * jnp.ones(size // 2))[:, None]
        return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)

    def loss(p: Any, batch: Any) -> jax.Array:
        x = p["table"][batch["tokens"]]
        b, s, _ = x.shape
        q, k, v = ((x @ p[name]).reshape(b, s, -1, size) for name in "qkv")
        k, v = (jnp.repeat(y, heads // kv_heads, 2) for y in (rotate(k), v))
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", rotate(q), k))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(b, s, -1) @ p["o"]
        return entropy(x @ p["head"], batch["targets"])

    e, q, k = EMBED, heads * size, kv_heads * size
    return weights(table=(VOCAB, e), q=(e, q), k=(e, k), v=(e, k), o=(q, e), head=(e, VOCAB)), loss, TEXT


def multi_query(heads: int = 4, size: int = 8) -> Case:
    """All queries share one head of keys and values."""

    def loss(p: Any, batch: Any) -> jax.Array:
        x = p["table"][batch["tokens"]]
        q, k, v = jnp.einsum("bse,ehd->bshd", x, p["q"]), x @ p["k"], x @ p["v"]
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkd->bhqk", q, k))
        x = x + jnp.einsum("bqhd,hde->bqe", jnp.einsum("bhqk,bkd->bqhd", scores, v), p["o"])
        return entropy(x @ p["table"].T, batch["targets"])

    e = EMBED
    shapes = {"table": (VOCAB, e), "q": (e, heads, size), "k": (e, size), "v": (e, size), "o": (heads, size, e)}
    return weights(**shapes), loss, TEXT


def experts(count: int = 4, capacity: int = 6) -> Case:
    """Switch routing by einsum."""

    def loss(p: Any, batch: Any) -> jax.Array:
        x = p["table"][batch["tokens"]]
        gates = jax.nn.softmax(x @ p["router"])
        top, where = jax.lax.top_k(gates, 1)
        chosen = jax.nn.one_hot(where, count).sum(2)
        place = jnp.cumsum(chosen, 1) * chosen - 1
        dispatch = jax.nn.one_hot(place.astype(int), capacity) * chosen[..., None]
        h = jax.nn.relu(jnp.einsum("egcm,emf->egcf", jnp.einsum("gtec,gtm->egcm", dispatch, x), p["up"]))
        h = jnp.einsum("egcf,efm->egcm", h, p["down"])
        x = x + jnp.einsum("gtec,egcm->gtm", dispatch * top[..., None], h)
        return entropy(x @ p["table"].T, batch["targets"])

    e = EMBED
    shapes = {"table": (VOCAB, e), "router": (e, count), "up": (count, e, MLP), "down": (count, MLP, e)}
    return weights(**shapes), loss, TEXT


def linen(module: nn.Module, loss: Callable[..., jax.Array], batch: Any, inputs: Callable[..., Any]) -> Case:
    """A Linen module with its loss on (outputs, batch), and batch statistics, if it has any, carried."""

    def make_model(key: jax.Array) -> Any:
        return module.init(key, *inputs(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)))

    def loss_fn(variables: Any, batch: Any) -> Any:
        carried = [name for name in variables if name != "params"]
        out, updates = module.apply(variables, *inputs(batch), mutable=carried)
        return loss(out, batch), {}, updates or None

    return make_model, loss_fn, batch


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = lambda y: nn.BatchNorm(use_running_average=False)(y)
        x = nn.relu(norm(nn.Conv(16, (3, 3))(x)))
        for width, stride in ((16, 1), (32, 2)):
            y = nn.relu(norm(nn.Conv(width, (3, 3), (stride, stride))(x)))
            y = norm(nn.Conv(width, (3, 3))(y))
            x = nn.relu(y + (x if x.shape == y.shape else norm(nn.Conv(width, (1, 1), (stride, stride))(x))))
        return nn.Dense(10)(x.mean((1, 2)))


class ViT(nn.Module):
    """With a class token, and patches from a convolution."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(EMBED, (4, 4), (4, 4), padding="VALID", name="patch")(images).reshape(len(images), -1, EMBED)
        token = self.param("token", nn.initializers.zeros, (1, 1, EMBED))
        x = jnp.concatenate([jnp.tile(token, (len(x), 1, 1)), x], 1)
        x = x + self.param("positions", nn.initializers.zeros, (1, x.shape[1], EMBED))
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
            x = x + nn.Dense(EMBED)(nn.gelu(nn.Dense(MLP)(nn.LayerNorm()(x))))
        return nn.Dense(10, name="classify")(nn.LayerNorm()(x)[:, 0])


class T5(nn.Module):
    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        table = nn.Embed(VOCAB, EMBED)
        attend = lambda q, kv, mask=None: nn.MultiHeadDotProductAttention(HEADS)(q, kv, mask=mask)
        mlp = lambda h: nn.Dense(EMBED)(nn.gelu(nn.Dense(MLP)(h)) * nn.Dense(MLP)(h))
        x, y = table(source), table(target)
        h = nn.RMSNorm()(x)
        x = x + attend(h, h)
        x = x + mlp(nn.RMSNorm()(x))
        h = nn.RMSNorm()(y)
        y = y + attend(h, h, nn.make_causal_mask(target))
        y = y + attend(nn.RMSNorm()(y), x)
        y = y + mlp(nn.RMSNorm()(y))
        return table.attend(nn.RMSNorm()(y))


class Mamba(nn.Module):
    """One layer of a selective state space, by an associative scan."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, EMBED)(tokens)
        u, gate = jnp.split(nn.Dense(2 * MLP, use_bias=False)(nn.RMSNorm()(x)), 2, -1)
        u = nn.silu(nn.Conv(MLP, (4,), feature_group_count=MLP, padding="CAUSAL")(u))
        low, b, c = jnp.split(nn.Dense(2 + 2 * 8)(u), (2, 10), -1)
        step = nn.softplus(nn.Dense(MLP)(low))
        decay = jnp.exp(-step[..., None] * jnp.exp(self.param("decay", nn.initializers.ones, (MLP, 8))))
        together = lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1])
        _, h = jax.lax.associative_scan(together, (decay, (step * u)[..., None] * b[:, :, None]), axis=1)
        x = x + nn.Dense(EMBED, use_bias=False)(jnp.einsum("bldn,bln->bld", h, c) * nn.silu(gate))
        return nn.Dense(VOCAB)(nn.RMSNorm()(x))


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return nn.Dense(VOCAB)(nn.RNN(nn.LSTMCell(MLP))(nn.Embed(VOCAB, EMBED)(tokens)))


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = nn.relu(nn.Conv(16, (3, 3))(x))
        low = nn.relu(nn.Conv(32, (3, 3), strides=(2, 2))(wide))
        up = jax.image.resize(low, (*wide.shape[:3], 32), "nearest")
        return nn.Conv(3, (1, 1))(nn.relu(nn.Conv(16, (3, 3))(jnp.concatenate([up, wide], -1))))


class DiT(nn.Module):
    """A diffusion transformer with adaptive norms, without attention."""

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        h = nn.Conv(EMBED, (4, 4), strides=(4, 4))(x)
        grid = h.shape
        h = h.reshape(len(h), -1, EMBED)
        angle = time[:, None] * jnp.exp(-jnp.arange(8.0))
        c = nn.silu(nn.Dense(EMBED)(jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)))
        for _ in range(2):
            shift, scale, gate = jnp.split(nn.Dense(3 * EMBED)(c)[:, None], 3, -1)
            y = nn.LayerNorm(use_scale=False, use_bias=False)(h) * (1 + scale) + shift
            h = h + gate * nn.Dense(EMBED)(nn.gelu(nn.Dense(MLP)(y)))
        h = nn.Dense(4 * 4 * 3)(nn.LayerNorm()(h))
        return h.reshape(*grid[:3], 4, 4, 3).swapaxes(2, 3).reshape(x.shape)


IMAGES = {"images": floats(8, 16, 16, 3), "labels": integers(8)}
labelled = lambda out, batch: entropy(out, batch["labels"])
squared = lambda out, batch: jnp.mean((out - batch["images"]) ** 2)
CASES: dict[str, Callable[[], Case]] = {
    "gpt": gpt,
    "gpt scanned": lambda: gpt(scanned=True),
    "gpt tied": lambda: gpt(tied=True),
    "fused qkv": fused_qkv,
    "grouped queries": grouped_queries,
    "multi-query": multi_query,
    "experts": experts,
    "resnet": lambda: linen(ResNet(), labelled, IMAGES, lambda b: (b["images"],)),
    "vit": lambda: linen(ViT(), labelled, IMAGES, lambda b: (b["images"],)),
    "t5": lambda: linen(
        T5(),
        lambda out, b: entropy(out[:, :-1], b["target"][:, 1:]),
        {"source": integers(8, 20), "target": integers(8, SEQ)},
        lambda b: (b["source"], b["target"]),
    ),
    "mamba": lambda: linen(Mamba(), lambda out, b: entropy(out, b["targets"]), TEXT, lambda b: (b["tokens"],)),
    "lstm": lambda: linen(Recurrent(), lambda out, b: entropy(out, b["targets"]), TEXT, lambda b: (b["tokens"],)),
    "unet": lambda: linen(UNet(), squared, {"images": floats(8, 16, 16, 3)}, lambda b: (b["images"],)),
    "diffusion transformer": lambda: linen(
        DiT(), squared, {"images": floats(8, 16, 16, 3), "time": floats(8)}, lambda b: (b["images"], b["time"])
    ),
}
