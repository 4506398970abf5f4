"""The layers of a mixture-of-experts decoder: the mixture, latent attention, and a block.

Shape suffixes: B batch, S sequence, E embed, H heads, D head dim, K choices, X experts, F expert_mlp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpar import hint
from jaxpar.models.llama.layers import Attend, Attention, RMSNorm, SwiGLU, TokenInfo, WindowedAttention, _kernel, rotate
from jaxpar.models.moe.config import LATENT_EPS, LatentAttentionConfig, MoEConfig
from jaxpar.nnx import axes
from jaxpar.parallel.experts.balance import load_balance_loss, router_z_loss
from jaxpar.parallel.experts.bias import bias_loss
from jaxpar.parallel.experts.experts import experts
from jaxpar.parallel.experts.metrics import routing_metrics
from jaxpar.parallel.experts.routing import Routing
from jaxpar.parallel.pipeline.executor.layer_inputs import LayerScalars
from jaxpar.parallel.precision.int8 import Int8
from jaxpar.parallel.precision.quantized_array import QuantizedArray
from jaxpar.parallel.zero.gather import gather_weight, sharded_dot
from jaxpar.training.remat import OUTPUT

RESIDUAL = ("batch", "residual_seq", "embed")
INNER, OUTER = ("experts", "embed", "expert_mlp"), ("experts", "expert_mlp", "embed")


class Mixture(nnx.Module):
    """A mixture of experts, with shared experts beside it."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs):
        c = config
        x, e, f = c.experts, c.embed, c.expert_mlp
        self.router = _kernel(rngs.params(), (e, x), ("embed", None), e, c)
        self.gate = _kernel(rngs.params(), (x, e, f), INNER, e, c)
        self.up = _kernel(rngs.params(), (x, e, f), INNER, e, c)
        self.down = _kernel(rngs.params(), (x, f, e), OUTER, 2 * c.layers * f, c)
        if c.shared_experts:
            self.shared = SwiGLU(replace(c, mlp=c.shared_experts * f), rngs)
        if c.bias_rate is not None:
            zeros = axes(jax.nn.initializers.zeros)("norm")
            self.router_bias = nnx.Param(zeros(rngs.params(), (x,), jnp.float32))
        self.config = c

    def __call__(self, x_BSE: jax.Array, *, decoding: bool = False) -> tuple[jax.Array, LayerScalars]:
        """Returns the sum of the experts' results for ``x_BSE`` [batch, seq, embed], and the layer's scalars.

        With ``decoding`` no choice is dropped, or a request's tokens would depend on those of other requests, and few
        tokens take the dispatch that sends the fewest bytes.
        """
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        router_EX = gather_weight(self.router[...], "embed", None, dtype=dtype, exact=True)
        logits_BSX = jnp.dot(x_BSE, router_EX, preferred_element_type=jnp.promote_types(dtype, jnp.float32))
        bias_X = self.router_bias[...] if c.bias_rate is not None else None
        routing = c.router(logits_BSX, bias_X)
        weights = ((self.gate, INNER), (self.up, INNER), (self.down, OUTER))
        options: dict[str, Any] = {"dispatch": c.dispatch, "capacity_factor": c.capacity_factor, "pieces": c.pieces}
        options["overlap"] = c.overlap_matmuls

        def cast(w: Any) -> Any:
            w = (w.by_channel([-2]) or w) if isinstance(w, QuantizedArray) else w
            return w if isinstance(w, Int8) else w.astype(dtype)

        cast_weights = ((cast(w[...]), dims) for w, dims in weights)
        y_BSE, dropped = experts(x_BSE, routing, *cast_weights, x_dims=RESIDUAL, **({} if decoding else options))
        if c.shared_experts:
            y_BSE += hint(self.shared(hint(x_BSE, "batch", "seq", "embed")), *RESIDUAL)
        return y_BSE, self._scalars(routing, dropped)

    def _scalars(self, routing: Routing, dropped: jax.Array) -> LayerScalars:
        c = self.config
        # The model sums over layers, so a mean over layers needs each layer's share.
        scalars = {name: value / c.expert_layers for name, value in routing_metrics(routing, dropped=dropped).items()}
        loss = jnp.zeros((), jnp.float32)
        if c.balance_loss:
            loss += c.balance_loss * load_balance_loss(routing, per=c.balance_per)
        if c.z_loss:
            loss += c.z_loss * router_z_loss(routing)
        if c.bias_rate is not None:
            loss += bias_loss(self.router_bias[...], routing)
        return {"loss": loss, **scalars}


class LatentAttention(WindowedAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) with rotary positions."""

    def __init__(self, config: MoEConfig, latent: LatentAttentionConfig, rngs: nnx.Rngs):
        super().__init__(config)
        c, a = config, latent
        e, h, query = c.embed, c.heads, c.head_dim + a.rope_dim
        if a.q_latent is None:
            self.q = _kernel(rngs.params(), (e, h, query), ("embed", "heads", "head_dim"), e, c)
        else:
            self.q_down = _kernel(rngs.params(), (e, a.q_latent), ("embed", "latent"), e, c)
            self.q_norm = RMSNorm(c, a.q_latent, LATENT_EPS)
            self.q_up = _kernel(rngs.params(), (a.q_latent, h, query), ("latent", "heads", "head_dim"), a.q_latent, c)
        self.kv_down = _kernel(rngs.params(), (e, a.kv_latent + a.rope_dim), ("embed", "latent"), e, c)
        self.kv_norm = RMSNorm(c, a.kv_latent, LATENT_EPS)
        up = (a.kv_latent, h, c.head_dim + a.value_dim)
        self.kv_up = _kernel(rngs.params(), up, ("latent", "heads", "head_dim"), a.kv_latent, c)
        out = (h, a.value_dim, e)
        self.o = _kernel(rngs.params(), out, ("heads", "head_dim", "embed"), 2 * c.layers * h * a.value_dim, c)
        self.latent, self.head_dim = a, c.head_dim

    def __call__(self, x_BSE: jax.Array, tokens: TokenInfo, attend: Attend | None = None) -> jax.Array:
        """Apply attention to ``x_BSE`` [batch, seq, embed]; the arguments are those of the Llama's attention."""
        a, d = self.latent, self.head_dim
        q_BSHD = self._query(x_BSE)
        q_BSHD = jnp.concatenate((q_BSHD[..., :d], rotate(q_BSHD[..., d:], tokens.rope)), -1)
        (kv_BSL,) = sharded_dot(x_BSE, (self.kv_down[...], ("embed", "latent")), **self.options)
        latent_BSL, shared_BSR = kv_BSL[..., : a.kv_latent], kv_BSL[..., a.kv_latent :]
        up = (self.kv_up[...], ("latent", "heads", "head_dim"))
        (kv_BSHD,) = sharded_dot(self.kv_norm(latent_BSL), up, **self.options)
        rotated_BSHR = rotate(shared_BSR[..., None, :], tokens.rope)
        rotated_BSHR = jnp.broadcast_to(rotated_BSHR, (*kv_BSHD.shape[:3], a.rope_dim))
        k_BSHD = jnp.concatenate((kv_BSHD[..., :d], rotated_BSHR), -1)
        q, k, v = (checkpoint_name(x, "qkv") for x in (q_BSHD, k_BSHD, kv_BSHD[..., d:]))
        o_BSHD = attend(q, k, v) if attend else self.attend(q, k, v, tokens)
        return sharded_dot(o_BSHD, (self.o[...], ("heads", "head_dim", "embed")), summed=2, **self.options)[0]

    def _query(self, x_BSE: jax.Array) -> jax.Array:
        if self.latent.q_latent is None:
            return sharded_dot(x_BSE, (self.q[...], ("embed", "heads", "head_dim")), **self.options)[0]
        (down_BSL,) = sharded_dot(x_BSE, (self.q_down[...], ("embed", "latent")), **self.options)
        up = (self.q_up[...], ("latent", "heads", "head_dim"))
        return sharded_dot(self.q_norm(down_BSL), up, **self.options)[0]


class _Layer(nnx.Module):
    """Norms and attention, as both kinds of block have them."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs):
        latent = config.latent_attention
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs) if latent is None else LatentAttention(config, latent, rngs)
        self.mlp_norm = RMSNorm(config)

    def attended(self, x_BSE: jax.Array, tokens: TokenInfo, attend: Attend | None) -> jax.Array:
        h_BSE = hint(self.attention_norm(x_BSE), "batch", "seq", "embed")
        return x_BSE + checkpoint_name(hint(self.attention(h_BSE, tokens, attend), *RESIDUAL), OUTPUT)


class DenseBlock(_Layer):
    """One of the first layers, with a dense MLP."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.mlp = SwiGLU(config, rngs)

    def __call__(self, x_BSE: jax.Array, tokens: TokenInfo, attend: Attend | None = None) -> jax.Array:
        x_BSE = self.attended(x_BSE, tokens, attend)
        h_BSE = hint(self.mlp_norm(x_BSE), "batch", "seq", "embed")
        return x_BSE + checkpoint_name(hint(self.mlp(h_BSE), *RESIDUAL), OUTPUT)


class MixtureBlock(_Layer):
    """One layer with experts."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.mixture = Mixture(config, rngs)

    def __call__(
        self, x_BSE: jax.Array, tokens: TokenInfo, attend: Attend | None = None
    ) -> tuple[jax.Array, LayerScalars]:
        x_BSE = self.attended(x_BSE, tokens, attend)
        # Only decoding replaces the attention.
        y_BSE, scalars = self.mixture(hint(self.mlp_norm(x_BSE), *RESIDUAL), decoding=attend is not None)
        return x_BSE + checkpoint_name(hint(y_BSE, *RESIDUAL), OUTPUT), scalars
