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
from jaxpar.models.llama.gemma import GemmaBlock
from jaxpar.models.llama.interleaved import HALVES, halves_order, interleaved_block
from jaxpar.models.llama.layer_groups import layer_of, layers_of, scan_groups
from jaxpar.models.llama.layers import Block, HasWindow, RMSNorm, TokenInfo, _kernel, layer_shapes, token_info
from jaxpar.models.losses import output_and_scalars, soft_capped
from jaxpar.nnx import stacked
from jaxpar.parallel.attention.context import TokenOrder
from jaxpar.parallel.offload.host_weights import is_waiting
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
        self._add_layers(config, rngs)
        self.norm = RMSNorm(config)
        if not config.tie_embeddings:
            shape = (config.embed, config.vocab)
            self.head = _kernel(rngs.params(), shape, ("embed", "vocab"), config.embed, config)

    def _add_layers(self, config: Any, rngs: nnx.Rngs) -> None:
        self.blocks = stack_of(Block if config.gemma is None else GemmaBlock, config, config.layers, rngs)

    def __call__(self, tokens_BS: jax.Array, positions_BS: jax.Array | None = None) -> jax.Array:
        hidden_BSE, _ = output_and_scalars(self.hidden(tokens_BS, positions_BS))
        logits_BSV = hint(hidden_BSE @ self.unembedding(), "batch", "seq", "vocab")
        return soft_capped(logits_BSV, self.logit_softcap)

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
        self, tokens_BS: jax.Array, positions_BS: jax.Array | None, order: TokenOrder, documents_BS: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the result of :meth:`hidden`, and the losses and metrics of the layers."""
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        tokens_BS = hint(tokens_BS, "batch", "seq")
        if positions_BS is None:
            positions_BS = jax.lax.broadcasted_iota(jnp.int32, tokens_BS.shape, 1)
        if halved(config) and order != HALVES:
            return self._in_halves(tokens_BS, positions_BS, documents_BS), {}
        tokens = token_info(positions_BS, config, order, documents_BS)
        x_BSE: Any = embedding_scaled(lookup(self.embedding[...], tokens_BS, dtype), config)
        x_BSE = cut_rows(x_BSE, config.copies, dim=config.copies_dim) if config.copies > 1 else x_BSE
        x_BSE, first = self.run_dense(tokens, x_BSE), config.layers - config.block_layers
        x_BSE, scalars = run_stack(self.blocks, config, tokens, x_BSE, first_layer=first)
        x_BSE = join_rows(x_BSE, dim=config.copies_dim) if config.copies > 1 else x_BSE
        return hint(self.norm(x_BSE), "batch", "seq", "embed"), scalars

    def _in_halves(self, tokens_BS: jax.Array, positions_BS: jax.Array, documents_BS: jax.Array | None) -> jax.Array:
        """Run :meth:`hidden` on tokens in natural order when the copies need the order of halves."""
        arrays = (tokens_BS, positions_BS) if documents_BS is None else (tokens_BS, positions_BS, documents_BS)
        order, at, (tokens_BS, positions_BS, *packed) = halves_order(*arrays)
        h_BSE = self.hidden(tokens_BS, positions_BS, order, *packed)
        return hint(h_BSE[:, jnp.argsort(at[0])], "batch", "seq", "embed")

    def run_dense(self, tokens: TokenInfo, x_BSE: jax.Array) -> jax.Array:
        """Returns the output of layers before the stack ``blocks``, which this model does not have."""
        return x_BSE

    @property
    def logit_softcap(self) -> float | None:
        """The soft cap of the logits, if there is one."""
        return self.config.logit_softcap

    def unembedding(self) -> jax.Array:
        """Returns the output head [embed, vocab] in the compute dtype; ``hidden @ unembedding`` gives the logits.

        They are without the soft cap of :attr:`logit_softcap`.
        """
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


def embedding_scaled(x_BSE: jax.Array, config: LlamaConfig) -> jax.Array:
    """Returns looked-up embeddings as the first layer takes them: a Gemma multiplies them by sqrt(embed)."""
    # Rounded to the compute dtype first, as in the models' pretraining.
    return x_BSE if config.gemma is None else x_BSE * jnp.asarray(config.embed**0.5, x_BSE.dtype)


def run_stack(
    blocks: Any, config: LlamaConfig, tokens: TokenInfo, x_BSE: Any, name: str = LAYERS, first_layer: int = 0
) -> tuple[Any, dict[str, jax.Array]]:
    """Returns the output of stacked blocks, and the sum over layers of what they report.

    Args:
      blocks: as :func:`stack_of` returned them.
      config: of the model.
      tokens: positions, order and documents of the tokens.
      x_BSE: the input of the first block, or its copies.
      name: the logical dim of the stack.
      first_layer: the number in the model of the first block.
    """
    blocks, recompute = _cast(blocks, jnp.dtype(config.dtype)), RematPolicy.of(config.remat)
    leaves = jax.tree.leaves(nnx.state(blocks), is_leaf=is_waiting)
    count = leaves[0].shape[0]
    local = config.local_layers[first_layer : first_layer + count]
    sums: dict[str, jax.Array] = {}
    for first, last, recomputed in recompute.segments(count):
        layer = _layer(recompute if recomputed else RematPolicy("none"), config, tokens)
        # Weights in host memory are fetched layer by layer, so a scan cannot take them in groups.
        fetched = any(is_waiting(w) or on_host(w) for w in leaves)
        groups = [(first, last, 0)] if fetched else scan_groups(local, first, last)
        for begin, end, period in groups:
            kinds = local[begin:end]
            traced = jnp.asarray(kinds) if period == 0 and len(set(kinds)) > 1 else None
            scan = nnx.scan(
                _step(layer, kinds, period),
                in_axes=(0, 0, nnx.Carry),
                out_axes=(nnx.Carry, 0),
                transform_metadata=stacked(name),
            )
            x_BSE, scalars = scan(layers_of(blocks, begin, end, period), traced, x_BSE)
            sums = {name: sums.get(name, 0) + value.sum(0) for name, value in scalars.items()}
    return x_BSE, sums


def _layer(recompute: RematPolicy, config: LlamaConfig, tokens: TokenInfo) -> Callable[[Any, Any, HasWindow], Any]:
    """Returns a function of a block, its input and whether it has the sliding window, to its output and scalars."""
    saved_dims = ("batch", "residual_seq", SAVED_EMBED if recompute.slice_activation else "embed")
    hint_all = lambda x_BSE, *dims: jax.tree.map(lambda x: hint(x, *dims), x_BSE)

    def layer(block: Any, x_BSE: Any, local: HasWindow) -> Any:
        @remat(recompute, config.reshard_after_forward)
        def run(block: Any, x_BSE: Any) -> Any:
            here = tokens.of_layer(local)
            x_BSE = hint_all(x_BSE, "batch", "residual_seq", "embed") if recompute.slice_activation else x_BSE
            if config.copies > 1:
                return interleaved_block(config, here)(block, x_BSE), {}
            return output_and_scalars(block(x_BSE, here))

        # Hint the layer's input too: the input is what the backward pass keeps.
        if not recompute.slice_activation:
            return run(block, x_BSE)
        x_BSE, scalars = run(block, hint_all(x_BSE, *saved_dims))
        return hint_all(x_BSE, *saved_dims), scalars

    return layer


def _step(
    layer: Callable[[Any, Any, HasWindow], Any], local: tuple[bool, ...], period: int
) -> Callable[[Any, jax.Array | None, Any], Any]:
    """Returns a step of a scan: it runs the ``period`` layers of a group, or one layer.

    Args:
      layer: as :func:`_layer` returned it.
      local: for each layer of the scan, whether it has the sliding window.
      period: the number of layers in a step; 0: one layer, and the scan passes whether it has the window.
    """

    def step(group: Any, kind: jax.Array | None, x_BSE: Any) -> Any:
        if period < 2:
            return layer(group, x_BSE, local[0] if kind is None else kind)
        sums: dict[str, jax.Array] = {}
        for number in range(period):
            x_BSE, scalars = layer(layer_of(group, number), x_BSE, local[number])
            sums = {name: sums.get(name, 0) + value for name, value in scalars.items()}
        return x_BSE, sums

    return step


def remat(
    recompute: RematPolicy,
    reshard_after_forward: bool | int,
    but: Callable[[Any], Any] = lambda policy: policy,
    *,
    scanned: bool = True,
) -> Callable[[Any], Any]:
    """Returns a decorator that rematerializes a layer by ``recompute``; ``but`` may wrap the checkpoint policy.

    ``scanned`` is whether the layer runs in a scan.
    """
    if jax.config.jax_disable_jit:
        return lambda f: f  # jax.checkpoint would trace, and disable_jit is used to inspect values.
    policy = but(recompute.rule(NAMES, reshard_after_forward=reshard_after_forward is True))
    # prevent_cse stops XLA from merging the recomputation with the forward pass, which the scan already prevents.
    return lambda f: nnx.remat(f, prevent_cse=not scanned, policy=policy)


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
