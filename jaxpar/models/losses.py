"""Cross-entropy losses that reduce over a sharded vocabulary without gathering it."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.parallel.collectives.gather_reduce import summing
from jaxpar.parallel.pipeline.staged_loss import REPORTED, with_extras
from jaxpar.parallel.tensor.matmul import product, product_grads, routes
from jaxpar.parallel.tensor.route import MatmulRoute
from jaxpar.sharding.layout import current_layout, hint
from jaxpar.sharding.resolve import num_shards_over

TOKEN_ARRAYS = ("tokens", "targets", "segment_ids", "positions", "loss_mask")
"""The arrays [batch, seq] of a batch that follow the order of its tokens."""
_PIECES = 8
_FP16_UNIT = 2.0**13
"""Scale of a logit's gradient, at most 1, while it is stored in fp16: probabilities down to 1e-8 keep 3 digits."""
_GRAD_DIMS = ("batch", "seq", None, None, "vocab")


def cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array, mask_BS: jax.Array | None = None) -> jax.Array:
    """Returns the mean cross entropy, exact and vocabulary-parallel: the vocabulary dim is reduced, never gathered.

    Args:
      logits_BSV: [batch, seq, vocab] in any layout; reduced in at least fp32.
      targets_BS: target class of each position, [batch, seq] int.
      mask_BS: weight of each position, [batch, seq]; 0 ignores it. Weights may be fractional.

    Returns:
      A scalar in nats: the mean weighted by ``mask_BS``, or 0 if all weights are 0.

    >>> import jax.numpy as jnp
    >>> float(cross_entropy(jnp.zeros((1, 2, 4)), jnp.zeros((1, 2), int)))  # log 4
    1.3862943649291992
    """
    logits_BSV = logits_BSV.astype(jnp.promote_types(logits_BSV.dtype, jnp.float32))
    lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    # A comparison with iota instead of take_along_axis: each vocabulary shard reads only its own slice.
    vocab = jax.lax.broadcasted_iota(jnp.int32, logits_BSV.shape, logits_BSV.ndim - 1)
    right_BS = jnp.sum(jnp.where(vocab == targets_BS[..., None], logits_BSV, 0), axis=-1)
    loss_BS = lse_BS - right_BS
    if mask_BS is None:
        return loss_BS.mean()
    weight_BS = mask_BS.astype(loss_BS.dtype)
    total = jnp.sum(weight_BS)
    return jnp.sum(loss_BS * weight_BS) / jnp.where(total > 0, total, 1)


def soft_capped(logits: jax.Array, cap: float | None) -> jax.Array:
    """Returns ``cap * tanh(logits / cap)`` in the dtype of the logits, computed in at least fp32; ``None``: no cap.

    >>> import jax.numpy as jnp
    >>> soft_capped(jnp.array([1.0, 1000.0]), 30.0).round(4).tolist()
    [0.9995999932289124, 30.0]
    """
    if cap is None:
        return logits
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return (cap * jnp.tanh(wide / cap)).astype(logits.dtype)


def linear_cross_entropy(
    x_BSE: jax.Array,
    head_EV: jax.Array,
    targets_BS: jax.Array,
    mask_BS: jax.Array | None = None,
    *,
    softcap: float | None = None,
) -> jax.Array:
    """Returns ``cross_entropy(x_BSE @ head_EV, ...)``, turning logits into their gradients piece by piece.

    The logits of all tokens never exist at the same time. The forward pass computes the gradient of the logits in the
    dtype of ``x_BSE``, so nothing is recomputed. The backward pass applies 1 / tokens and the loss scale to its results
    in fp32, so a 16-bit gradient neither vanishes nor overflows with the number of tokens or with the scale.

    Args:
      x_BSE: output of the last layer, [batch, seq, embed].
      head_EV: output head [embed, vocab] in the same dtype; its vocabulary may be sharded.
      targets_BS, mask_BS: as for :func:`cross_entropy`.
      softcap: c: a logit z becomes c tanh(z / c), as in Gemma 2; ``None`` for no cap.

    Returns:
      A scalar in nats, as :func:`cross_entropy`.

    Raises:
      NoLayoutError: outside ``with layout:``.
    """
    dtype = jnp.promote_types(x_BSE.dtype, jnp.float32)
    weight_BS = jnp.ones(targets_BS.shape, dtype) if mask_BS is None else mask_BS.astype(dtype)
    total = jnp.sum(weight_BS)
    total = jnp.where(total > 0, total, 1)
    if mask_BS is None or x_BSE.dtype != jnp.float16:
        return _weighted_nll(softcap, x_BSE, head_EV, targets_BS, weight_BS) / total
    # fp16 has 5 digits of range: scale the weights to at most 1, whatever the unit of the mask.
    unit = jax.lax.stop_gradient(jnp.max(jnp.abs(weight_BS)))
    unit = jnp.where(unit > 0, unit, 1)
    return _weighted_nll(softcap, x_BSE, head_EV, targets_BS, weight_BS / unit) * (unit / total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_nll(
    softcap: float | None, x_BSE: jax.Array, head_EV: jax.Array, targets_BS: jax.Array, weight_BS: jax.Array
) -> jax.Array:
    """Returns the weighted sum of the losses of all positions."""
    x, targets, weight = _pieces(x_BSE), _pieces(targets_BS), _pieces(weight_BS)
    loss = lambda p: _nll(_logits(_piece(x, p), head_EV), _piece(targets, p), softcap).nll
    nll_PBWT = jax.lax.map(loss, jnp.arange(x.shape[2]))
    return jnp.sum(jnp.moveaxis(nll_PBWT, 0, 2) * weight)


def _forward(
    softcap: float | None, x_BSE: jax.Array, head_EV: jax.Array, targets_BS: jax.Array, weight_BS: jax.Array
) -> tuple[Any, Any]:
    x, targets, weight = _pieces(x_BSE), _pieces(targets_BS), _pieces(weight_BS)
    unit = _unit(x_BSE.dtype)

    def one(grad_BWPTV: jax.Array, p: jax.Array) -> tuple[jax.Array, jax.Array]:
        weight_BWT = _piece(weight, p)
        found = _nll(_logits(_piece(x, p), head_EV), _piece(targets, p), softcap)
        grad_BWTV = (found.probability - found.right) * (unit * weight_BWT)[..., None]
        grad_BWTV = grad_BWTV if found.slope is None else grad_BWTV * found.slope
        grad_BWTV = grad_BWTV.astype(x_BSE.dtype)
        grad_BWPTV = jax.lax.dynamic_update_index_in_dim(grad_BWPTV, grad_BWTV, p, 2)
        return hint(grad_BWPTV, *_GRAD_DIMS), found.nll

    empty = hint(jnp.zeros((*x.shape[:-1], head_EV.shape[1]), x_BSE.dtype), *_GRAD_DIMS)
    grad_BWPTV, nll_PBWT = jax.lax.scan(one, empty, jnp.arange(x.shape[2]))
    nll_BWPT = jnp.moveaxis(nll_PBWT, 0, 2)
    # Sum after the loop: a sum inside it would cross the mesh once per piece.
    return jnp.sum(nll_BWPT * weight), (x, head_EV, grad_BWPTV, nll_BWPT.reshape(targets_BS.shape))


def _backward(_: float | None, saved: tuple[jax.Array, ...], grad: jax.Array) -> tuple[jax.Array | None, ...]:
    """Returns the stored gradients times ``grad``, which holds 1 / tokens and the loss scale, in at least fp32.

    In fp16 the scale must not touch the logits' gradients: 1 / tokens rounds those of rare tokens to 0, and a loss
    scale of 2^16 exceeds the range of fp16. Both matmuls therefore accumulate in fp32 and are scaled before they are
    rounded.
    """
    x_BWPTE, head_EV, grad_BWPTV, nll_BS = saved
    batch, num_shards, pieces, rows, embed = x_BWPTE.shape
    half = x_BWPTE.dtype == jnp.float16
    scale = grad / _unit(x_BWPTE.dtype)
    scaled = lambda y: y.astype(jnp.promote_types(y.dtype, jnp.float32)) * scale

    sum_dtype = summing(head_EV.dtype)
    wide = jnp.float32 if half else None
    route = _route(x_BWPTE, head_EV)
    grad_x, grad_EV = product_grads(route, x_BWPTE, head_EV, grad_BWPTV, (wide, wide or sum_dtype))
    grad_x = scaled(grad_x).astype(x_BWPTE.dtype)
    grad_x = hint(grad_x.reshape(batch, num_shards * pieces * rows, embed), "batch", "seq", "embed")
    grad_head = scaled(grad_EV).astype(sum_dtype or head_EV.dtype)
    grad_head = hint(grad_head, "embed", "vocab", role="gradients")
    if sum_dtype is not None:  # The barrier keeps the compiler from summing already rounded values.
        grad_head = jax.lax.optimization_barrier(grad_head).astype(head_EV.dtype)
    # One barrier for both matmuls: without it the logits' gradient, the largest tensor, stays alive through the layers'
    # backward pass.
    grad_x, grad_head = jax.lax.optimization_barrier((grad_x, grad_head))
    return grad_x, grad_head, None, grad * nll_BS


def _logits(x: jax.Array, head_EV: jax.Array) -> jax.Array:
    return product(_route(x, head_EV), x, head_EV)


def _route(x: jax.Array, head_EV: jax.Array) -> MatmulRoute | None:
    """Returns how the gathered head is multiplied if mesh axes ``x``, ``y``, ``z`` have a part in it."""
    found = routes(x, [(head_EV, ("embed", "vocab"))], 1, observed=False)
    return None if found is None else found[0].with_gathered_weight


def _unit(dtype: Any) -> float:
    """Returns the scale of a logit's gradient while it is stored."""
    return _FP16_UNIT if dtype == jnp.float16 else 1.0


_weighted_nll.defvjp(_forward, _backward)


class _Piece(NamedTuple):
    """The losses of some positions, and the gradients of their logits.

    Attributes:
      nll: negative log likelihoods [B, W, T].
      probability: [B, W, T, V].
      right: the mask of the target class [B, W, T, V].
      slope: the derivative of the soft cap [B, W, T, V], if there is one.
    """

    nll: jax.Array
    probability: jax.Array
    right: jax.Array
    slope: jax.Array | None


def _nll(logits_BWTV: jax.Array, targets_BWT: jax.Array, softcap: float | None) -> _Piece:
    """Returns the losses of some positions, in at least fp32."""
    logits_BWTV = hint(logits_BWTV, "batch", "seq", None, "vocab")
    logits_BWTV = logits_BWTV.astype(jnp.promote_types(logits_BWTV.dtype, jnp.float32))
    slope_BWTV = None
    if softcap is not None:
        tanh_BWTV = jnp.tanh(logits_BWTV / softcap)
        logits_BWTV, slope_BWTV = softcap * tanh_BWTV, 1 - tanh_BWTV * tanh_BWTV
    lse_BWT1 = jax.nn.logsumexp(logits_BWTV, axis=-1, keepdims=True)
    # A comparison with iota instead of take_along_axis: each vocabulary shard reads only its own slice.
    vocab = jax.lax.broadcasted_iota(jnp.int32, logits_BWTV.shape, logits_BWTV.ndim - 1)
    right_BWTV = vocab == targets_BWT[..., None]
    nll_BWT = lse_BWT1[..., 0] - jnp.sum(jnp.where(right_BWTV, logits_BWTV, 0), axis=-1)
    return _Piece(nll_BWT, jnp.exp(logits_BWTV - lse_BWT1), right_BWTV, slope_BWTV)


def _pieces(x_BS: jax.Array) -> jax.Array:
    """Reshape [B, S, ...] to [B, W, P, T, ...]: W shards of the sequence, each in P pieces of T positions."""
    layout, seq = current_layout(), x_BS.shape[1]
    axes = layout.resolve(("seq",), (seq,)).axes[0]
    num_shards = num_shards_over(axes, layout.sizes)
    pieces = math.gcd(seq // num_shards, _PIECES)
    return x_BS.reshape(x_BS.shape[0], num_shards, pieces, seq // num_shards // pieces, *x_BS.shape[2:])


def _piece(x_BWP: jax.Array, p: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x_BWP, p, 2, keepdims=False)


def next_token_loss(model: Any, batch: dict[str, jax.Array]) -> Any:
    """Returns the mean next-token loss of a language model; a ``loss_fn`` for :func:`jaxpar.train_step`.

    Args:
      model: has ``hidden(tokens)`` and ``unembedding()``. If ``hidden`` returns a pair, its second part is a dict of
        scalars: ``loss`` is added to the loss and reported as ``aux_loss``, and the others are metrics. A model with a
        method ``reorder_tokens`` chooses the order of its tokens; the mean loss does not depend on the order. A number
        ``logit_softcap`` caps the logits; see :func:`linear_cross_entropy`. Methods ``further_targets`` and
        ``further_loss`` predict further tokens; see :class:`jaxpar.models.moe.model.MoEDecoder`.
      batch: ``tokens`` and ``targets``, each [batch, seq] int; optionally ``loss_mask``, 0 for targets that do not
        count. For a model with ``reorder_tokens`` optionally ``segment_ids``, the document of each token, ``positions``
        within it, and ``order``, one token order for all rows; each [batch, seq] int.

    Returns:
      A scalar in nats; with scalars of the model ``(loss, metrics)``. With ``loss_mask``, the metric ``weight`` is the
      number of targets that count.

    Raises:
      NoLayoutError: no layout is ambient.
      LayoutError: the rules cannot place the logits.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> class Uniform:
    ...     def hidden(self, tokens):
    ...         return jnp.ones((*tokens.shape, 2))
    ...     def unembedding(self):
    ...         return jnp.zeros((2, 4))
    >>> batch = dict.fromkeys(("tokens", "targets"), jnp.zeros((8, 16), int))
    >>> with jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data", seq=None, embed=None, vocab=None)):
    ...     round(float(next_token_loss(Uniform(), batch)), 4)  # log 4
    1.3863
    """
    return _next_token_loss(model, batch, further=True)


def _next_token_loss(model: Any, batch: dict[str, jax.Array], *, further: bool) -> Any:
    """Returns :func:`next_token_loss`; ``further``: with the losses of further tokens, if the model predicts any."""
    loss = functools.partial(mean_over_targets, softcap=getattr(model, "logit_softcap", None))
    if not hasattr(model, "reorder_tokens"):
        hidden, scalars = output_and_scalars(model.hidden(batch["tokens"]))
        return with_extras(loss(hidden, model.unembedding(), batch), scalars)
    more = model.further_targets(batch) if further and hasattr(model, "further_targets") else {}
    names = [*(name for name in TOKEN_ARRAYS if name in batch), *more]
    batch = {**batch, **more}
    order, positions, arrays = model.reorder_tokens(*(batch[name] for name in names), order_BS=batch.get("order"))
    batch = dict(zip(names, arrays, strict=True))
    documents = [batch["segment_ids"]] if "segment_ids" in batch else []
    positions = batch.get("positions", positions)
    hidden, scalars = output_and_scalars(model.hidden(batch["tokens"], positions, order, *documents))
    value = with_extras(loss(hidden, model.unembedding(), batch), scalars)
    return value if not more else with_further(value, model.further_loss(hidden, batch, positions, order))


def with_further(value: Any, further: tuple[jax.Array, dict[str, jax.Array]]) -> Any:
    """Adds the loss and the metrics of further tokens to a loss, or to a pair of loss and metrics."""
    loss, metrics = output_and_scalars(value)
    return loss + further[0], {**metrics, **further[1]}


def mean_over_targets(
    x_BSE: jax.Array, head_EV: jax.Array, batch: dict[str, jax.Array], *, softcap: float | None = None
) -> Any:
    """Returns :func:`linear_cross_entropy` of a batch; with ``loss_mask`` also the number of its targets, ``weight``.

    The weight lets the means of microbatches with different numbers of targets add up to that of the batch.
    """
    mask_BS = batch.get("loss_mask")
    loss = linear_cross_entropy(x_BSE, head_EV, batch["targets"], mask_BS, softcap=softcap)
    return loss if mask_BS is None else (loss, {"weight": jnp.sum(mask_BS, dtype=jnp.float32)})


def token_loss(model: Any, batch: dict[str, jax.Array]) -> Any:
    """Returns :func:`next_token_loss` without the model's own losses: for held-out data.

    These are the losses of routers, and those of further tokens.
    """
    found = _next_token_loss(model, batch, further=False)
    if not isinstance(found, tuple):
        return found
    loss, metrics = found
    loss = loss - metrics.get(REPORTED, 0)
    return (loss, {"weight": metrics["weight"]}) if "weight" in metrics else loss


def output_and_scalars(found: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Returns what a layer or a model returned as a pair; without losses and metrics of its own, the second is empty.

    >>> output_and_scalars(1.0)
    (1.0, {})
    """
    return found if isinstance(found, tuple) else (found, {})
