"""The layers of a Llama: norms, grouped-query attention, gated MLP, rotary positions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpar import hint
from jaxpar.models.llama.config import LlamaConfig
from jaxpar.models.llama.rope import frequencies
from jaxpar.nnx import axes
from jaxpar.parallel.attention.context import TokenOrder
from jaxpar.parallel.overlap.sequence_dot import dot_scatter, gather_dot
from jaxpar.parallel.zero.gather import gather_weight, sharded_dot
from jaxpar.training.remat import OUTPUT

type Rope = tuple[jax.Array, jax.Array]
"""Cosines and sines of the rotary angles, as :func:`rope_table` returns them."""


type HasWindow = bool | jax.Array
"""Whether a layer has the sliding window; traced where one program runs layers of both kinds."""


class TokenInfo(NamedTuple):
    """What the layers know of the tokens besides their activations.

    Attributes:
      rope: rotary angles of the tokens.
      order: the order in which the tokens are sharded over the sequence; ``None`` for the natural one.
      documents_BS: document of each token [batch, seq] int; tokens attend within their document.
      local_rope: rotary angles in layers with the sliding window, if they have other ones.
      local: whether this layer has the model's sliding window, if there is one.
    """

    rope: Rope
    order: TokenOrder = None
    documents_BS: jax.Array | None = None
    local_rope: Rope | None = None
    local: HasWindow = True

    def of_layer(self, local: HasWindow) -> TokenInfo:
        """Returns the same for a layer with (``local``) or without the sliding window."""
        rope = self.rope
        if self.local_rope is not None:
            # A traced choice between two small tables costs less than two programs.
            rope = jax.tree.map(lambda x, y: jnp.where(local, x, y), self.local_rope, self.rope)
        return self._replace(rope=rope, local_rope=None, local=local)


type Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""``attend(q, k, v) -> o``: queries and output [batch, seq, heads, head_dim], keys and values
[batch, seq, kv_heads, head_dim]."""


def _kernel(
    key: jax.Array, shape: tuple[int, ...], dims: tuple[str | None, ...], fan_in: int, config: LlamaConfig
) -> nnx.Param:
    """Initialize a weight from a truncated normal with variance 1 / fan_in."""
    init = axes(jax.nn.initializers.truncated_normal(stddev=1 / math.sqrt(fan_in)))(*dims)
    return nnx.Param(init(key, shape, jnp.dtype(config.param_dtype)))


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467), computed in at least fp32.

    The parameter of a Gemma is the difference of the scale from 1, so weight decay pulls the scale to 1.
    """

    def __init__(self, config: LlamaConfig, size: int | None = None, eps: float | None = None):
        self.offset = 0 if config.gemma is None else 1
        first = axes(jax.nn.initializers.constant(1 - self.offset))("norm")
        self.scale = nnx.Param(first(jax.random.key(0), (size or config.embed,), jnp.dtype(config.param_dtype)))
        self.eps, self.dtype = config.norm_eps if eps is None else eps, jnp.dtype(config.dtype)

    def __call__(self, x_BSE: jax.Array) -> jax.Array:
        x_fp32 = x_BSE.astype(jnp.promote_types(x_BSE.dtype, jnp.float32))
        x_fp32 = x_fp32 * jax.lax.rsqrt(jnp.mean(x_fp32 * x_fp32, axis=-1, keepdims=True) + self.eps)
        # Without the barrier the compiler recomputes the norm inside each matmul that reads it. That is three times the
        # work, and a third of the compile time.
        scale = self.scale[...] + self.offset if self.offset else self.scale[...]
        return jax.lax.optimization_barrier((x_fp32 * scale).astype(self.dtype))


class WindowedAttention(nnx.Module):
    """The attention itself, with the mask, scale and soft cap of the layer; subclasses add the projections."""

    def __init__(self, config: LlamaConfig):
        c, softcap = config, None if config.gemma is None else config.gemma.attention_softcap
        self.options: dict[str, Any] = {"dtype": jnp.dtype(c.dtype), "reshard_after_forward": c.reshard_after_forward}
        self.context, self.window = c.context, c.sliding_window
        self.score_options: dict[str, float | None] = {"scale": c.score_scale, "softcap": softcap}

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tokens: TokenInfo) -> jax.Array:
        """Returns causal attention; the shapes are those of :data:`Attend`."""
        return by_window(tokens.local, self.window, functools.partial(self._attend, q, k, v, tokens))

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tokens: TokenInfo, window: int | None) -> jax.Array:
        return self.context(q, k, v, tokens.order, tokens.documents_BS, window=window, **self.score_options)


def by_window(local: HasWindow, window: int | None, run: Callable[[int | None], Any]) -> Any:
    """Returns ``run(window)`` in a layer with the sliding window, else ``run(None)``.

    The window is static in ``run`` in both cases, so that attention skips the tiles outside of it.
    """
    if isinstance(local, bool) or window is None:
        return run(window if local is not False else None)
    return jax.lax.cond(local, lambda: run(window), lambda: run(None))


class Attention(WindowedAttention):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with rotary positions."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        super().__init__(config)
        c = config
        e, h, k, d = c.embed, c.heads, c.kv_heads, c.head_dim
        self.q = _kernel(rngs.params(), (e, h, d), ("embed", "heads", "head_dim"), e, c)
        self.k = _kernel(rngs.params(), (e, k, d), ("embed", "kv_heads", "head_dim"), e, c)
        self.v = _kernel(rngs.params(), (e, k, d), ("embed", "kv_heads", "head_dim"), e, c)
        # Scaled by depth so that the residual stream's variance does not grow with it (GPT-2).
        self.o = _kernel(rngs.params(), (h, d, e), ("heads", "head_dim", "embed"), 2 * c.layers * h * d, c)
        if c.qkv_bias:
            zeros = lambda size, name: nnx.Param(
                axes(jax.nn.initializers.zeros)(name, "head_dim")(rngs.params(), (size, d), jnp.dtype(c.param_dtype))
            )
            self.q_bias, self.k_bias, self.v_bias = zeros(h, "heads"), zeros(k, "kv_heads"), zeros(k, "kv_heads")
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c, d), RMSNorm(c, d)
        self.qk_norm, self.qkv_bias = c.qk_norm, c.qkv_bias

    def __call__(
        self,
        x_BSE: jax.Array,
        tokens: TokenInfo,
        attend: Attend | None = None,
        *,
        half: bool = False,
        residual: bool = False,
    ) -> jax.Array:
        """Apply attention to ``x_BSE`` [batch, seq, embed].

        Args:
          x_BSE: the normed residual stream.
          tokens: positions, order and documents of the tokens.
          attend: replaces the attention itself, for example to use a cache.
          half: stop before the output projection, which :meth:`output` applies.
          residual: ``x_BSE`` and the result are sharded as the residual stream, along ``residual_seq``.

        Returns:
          [batch, seq, embed]; with ``half`` the heads' outputs [batch, seq, heads, head_dim].
        """
        kv_dims = ("embed", "kv_heads", "head_dim")
        weights = ((self.q[...], ("embed", "heads", "head_dim")), (self.k[...], kv_dims), (self.v[...], kv_dims))
        # Not joined: a single all-gather of the three weights would finish too late to overlap with the previous
        # matmul.
        dot = gather_dot if residual else sharded_dot
        q, k, v = dot(x_BSE, *weights, joined=False, **self.options)
        if self.qkv_bias:
            biases = ((self.q_bias, "heads"), (self.k_bias, "kv_heads"), (self.v_bias, "kv_heads"))
            dtype = self.options["dtype"]
            q, k, v = (
                x + gather_weight(bias[...], name, "head_dim", dtype=dtype)
                for x, (bias, name) in zip((q, k, v), biases, strict=True)
            )
        q, k = (self.q_norm(q), self.k_norm(k)) if self.qk_norm else (q, k)
        q, k, v = (checkpoint_name(x, "qkv") for x in (rotate(q, tokens.rope), rotate(k, tokens.rope), v))
        o_BSHD = attend(q, k, v) if attend else self.attend(q, k, v, tokens)
        if residual:
            return dot_scatter(o_BSHD, (self.o[...], ("heads", "head_dim", "embed")), summed=2, **self.options)
        return o_BSHD if half else self.output(o_BSHD)

    def output(self, o_BSHD: jax.Array) -> jax.Array:
        """Apply the output projection to ``o_BSHD`` [batch, seq, heads, head_dim]; returns [batch, seq, embed]."""
        return sharded_dot(o_BSHD, (self.o[...], ("heads", "head_dim", "embed")), summed=2, **self.options)[0]


class SwiGLU(nnx.Module):
    """Gated MLP (Shazeer 2020, arXiv:2002.05202)."""

    activation = staticmethod(jax.nn.silu)

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        c = config
        self.gate = _kernel(rngs.params(), (c.embed, c.mlp), ("embed", "mlp"), c.embed, c)
        self.up = _kernel(rngs.params(), (c.embed, c.mlp), ("embed", "mlp"), c.embed, c)
        self.down = _kernel(rngs.params(), (c.mlp, c.embed), ("mlp", "embed"), 2 * c.layers * c.mlp, c)
        self.options: dict[str, Any] = {"dtype": jnp.dtype(c.dtype), "reshard_after_forward": c.reshard_after_forward}

    def __call__(self, x_BSE: jax.Array, *, half: bool = False, residual: bool = False) -> jax.Array:
        """Apply the MLP to ``x_BSE`` [batch, seq, embed].

        With ``half`` stop before the down projection, which :meth:`output` applies, and return [batch, seq, mlp].
        With ``residual``, ``x_BSE`` and the result are sharded as the residual stream, along ``residual_seq``.
        """
        dims, dot = ("embed", "mlp"), gather_dot if residual else sharded_dot
        gate, up = dot(x_BSE, (self.gate[...], dims), (self.up[...], dims), **self.options)
        gate, up = hint(gate, "batch", "seq", "mlp"), hint(up, "batch", "seq", "mlp")
        hidden = checkpoint_name(self.activation(gate) * up, "mlp_hidden")
        if residual:
            return dot_scatter(hidden, (self.down[...], ("mlp", "embed")), **self.options)
        return hidden if half else self.output(hidden)

    def output(self, hidden_BSF: jax.Array) -> jax.Array:
        """Apply the down projection to ``hidden_BSF`` [batch, seq, mlp]; returns [batch, seq, embed]."""
        return sharded_dot(hidden_BSF, (self.down[...], ("mlp", "embed")), **self.options)[0]


class Block(nnx.Module):
    """One layer: attention and MLP, each on the normed residual stream.

    ``attend(q, k, v)`` replaces the layer's own attention.
    """

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config)
        self.mlp = SwiGLU(config, rngs)
        self.overlap_matmuls = config.overlap_matmuls

    def __call__(self, x_BSE: jax.Array, tokens: TokenInfo, attend: Attend | None = None) -> jax.Array:
        residual = ("batch", "residual_seq", "embed")
        given = residual if self.overlap_matmuls else ("batch", "seq", "embed")
        h_BSE = hint(self.attention_norm(x_BSE), *given)
        y_BSE = self.attention(h_BSE, tokens, attend, residual=self.overlap_matmuls)
        x_BSE += checkpoint_name(hint(y_BSE, *residual), OUTPUT)
        h_BSE = hint(self.mlp_norm(x_BSE), *given)
        return x_BSE + checkpoint_name(hint(self.mlp(h_BSE, residual=self.overlap_matmuls), *residual), OUTPUT)


def layer_shapes(config: LlamaConfig, shape: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the shapes of a layer's queries and keys for tokens of ``shape`` [batch, seq]."""
    of_heads = lambda n: jax.ShapeDtypeStruct((*shape, n, config.qk_dim), jnp.dtype(config.dtype))
    return of_heads(config.heads), of_heads(config.kv_heads)


def token_info(
    positions_BS: jax.Array, config: LlamaConfig, order: TokenOrder = None, documents_BS: jax.Array | None = None
) -> TokenInfo:
    """Returns what the layers know of tokens at these positions."""
    rope, local_rope = rope_table(positions_BS, config), local_rope_table(positions_BS, config)
    return TokenInfo(rope, order, documents_BS, local_rope)


def rope_table(positions_BS: jax.Array, config: LlamaConfig, *, local: bool = False) -> Rope:
    """Returns fp32 cosines and sines [batch, seq, 1, rope_dim / 2] of the rotary angles.

    ``local`` gives those of layers with the sliding window.
    """
    theta, scaling = config.rope_theta, config.rope_scaling
    if local and config.gemma is not None and config.gemma.local_rope_theta is not None:
        theta, scaling = config.gemma.local_rope_theta, None
    angle = positions_BS[..., None, None].astype(jnp.float32) * frequencies(config.rope_dim, theta, scaling)
    factor = 1.0 if scaling is None else scaling.rotated_factor
    cos, sin = (f(angle) if factor == 1 else f(angle) * factor for f in (jnp.cos, jnp.sin))
    # The barrier keeps the compiler from recomputing them in every layer.
    return jax.lax.optimization_barrier((cos, sin))


def local_rope_table(positions_BS: jax.Array, config: LlamaConfig) -> Rope | None:
    """Returns :func:`rope_table` of layers with the sliding window; ``None`` if it is that of all layers."""
    own = config.gemma is not None and config.gemma.local_rope_theta is not None
    return rope_table(positions_BS, config, local=True) if own else None


def rotate(x_BSHD: jax.Array, rope: Rope) -> jax.Array:
    """Rotate the pairs (i, i + head_dim / 2) of each head by the angles of their position."""
    cos, sin = rope
    low, high = jnp.split(x_BSHD, 2, axis=-1)
    return jnp.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1).astype(x_BSHD.dtype)
