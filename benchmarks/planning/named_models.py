"""Models of full size without a single name: how long ``jp.annotate`` takes, and how many dims of parameters it names.

    uv run python benchmarks/planning/named_models.py

Only shapes are made. A dim counts as named if it has a name other than ``features``, which means that no use of it
tells what it is; dims of one element do not count. Of the Llama and the ViT of ``jaxpar.models``, whose names are taken
away, the last column counts the dims that are named as by hand.

Goals: 5 CPU seconds for each model; 95 % of the dims of the Llama and the ViT as by hand. Exit status 1 otherwise.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

import jaxpar as jp
from jaxpar.models import ViTConfig, make_llama, make_vit, next_token_loss, preset, vit_loss
from jaxpar.planning.names.annotation import Annotation
from jaxpar.training.model import read, show

SECONDS, AS_BY_HAND = 5.0, 0.95
ROWS = 16


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((ROWS, *shape), "int32")


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((ROWS, *shape), "float32")


def entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Block(nnx.Module):
    def __init__(self, embed: int, heads: int, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(embed, rngs=rngs), nnx.LayerNorm(embed, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, embed, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(embed, 4 * embed, rngs=rngs), nnx.Linear(4 * embed, embed, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(jnp.zeros(x.shape[:2])))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """GPT-2 of 124M parameters, its layers in a list or scanned."""

    def __init__(self, rngs: nnx.Rngs, scanned: bool):
        self.tokens, self.positions = nnx.Embed(50257, 768, rngs=rngs), nnx.Embed(1024, 768, rngs=rngs)
        make = lambda rngs: Block(768, 12, rngs)
        stack = lambda: nnx.split_rngs(splits=12)(nnx.vmap(make, in_axes=0, out_axes=0))(rngs)
        self.blocks = stack() if scanned else nnx.List([make(rngs) for _ in range(12)])
        self.norm, self.scanned = nnx.LayerNorm(768, rngs=rngs), scanned

    def __call__(self, tokens: Any) -> Any:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        if self.scanned:
            layer = nnx.remat(lambda x, block: block(x))
            x = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        return self.tokens.attend(self.norm(x))


class Gemma(nn.Module):
    """The sizes of Gemma 3 1B: one head of keys, norms around each half, windows in five layers of six."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        table = nn.Embed(262144, 1152)
        x = table(tokens) * 1152**0.5
        rows, columns = jnp.arange(tokens.shape[1])[:, None], jnp.arange(tokens.shape[1])
        for layer in range(26):
            h = nn.RMSNorm()(x)
            q, k, v = (nn.DenseGeneral((heads, 256), use_bias=False)(h) for heads in (4, 1, 1))
            q, k = nn.RMSNorm()(q) * 256**-0.5, nn.RMSNorm()(k)
            seen = (rows >= columns) & ((layer % 6 == 5) | (rows - columns < 512))
            o = jax.nn.dot_product_attention(q, k, v, mask=seen[None, None], scale=1.0)
            x = x + nn.RMSNorm()(nn.DenseGeneral(1152, (-2, -1), use_bias=False)(o))
            h = nn.RMSNorm()(x)
            h = nn.gelu(nn.Dense(6912, use_bias=False)(h)) * nn.Dense(6912, use_bias=False)(h)
            x = x + nn.RMSNorm()(nn.Dense(1152, use_bias=False)(h))
        return table.attend(nn.RMSNorm()(x))


class ResNet50(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        norm = lambda y: nn.BatchNorm(use_running_average=False)(y)
        x = nn.max_pool(nn.relu(norm(nn.Conv(64, (7, 7), (2, 2))(x))), (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate((3, 4, 6, 3)):
            width = 64 * 2**stage
            for block in range(blocks):
                strides = (2, 2) if stage and not block else (1, 1)
                y = nn.relu(norm(nn.Conv(width, (1, 1))(x)))
                y = nn.relu(norm(nn.Conv(width, (3, 3), strides)(y)))
                y = norm(nn.Conv(4 * width, (1, 1))(y))
                x = nn.relu(y + (x if x.shape == y.shape else norm(nn.Conv(4 * width, (1, 1), strides)(x))))
        return nn.Dense(1000)(x.mean((1, 2)))


def encoder(x: Any, layers: int, heads: int) -> Any:
    for _ in range(layers):
        x = x + nn.MultiHeadDotProductAttention(heads)(nn.LayerNorm()(x))
        x = x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))
    return nn.LayerNorm()(x)


class ViT(nn.Module):
    """ViT-B/16 with a class token."""

    @nn.compact
    def __call__(self, images: Any) -> Any:
        x = nn.Conv(768, (16, 16), (16, 16), padding="VALID")(images).reshape(len(images), -1, 768)
        token = self.param("token", nn.initializers.zeros, (1, 1, 768))
        x = jnp.concatenate([jnp.tile(token, (len(x), 1, 1)), x], 1)
        x = x + self.param("positions", nn.initializers.zeros, (1, x.shape[1], 768))
        return nn.Dense(1000)(encoder(x, 12, 12)[:, 0])


class UNet(nn.Module):
    """A diffusion U-Net with residual blocks, times and attention at the lowest resolution."""

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        angle = time[:, None] * jnp.exp(-jnp.arange(64.0) / 8)
        t = nn.Dense(512)(nn.silu(nn.Dense(512)(jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1))))

        def residual(x: Any, width: int) -> Any:
            y = nn.Conv(width, (3, 3))(nn.silu(nn.GroupNorm(32)(x)))
            y = y + nn.Dense(width)(nn.silu(t))[:, None, None]
            y = nn.Conv(width, (3, 3))(nn.silu(nn.GroupNorm(32)(y)))
            return y + (x if x.shape[-1] == width else nn.Conv(width, (1, 1))(x))

        x, kept = nn.Conv(128, (3, 3))(x), []
        for width in (128, 256, 512):
            x = residual(residual(x, width), width)
            kept.append(x)
            x = nn.Conv(width, (3, 3), (2, 2))(x)
        y = x.reshape(len(x), -1, 512)
        x = x + nn.MultiHeadDotProductAttention(8)(nn.LayerNorm()(y)).reshape(x.shape)
        for width in (512, 256, 128):
            x = jax.image.resize(x, (len(x), 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "nearest")
            x = residual(residual(jnp.concatenate([x, kept.pop()], -1), width), width)
        return nn.Conv(3, (3, 3))(nn.silu(nn.GroupNorm(32)(x)))


class MoE(nn.Module):
    """A GPT whose MLPs are 8 experts, of which two are chosen for each token, with a capacity."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        table = nn.Embed(32000, 1024)
        x = table(tokens)
        mask = nn.make_causal_mask(tokens)
        init = nn.initializers.lecun_normal()
        for layer in range(12):
            x = x + nn.MultiHeadDotProductAttention(16)(nn.RMSNorm()(x), mask=mask)
            h = nn.RMSNorm()(x)
            weights, chosen = jax.lax.top_k(jax.nn.softmax(nn.Dense(8, use_bias=False)(h)), 2)
            one_hot = jax.nn.one_hot(chosen, 8)
            place = (jnp.cumsum(one_hot.sum(2), 1)[:, :, None] * one_hot - 1).astype(int)
            dispatch = jax.nn.one_hot(place, 320) * one_hot[..., None]
            up, gate = (self.param(f"{name}_{layer}", init, (8, 1024, 3584)) for name in ("up", "gate"))
            down = self.param(f"down_{layer}", init, (8, 3584, 1024))
            y = jnp.einsum("gtkec,gtm->egcm", dispatch, h)
            y = nn.silu(jnp.einsum("egcm,emf->egcf", y, gate)) * jnp.einsum("egcm,emf->egcf", y, up)
            y = jnp.einsum("egcf,efm->egcm", y, down)
            x = x + jnp.einsum("gtkec,gtk,egcm->gtm", dispatch, weights, y)
        return table.attend(nn.RMSNorm()(x))


class T5(nn.Module):
    """The sizes of T5 v1.1 base: relative positions, gated MLPs."""

    @nn.compact
    def __call__(self, source: Any, target: Any) -> Any:
        table = nn.Embed(32128, 768)

        def attend(x: Any, kv: Any, bias: Any) -> Any:
            q, k, v = (nn.DenseGeneral((12, 64), use_bias=False)(y) for y in (x, kv, kv))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
            o = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
            return nn.DenseGeneral(768, (-2, -1), use_bias=False)(o)

        def relative(length: int) -> Any:
            distance = jnp.clip(jnp.arange(length) - jnp.arange(length)[:, None], -15, 16) + 15
            return nn.Embed(32, 12)(distance).transpose(2, 0, 1)[None]

        def stack(x: Any, bias: Any, memory: Any = None) -> Any:
            for _ in range(12):
                h = nn.RMSNorm()(x)
                x = x + attend(h, h, bias)
                x = x if memory is None else x + attend(nn.RMSNorm()(x), memory, 0.0)
                h = nn.RMSNorm()(x)
                h = nn.gelu(nn.Dense(2048, use_bias=False)(h)) * nn.Dense(2048, use_bias=False)(h)
                x = x + nn.Dense(768, use_bias=False)(h)
            return nn.RMSNorm()(x)

        encoded = stack(table(source), relative(source.shape[1]))
        causal = jnp.where(nn.make_causal_mask(target[:1]) > 0, 0.0, -1e10)
        return nn.Dense(32128, use_bias=False)(stack(table(target), relative(target.shape[1]) + causal, encoded))


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(10000, 650)(tokens)
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(1500))(x)
        return nn.Dense(10000)(x)


class DiT(nn.Module):
    """The sizes of DiT-XL/2: adaptive norms from times and labels."""

    @nn.compact
    def __call__(self, x: Any, time: Any, label: Any) -> Any:
        h = nn.Conv(1152, (2, 2), (2, 2))(x)
        grid = h.shape
        h = h.reshape(len(h), -1, 1152)
        h = h + self.param("positions", nn.initializers.zeros, (1, h.shape[1], 1152))
        angle = time[:, None] * jnp.exp(-jnp.arange(128.0) / 14)
        c = nn.Dense(1152)(nn.silu(nn.Dense(1152)(jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1))))
        c = nn.silu(c + nn.Embed(1000, 1152)(label))
        norm = lambda h, shift, scale: nn.LayerNorm(use_scale=False, use_bias=False)(h) * (1 + scale) + shift
        for _ in range(28):
            a, b, c1, d, e, f = jnp.split(nn.Dense(6 * 1152)(c)[:, None], 6, -1)
            h = h + c1 * nn.MultiHeadDotProductAttention(16)(norm(h, a, b))
            h = h + f * nn.Dense(1152)(nn.gelu(nn.Dense(4608)(norm(h, d, e))))
        h = nn.Dense(2 * 2 * 4)(nn.LayerNorm()(h))
        return h.reshape(*grid[:3], 2, 2, 4).swapaxes(2, 3).reshape(x.shape)


class Mamba(nn.Module):
    """The sizes of Mamba 130M: a selective state space in 24 layers, by an associative scan."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        table = nn.Embed(50280, 768)
        x = table(tokens)
        together = lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1])
        for layer in range(24):
            u, gate = jnp.split(nn.Dense(3072, use_bias=False)(nn.RMSNorm()(x)), 2, -1)
            u = nn.silu(nn.Conv(1536, (4,), feature_group_count=1536, padding="CAUSAL")(u))
            low, b, c = jnp.split(nn.Dense(48 + 2 * 16, use_bias=False)(u), (48, 64), -1)
            step = nn.softplus(nn.Dense(1536)(low))
            decay = -jnp.exp(self.param(f"decay_{layer}", nn.initializers.ones, (1536, 16)))
            pair = jnp.exp(step[..., None] * decay), (step * u)[..., None] * b[:, :, None]
            _, h = jax.lax.associative_scan(together, pair, axis=1)
            y = jnp.einsum("bldn,bln->bld", h, c) + u * self.param(f"skip_{layer}", nn.initializers.ones, (1536,))
            x = x + nn.Dense(768, use_bias=False)(y * nn.silu(gate))
        return table.attend(nn.RMSNorm()(x))


def of_linen(module: nn.Module, batch: dict[str, Any], loss: Any, *inputs: str) -> tuple[Any, Any, Any]:
    """A case of a Linen module, its inputs by their names in the batch, and batch statistics if it has any."""
    arguments = lambda batch: [batch[name] for name in inputs]

    def make_model(key: Any) -> Any:
        return module.init(key, *arguments(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)))

    def loss_fn(variables: Any, batch: Any) -> Any:
        carried = [name for name in variables if name != "params"]
        out, updates = module.apply(variables, *arguments(batch), mutable=carried)
        return loss(out, batch), {}, updates or None

    return make_model, loss_fn, batch


def text_loss(model: Any, batch: Any) -> Any:
    return entropy(model(batch["tokens"]), batch["targets"])


LABELLED = lambda out, batch: entropy(out, batch["labels"])
TARGETS = lambda out, batch: entropy(out, batch["targets"])
SQUARED = lambda out, batch: jnp.mean((out - batch["images"]) ** 2)
TEXT = {"tokens": ints(1024), "targets": ints(1024)}
IMAGES = {"images": floats(224, 224, 3), "labels": ints()}
NOISY = {"images": floats(64, 64, 3), "time": floats()}
LATENT = {"images": floats(32, 32, 4), "time": floats(), "labels": ints()}
PAIRS = {"source": ints(512), "tokens": ints(128), "targets": ints(128)}
CASES: dict[str, tuple[Any, Any, Any]] = {
    "GPT-2 124M, 12 layers in a list": (lambda key: GPT(nnx.Rngs(key), False), text_loss, TEXT),
    "GPT-2 124M, layers scanned": (lambda key: GPT(nnx.Rngs(key), True), text_loss, TEXT),
    "as Gemma 3 1B, 26 layers in a list": of_linen(Gemma(), TEXT, TARGETS, "tokens"),
    "ResNet-50": of_linen(ResNet50(), IMAGES, LABELLED, "images"),
    "ViT-B/16": of_linen(ViT(), IMAGES, LABELLED, "images"),
    "diffusion U-Net": of_linen(UNet(), NOISY, SQUARED, "images", "time"),
    "GPT with 8 experts, 12 layers": of_linen(MoE(), TEXT, TARGETS, "tokens"),
    "as T5 v1.1 base": of_linen(T5(), PAIRS, TARGETS, "source", "tokens"),
    "LSTM, 2 layers of 1500": of_linen(LSTM(), TEXT, TARGETS, "tokens"),
    "DiT-XL/2": of_linen(DiT(), LATENT, SQUARED, "images", "time", "labels"),
    "Mamba 130M, 24 layers": of_linen(Mamba(), TEXT, TARGETS, "tokens"),
}
LLAMA, VIT_CONFIG = preset("llama3_1_8b"), ViTConfig()
OURS: dict[str, tuple[Any, Any, Any]] = {
    "the example Llama 8B, names removed": (make_llama(LLAMA), next_token_loss, TEXT),
    "the example ViT, names removed": (
        make_vit(VIT_CONFIG),
        vit_loss(VIT_CONFIG),
        {"images": floats(VIT_CONFIG.image, VIT_CONFIG.image, 3), "labels": ints()},
    ),
}


def without_names(make_model: Any) -> Any:
    """Returns the model without its annotations."""

    def made(key: Any) -> Any:
        model = make_model(key)
        if not isinstance(model, nnx.Module):
            return nn.unbox(model)
        for _, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.Variable) and "logical_dims" in variable.get_metadata():
                variable.set_metadata("logical_dims", None)
        return model

    return made


def by_hand(make_model: Any) -> dict[str, Any]:
    """Returns the names that the model gives its parameters, by path."""
    names: dict[str, Any] = {}

    def collect(key: Any) -> Any:
        names.update({show(path): dims for path, dims in read(make_model(key)).dims})
        return jnp.zeros(())

    dims = dict.fromkeys(("batch", "seq", "residual_seq", "embed", "mlp", "vocab", "norm", "heads", "layers"))
    with jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), jp.Rules(**dims)):
        jax.eval_shape(collect, jax.random.key(0))
    return names


def named(found: Annotation) -> tuple[int, int, list[str]]:
    """Returns how many dims of parameters there are, how many have a name, and these names."""
    arrays = [array for array in found.arrays if array.path.startswith("params/")]
    dims = [name for array in arrays for name, size in zip(array.names, array.shape, strict=True) if size > 1]
    known = [name for name in dims if name is not None and not name.startswith("features")]
    return len(dims), len(known), sorted(set(known))


def main() -> int:
    print("model                                  seconds  named          as by hand  names, attention")
    missed = 0
    for title, (make_model, loss_fn, batch) in (CASES | OURS).items():
        plain = without_names(make_model) if title in OURS else make_model
        start = time.process_time()
        found = jp.annotate(plain, loss_fn, batch)
        seconds = time.process_time() - start
        count, known, names = named(found)
        hand = ""
        if title in OURS:
            own = {array.path: array.names for array in found.arrays}
            pairs = [
                (mine, "embed" if theirs == "norm" else theirs)
                for path, dims in by_hand(make_model).items()
                for mine, theirs in zip(own[path], dims, strict=True)
            ]
            right = sum(mine == theirs for mine, theirs in pairs)
            hand = f"{right} of {len(pairs)}"
            missed += right / len(pairs) < AS_BY_HAND
        missed += seconds > SECONDS
        recognised = sum(site.count for site in found.attention if not site.reason)
        attention = f"; attention {recognised} of {sum(site.count for site in found.attention)}"
        print(
            f"{title:37}  {seconds:7.1f}  {f'{known} of {count}':13}  {hand:10}  {', '.join(names)}"
            f"{attention if found.attention else ''}"
        )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
