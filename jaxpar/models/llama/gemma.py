"""The layer of Gemma 2 and 3: norms before and after attention and MLP, and a GELU in the MLP's gate."""

from __future__ import annotations

import functools

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpar import hint
from jaxpar.models.llama.config import LlamaConfig
from jaxpar.models.llama.layers import Attend, Attention, RMSNorm, SwiGLU, TokenInfo
from jaxpar.training.remat import OUTPUT


class GeGLU(SwiGLU):
    """Gated MLP with a GELU in its tanh form (Shazeer 2020, arXiv:2002.05202)."""

    activation = staticmethod(functools.partial(jax.nn.gelu, approximate=True))


class GemmaBlock(nnx.Module):
    """One layer of a Gemma. The arguments are those of :class:`jaxpar.models.llama.layers.Block`."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs)
        self.post_attention_norm = RMSNorm(config)
        self.mlp_norm = RMSNorm(config)
        self.mlp = GeGLU(config, rngs)
        self.post_mlp_norm = RMSNorm(config)

    def __call__(self, x_BSE: jax.Array, tokens: TokenInfo, attend: Attend | None = None) -> jax.Array:
        residual = ("batch", "residual_seq", "embed")
        h_BSE = hint(self.attention_norm(x_BSE), "batch", "seq", "embed")
        y_BSE = checkpoint_name(hint(self.attention(h_BSE, tokens, attend), *residual), OUTPUT)
        x_BSE += self.post_attention_norm(y_BSE)
        h_BSE = hint(self.mlp_norm(x_BSE), "batch", "seq", "embed")
        y_BSE = checkpoint_name(hint(self.mlp(h_BSE), *residual), OUTPUT)
        return x_BSE + self.post_mlp_norm(y_BSE)
