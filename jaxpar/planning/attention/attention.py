"""``FoundAttention``: what a program computes as attention, in the terms of :func:`jaxpar.attention`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jaxpar.parallel.attention.mask import Mask
from jaxpar.planning.attention.axes import Axis, Dims, Group, axes_of, size, split
from jaxpar.planning.attention.find import ScoreReader, WeightedValues
from jaxpar.planning.attention.values import Condition, Linear, View
from jaxpar.sharding.names import Names

NamesOf = Callable[[Any], Names]
"""The names of a variable's dims."""
HEADS = ("heads", "kv_heads", "head_groups")


class NotAttentionError(Exception):
    """Why a product of softmax weights and values cannot be run as attention; caught where it is reported."""


@dataclass(frozen=True)
class AttentionOperand:
    """Queries, keys, values or the result.

    Attributes:
      var: its variable.
      dims: its dims.
    """

    var: Any
    dims: Dims


@dataclass(frozen=True)
class Masks:
    """Which keys a query sees.

    Attributes:
      band: the least and the largest difference of the positions of query and key, or ``None`` for no limit.
      conditions: arrays of booleans that must be true.
      fill: the score of hidden keys; ``None`` if each query sees a key.
      added: conditions, and what is added to the scores of keys for which they are not true.
    """

    band: tuple[int | None, int | None] = (None, None)
    conditions: tuple[View, ...] = ()
    fill: float | None = None
    added: tuple[tuple[Condition, float], ...] = ()

    @property
    def rule(self) -> Mask:
        """Returns the part of the mask that positions tell."""
        least, most = self.band
        if least == 0:
            return Mask(window=None if most is None else most + 1)
        if least is None and most is None:
            return Mask(causal=False)
        return Mask(causal=False, window=(most, None if least is None else -least))

    def arrays(self) -> tuple[View, ...]:
        """Returns the arrays that it depends on."""
        parts = [part for condition, _ in self.added for part in condition]
        return (*self.conditions, *(part for part in parts if isinstance(part, View)))

    def split(self, axis: Axis, parts: Group) -> Masks:
        """Returns the same with an axis divided into several."""
        added = tuple((tuple(_split(part, axis, parts) for part in one), fill) for one, fill in self.added)
        return replace(self, conditions=tuple(_split(view, axis, parts) for view in self.conditions), added=added)


@dataclass(frozen=True)
class FoundAttention:
    """Attention that a program computes with matmuls.

    Attributes:
      eqn: the equation of its result.
      q, k, v, out: its operands and its result.
      batch: the axes of the batch, at most one.
      seq, keys: the axes of the queries and of the keys.
      kv_heads: the axes of heads that keys and values have.
      groups: the axes of heads that only queries have.
      head, value_head: the axes of the size of a head.
      scale, softcap: as for :func:`jaxpar.attention`.
      masks: which keys a query sees.
      biases: arrays that are added to the scores.
      may_hide_all: whether what is added depends on the batch, and may hide all keys of a query.
    """

    eqn: JaxprEqn
    q: AttentionOperand
    k: AttentionOperand
    v: AttentionOperand
    out: AttentionOperand
    batch: Group
    seq: Axis
    keys: Axis
    kv_heads: Group
    groups: Group
    head: Group
    value_head: Group
    scale: float
    softcap: float | None
    masks: Masks
    biases: tuple[View, ...]
    may_hide_all: bool

    @classmethod
    def of(cls, weighted: WeightedValues, reader: ScoreReader, names_of: NamesOf) -> Self:
        """Returns the attention that a product of weights and values is.

        Raises:
          NotAttentionError: it is none that :func:`jaxpar.attention` computes.
        """
        scores = weighted.scores
        product, keys = scores.product, scores.over
        if keys is None or keys in product.both or keys in product.contracted:
            raise NotAttentionError("its softmax is not over the keys")
        side = 0 if keys in product.free[1] else 1  # of the queries
        if product.free[1 - side] != (keys,):
            raise NotAttentionError("its keys have several dims of their own")
        q, k = (AttentionOperand(product.eqn.invars[i], product.operands[i]) for i in (side, 1 - side))
        v, out = (
            AttentionOperand(weighted.values, weighted.value_dims),
            AttentionOperand(weighted.eqn.outvars[0], weighted.dims),
        )
        shared = tuple(axis for axis in product.both if axis in axes_of(v.dims))
        expected = {*shared, keys, *weighted.value_head}
        if len(shared) != len(product.both) or set(axes_of(v.dims)) != expected:
            raise NotAttentionError("its keys and values have different dims")
        if {*axes_of(scores.dims)} != {*product.both, *product.free[side], keys}:
            raise NotAttentionError("its weights are repeated or summed")
        seq = _sequence(product.free[side], q, k, keys, names_of)
        batch = tuple(axis for axis in axes_of(q.dims)[:1] if axis in shared)
        heads = tuple(axis for axis in axes_of(k.dims) if axis in shared and axis not in batch)
        groups = tuple(axis for axis in axes_of(q.dims) if axis in product.free[side] and axis is not seq)
        for eqn in (product.eqn, weighted.eqn):
            if not _usual_precision(eqn):
                raise NotAttentionError("its matmuls have a precision of their own")
        masks = _masks(scores.hidden, seq, keys)
        may_hide_all = bool(masks.added) or any(reader.is_data(view.source) for view in scores.biases)
        if may_hide_all and (masks.conditions or masks.band != (None, None)):
            raise NotAttentionError("one of its masks is added to the scores, and another replaces them")
        if may_hide_all and scores.softcap is not None:
            raise NotAttentionError("it has a softcap, and a mask that is added")
        found = cls(
            weighted.eqn, q, k, v, out, batch, seq, keys, heads, groups, product.contracted, weighted.value_head,
            scores.scale, scores.softcap, masks, scores.biases, may_hide_all,
        )  # fmt: skip
        return found._without_repeats(reader)

    @property
    def heads(self) -> Group:
        """The axes of the queries' heads: those of a key's head side by side."""
        return (*self.kv_heads, *self.groups)

    def variables(self) -> tuple[Any, ...]:
        """Returns the variables that it reads: queries, keys, values, and the arrays of masks and biases."""
        return (self.q.var, self.k.var, self.v.var, *(view.source for view in (*self.masks.arrays(), *self.biases)))

    def describe(self) -> str:
        """Returns its sizes and options in a line.

        A mask is ``causal``, ``window`` or ``mask`` for an array; several are listed.
        """
        heads, kv_heads = size(self.heads), size(self.kv_heads)
        shared = f" ({kv_heads} of keys)" if kv_heads != heads else ""
        parts = [f"{self.seq.size} queries, {self.keys.size} keys, {heads} heads{shared}"]
        least, most = self.masks.band
        parts += ["causal"] if least == 0 else []
        parts += ["window"] if most is not None or least not in (None, 0) else []
        parts += ["mask"] * bool(self.masks.arrays()) + ["bias"] * bool(self.biases)
        parts += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        return ", ".join(parts)

    def _without_repeats(self, reader: ScoreReader) -> Self:
        """The same with keys and values before they were repeated for the queries that share them."""
        found = self
        for axis in self.kv_heads:
            one, other = (_repeats(operand, axis, reader) for operand in (found.k, found.v))
            if one is None or other is None or one[1] != other[1]:
                continue
            (k, count), (v, _) = one, other
            kept = (Axis(axis.size // count),) if axis.size != count else ()
            parts = (*kept, Axis(count))
            at = found.kv_heads.index(axis)
            found = replace(
                found,
                q=replace(found.q, dims=split(found.q.dims, axis, parts)),
                k=AttentionOperand(k.source, _source_dims(k, found.k.dims, axis, kept)),
                v=AttentionOperand(v.source, _source_dims(v, found.v.dims, axis, kept)),
                out=replace(found.out, dims=split(found.out.dims, axis, parts)),
                kv_heads=(*found.kv_heads[:at], *kept, *found.kv_heads[at + 1 :]),
                groups=(*found.groups, parts[-1]),
                masks=found.masks.split(axis, parts),
                biases=tuple(_split(view, axis, parts) for view in found.biases),
            )
        return found


def _usual_precision(eqn: JaxprEqn) -> bool:
    """Whether a matmul has the precision of one in :func:`jaxpar.attention`, which sums bf16 in fp32."""
    precision = eqn.params["precision"]
    if precision == jax.lax.DotAlgorithmPreset.BF16_BF16_F32:
        return all(atom.aval.dtype == jnp.bfloat16 for atom in cast(Any, eqn.invars))
    return precision in (None, jax.lax.Precision.DEFAULT, (jax.lax.Precision.DEFAULT,) * 2)


def _sequence(free: Group, q: AttentionOperand, k: AttentionOperand, keys: Axis, names_of: NamesOf) -> Axis:
    """The axis of the queries among those that only they have."""
    if not free:
        raise NotAttentionError("it has one query")
    if len(free) == 1:
        return free[0]
    names = {axis: name for group, name in zip(q.dims, names_of(q.var), strict=True) for axis in group}
    (name,) = [name for group, name in zip(k.dims, names_of(k.var), strict=True) if group == (keys,)]
    alike = [axis for axis in free if names[axis] == name]
    others = [axis for axis in free if names[axis] not in HEADS]
    found = alike if len(alike) == 1 else others
    if len(found) != 1:
        raise NotAttentionError("several of its dims may be the sequence")
    return found[0]


def _masks(hidden: Sequence[tuple[Condition, float, bool]], seq: Axis, keys: Axis) -> Masks:
    """The masks of scores, those that positions tell as a band.

    Scores that are replaced where a key is hidden are equal there, so that a query without a key weighs all keys alike.
    Numbers that are added accumulate, and are kept as arrays where one of them depends on data.
    """
    arrays_added = any(adds and any(isinstance(x, View) for x in condition) for condition, _, adds in hidden)
    least, most = -keys.size, seq.size  # no limit
    conditions, added, fills = list[View](), list[tuple[Condition, float]](), set[float]()
    for condition, fill, adds in hidden:
        if adds and arrays_added:
            added.append((condition, fill))
            continue
        fills.add(fill)
        for part in condition:
            if isinstance(part, View):
                conditions.append(part)
            else:
                low, high = _limits(part, seq, keys)
                least, most = max(least, low), min(most, high)
    all_see = least <= min(0, most) and seq.size - most <= keys.size
    if (fills and added) or (len(fills) > 1 and not (all_see and not conditions)):
        raise NotAttentionError("its masks put different scores")
    if not all_see and any(adds for _, _, adds in hidden):
        raise NotAttentionError("its mask hides all keys from a query")
    if least > 0 or most < 0:
        raise NotAttentionError("its mask hides from each query the key of the same position")
    band = (None if least <= 1 - keys.size else least, None if most >= seq.size - 1 else most)
    common = fills.pop() if conditions or not all_see else None
    return Masks(band, tuple(conditions), common, tuple(added))


def _limits(part: Linear, seq: Axis, keys: Axis) -> tuple[int, int]:
    """The least and the largest difference of the positions of query and key where ``part`` is at least 0."""
    first, second = part.factors.get(seq, 0), part.factors.get(keys, 0)
    if part.factors.keys() - {seq, keys} or not first or first != -second:
        raise NotAttentionError("its mask compares positions in another way than a causal mask or a window")
    if first > 0:
        return math.ceil(-part.constant / first), seq.size
    return -keys.size, math.floor(part.constant / -first)


def _repeats(operand: AttentionOperand, axis: Axis, reader: ScoreReader) -> tuple[View, int] | None:
    """What was repeated along an axis, side by side, and how often."""
    view = reader.value(operand.var)
    at = next((i for i, group in enumerate(operand.dims) if group == (axis,)), None)
    if at is None or not isinstance(view, View) or not view.dims[at] or not view.dims[at][-1].copies:
        return None
    copies = [one for group in view.dims for one in group if one.copies]
    if (
        any(len(group) > 1 + (i == at) for i, group in enumerate(view.dims))
        or len(copies) != 1
        or view.source.aval.dtype != operand.var.aval.dtype
    ):
        return None
    return view, copies[0].size


def _source_dims(view: View, dims: Dims, axis: Axis, kept: Group) -> Dims:
    """The dims of what was repeated: those of the operand, with what is left of the axis."""
    names = {
        own: (kept if group == (axis,) else group)
        for group, owns in zip(dims, view.dims, strict=True)
        for own in owns[:1]
        if not own.copies
    }
    return tuple(axes_of(names[own] for own in group) for group in view.source_dims)


def _split[T: View | Linear](x: T, axis: Axis, parts: Group) -> T:
    """A value in other axes; positions in a mask do not depend on heads."""
    if isinstance(x, Linear):
        return x
    return replace(x, dims=split(x.dims, axis, parts), source_dims=split(x.source_dims, axis, parts))
