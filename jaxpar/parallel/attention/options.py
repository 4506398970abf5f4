"""Options of ``attention`` and ``attention_local``: reads and checks them before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import ConfigError, LayoutError, did_you_mean, listing, unknown
from jaxpar.parallel.attention.integers import clipped, exact_ids, exact_offset, exact_positions, kind_of
from jaxpar.parallel.attention.mask import Mask, Rule, mask_of
from jaxpar.parallel.attention.tiled.tile import AttentionArrays, Segments, TileSpec
from jaxpar.utils.arrays import accumulator

Impl = Literal["auto", "dense", "flash", "gather", "ring", "ring_self_attention", "ulysses", "hybrid", "split_kv"]
IMPLS: tuple[str, ...] = get_args(Impl)
KV_GRAD_DTYPES = ("float32", "bfloat16")


class Options(TypedDict, total=False):
    """Keyword options of :func:`jaxpar.attention` and :func:`jaxpar.context.attention_local`.

    Attributes:
      causal: whether a query sees only the keys up to its own position. Default: the mask's ``causal``, or ``True``.
      mask: a :class:`jaxpar.Mask`, or a function of two positions. The function's mask is also causal unless
        ``causal=False``.
      segment_ids: integers ``[batch, seq]``, or a pair of such arrays for queries and keys. A token sees only its own
        segment. A negative id is padding: no token sees it, and its result and gradients are 0, even if its queries,
        keys, values or incoming gradient are NaN. Ids are int32. Ids of wider dtypes must fit int32 if their values are
        known; traced int64 ids are compared as int64.
      prefix: the number of leading keys that every query sees regardless of ``causal`` and ``window``: an integer of
        any size, or integers ``[batch]``.
      scale: factor of the scores. Default: 1 / sqrt(head_dim).
      softcap: replaces each score by ``softcap * tanh(score / softcap)`` (Gemma 2), before biases are added.
      alibi: slopes ``[heads]``; ``-slope * |q - k|`` is added to the scores. ``True`` selects the slopes of Press et
        al. 2021 (arXiv:2108.12409).
      bias: added to the scores, ``[batch or 1, heads or 1, queries, keys]``, with rows and columns in the order of the
        tokens in ``q`` and ``k``. A bias hides a key if it lowers the score to -1e30 or less. -inf and the minimum of
        fp32 or bf16 do so; the minimum of fp16 does not. A query that sees no key gets a result of 0 and gradients of
        0.
      sinks: a logit ``[heads]`` that joins the denominator of every softmax and has no value (attention sinks).
      dropout: the fraction of weights to drop; the other weights are scaled by 1 / (1 - dropout). The same ``key``
        drops the same weights under every layout.
      key: the JAX PRNG key of the dropout, or one key per sequence ``[batch]``. A single key is combined with the index
        of the sequence in the global batch, the head and the two positions of a weight. A key per sequence is combined
        with the head and the two positions.
      q_offset: the position of the first query, relative to the first key: an integer of either sign, which may be
        traced. All positions must be int32 and greater than the minimum of int32; a traced offset is not checked.
      order: how the tokens are ordered along the devices of a ring: ``contiguous``, ``zigzag`` or ``striped``. With
        ``None`` the tokens are in their natural order, and a ring under a causal mask reorders them into zigzag and
        back. Alternatively the position of each token ``[seq]``, the same for all sequences, such as
        :func:`jaxpar.context.balanced_packing` returns; it may be traced.
      kv_grad_dtype: the dtype in which devices send gradients of keys and values, ``float32`` or ``bfloat16``. Default:
        the dtype of the sums.
      keep_gathered_kv: for ``gather``: keep the gathered keys and values for the backward pass, which then gathers
        nothing. A remat policy that saves attention outputs (``save_attention``) also saves them, under the name
        ``attention_keys``. If the policy does not save them, the backward pass gathers them again.
      block: the maximum number of tokens on a tile's side. Default: 512, or 256 on CPUs.
    """

    causal: bool | None
    mask: Mask | Rule | None
    segment_ids: Any
    prefix: Any
    scale: float | None
    softcap: float | None
    alibi: Any
    bias: Any
    sinks: Any
    dropout: float
    key: Any
    q_offset: Any
    order: Any
    kv_grad_dtype: str | None
    keep_gathered_kv: bool
    block: int | None


def read(
    q: Any, k: Any, v: Any, options: Options, tokens: tuple[int, int] | None = None, queries: int | None = None
) -> tuple[TileSpec, AttentionArrays, int]:
    """Returns the static spec, the array options, and the first query's position (0 if it is an array).

    Args:
      q, k, v: queries, keys and values ``[batch, seq, heads, head_dim]``.
      options: the caller's options.
      tokens: expected number of rows and columns of a bias. Default: the lengths of ``q`` and ``k``.
      queries: number of queries on all devices. Default: the length of ``q``.

    Raises:
      ConfigError, LayoutError: an option is invalid; see :func:`jaxpar.attention`.
    """
    names = tuple(Options.__annotations__)
    for name in options:
        if name not in names:
            raise ConfigError(f"attention: {unknown('option', name, names)}")
    _check_shapes(q, k, v)
    heads = q.shape[2]
    mask = mask_of(options.get("causal"), options.get("mask"))
    offset, prefix = exact_offset(options.get("q_offset"), queries or q.shape[1]), options.get("prefix")
    if offset is None and q.shape[1] != k.shape[1] and mask.sides != (None, None):
        raise LayoutError(
            f"attention: {q.shape[1]} queries and {k.shape[1]} keys under a mask that compares their positions, but "
            f"the position of the first query is unknown. Remedy: pass q_offset={k.shape[1] - q.shape[1]} if the last "
            f"query is at the last key, q_offset=0 if the first query is at the first key, or causal=False."
        )
    if isinstance(prefix, int):
        mask, prefix = replace(mask, prefix=prefix), None
    scale, softcap = options.get("scale"), options.get("softcap")
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"attention: softcap must be a number > 0, got {softcap!r}.")
    dropout, key, order = options.get("dropout", 0.0), options.get("key"), options.get("order")
    if not 0 <= dropout < 1:
        raise ConfigError(f"attention: dropout must be a fraction >= 0 and < 1, got {dropout!r}.")
    if dropout and key is None:
        raise ConfigError(
            f"attention: dropout is {dropout}, but no key is given. Remedy: pass key=jax.random.key(...), a new one in "
            f"every step, or dropout=0."
        )
    array_options = AttentionArrays(
        _segments(q, k, options.get("segment_ids")),
        None if prefix is None else _prefix(q, prefix),
        _slopes(heads, options.get("alibi")),
        _bias(q, options.get("bias"), tokens or (q.shape[1], k.shape[1])),
        _per_head("sinks", heads, options.get("sinks")),
        _words(key, q.shape[0]) if dropout else None,
        None if isinstance(offset, int) else offset,
        None if order is None or isinstance(order, str) else exact_positions("order", order),
    )
    rules = TileSpec(mask, scale, None if softcap is None else float(softcap), float(dropout))
    return rules, array_options, offset if isinstance(offset, int) else 0


def read_kv_grad_dtype(kv_grad_dtype: str | None) -> str | None:
    """Returns ``kv_grad_dtype``; raises ConfigError if it is unknown."""
    if kv_grad_dtype is not None and kv_grad_dtype not in KV_GRAD_DTYPES:
        raise ConfigError(
            f"attention: kv_grad_dtype must be {' or '.join(map(repr, KV_GRAD_DTYPES))}, got "
            f"{kv_grad_dtype!r}.{did_you_mean(str(kv_grad_dtype), KV_GRAD_DTYPES)}"
        )
    return kv_grad_dtype


def read_keep(impl: str, options: Options) -> bool:
    """Whether gathered keys and values are kept for the backward pass; raises if ``impl`` does not gather."""
    keep = options.get("keep_gathered_kv", False)
    if not isinstance(keep, bool):
        raise ConfigError(f"attention: keep_gathered_kv must be True or False, got {keep!r}.")
    if keep and impl != "gather":
        raise ConfigError(
            f"attention(impl={impl!r}): keep_gathered_kv=True keeps gathered keys and values for the backward pass, "
            f"but only impl 'gather' gathers them. Remedy: use impl='gather', or leave keep_gathered_kv out."
        )
    return keep


def check_impl(impl: str) -> None:
    """Raises ConfigError for an unknown implementation."""
    if impl not in IMPLS:
        raise ConfigError(f"attention: {unknown('impl', impl, IMPLS, 'implementations')}")


def _check_shapes(q: Any, k: Any, v: Any) -> None:
    sizes = f"queries {list(q.shape)}, keys {list(k.shape)}, values {list(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise LayoutError(
            f"attention: each of queries, keys and values must be [batch, seq, heads, head_dim], got {sizes}."
        )
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise LayoutError(
            f"attention: queries, keys and values must have one batch size, keys and values one length and number of "
            f"heads, and queries and keys one head_dim, got {sizes}."
        )
    if q.shape[2] % k.shape[2]:
        raise LayoutError(
            f"attention: {q.shape[2]} query heads are not a multiple of {k.shape[2]} key heads, so they cannot share "
            f"the key heads evenly."
        )


def _segments(q: Any, k: Any, ids: Any) -> Segments:
    if ids is None:
        return None
    pair = ids if isinstance(ids, tuple) else (ids, ids)
    pair = tuple(x if hasattr(x, "dtype") else np.asarray(x) for x in pair)
    for name, x, tokens in zip(("queries", "keys"), pair, (q, k), strict=True):
        if jnp.shape(x) != tokens.shape[:2] or not jnp.issubdtype(x.dtype, jnp.integer):
            raise LayoutError(
                f"attention: segment_ids of the {name} must be integers {list(tokens.shape[:2])}, one per token, got "
                f"{kind_of(x)}."
            )
    if not isinstance(ids, tuple):  # the same object twice, which `select.find` looks for
        both = exact_ids("segment_ids", pair[0])
        return both, both
    a, b = (exact_ids(f"segment_ids of the {name}", x) for name, x in zip(("queries", "keys"), pair, strict=True))
    return a, b


def _prefix(q: Any, prefix: Any) -> jax.Array:
    given = prefix if hasattr(prefix, "dtype") else np.asarray(prefix)
    if given.dtype != object and not jnp.issubdtype(given.dtype, jnp.integer):
        raise LayoutError(f"attention: prefix must be integers, got {kind_of(given)}.")
    lengths = jnp.atleast_1d(clipped(given))
    if lengths.shape not in ((1,), (q.shape[0],)):
        raise LayoutError(
            f"attention: prefix must be one number, or one for each of {q.shape[0]} sequences, got shape "
            f"{list(lengths.shape)}."
        )
    return lengths


def _slopes(heads: int, alibi: Any) -> Any:
    if alibi is None or alibi is False:
        return None
    return jnp.asarray(standard_slopes(heads)) if alibi is True else _per_head("alibi", heads, alibi)


def standard_slopes(heads: int) -> list[float]:
    """Returns the ALiBi slopes [heads] of Press et al. 2021 (arXiv:2108.12409).

    If ``heads`` is a power of two, they go geometrically from 2^(-8 / heads) to 2^-8. Otherwise they are the slopes of
    the next lower power of two, then every other slope of the next higher one.

    >>> standard_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 1 << (heads.bit_length() - 1)
    regular = lambda n: [2 ** (-8 * (i + 1) / n) for i in range(n)]
    return regular(power) + regular(2 * power)[::2][: heads - power]


def _bias(q: Any, bias: Any, tokens: tuple[int, int]) -> Any:
    if bias is None:
        return None
    batch, _, heads, _ = q.shape
    bias = _array(bias)
    shape = bias.shape
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2:] != tokens:
        raise LayoutError(
            f"attention: bias must have the shape [{batch} or 1, {heads} or 1, {tokens[0]}, {tokens[1]}] (batch, "
            f"heads, queries, keys), got {list(shape)}."
        )
    if bias.dtype == bool:
        raise LayoutError(
            f"attention: bias {list(shape)} must be numbers, because it is added to the scores, got booleans. Remedy: "
            f"bias=jnp.where(bias, 0, -jnp.inf), which hides the keys for which it is False."
        )
    return _floats(bias)


def check_order(impl: str, options: Options, ring: Sequence[str], heads: Sequence[str]) -> None:
    """Raises LayoutError for a ring order if the sequence is exchanged for heads and there is no ring."""
    order = options.get("order")
    if isinstance(order, str) and order != "contiguous" and heads and not ring:
        raise LayoutError(
            f"attention(impl={impl!r}): order {order!r} applies to the devices of a ring, but there is no ring: the "
            f"sequence is exchanged for heads over {listing(heads)}. Remedy: use impl='ring' or 'hybrid', or "
            f"order='contiguous' for tokens in their natural order."
        )


def _per_head(name: str, heads: int, x: Any) -> Any:
    if x is None:
        return None
    x = _array(x)
    if x.shape != (heads,):
        raise LayoutError(
            f"attention: {name} must be one number for each of {heads} query heads, got shape {list(x.shape)}."
        )
    return _floats(x)


def _array(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jnp.asarray(x)


def _floats(x: Any) -> Any:
    """Returns an array of floats, because integers have no gradients."""
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(accumulator(x))


def _words(key: Any, batch: int) -> jax.Array:
    """Returns two 32-bit words of any kind of PRNG key, [2]; [batch, 2] for one key per sequence."""
    data = key if jnp.issubdtype(key.dtype, jnp.unsignedinteger) else jax.random.key_data(key)
    *lead, width = data.shape
    if lead not in ([], [batch]):
        raise LayoutError(
            f"attention: key must be one key, or one for each of {batch} sequences, got shape {lead}. Remedy: pass "
            f"key=jax.random.key(...), or jax.random.split(key, {batch})."
        )
    words = data.reshape(*lead, width // 2, 2)
    return words[..., 0, :] if width == 2 else words[..., 0, :] ^ words[..., 1, :]
