"""What a caller asks of attention, checked before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import ConfigError, LayoutError, did_you_mean, listing
from jaxpar.parallel.attention.integers import clipped, exact_ids, exact_offset, exact_positions, kind_of
from jaxpar.parallel.attention.mask import Mask, Rule, mask_of
from jaxpar.parallel.attention.tiled.tile import AttentionArrays, Segments, TileSpec

Impl = Literal["auto", "dense", "flash", "gather", "ring", "ring_self_attention", "ulysses", "hybrid", "split_kv"]
IMPLS: tuple[str, ...] = get_args(Impl)
KV_GRAD_DTYPES = ("float32", "bfloat16")


class Options(TypedDict, total=False):
    """What :func:`jaxpar.attention` and :func:`jaxpar.attention_local` take beside queries, keys and values.

    Attributes:
      causal: a query sees the keys up to its own position. It does, unless ``False`` stands here or in the :class:`jaxpar.Mask`.
      mask: a :class:`jaxpar.Mask`, or a function of two positions, which is causal too unless ``causal=False`` stands beside it.
      segment_ids: integers [batch, seq], or a pair of them for queries and keys: a token sees those of its own segment. A
        negative number is padding. Padding never influences anything, also not if its queries, keys, values or the gradient of its result are
        NaN: no token sees it, and its result and gradients are 0. Ids are int32; of others, those that are known here must fit, and traced int64
        are compared as they are.
      prefix: how many keys every query sees whatever the mask says of them: an integer, or one for each sequence [batch]. Of any size.
      scale: of the scores; 1 / sqrt(head_dim) if not given.
      softcap: ``softcap * tanh(score / softcap)`` in the place of the score (Gemma 2), before biases.
      alibi: slopes [heads] of ``-slope * |q - k|``, or ``True`` for those of Press et al. 2021 (arXiv:2108.12409).
      bias: added to the scores, [batch or 1, heads or 1, queries, keys], its rows and columns in the order of the tokens in ``q`` and ``k``. A key
        whose score it brings to -1e30 or below (-inf, or the least number of fp32 or bf16; that of fp16 is greater) is hidden. A row
        without keys is 0, and so are its gradients.
      sinks: a logit [heads] that takes part in every softmax and adds nothing (attention sinks).
      dropout: the share of weights that are dropped; the others grow accordingly. The same ``key`` drops the same ones in
        every layout.
      key: of the dropout, a jax PRNG key, or one for each sequence [batch]. With one key a weight is drawn for by the place of its sequence in the whole
        batch, its head and its two positions; with a key for each sequence by that key, its head and its positions.
      q_offset: the position of the first query, where that of the first key is 0; an integer of any sign, which may be traced. All positions
        are int32, above its least number; of a traced offset that is not checked.
      order: how the tokens lie along the devices of a ring; ``None`` for as they come, and a ring under a causal mask then lays them
        out in zigzag and back by itself. Or the position of each token, as they lie [seq], of all devices and for all sequences:
        what :func:`jaxpar.balanced_packing` gives; it may be traced.
      kv_grad_dtype: the dtype in which gradients of keys and values go from device to device.
      keep_gathered_kv: for ``gather``: the keys and values of all devices stay from the forward to the backward pass, which then gathers nothing. Under
        a policy of recomputation they are among what attention makes (``save_attention``), by the name ``attention_keys``; where that is not
        saved, they are gathered again.
      block: tokens of a tile's side, at most; ``None`` for 512, and 256 on CPUs.
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


def known(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option that there is not."""
    names = tuple(Options.__annotations__)
    for name in options:
        if name not in names:
            raise ConfigError(
                f"attention: no option {name!r}.{did_you_mean(name, names)} The options are: {', '.join(names)}."
            )


def read(
    q: Any, k: Any, v: Any, options: Options, tokens: tuple[int, int] | None = None, queries: int | None = None
) -> tuple[TileSpec, AttentionArrays, int]:
    """What is to be computed, the arrays beside, and the first query's position where it is a plain number.

    Args:
      tokens: rows and columns of a bias, where they are not those of ``q`` and ``k``.
      queries: those of all devices, where they are more than ``q`` has.

    Raises:
      ConfigError, LayoutError: what is asked for does not fit; see :func:`jaxpar.attention`.
    """
    known(options)
    _check_shapes(q, k, v)
    heads = q.shape[2]
    mask = mask_of(options.get("causal"), options.get("mask"))
    offset, prefix = exact_offset(options.get("q_offset"), queries or q.shape[1]), options.get("prefix")
    if offset is None and q.shape[1] != k.shape[1] and mask.sides != (None, None):
        raise LayoutError(
            f"attention: {q.shape[1]} queries and {k.shape[1]} keys under a mask that compares their positions, but nothing says where the "
            f"first query stands. Remedy: q_offset={k.shape[1] - q.shape[1]} if the last query is at the last key, q_offset=0 if the "
            f"first is at the first, or causal=False."
        )
    if isinstance(prefix, int):
        mask, prefix = replace(mask, prefix=prefix), None
    scale, softcap = options.get("scale"), options.get("softcap")
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"attention: softcap is {softcap!r}, but a number above 0 is wanted.")
    dropout, key = options.get("dropout", 0.0), options.get("key")
    if not 0 <= dropout < 1:
        raise ConfigError(f"attention: dropout is {dropout!r}, but a share from 0 to below 1 is wanted.")
    if dropout and key is None:
        raise ConfigError(
            f"attention: dropout is {dropout}, but there is no key to draw from. Remedy: key=jax.random.key(...), another in every step, or "
            f"dropout=0."
        )
    beside = AttentionArrays(
        _segments(q, k, options.get("segment_ids")),
        None if prefix is None else _prefix(q, prefix),
        _slopes(heads, options.get("alibi")),
        _bias(q, options.get("bias"), tokens or (q.shape[1], k.shape[1])),
        _per_head("sinks", heads, options.get("sinks")),
        _words(key, q.shape[0]) if dropout else None,
        None if isinstance(offset, int) else offset,
    )
    softcap, order = None if softcap is None else float(softcap), options.get("order")
    if order is not None and not isinstance(order, str):
        beside = beside._replace(order=exact_positions("order", order))
    return TileSpec(mask, scale, softcap, float(dropout)), beside, offset if isinstance(offset, int) else 0


def read_kv_grad_dtype(kv_grad_dtype: str | None) -> str | None:
    if kv_grad_dtype is not None and kv_grad_dtype not in KV_GRAD_DTYPES:
        raise ConfigError(
            f"attention: kv_grad_dtype is {kv_grad_dtype!r}, but {' or '.join(map(repr, KV_GRAD_DTYPES))} is wanted.{did_you_mean(str(kv_grad_dtype), KV_GRAD_DTYPES)}"
        )
    return kv_grad_dtype


def read_keep(impl: str, options: Options) -> bool:
    """Whether gathered keys are kept; raises where nothing is gathered."""
    keep = options.get("keep_gathered_kv", False)
    if not isinstance(keep, bool):
        raise ConfigError(f"attention: keep_gathered_kv is {keep!r}, but True or False is wanted.")
    if keep and impl != "gather":
        raise ConfigError(
            f"attention(impl={impl!r}): keep_gathered_kv=True keeps gathered keys and values for the backward pass, but only impl 'gather' gathers them. "
            f"Remedy: impl='gather', or leave keep_gathered_kv out."
        )
    return keep


def check_impl(impl: str) -> None:
    if impl not in IMPLS:
        raise ConfigError(
            f"attention: unknown impl {impl!r}.{did_you_mean(impl, IMPLS)} The implementations are: {', '.join(IMPLS)}."
        )


def _check_shapes(q: Any, k: Any, v: Any) -> None:
    sizes = f"queries {list(q.shape)}, keys {list(k.shape)}, values {list(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise LayoutError(f"attention: {sizes}, but [batch, seq, heads, head_dim] is wanted of each.")
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise LayoutError(
            f"attention: {sizes}, but one batch, as many keys as values of as many heads, and one head_dim of queries and keys are wanted."
        )
    if q.shape[2] % k.shape[2]:
        raise LayoutError(
            f"attention: {q.shape[2]} query heads are no multiple of {k.shape[2]} key heads, so they cannot share them evenly."
        )


def _segments(q: Any, k: Any, ids: Any) -> Segments:
    if ids is None:
        return None
    pair = ids if isinstance(ids, tuple) else (ids, ids)
    pair = tuple(x if hasattr(x, "dtype") else np.asarray(x) for x in pair)
    for name, x, tokens in zip(("queries", "keys"), pair, (q, k), strict=True):
        if jnp.shape(x) != tokens.shape[:2] or not jnp.issubdtype(x.dtype, jnp.integer):
            raise LayoutError(
                f"attention: segment_ids of the {name} are {kind_of(x)}, but integers {list(tokens.shape[:2])}, one for each token, are wanted."
            )
    if not isinstance(ids, tuple):  # one array, so that a kernel that wants one for both can tell
        both = exact_ids("segment_ids", pair[0])
        return both, both
    a, b = (exact_ids(f"segment_ids of the {name}", x) for name, x in zip(("queries", "keys"), pair, strict=True))
    return a, b


def _prefix(q: Any, prefix: Any) -> jax.Array:
    given = prefix if hasattr(prefix, "dtype") else np.asarray(prefix)
    if given.dtype != object and not jnp.issubdtype(given.dtype, jnp.integer):
        raise LayoutError(f"attention: prefix is {kind_of(given)}, but integers are required.")
    lengths = jnp.atleast_1d(clipped(given))
    if lengths.shape not in ((1,), (q.shape[0],)):
        raise LayoutError(
            f"attention: prefix has shape {list(lengths.shape)}, but a number, or one for each of {q.shape[0]} sequences, is wanted."
        )
    return lengths


def _slopes(heads: int, alibi: Any) -> Any:
    if alibi is None or alibi is False:
        return None
    return jnp.asarray(standard_slopes(heads)) if alibi is True else _per_head("alibi", heads, alibi)


def standard_slopes(heads: int) -> list[float]:
    """The slopes of Press et al.: for a power of two, from 2^(-8 / heads) down to 2^-8; else those of the power below and every other of
    the one above.

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
    shape = jnp.shape(bias)
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2:] != tokens:
        raise LayoutError(
            f"attention: bias has shape {list(shape)}, but [{batch} or 1, {heads} or 1, {tokens[0]}, {tokens[1]}] (batch, heads, queries, keys) "
            f"is wanted."
        )
    return bias


def check_order(impl: str, options: Options, ring: Sequence[str], heads: Sequence[str]) -> None:
    """Raises where tokens are said to lie in the order of a ring that there is not."""
    order = options.get("order")
    if isinstance(order, str) and order != "contiguous" and heads and not ring:
        raise LayoutError(
            f"attention(impl={impl!r}): order {order!r} says how tokens lie along the devices of a ring, but there is none: the sequence is "
            f"exchanged for heads over {listing(heads)}. Remedy: impl='ring' or 'hybrid', or order='contiguous' for tokens as they come."
        )


def _per_head(name: str, heads: int, x: Any) -> Any:
    if x is not None and jnp.shape(x) != (heads,):
        raise LayoutError(
            f"attention: {name} has shape {list(jnp.shape(x))}, but one number for each of {heads} query heads is wanted."
        )
    return x


def _words(key: Any, batch: int) -> jax.Array:
    """Two 32-bit words of a PRNG key of any kind, [2]; of a key for each sequence [batch, 2]."""
    data = key if jnp.issubdtype(key.dtype, jnp.unsignedinteger) else jax.random.key_data(key)
    *lead, width = data.shape
    if lead not in ([], [batch]):
        raise LayoutError(
            f"attention: key has shape {lead}, but one key, or one for each of {batch} sequences, is wanted. Remedy: "
            f"key=jax.random.key(...), or jax.random.split(key, {batch})."
        )
    words = data.reshape(*lead, width // 2, 2)
    return words[..., 0, :] if width == 2 else words[..., 0, :] ^ words[..., 1, :]
