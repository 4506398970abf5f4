"""The Llama's next-token loss in pieces, for pipelines."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpar import Staged, hint
from jaxpar.models.embedding import lookup
from jaxpar.models.llama import Block, Llama, LlamaConfig, Rope, remat, rope_table
from jaxpar.models.losses import linear_cross_entropy
from jaxpar.recompute import Recompute

type Batch = dict[str, jax.Array]


def staged_next_token_loss(config: LlamaConfig) -> Staged:
    """:func:`jaxpar.models.losses.next_token_loss` of a Llama as a :class:`jaxpar.Staged`: batches of ``tokens`` and ``targets`` [batch, seq] int.

    Under a pipeline every layer recomputes by ``config.remat``; which layers of a stage do is the pipeline's matter.
    """
    dtype, recompute = jnp.dtype(config.dtype), Recompute.of(config.remat)

    def prepare(model: Llama, batch: Batch) -> Batch:
        _, positions, (tokens, targets) = model.laid(batch["tokens"], batch["targets"])
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        return {"tokens": tokens, "targets": targets, "positions": jnp.broadcast_to(positions, tokens.shape)}

    def before(model: Llama, batch: Batch) -> jax.Array:
        return lookup(model.embedding[...], hint(batch["tokens"], "batch", "seq"), dtype)

    def side(model: Llama, batch: Batch) -> Rope:
        return rope_table(batch["positions"], config)

    def layer(block: Block, x_BSE: jax.Array, rope: Rope) -> jax.Array:
        shape = (*x_BSE.shape[:2], config.heads, config.head_dim)
        q, k = (jax.ShapeDtypeStruct((*shape[:2], n, shape[3]), dtype) for n in (config.heads, config.kv_heads))
        order = config.context.order_here(q, k)
        run = remat(recompute, config.regather)(lambda block, x_BSE: block(x_BSE, rope, order))
        y_BSE: jax.Array = run(block, x_BSE)
        return y_BSE

    def after(model: Llama, x_BSE: jax.Array, batch: Batch) -> jax.Array:
        h_BSE = hint(model.norm(x_BSE), "batch", "seq", "embed")
        return linear_cross_entropy(h_BSE, model.unembedding(), batch["targets"])

    return Staged(
        layers="blocks",
        before=before,
        layer=layer,
        after=after,
        prepare=prepare,
        side=side,
        dims=("batch", "residual_seq", "embed"),
    )
