"""Mixture-of-experts decoders in NNX: the Llama with experts instead of MLPs, in all layers but the first few."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.models.llama.config import LlamaConfig
from jaxpar.models.llama.layers import TokenInfo, token_info
from jaxpar.models.llama.model import Llama, make_llama, run_stack, stack_of
from jaxpar.models.moe.config import MoEConfig
from jaxpar.models.moe.layers import DenseBlock, MixtureBlock
from jaxpar.models.moe.multi_token import PredictionLayer, further_loss, further_targets
from jaxpar.parallel.attention.context import TokenOrder
from jaxpar.parallel.pipeline.executor.layer_inputs import LayerScalars

DENSE_LAYERS = "dense_layers"
"""The logical dim of the stack of dense layers. In a pipeline they run before the first stage, on all devices."""


class MoEDecoder(Llama):
    """A mixture-of-experts decoder: maps tokens [batch, seq] int to logits [batch, seq, vocab] in ``config.dtype``.

    Unlike that of a Llama, :meth:`hidden` returns a pair: the output of the last layer, and the losses and metrics of
    the routers, summed over layers.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> from flax import nnx
    >>> from jaxpar.models.moe.config import preset
    >>> rules = jp.Rules(batch=("data", "expert"), seq=None, residual_seq=None, embed=None, norm=None, heads=None,
    ...                  kv_heads=None, head_dim=None, vocab=None, layers=None, experts="expert", expert_mlp=None)
    >>> with jp.Layout(jp.MeshSpec(data=-1, expert=4).build(), rules):
    ...     run = lambda: MoEDecoder(preset("mixtral", layers=1), rngs=nnx.Rngs(0))(jnp.zeros((8, 16), int))
    ...     jax.eval_shape(run).shape
    (8, 16, 256)
    """

    config: MoEConfig

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        if config.mtp_depth:
            self.mtp = nnx.List([PredictionLayer(config, rngs) for _ in range(config.mtp_depth)])

    def _add_layers(self, config: MoEConfig, rngs: nnx.Rngs) -> None:
        if config.dense_layers:
            self.dense_blocks = stack_of(DenseBlock, config, config.dense_layers, rngs, DENSE_LAYERS)
        self.blocks = stack_of(MixtureBlock, config, config.expert_layers, rngs)

    def hidden(  # type: ignore[override]
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array | None = None,
        order: TokenOrder = None,
        documents_BS: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerScalars]:
        """Returns the normed output of the last layer, [batch, seq, embed], and the routers' losses and metrics.

        The arguments and errors are those of :meth:`jaxpar.models.Llama.hidden`.
        """
        return self._hidden(tokens_BS, positions_BS, order, documents_BS)

    def further_targets(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the arrays that :meth:`further_loss` needs, before the tokens are reordered; empty without depths."""
        return further_targets(batch, self.config.mtp_depth)

    def further_loss(
        self, h_BSE: jax.Array, batch: dict[str, jax.Array], positions_BS: jax.Array | None, order: TokenOrder = None
    ) -> tuple[jax.Array, LayerScalars]:
        """Returns what predicting further tokens adds to the loss, and its metrics.

        Args:
          h_BSE: the normed output of the last layer.
          batch: its arrays in the order of ``h_BSE``, with those of :meth:`further_targets`.
          positions_BS, order: as for :meth:`hidden`.
        """
        if positions_BS is None:
            positions_BS = jax.lax.broadcasted_iota(jnp.int32, batch["targets"].shape, 1)
        tokens = token_info(positions_BS, self.config, order, batch.get("segment_ids"))
        return further_loss(self, h_BSE, batch, tokens.of_layer(self.config.local_layers[-1]))

    def run_dense(self, tokens: TokenInfo, x_BSE: jax.Array) -> jax.Array:
        """Returns the output of the first layers, which have no experts."""
        if not self.config.dense_layers:
            return x_BSE
        return run_stack(self.dense_blocks, self.config, tokens, x_BSE, DENSE_LAYERS)[0]


def make_moe(config: MoEConfig) -> Callable[[jax.Array], MoEDecoder]:
    """Returns the ``make_model`` of a mixture-of-experts decoder for :func:`jaxpar.init`.

    >>> import jax
    >>> from jaxpar.models.moe.config import preset
    >>> jax.eval_shape(lambda: make_moe(preset("mixtral"))(jax.random.key(0)).blocks.mixture.up[...]).shape
    (4, 8, 128, 192)
    """
    return lambda key: MoEDecoder(config, rngs=nnx.Rngs(key))


def make_decoder(config: LlamaConfig) -> Callable[[jax.Array], Llama]:
    """Returns the ``make_model`` of a Llama, or of a mixture-of-experts decoder if ``config`` is a ``MoEConfig``.

    >>> import jax
    >>> from jaxpar.models import preset
    >>> jax.eval_shape(lambda: make_decoder(preset("tiny"))(jax.random.key(0)).embedding[...]).shape
    (256, 128)
    """
    return make_moe(config) if isinstance(config, MoEConfig) else make_llama(config)
