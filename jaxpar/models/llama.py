"""The Llama family (Touvron et al. 2023, arXiv:2302.13971; Llama 3, arXiv:2407.21783) in NNX.

RMSNorm, rotary positions, grouped-query attention, SwiGLU; layers stacked and scanned. Everything about parallelism is in
the logical dims: of the parameters (``axes``) and of the activations (``hint``). The residual stream between blocks has the
dim ``residual_seq``, inside attention and MLP it is ``seq``: a table that sends ``residual_seq`` to ``model`` too is
Megatron's sequence parallelism (arXiv:2205.05198).

Shape suffixes: B batch, S sequence, E embed, H query heads, K key/value heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpar import hint
from jaxpar.attn.blocks import KEPT, SAVED
from jaxpar.attn.context import AUTO, Context, Laid
from jaxpar.copies import Cut, check_count
from jaxpar.copies import cut as cut_rows
from jaxpar.copies import join as join_rows
from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.host import on_host
from jaxpar.models.embedding import lookup
from jaxpar.models.interleaved import HALVES, block_in_copies, halved, laid_for_halves
from jaxpar.nnx import axes, stacked
from jaxpar.recompute import OUTPUT, SAVED_EMBED, Recompute
from jaxpar.waiting import cut
from jaxpar.weights import gather_weight, project

NAMES = (SAVED, KEPT, OUTPUT, "qkv", "mlp_hidden")
"""What tensors of a layer are called, for :class:`jaxpar.Recompute`."""

type Rope = tuple[jax.Array, jax.Array]
type Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and numerics of a Llama. ``dtype`` computes, ``param_dtype`` is stored.

    ``remat`` is what the backward pass computes again, a policy's name or a :class:`jaxpar.Recompute`; ``regather`` gathers sharded
    weights anew for it, from all or within groups of so many devices. ``copies`` runs the layers on so many parts of each device's rows (:func:`jaxpar.in_copies`), or, with ``copies_dim="seq"``, of its tokens. ``rope_factor`` > 1 stretches the low rotary frequencies as Llama 3.1 does, from ``rope_original_seq`` positions.

    Raises:
      ConfigError: ``heads`` is not a multiple of ``kv_heads``, ``head_dim`` is odd, or ``remat`` does not fit the layers.
    """

    vocab: int = 256
    embed: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 384
    rope_theta: float = 10_000.0
    rope_factor: float = 1.0
    rope_original_seq: int = 8192
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: str | Recompute = "none"
    regather: bool | int = True
    context: Context = AUTO
    copies: int = 1
    copies_dim: Cut = "batch"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"llama: heads={self.heads} is not a multiple of kv_heads={self.kv_heads}, so query heads cannot share "
                f"key/value heads evenly. Remedy: a kv_heads that divides {self.heads}."
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"llama: head_dim={self.head_dim} is odd; rotary positions turn pairs. Remedy: make it even."
            )
        Recompute.of(self.remat).segments(self.layers)
        check_count(self.copies, self.copies_dim)
        if halved(self) and self.context.order is not None:
            raise ConfigError(
                f"interleave_dim is 'seq', which lays out the tokens for its halves, but parallel.context's order is {self.context.order!r}. Remedy: leave "
                f"the order out, or interleave_dim: batch."
            )
        if self.copies > 1 and not isinstance(self.regather, bool):
            raise ConfigError(
                f"interleave_copies is {self.copies}, but regather is {self.regather}: the copies gather a layer's weights once for both, from all devices. "
                f"Remedy: regather: true or false, or interleave_copies: 1."
            )

    @property
    def matmul_params(self) -> int:
        """Parameters that take part in a matmul for every token (all but norms and the embedding lookup)."""
        attention = self.embed * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.embed * self.mlp) + self.embed * self.vocab

    @property
    def params(self) -> int:
        """All parameters."""
        lookup = 0 if self.tie_embeddings else self.embed * self.vocab
        return self.matmul_params + lookup + (2 * self.layers + 1) * self.embed

    def flops_per_token(self, seq: int) -> float:
        """Training FLOPs a token (forward + backward, no recompute), causal attention counted at half of seq²."""
        return 6.0 * self.matmul_params + 6.0 * self.layers * self.heads * self.head_dim * seq


PRESETS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(),
    "1b": LlamaConfig(
        vocab=32_000,
        embed=2048,
        layers=16,
        heads=16,
        kv_heads=16,
        head_dim=128,
        mlp=7168,
        dtype="bfloat16",
        remat="full",
    ),
    "llama3_1_8b": LlamaConfig(
        vocab=128_256,
        embed=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp=14_336,
        rope_theta=500_000.0,
        rope_factor=8.0,
        dtype="bfloat16",
        remat="full",
    ),
    "llama3_1_70b": LlamaConfig(
        vocab=128_256,
        embed=8192,
        layers=80,
        heads=64,
        kv_heads=8,
        head_dim=128,
        mlp=28_672,
        rope_theta=500_000.0,
        rope_factor=8.0,
        dtype="bfloat16",
        remat="full",
    ),
}


def preset(name: str, **changes: Any) -> LlamaConfig:
    """A preset by name, with some fields changed.

    >>> preset("1b").params
    1104218112

    Raises:
      ConfigError: no preset has this name.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"llama: unknown preset {name!r}.{did_you_mean(name, PRESETS)} Presets: {', '.join(PRESETS)}."
        )
    return replace(PRESETS[name], **changes)


def _kernel(
    key: jax.Array, shape: tuple[int, ...], dims: tuple[str, ...], fan_in: int, config: LlamaConfig
) -> nnx.Param:
    """A weight, truncated normal with variance 1 / fan_in."""
    init = axes(jax.nn.initializers.truncated_normal(stddev=1 / math.sqrt(fan_in)))(*dims)
    return nnx.Param(init(key, shape, jnp.dtype(config.param_dtype)))


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019), computed in at least fp32."""

    def __init__(self, config: LlamaConfig):
        ones = axes(jax.nn.initializers.ones)("norm")
        self.scale = nnx.Param(ones(jax.random.key(0), (config.embed,), jnp.dtype(config.param_dtype)))
        self.eps, self.dtype = config.norm_eps, jnp.dtype(config.dtype)

    def __call__(self, x_BSE: jax.Array) -> jax.Array:
        wide = x_BSE.astype(jnp.promote_types(x_BSE.dtype, jnp.float32))
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        # Else the compiler norms anew inside of each matmul that reads this: three times the work, a third of its own time.
        return jax.lax.optimization_barrier((wide * self.scale[...]).astype(self.dtype))


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        c = config
        e, h, k, d = c.embed, c.heads, c.kv_heads, c.head_dim
        self.q = _kernel(rngs.params(), (e, h, d), ("embed", "heads", "head_dim"), e, c)
        self.k = _kernel(rngs.params(), (e, k, d), ("embed", "kv_heads", "head_dim"), e, c)
        self.v = _kernel(rngs.params(), (e, k, d), ("embed", "kv_heads", "head_dim"), e, c)
        # Scaled by depth so that the residual stream's variance does not grow with it (GPT-2).
        self.o = _kernel(rngs.params(), (h, d, e), ("heads", "head_dim", "embed"), 2 * c.layers * h * d, c)
        self.how: dict[str, Any] = {"dtype": jnp.dtype(c.dtype), "regather": c.regather}
        self.context = c.context

    def __call__(
        self,
        x_BSE: jax.Array,
        rope: Rope,
        order: Laid,
        documents_BS: jax.Array | None,
        attend: Attend | None = None,
        *,
        half: bool = False,
    ) -> jax.Array:
        """[batch, seq, embed]; or only the first ``half`` of the work, what each head makes of the tokens: [batch, seq, heads, head_dim]."""
        kv_dims = ("embed", "kv_heads", "head_dim")
        # One by one: gathered together they come too late to hide behind the matmul before.
        (q,) = project(x_BSE, (self.q[...], ("embed", "heads", "head_dim")), **self.how)
        (k,) = project(x_BSE, (self.k[...], kv_dims), **self.how)
        (v,) = project(x_BSE, (self.v[...], kv_dims), **self.how)
        q, k, v = (checkpoint_name(x, "qkv") for x in (rotate(q, rope), rotate(k, rope), v))
        o_BSHD: jax.Array = self.context(q, k, v, order, documents_BS) if attend is None else attend(q, k, v)
        if half:
            return o_BSHD
        (y_BSE,) = project(o_BSHD, (self.o[...], ("heads", "head_dim", "embed")), summed=2, **self.how)
        return y_BSE

    def output(self, o_BSHD: jax.Array) -> jax.Array:
        """The other half."""
        (y_BSE,) = project(o_BSHD, (self.o[...], ("heads", "head_dim", "embed")), summed=2, **self.how)
        return y_BSE


class SwiGLU(nnx.Module):
    """Gated MLP (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        c = config
        self.gate = _kernel(rngs.params(), (c.embed, c.mlp), ("embed", "mlp"), c.embed, c)
        self.up = _kernel(rngs.params(), (c.embed, c.mlp), ("embed", "mlp"), c.embed, c)
        self.down = _kernel(rngs.params(), (c.mlp, c.embed), ("mlp", "embed"), 2 * c.layers * c.mlp, c)
        self.how: dict[str, Any] = {"dtype": jnp.dtype(c.dtype), "regather": c.regather}

    def __call__(self, x_BSE: jax.Array, *, half: bool = False) -> jax.Array:
        """[batch, seq, embed]; or only the first ``half`` of the work, the gated units: [batch, seq, mlp]."""
        dims = ("embed", "mlp")
        gate, up = project(x_BSE, (self.gate[...], dims), (self.up[...], dims), **self.how)
        gate, up = hint(gate, "batch", "seq", "mlp"), hint(up, "batch", "seq", "mlp")
        hidden = checkpoint_name(jax.nn.silu(gate) * up, "mlp_hidden")
        if half:
            return hidden
        (y_BSE,) = project(hidden, (self.down[...], ("mlp", "embed")), **self.how)
        return y_BSE

    def output(self, hidden_BSF: jax.Array) -> jax.Array:
        """The other half."""
        (y_BSE,) = project(hidden_BSF, (self.down[...], ("mlp", "embed")), **self.how)
        return y_BSE


class Block(nnx.Module):
    """One layer: attention and MLP, each on the normed residual stream; ``attend(q, k, v)`` in the place of its own, if given."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config)
        self.mlp = SwiGLU(config, rngs)

    def __call__(
        self,
        x_BSE: jax.Array,
        rope: Rope,
        order: Laid = None,
        documents_BS: jax.Array | None = None,
        attend: Attend | None = None,
    ) -> jax.Array:
        residual = ("batch", "residual_seq", "embed")
        h_BSE = hint(self.attention_norm(x_BSE), "batch", "seq", "embed")
        x_BSE += checkpoint_name(hint(self.attention(h_BSE, rope, order, documents_BS, attend), *residual), OUTPUT)
        h_BSE = hint(self.mlp_norm(x_BSE), "batch", "seq", "embed")
        return x_BSE + checkpoint_name(hint(self.mlp(h_BSE), *residual), OUTPUT)


def layer_shapes(config: LlamaConfig, shape: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Queries and keys of a layer, of tokens [batch, seq]."""
    c = config
    q, k = (jax.ShapeDtypeStruct((*shape, n, c.head_dim), jnp.dtype(c.dtype)) for n in (c.heads, c.kv_heads))
    return q, k


class Llama(nnx.Module):
    """A Llama: tokens [batch, seq] int → logits [batch, seq, vocab] in ``config.dtype``.

    >>> import jaxpar as jp
    >>> from flax import nnx
    >>> rules = jp.Rules(batch="data", seq=None, residual_seq=None, embed=None, norm=None, heads=None, kv_heads=None,
    ...                  head_dim=None, mlp=None, vocab=None, layers=None)
    >>> with jp.Layout(jp.MeshSpec(data=-1).build(), rules):
    ...     Llama(preset("tiny", layers=1), rngs=nnx.Rngs(0))(jnp.zeros((8, 16), int)).shape
    (8, 16, 256)
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = _kernel(rngs.params(), (config.vocab, config.embed), ("vocab", "embed"), config.embed, config)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=stacked("layers"))
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs)

        self.blocks = blocks(rngs)
        self.norm = RMSNorm(config)
        if not config.tie_embeddings:
            shape = (config.embed, config.vocab)
            self.head = _kernel(rngs.params(), shape, ("embed", "vocab"), config.embed, config)

    def __call__(self, tokens_BS: jax.Array, positions_BS: jax.Array | None = None) -> jax.Array:
        return hint(self.hidden(tokens_BS, positions_BS) @ self.unembedding(), "batch", "seq", "vocab")

    def laid(self, *arrays_BS: jax.Array, order_BS: jax.Array | None = None) -> tuple[Laid, Any, tuple[jax.Array, ...]]:
        """Tokens and targets as :meth:`hidden` takes them fastest, their positions, and the order that they lie in.

        ``order_BS`` is one that comes with the batch; see :meth:`jaxpar.attn.context.Context.laid`.
        """
        if halved(self.config):
            return laid_for_halves(*arrays_BS)
        q, k = layer_shapes(self.config, arrays_BS[0].shape)
        return self.config.context.laid(q, k, *arrays_BS, order_BS=order_BS)

    def hidden(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array | None = None,
        order: Laid = None,
        documents_BS: jax.Array | None = None,
    ) -> jax.Array:
        """What the last layer gives, normed: [batch, seq, embed] in ``config.dtype``; tokens see those of their own document."""
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        tokens_BS = hint(tokens_BS, "batch", "seq")
        if positions_BS is None:
            positions_BS = jax.lax.broadcasted_iota(jnp.int32, tokens_BS.shape, 1)
        if halved(config) and order != HALVES:
            return self._in_halves(tokens_BS, positions_BS, documents_BS)
        rope = rope_table(positions_BS, config)
        x_BSE: Any = lookup(self.embedding[...], tokens_BS, dtype)

        blocks, recompute = _cast(self.blocks, dtype), Recompute.of(config.remat)
        x_BSE = cut_rows(x_BSE, config.copies, dim=config.copies_dim) if config.copies > 1 else x_BSE
        for first, last, again in recompute.segments(config.layers):
            layers = _stacked(recompute if again else Recompute("none"), config, rope, order, documents_BS)
            x_BSE = layers(blocks if (first, last) == (0, config.layers) else _part(blocks, first, last), x_BSE)
        x_BSE = join_rows(x_BSE, dim=config.copies_dim) if config.copies > 1 else x_BSE
        return hint(self.norm(x_BSE), "batch", "seq", "embed")

    def _in_halves(self, tokens_BS: jax.Array, positions_BS: jax.Array, documents_BS: jax.Array | None) -> jax.Array:
        """:meth:`hidden` of tokens as they come, for copies that want them in an order of their own."""
        given = (tokens_BS, positions_BS) if documents_BS is None else (tokens_BS, positions_BS, documents_BS)
        order, at, (tokens_BS, positions_BS, *packed) = laid_for_halves(*given)
        h_BSE = self.hidden(tokens_BS, positions_BS, order, *packed)
        return hint(h_BSE[:, jnp.argsort(at[0])], "batch", "seq", "embed")

    def unembedding(self) -> jax.Array:
        """The head [embed, vocab] in the compute dtype: its product with :meth:`hidden` is the logits."""
        head_EV = self.embedding[...].T if self.config.tie_embeddings else self.head[...]
        return gather_weight(head_EV, "embed", "vocab", dtype=jnp.dtype(self.config.dtype))


def _stacked(
    recompute: Recompute, config: LlamaConfig, rope: Rope, order: Laid, documents_BS: jax.Array | None
) -> Callable[[Block, jax.Array], jax.Array]:
    """A stack of layers, one after the other."""
    kept = ("batch", "residual_seq", SAVED_EMBED if recompute.slice_activation else "embed")
    laid = lambda x_BSE, *dims: jax.tree.map(lambda x: hint(x, *dims), x_BSE)

    @remat(recompute, config.regather)
    def layer(block: Block, x_BSE: Any) -> Any:
        x_BSE = laid(x_BSE, "batch", "residual_seq", "embed") if recompute.slice_activation else x_BSE
        if config.copies > 1:
            how = config.copies, config.copies_dim, config.context
            return block_in_copies(*how, rope, order, documents_BS)(block, x_BSE)
        return block(x_BSE, rope, order, documents_BS)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=stacked("layers"))
    def layers(block: Block, x_BSE: Any) -> Any:
        # Before the layer too: it is what the layer is given that is kept.
        return laid(layer(block, laid(x_BSE, *kept)), *kept) if recompute.slice_activation else layer(block, x_BSE)

    return layers


def remat(
    recompute: Recompute, regather: bool | int, but: Callable[[Any], Any] = lambda policy: policy
) -> Callable[[Any], Any]:
    """Recomputation of a layer by a policy, or by what ``but`` makes of it."""
    if jax.config.jax_disable_jit:
        return lambda f: f  # checkpointing would trace, where somebody wants to see values
    policy = but(recompute.rule(NAMES, regather=regather is True))
    # prevent_cse guards against a merge with the forward pass that a scan already rules out.
    return lambda f: nnx.remat(f, prevent_cse=False, policy=policy)


def _part(module: nnx.Module, first: int, last: int) -> nnx.Module:
    """Some of a stack of layers."""
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(lambda x: cut(x, first, last), state))


def _cast(module: nnx.Module, dtype: Any) -> nnx.Module:
    """The module with its matrices in ``dtype``: cast before the scan, their gradients are stacked in it too."""
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 2 and not on_host(x) else x, state))


def rope_table(positions_BS: jax.Array, config: LlamaConfig) -> Rope:
    """Cosines and sines [batch, seq, 1, head_dim / 2] of the rotary angles (Su et al. 2021), in fp32."""
    frequency = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    if config.rope_factor > 1:
        # Llama 3.1: wavelengths beyond the original window are stretched, those well inside it kept, with a ramp between.
        turns = config.rope_original_seq * frequency / (2 * math.pi)
        keep = jnp.clip((turns - 1) / (4 - 1), 0, 1)
        frequency = frequency * (keep + (1 - keep) / config.rope_factor)
    angle = positions_BS[..., None, None].astype(jnp.float32) * frequency
    # Else they are computed again in every layer.
    return jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))


def rotate(x_BSHD: jax.Array, rope: Rope) -> jax.Array:
    """Turn the pairs (i, i + head_dim / 2) of each head by the angles of its position."""
    cos, sin = rope
    low, high = jnp.split(x_BSHD, 2, axis=-1)
    return jnp.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1).astype(x_BSHD.dtype)


def make_llama(config: LlamaConfig) -> Callable[[jax.Array], Llama]:
    """``make_model`` for :func:`jaxpar.init`."""
    return lambda key: Llama(config, rngs=nnx.Rngs(key))
