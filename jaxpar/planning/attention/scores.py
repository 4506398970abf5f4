"""How operations change scores on their way from a product of queries and keys to the weights of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from jaxpar.planning.attention.axes import axes_of, fresh, moved, size
from jaxpar.planning.attention.positions import align, as_choice, number
from jaxpar.planning.attention.values import Conditional, Lost, Number, Product, Scores, Stage, Value, View, negated

HIDDEN = -1e4
"""A score of at most this hides a key: beside any usual score its exponential is 0 in floating point."""


def product(eqn: JaxprEqn) -> Scores:
    """Returns the scores that a matmul of two activations may be."""
    contracted, batch = eqn.params["dimension_numbers"]
    first, second = (list(fresh(cast(Any, atom.aval).shape)) for atom in eqn.invars)
    for i, j in (*zip(*contracted, strict=True), *zip(*batch, strict=True)):
        second[j] = first[i]
    both, summed = ([first[i] for i in dims] for dims in (batch[0], contracted[0]))
    free = [
        [group for i, group in enumerate(dims) if i not in (*mine, *paired)]
        for dims, mine, paired in zip((first, second), contracted, batch, strict=True)
    ]
    operands = tuple(first), tuple(second)
    whole = Product(eqn, operands, axes_of(both), (axes_of(free[0]), axes_of(free[1])), axes_of(summed))
    return Scores((*both, *free[0], *free[1]), whole)


def after(eqn: JaxprEqn, reads: Sequence[Value]) -> Value:
    """Returns what an operation makes of scores or weights; ``Lost`` where attention has no such operation."""
    lost = next((x for x in reads if isinstance(x, Lost)), None)
    if lost is not None:
        return replace(lost, softmax=lost.softmax or eqn.primitive.name == "exp")
    scores = next(x for x in reads if isinstance(x, Scores))
    out: Any = eqn.outvars[0].aval
    found: Value | str | None = None
    if len(eqn.outvars) == 1:
        if (dims := moved(eqn.primitive.name, eqn.params, scores.dims, out.shape)) is not None:
            found = replace(scores, dims=dims) if _is_float(out.dtype) else None
        elif eqn.primitive.name in ("reduce_max", "reduce_sum"):
            found = _reduced(eqn, scores)
        else:
            found = _elementwise(eqn, reads, scores, out.shape)
    if found is None or isinstance(found, str):
        dropout = scores.stage == Stage.WEIGHTS and eqn.primitive.name in ("mul", "div", "select_n")
        operation = eqn.primitive.name
        if operation in ("jit", "pjit"):  # all others are inlined
            operation = (
                f"the jitted function {eqn.params['name']!r}, which has shardings or compiler options of its own"
            )
        reason = found or f"its {scores.stage} go through {operation}{', as in dropout' * dropout}"
        softmax = scores.stage in (Stage.EXPONENTIALS, Stage.SUM, Stage.WEIGHTS) or eqn.primitive.name == "exp"
        return Lost(scores.product, reason, softmax)
    return found


def _elementwise(eqn: JaxprEqn, reads: Sequence[Value], scores: Scores, shape: Sequence[int]) -> Value | str | None:
    name, stage = eqn.primitive.name, scores.stage
    if len(reads) == 1:
        return _unary(name, scores)
    first, second = (reads[0], reads[1]) if len(reads) == 2 else (None, None)
    if isinstance(first, Scores) and isinstance(second, Scores):
        return _softmax(name, first, second)
    if stage == Stage.SHIFT and name == "max":  # reduce_max starts from -inf
        return scores if number(first if second is scores else second) == -float("inf") else None
    if stage != Stage.SCORES:
        return None
    if name == "select_n" and len(reads) == 3:
        return _masked(reads, scores, shape)
    other = second if first is scores else first
    factor = number(other)
    if name == "mul" and factor is not None:
        return _scaled(scores, factor)
    if name == "div" and factor and first is scores:
        return _scaled(scores, 1 / factor)
    if name == "add" or (name == "sub" and first is scores):
        atom = eqn.invars[1 if first is scores else 0]
        return _added(scores, other, atom, -1 if name == "sub" else 1)
    return None


def _unary(name: str, scores: Scores) -> Scores | str | None:
    if name == "exp" and scores.stage in (Stage.SCORES, Stage.SHIFTED):
        return "its softcap has no factor" if scores.capped else replace(scores, stage=Stage.EXPONENTIALS)
    if name == "stop_gradient" and scores.stage == Stage.SHIFT:
        return scores
    if name == "tanh" and scores.stage == Stage.SCORES:
        changed = scores.capped or scores.softcap is not None or scores.hidden or scores.biases
        return None if changed else replace(scores, capped=True)
    return None


def _scaled(scores: Scores, factor: Number) -> Scores | str:
    if scores.hidden or scores.biases or scores.softcap is not None:
        return "its scores are scaled after a mask, a bias or a softcap"
    if scores.capped:
        cap = float(factor)
        return replace(scores, scale=scores.scale * cap, softcap=cap, capped=False) if cap > 0 else "a negative softcap"
    return replace(scores, scale=scores.scale * float(factor))


def _added(scores: Scores, other: Any, atom: Any, sign: int) -> Scores | str | None:
    if scores.capped:
        return "its softcap has no factor"
    if number(other) == 0:
        return scores
    if isinstance(other, Conditional) and other.no == 0:
        other = negated(other) or other
    masks = isinstance(other, Conditional) and other.yes == 0 and sign * other.no <= HIDDEN
    if not masks and not isinstance(other, View) and isinstance(atom, Var):
        other = View.of(atom)
    found = align([scores.without_values(), other], [size(group) for group in scores.dims])
    if found is None or found[0] != scores.dims:  # scores that it would repeat
        return None
    other = found[1][1]
    if isinstance(other, Conditional):
        return replace(scores, hidden=(*scores.hidden, (other.condition, sign * float(other.no), True)))
    if any(isinstance(x, View) for condition, _, added in scores.hidden if not added for x in condition):
        return "a bias is added to its scores after a mask"
    if isinstance(other, View) and sign == 1 and _is_float(other.source.aval.dtype):
        return replace(scores, biases=(*scores.biases, other))
    return None


def _masked(reads: Sequence[Value], scores: Scores, shape: Sequence[int]) -> Scores | str | None:
    which, off, on = as_choice(reads[0]), reads[1], reads[2]
    if not isinstance(which, Conditional) or scores.capped:
        return None
    found = align([scores.without_values(), which], shape)
    if found is None or found[0] != scores.dims:  # scores that it would repeat
        return None
    which = found[1][1]
    if on is not scores:
        off, which = on, negated(which) if which.yes else which
    elif not which.yes:
        which = negated(which)
    hidden = number(off)
    if which is None or hidden is None:
        return "its scores are replaced where a mask holds"
    if hidden > HIDDEN:
        return f"its mask puts {hidden:g}, which does not hide a key"
    return replace(scores, hidden=(*scores.hidden, (which.condition, float(hidden), False)))


def _reduced(eqn: JaxprEqn, scores: Scores) -> Scores | str | None:
    axes = [int(i) for i in eqn.params["axes"]]
    over = axes_of([scores.dims[i] for i in axes])
    dims = tuple(group for i, group in enumerate(scores.dims) if i not in axes)
    if len(over) != 1:
        return f"its softmax is over {len(over)} dims"
    (axis,) = over
    if eqn.primitive.name == "reduce_max" and scores.stage == Stage.SCORES:
        return replace(scores, dims=dims, stage=Stage.SHIFT, over=axis)
    if eqn.primitive.name == "reduce_sum" and scores.stage == Stage.EXPONENTIALS and scores.over in (None, axis):
        return replace(scores, dims=dims, stage=Stage.SUM, over=axis)
    return None


def _softmax(name: str, first: Scores, second: Scores) -> Scores | None:
    """The steps of a softmax that combine two arrays made of the same scores."""
    repeated = tuple(() if group == (second.over,) else group for group in first.dims)
    if not first.alike(second) or second.dims != repeated:
        return None
    stages = name, first.stage, second.stage
    if stages == ("sub", Stage.SCORES, Stage.SHIFT):
        return replace(first, stage=Stage.SHIFTED, over=second.over)
    if stages == ("div", Stage.EXPONENTIALS, Stage.SUM) and first.over in (None, second.over):
        return replace(first, stage=Stage.WEIGHTS, over=second.over)
    return None


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))
