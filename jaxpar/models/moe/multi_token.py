"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): layers that predict further tokens in training.

The layer of depth k takes, for each position i, the output of depth k - 1 (of the model itself for k = 1) and the
embedding of token i + k, norms both, projects the pair to the model's width, and runs one block with experts. The
model's own output head then predicts token i + k + 1. Generation does not use these layers.

The output of the model is taken after its last norm, as the published weights are used for speculative decoding; and so
is that of each depth. Positions without a token i + k + 1 have no loss; the others are summed and divided by the number
of all targets (equation 24 of the paper).

Shape suffixes: B batch, S sequence, E embed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar import hint
from jaxpar.models.embedding import lookup
from jaxpar.models.llama.layers import RMSNorm, TokenInfo, _kernel
from jaxpar.models.llama.model import remat
from jaxpar.models.losses import linear_cross_entropy, output_and_scalars
from jaxpar.models.moe.config import MoEConfig
from jaxpar.models.moe.layers import RESIDUAL, MixtureBlock
from jaxpar.parallel.zero.gather import gather_weight
from jaxpar.training.remat import RematPolicy

PREFIX = "mtp_"
"""The start of the names of the arrays that :func:`further_targets` adds to a batch."""


class PredictionLayer(nnx.Module):
    """The layer of one depth."""

    def __init__(self, config: MoEConfig, rngs: nnx.Rngs):
        self.token_norm, self.hidden_norm = RMSNorm(config), RMSNorm(config)
        width = 2 * config.embed
        self.projection = _kernel(rngs.params(), (width, config.embed), ("embed", None), width, config)
        self.block = MixtureBlock(config, rngs)
        self.norm = RMSNorm(config)
        self.dtype = jnp.dtype(config.dtype)

    def __call__(self, h_BSE: jax.Array, e_BSE: jax.Array, tokens: TokenInfo) -> tuple[jax.Array, jax.Array]:
        """Returns the normed output [batch, seq, embed], and the loss of the block's router.

        Args:
          h_BSE: the normed output of the depth before.
          e_BSE: the embeddings of the tokens at this depth.
          tokens: positions, order and documents, as for the model's own layers.
        """
        pair_BSF = jnp.concatenate((self.token_norm(e_BSE), self.hidden_norm(h_BSE)), -1)
        weight_FE = gather_weight(self.projection[...], "embed", None, dtype=self.dtype)
        x_BSE = hint(hint(pair_BSF, "batch", "residual_seq", None) @ weight_FE, *RESIDUAL)
        x_BSE, scalars = output_and_scalars(self.block(x_BSE, tokens))
        return hint(self.norm(x_BSE), "batch", "seq", "embed"), scalars["loss"]


def further_targets(batch: Mapping[str, jax.Array], depth: int) -> dict[str, jax.Array]:
    """Returns the tokens that each depth predicts, and which of them count: arrays [batch, seq] in the natural order.

    Args:
      batch: ``targets``, and optionally ``loss_mask`` and ``segment_ids``; tokens of another document do not count.
      depth: the number of further tokens.

    >>> import jax.numpy as jnp
    >>> found = further_targets({"targets": jnp.array([[5, 6, 7]])}, 1)
    >>> found["mtp_targets_1"].tolist(), found["mtp_mask_1"].tolist()
    ([[6, 7, 0]], [[1.0, 1.0, 0.0]])
    """
    found: dict[str, jax.Array] = {}
    targets_BS = batch["targets"]
    mask_BS = batch.get("loss_mask", jnp.ones(targets_BS.shape, jnp.float32)).astype(jnp.float32)
    for k in range(1, depth + 1):
        later = lambda x_BS, k=k: jnp.pad(x_BS[:, k:], ((0, 0), (0, min(k, x_BS.shape[1]))))
        weight_BS = later(mask_BS)
        if "segment_ids" in batch:
            documents_BS = batch["segment_ids"]
            weight_BS = jnp.where(later(documents_BS) == documents_BS, weight_BS, 0)
        found |= {f"{PREFIX}targets_{k}": later(targets_BS), f"{PREFIX}mask_{k}": weight_BS}
    return found


def further_loss(
    model: Any, h_BSE: jax.Array, batch: Mapping[str, jax.Array], tokens: TokenInfo
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns what the depths add to the loss, and the metric ``mtp_loss``, the mean of their cross entropies.

    Args:
      model: a :class:`jaxpar.models.moe.model.MoEDecoder`: its embedding, its depths and its output head.
      h_BSE: the normed output of its last layer, [batch, seq, embed].
      batch: ``targets``, optionally ``loss_mask``, and the result of :func:`further_targets`, in the order of
        ``h_BSE``.
      tokens: positions, order and documents of the tokens.
    """
    config, dtype = model.config, jnp.dtype(model.config.dtype)
    mask_BS = batch.get("loss_mask")
    total = jnp.asarray(batch["targets"].size, jnp.float32) if mask_BS is None else jnp.sum(mask_BS, dtype=jnp.float32)
    run = remat(RematPolicy.of(config.remat), config.reshard_after_forward, scanned=False)
    next_BS, losses, router_loss = batch["targets"], [], jnp.zeros((), jnp.float32)
    for k, layer in enumerate(model.mtp, 1):
        e_BSE = lookup(model.embedding[...], hint(next_BS, "batch", "seq"), dtype)
        h_BSE, own_loss = run(lambda layer, h, e: layer(h, e, tokens))(layer, h_BSE, e_BSE)
        next_BS, weight_BS = batch[f"{PREFIX}targets_{k}"], batch[f"{PREFIX}mask_{k}"]
        mean = linear_cross_entropy(h_BSE, model.unembedding(), next_BS, weight_BS, softcap=model.logit_softcap)
        losses.append(mean * jnp.sum(weight_BS) / jnp.where(total > 0, total, 1))
        router_loss += own_loss
    loss: Any = sum(losses) / config.mtp_depth
    return config.mtp_weight * loss + router_loss, {"mtp_loss": jax.lax.stop_gradient(loss)}
