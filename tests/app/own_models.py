"""Models and data as a user would write them, who knows nothing of jaxpar; tests name them in configurations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jaxpar as jp

CLASSES = 4


# Vectors: an NNX MLP, and columns of arrays.


class MLP(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.up, self.mid = nnx.Linear(8, width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.mid(nnx.relu(self.up(x)))))


def make_mlp(key: jax.Array, width: int = 16) -> MLP:
    return MLP(width, nnx.Rngs(key))


def classify(model: MLP, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"]).mean()


def make_points(split: str, examples: int = 64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(split == "train")
    x = rng.normal(size=(examples, 8))  # float64, as NumPy draws
    return {"x": x, "label": np.argmax(x[:, :CLASSES], 1)}


# Images: a Linen CNN with batch statistics, and examples by number.


class ResNet(nn.Module):
    channels: int = 8

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        norm = lambda: nn.BatchNorm(use_running_average=not train)
        conv = lambda: nn.Conv(self.channels, (3, 3), use_bias=False)
        x = nn.relu(norm()(conv()(x)))
        for _ in range(2):
            y = nn.relu(norm()(conv()(x)))
            x = nn.relu(x + norm()(conv()(y)))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


def make_resnet(key: jax.Array, channels: int = 8) -> Any:
    return ResNet(channels).init(key, jnp.zeros((1, 8, 8, 3)), train=False)


def resnet_loss(variables: Any, batch: Any) -> Any:
    channels = variables["params"]["Conv_0"]["kernel"].shape[-1]
    logits, updates = ResNet(channels).apply(variables, batch["pixels"]["image"], train=True, mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}, updates


def resnet_eval_loss(variables: Any, batch: Any) -> jax.Array:
    channels = variables["params"]["Conv_0"]["kernel"].shape[-1]
    logits = ResNet(channels).apply(variables, batch["pixels"]["image"], train=False)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


class Images:
    """Examples by number, as torch's and grain's data sets are."""

    def __init__(self, examples: int, seed: int):
        self._examples, self._seed = examples, seed

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, number: int) -> Any:
        rng = np.random.default_rng([self._seed, number])
        label = int(rng.integers(CLASSES))
        image = rng.normal(size=(8, 8, 3)).astype(np.float32)
        image[2 * label : 2 * label + 2] += 2
        return {"pixels": {"image": image}, "label": label}


def make_images(split: str, examples: int = 64) -> Images:
    return Images(examples, seed=0 if split == "train" else 1)


# Tokens: a Linen transformer with dropout, and an iterator with a position.


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
        x = nn.Embed(32, 16)(tokens)
        for _ in range(2):
            y = nn.MultiHeadDotProductAttention(2, deterministic=not train, dropout_rate=0.1)(nn.LayerNorm()(x))
            x = x + nn.Dropout(0.1, deterministic=not train)(y)
            x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        return nn.Dense(32)(x)


def make_encoder(key: jax.Array) -> Any:
    return Encoder().init(key, jnp.zeros((1, 8), jnp.int32), train=False)


def copy_loss(variables: Any, batch: Any, key: jax.Array) -> jax.Array:
    logits = Encoder().apply(variables, batch["tokens"], train=True, rngs={"dropout": key})
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"]).mean()


def copy_eval_loss(variables: Any, batch: Any) -> jax.Array:
    logits = Encoder().apply(variables, batch["tokens"], train=False)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"]).mean()


class TokenBatches:
    """This process's rows of batches of random tokens; its position is the number of the next batch."""

    def __init__(self, rows: int, first: int, seed: int, seq: int):
        self._rows, self._first, self._seed, self._seq, self._next = rows, first, seed, seq, 0

    def __iter__(self) -> TokenBatches:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([self._seed, self._next])
        self._next += 1
        rows = rng.integers(0, 32, (self._first + self._rows, self._seq), dtype=np.int32)
        return {"tokens": rows[self._first :]}

    def get_state(self) -> dict[str, int]:
        return {"next": self._next, "first_row": self._first}

    def set_state(self, state: dict[str, int]) -> None:
        if state["first_row"] != self._first:
            raise ValueError("the position of another process")
        self._next = state["next"]


def make_tokens(batch: int, seq: int, seed: int, split: str, process_index: int, process_count: int) -> TokenBatches:
    rows = batch // process_count
    return TokenBatches(rows, process_index * rows, seed + 1000 * (split == "heldout"), seq)


# Bytes: an NNX GPT, on the built-in text.


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(jnp.zeros(x.shape[:2]))
        x = x + self.attn(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, width: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_gpt(key: jax.Array, width: int = 16, layers: int = 2) -> GPT:
    return GPT(width, layers, nnx.Rngs(key))


def next_byte(model: GPT, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"]).mean()


staged_next_byte = jp.pipeline.PipelineLoss(
    layers="blocks",
    embed=lambda model, batch: model.embed(batch["tokens"]),
    layer=lambda block, x, side: block(x),
    head=lambda model, x, batch: optax.softmax_cross_entropy_with_integer_labels(
        model.head(model.norm(x)), batch["targets"]
    ).mean(),
)


def gpt_decoder(**args: Any) -> jp.inference.DecoderFns:
    """Keeps the tokens and runs the full model for each new one; a causal model ignores slots that are empty."""

    def prefill(model: GPT, tokens: jax.Array, slots: int) -> tuple[jax.Array, Any]:
        kept = jnp.zeros((tokens.shape[0], slots), jnp.int32).at[:, : tokens.shape[1]].set(tokens)
        return model(tokens), {"tokens": kept}

    def step(model: GPT, tokens: jax.Array, positions: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        rows = jnp.arange(tokens.shape[0])
        kept = cache["tokens"].at[rows, positions].set(tokens)
        return model(kept)[rows, positions], {"tokens": kept}

    return jp.inference.DecoderFns(
        cache=lambda batch, slots: {"tokens": jp.tag(jax.ShapeDtypeStruct((batch, slots), "int32"), "batch", None)},
        prefill=prefill,
        step=step,
        logits=lambda model, logits: logits,
        vocab=256,
    )


def no_data() -> int:
    return 3


def a_text() -> str:
    return "abc"


class FewBatches(TokenBatches):
    """So many batches, and then no more."""

    def __init__(self, rows: int, count: int):
        super().__init__(rows, 0, 0, 8)
        self._count = count

    def __next__(self) -> dict[str, np.ndarray]:
        if self._next == self._count:
            raise StopIteration
        return super().__next__()


def few_batches(batch: int, split: str, count: int = 0) -> FewBatches:
    return FewBatches(batch, count)


def more_points() -> dict[str, np.ndarray]:
    return make_points("train")
