"""The Llama family (Touvron et al. 2023, arXiv:2302.13971; Llama 3, arXiv:2407.21783) in NNX.

The model uses RMSNorm, rotary positions, grouped-query attention and SwiGLU; its layers are stacked and scanned. All
parallelism follows from the logical dims of the parameters (``axes``) and of the activations (``hint``). The residual
stream between blocks has the dim ``residual_seq``; inside attention and MLP the dim is ``seq``. Rules that shard
``residual_seq`` over ``model`` as well give Megatron's sequence parallelism (arXiv:2205.05198).

Shape suffixes: B batch, S sequence, E embed, H query heads, K key/value heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar import hint
from jaxpar.models.embedding import lookup
from jaxpar.models.llama.config import NAMES, LlamaConfig, halved
from jaxpar.models.llama.interleaved import HALVES, halves_order, interleaved_block
from jaxpar.models.llama.layers import Block, RMSNorm, TokenInfo, _kernel, layer_shapes, rope_table
from jaxpar.models.losses import output_and_scalars
from jaxpar.nnx import stacked
from jaxpar.parallel.attention.context import TokenOrder
from jaxpar.parallel.offload.host_weights import cut
from jaxpar.parallel.offload.placement import on_host
from jaxpar.parallel.overlap.interleave import cut as cut_rows
from jaxpar.parallel.overlap.interleave import join as join_rows
from jaxpar.parallel.zero.gather import gather_weight
from jaxpar.sharding.names import LAYERS
from jaxpar.training.remat import SAVED_EMBED, RematPolicy


class Llama(nnx.Module):
    """A Llama: maps tokens [batch, seq] int to logits [batch, seq, vocab] in ``config.dtype``.

    >>> import jaxpar as jp
    >>> from flax import nnx
    >>> from jaxpar.models.llama import preset
    >>> rules = jp.Rules(batch="data", seq=None, residual_seq=None, embed=None, norm=None, heads=None, kv_heads=None,
    ...                  head_dim=None, mlp=None, vocab=None, layers=None)
    >>> with jp.Layout(jp.MeshSpec(data=-1).build(), rules):
    ...     Llama(preset("tiny", layers=1), rngs=nnx.Rngs(0))(jnp.zeros((8, 16), int)).shape
    (8, 16, 256)
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = _kernel(rngs.params(), (config.vocab, config.embed), ("vocab", "embed"), config.embed, config)
        self.blocks = stack_of(Block, config, config.layers, rngs)
        self.norm = RMSNorm(config)
        if not config.tie_embeddings:
            shape = (config.embed, config.vocab)
            self.head = _kernel(rngs.params(), shape, ("embed", "vocab"), config.embed, config)

    def __call__(self, tokens_BS: jax.Array, positions_BS: jax.Array | None = None) -> jax.Array:
        hidden_BSE, _ = output_and_scalars(self.hidden(tokens_BS, positions_BS))
        return hint(hidden_BSE @ self.unembedding(), "batch", "seq", "vocab")

    def reorder_tokens(
        self, *arrays_BS: jax.Array, order_BS: jax.Array | None = None
    ) -> tuple[TokenOrder, Any, tuple[jax.Array, ...]]:
        """Returns arrays [batch, seq] in the token order that is fastest for :meth:`hidden`.

        Args:
          arrays_BS: tokens, targets and, for packed documents, segment ids; each [batch, seq].
          order_BS: an order [batch, seq] that comes with the batch; see
            :meth:`jaxpar.parallel.attention.context.Context.reorder_tokens`.

        Returns:
          The order for :meth:`hidden`, the token positions [1, seq] or ``None``, and the permuted arrays.
        """
        if halved(self.config):
            return halves_order(*arrays_BS)
        q, k = layer_shapes(self.config, arrays_BS[0].shape)
        return self.config.context.reorder_tokens(q, k, *arrays_BS, order_BS=order_BS)

    def hidden(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array | None = None,
        order: TokenOrder = None,
        documents_BS: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the normed output of the last layer, [batch, seq, embed] in ``config.dtype``.

        Args:
          tokens_BS: token ids [batch, seq] int.
          positions_BS: position of each token [1 or batch, seq] int; 0, 1, ... if not given.
          order: the order of the tokens, as :meth:`reorder_tokens` returns it; ``None`` for the natural one.
          documents_BS: document of each token [batch, seq] int; tokens attend only within their document.

        Raises:
          NoLayoutError: no layout is ambient.
          LayoutError: the rules cannot place an activation.
        """
        return self._hidden(tokens_BS, positions_BS, order, documents_BS)[0]

    def _hidden(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array | None,
        order: TokenOrder,
        documents_BS: jax.Array | None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the result of :meth:`hidden`, and the losses and metrics of the layers."""
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        tokens_BS = hint(tokens_BS, "batch", "seq")
        if positions_BS is None:
            positions_BS = jax.lax.broadcasted_iota(jnp.int32, tokens_BS.shape, 1)
        if halved(config) and order != HALVES:
            return self._in_halves(tokens_BS, positions_BS, documents_BS), {}
        tokens = TokenInfo(rope_table(positions_BS, config), order, documents_BS)
        x_BSE: Any = lookup(self.embedding[...], tokens_BS, dtype)
        x_BSE = cut_rows(x_BSE, config.copies, dim=config.copies_dim) if config.copies > 1 else x_BSE
        x_BSE, scalars = self._run_layers(tokens, x_BSE)
        x_BSE = join_rows(x_BSE, dim=config.copies_dim) if config.copies > 1 else x_BSE
        return hint(self.norm(x_BSE), "batch", "seq", "embed"), scalars

    def _run_layers(self, tokens: TokenInfo, x_BSE: Any) -> tuple[Any, dict[str, jax.Array]]:
        return run_stack(self.blocks, self.config, tokens, x_BSE)

    def _in_halves(self, tokens_BS: jax.Array, positions_BS: jax.Array, documents_BS: jax.Array | None) -> jax.Array:
        """Run :meth:`hidden` on tokens in natural order when the copies need the order of halves."""
        arrays = (tokens_BS, positions_BS) if documents_BS is None else (tokens_BS, positions_BS, documents_BS)
        order, at, (tokens_BS, positions_BS, *packed) = halves_order(*arrays)
        h_BSE = self.hidden(tokens_BS, positions_BS, order, *packed)
        return hint(h_BSE[:, jnp.argsort(at[0])], "batch", "seq", "embed")

    def run_dense(self, tokens: TokenInfo, x_BSE: jax.Array) -> jax.Array:
        """Returns the output of layers before the stack ``blocks``, which this model does not have."""
        return x_BSE

    def unembedding(self) -> jax.Array:
        """Returns the output head [embed, vocab] in the compute dtype; ``hidden @ unembedding`` gives the logits."""
        head_EV = self.embedding[...].T if self.config.tie_embeddings else self.head[...]
        return gather_weight(head_EV, "embed", "vocab", dtype=jnp.dtype(self.config.dtype))


def stack_of(
    block: Callable[[Any, nnx.Rngs], Any], config: Any, layers: int, rngs: nnx.Rngs, name: str = LAYERS
) -> Any:
    """Returns ``layers`` blocks as one module, whose parameters are stacked along a first dim called ``name``."""

    @nnx.split_rngs(splits=layers)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=stacked(name))
    def blocks(rngs: nnx.Rngs) -> Any:
        return block(config, rngs)

    return blocks(rngs)


def run_stack(
    blocks: Any, config: LlamaConfig, tokens: TokenInfo, x_BSE: Any, name: str = LAYERS
) -> tuple[Any, dict[str, jax.Array]]:
    """Returns the output of stacked blocks, and the sum over layers of what they report.

    Args:
      blocks: as :func:`stack_of` returned them.
      config: of the model.
      tokens: positions, order and documents of the tokens.
      x_BSE: the input of the first block, or its copies.
      name: the logical dim of the stack.
    """
    blocks, recompute = _cast(blocks, jnp.dtype(config.dtype)), RematPolicy.of(config.remat)
    count = jax.tree.leaves(nnx.state(blocks))[0].shape[0]
    sums: dict[str, jax.Array] = {}
    for first, last, recomputed in recompute.segments(count):
        layers = _stacked(recompute if recomputed else RematPolicy("none"), config, tokens, name)
        x_BSE, scalars = layers(blocks if (first, last) == (0, count) else _part(blocks, first, last), x_BSE)
        sums = {name: sums.get(name, 0) + value.sum(0) for name, value in scalars.items()}
    return x_BSE, sums


def _stacked(
    recompute: RematPolicy, config: LlamaConfig, tokens: TokenInfo, name: str
) -> Callable[[Any, jax.Array], Any]:
    """Returns a function that scans over a stack of layers; it returns their output and each layer's scalars."""
    saved_dims = ("batch", "residual_seq", SAVED_EMBED if recompute.slice_activation else "embed")
    hint_all = lambda x_BSE, *dims: jax.tree.map(lambda x: hint(x, *dims), x_BSE)

    @remat(recompute, config.reshard_after_forward)
    def layer(block: Any, x_BSE: Any) -> Any:
        x_BSE = hint_all(x_BSE, "batch", "residual_seq", "embed") if recompute.slice_activation else x_BSE
        if config.copies > 1:
            return interleaved_block(config, tokens)(block, x_BSE), {}
        return output_and_scalars(block(x_BSE, tokens))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0), transform_metadata=stacked(name))
    def layers(block: Any, x_BSE: Any) -> Any:
        # Hint the layer's input too: the input is what the backward pass keeps.
        if not recompute.slice_activation:
            return layer(block, x_BSE)
        x_BSE, scalars = layer(block, hint_all(x_BSE, *saved_dims))
        return hint_all(x_BSE, *saved_dims), scalars

    return layers


def remat(
    recompute: RematPolicy, reshard_after_forward: bool | int, but: Callable[[Any], Any] = lambda policy: policy
) -> Callable[[Any], Any]:
    """Returns a decorator that rematerializes a layer by ``recompute``; ``but`` may wrap the checkpoint policy."""
    if jax.config.jax_disable_jit:
        return lambda f: f  # jax.checkpoint would trace, and disable_jit is used to inspect values.
    policy = but(recompute.rule(NAMES, reshard_after_forward=reshard_after_forward is True))
    # prevent_cse stops XLA from merging the recomputation with the forward pass, which the scan already prevents.
    return lambda f: nnx.remat(f, prevent_cse=False, policy=policy)


def _part(module: nnx.Module, first: int, last: int) -> nnx.Module:
    """Returns layers ``first`` to ``last - 1`` of a stack."""
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(lambda x: cut(x, first, last), state))


def _cast(module: nnx.Module, dtype: Any) -> nnx.Module:
    """Cast a module's matrices to ``dtype``. Cast before the scan, their gradients are stacked in ``dtype`` too."""
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 2 and not on_host(x) else x, state))


def make_llama(config: LlamaConfig) -> Callable[[jax.Array], Llama]:
    """Returns the ``make_model`` of a Llama for :func:`jaxpar.init`.

    >>> import jax
    >>> import jaxpar as jp
    >>> model = jax.eval_shape(lambda: make_llama(jp.models.preset("tiny"))(jax.random.key(0)).embedding[...])
    >>> model.shape
    (256, 128)
    """
    return lambda key: Llama(config, rngs=nnx.Rngs(key))
