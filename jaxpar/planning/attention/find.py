"""Finds attention in a traced program: softmax(scale q k^T + mask) v, written out in matmuls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxpar.planning.attention.axes import Dims, Group, axes_of, fresh, moved
from jaxpar.planning.attention.positions import as_choice, constant, position
from jaxpar.planning.attention.scores import after, product
from jaxpar.planning.attention.values import Lost, Product, Scores, Stage, Value, View
from jaxpar.utils.jaxprs import opened

MOVED_BOOLEANS = ("and", "or", "not", "select_n")
IsData = Callable[[Any], bool]


@dataclass(frozen=True, eq=False)
class WeightedValues:
    """The product of softmax weights and values: the result of attention.

    Attributes:
      eqn: its equation.
      scores: the weights.
      values: the variable of the values.
      value_dims: its dims, in the axes of the weights where they are paired.
      value_head: the axes that only the values have.
      dims: the dims of the result.
    """

    eqn: JaxprEqn
    scores: Scores
    values: Any
    value_dims: Dims
    value_head: Group
    dims: Dims


@dataclass
class ScoreReader:
    """Follows the equations of one jaxpr.

    Attributes:
      is_data: whether a variable depends on the batch.
      values: what is known of the variables; of others, nothing.
      found: products of weights and values.
      lost: products of queries and keys whose softmax is no usual one, with the reason.
    """

    is_data: IsData
    values: dict[Any, Value] = field(default_factory=dict)
    found: list[WeightedValues] = field(default_factory=list)
    lost: dict[Product, str] = field(default_factory=dict)
    _literals: dict[int, Value] = field(default_factory=dict)

    def read(self, eqns: Iterable[JaxprEqn]) -> None:
        """Follow equations."""
        for eqn in eqns:
            reads = [self.value(atom) for atom in eqn.invars]
            if eqn.primitive.name == "custom_jvp_call":
                self._inside(eqn, reads)
            elif eqn.primitive.name == "dot_general":
                self._matmul(eqn, reads)
            elif any(isinstance(x, Scores | Lost) for x in reads):
                self.values |= dict.fromkeys(eqn.outvars, after(eqn, reads))
            elif len(eqn.outvars) == 1 and (known := _known(eqn, reads)) is not None:
                self.values[eqn.outvars[0]] = known

    def value(self, atom: Any) -> Value:
        """Returns what is known of a variable or a constant."""
        if isinstance(atom, Literal):
            if id(atom) not in self._literals:
                self._literals[id(atom)] = constant(atom.val) or View.of(atom)
            return self._literals[id(atom)]
        return self.values[atom] if atom in self.values else View.of(atom)

    def _inside(self, eqn: JaxprEqn, reads: Sequence[Value]) -> None:
        """Follow the body of a function with its own derivative, as ``jax.nn.softmax`` was before jax 0.8."""
        body = opened(eqn.params["call_jaxpr"])
        inner = ScoreReader(lambda var: False)
        inner.values |= zip(body.invars, reads, strict=True)
        inner.read(body.eqns)
        for var, atom in zip(eqn.outvars, body.outvars, strict=True):
            value = inner.value(atom)
            if not isinstance(value, View):
                self.values[var] = value

    def _matmul(self, eqn: JaxprEqn, reads: Sequence[Value]) -> None:
        for x in reads:
            if isinstance(x, Lost) and x.softmax:
                self.lost.setdefault(x.product, x.reason)
        weights = [i for i, x in enumerate(reads) if isinstance(x, Scores) and x.stage == Stage.WEIGHTS]
        if len(weights) == 1:
            scores = cast(Scores, reads[weights[0]])
            result = _weighted(eqn, scores, weights[0])
            if isinstance(result, str):
                self.lost.setdefault(scores.product, result)
            else:
                self.found.append(result)
        for x in reads:
            if isinstance(x, Scores) and x.stage in (Stage.EXPONENTIALS, Stage.SUM):
                self.lost.setdefault(x.product, f"a matmul reads {x.stage}")
        if all(self.is_data(atom) for atom in eqn.invars):
            self.values[eqn.outvars[0]] = product(eqn)


def find(jaxpr: Jaxpr, is_data: IsData, known: Mapping[Any, Value] | None = None) -> ScoreReader:
    """Returns what is found in the equations of a jaxpr, without those of the bodies of loops and branches.

    Args:
      jaxpr: the program.
      is_data: whether a variable depends on the batch.
      known: what is known of its arguments and constants.
    """
    reader = ScoreReader(is_data, dict(known or {}))
    reader.read(jaxpr.eqns)
    return reader


def _known(eqn: JaxprEqn, reads: Sequence[Value]) -> Value | None:
    """What is known of a result that is no score."""
    name, out = eqn.primitive.name, cast(Any, eqn.outvars[0].aval)
    if name in MOVED_BOOLEANS and out.dtype == bool:
        reads = [as_choice(x) for x in reads]
    if (found := position(name, eqn.params, reads, out)) is not None:
        return found
    if len(reads) == 1 and isinstance(reads[0], View):
        if name == "convert_element_type" and not _keeps_values(cast(Any, eqn.invars[0].aval).dtype, out.dtype):
            return None
        dims = moved(name, eqn.params, reads[0].dims, out.shape)
        return None if dims is None else View(dims, reads[0].source, reads[0].source_dims)
    return None


def _keeps_values(before: Any, after: Any) -> bool:
    """Whether a conversion keeps a value: one that is rounded is another one, and so are floats made of integers."""
    return np.can_cast(before, after) and not np.issubdtype(before, np.integer)


def _weighted(eqn: JaxprEqn, scores: Scores, which: int) -> WeightedValues | str:
    """The product of weights and values, or why it is none."""
    other = 1 - which
    contracted, batch = eqn.params["dimension_numbers"]
    if [scores.dims[i] for i in contracted[which]] != [(scores.over,)]:
        return "its weights are not contracted along the keys"
    dims = list(fresh(cast(Any, eqn.invars[other].aval).shape))
    for i, j in (
        *zip(contracted[which], contracted[other], strict=True),
        *zip(batch[which], batch[other], strict=True),
    ):
        dims[j] = scores.dims[i]
    taken = {side: (*contracted[side], *batch[side]) for side in (0, 1)}
    free = {
        side: [group for i, group in enumerate(own) if i not in taken[side]]
        for side, own in ((which, scores.dims), (other, dims))
    }
    out = (*(scores.dims[i] for i in batch[which]), *free[0], *free[1])
    return WeightedValues(eqn, scores, eqn.invars[other], tuple(dims), axes_of(free[other]), out)
