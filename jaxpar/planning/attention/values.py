"""What is known of a program's values while attention is looked for: positions, masks, scores and softmax weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from jax.extend.core import JaxprEqn

from jaxpar.planning.attention.axes import Axis, Dims, Group, fresh, renamed

Number = int | float | bool


@dataclass(frozen=True, eq=False)
class View:
    """An array of which nothing is known but the variable that it was moved from.

    Attributes:
      dims: its dims.
      source: the variable.
      source_dims: the dims of the variable, in the same axes.
      negated: of booleans, whether they are the other way round.
    """

    dims: Dims
    source: Any
    source_dims: Dims
    negated: bool = False

    @classmethod
    def of(cls, var: Any) -> Self:
        """Returns a variable as it is."""
        dims = fresh(var.aval.shape)
        return cls(dims, var, dims)

    def with_axes(self, names: Mapping[Axis, Axis]) -> View:
        return replace(self, dims=renamed(self.dims, names), source_dims=renamed(self.source_dims, names))


@dataclass(frozen=True)
class Linear:
    """A number that depends on the position alone: ``constant`` plus the sum of ``factor * index`` over axes."""

    dims: Dims
    constant: Number
    factors: Mapping[Axis, Number] = field(default_factory=dict)

    def with_axes(self, names: Mapping[Axis, Axis]) -> Linear:
        factors = {names.get(axis, axis): factor for axis, factor in self.factors.items()}
        return Linear(renamed(self.dims, names), self.constant, factors)


Condition = tuple[Linear | View, ...]
"""What must all hold: a ``Linear`` is at least 0, a ``View`` of booleans is true."""


@dataclass(frozen=True)
class Conditional:
    """A number that is ``yes`` where all conditions hold, and ``no`` elsewhere."""

    dims: Dims
    condition: Condition
    yes: Number
    no: Number

    def with_axes(self, names: Mapping[Axis, Axis]) -> Conditional:
        condition = tuple(part.with_axes(names) for part in self.condition)
        return replace(self, dims=renamed(self.dims, names), condition=condition)


def negated(choice: Conditional) -> Conditional | None:
    """Returns the same choice with the opposite condition, if that is one condition and not several."""
    if len(choice.condition) != 1:
        return None
    (part,) = choice.condition
    if isinstance(part, View):
        opposite: Linear | View = replace(part, negated=not part.negated)
    else:
        factors = {axis: -factor for axis, factor in part.factors.items()}
        opposite = Linear(part.dims, -1 - part.constant, factors)
    return Conditional(choice.dims, (opposite,), choice.no, choice.yes)


class Stage(StrEnum):
    """How far attention has been computed."""

    SCORES = "scores"
    SHIFT = "the scores' maximum"
    SHIFTED = "scores less their maximum"
    EXPONENTIALS = "exponentials of the scores"
    SUM = "sums of the exponentials"
    WEIGHTS = "softmax weights"


@dataclass(frozen=True, eq=False)
class Product:
    """The product of queries and keys.

    Attributes:
      eqn: its equation.
      operands: the dims of each operand.
      both: the axes that are kept apart in both operands, in the order of the result.
      free: the axes that each operand has alone.
      contracted: the axes that are summed over.
    """

    eqn: JaxprEqn
    operands: tuple[Dims, Dims]
    both: Group
    free: tuple[Group, Group]
    contracted: Group


@dataclass(frozen=True)
class Scores:
    """A product of two activations on its way to the weights of attention.

    Attributes:
      dims: its dims.
      product: the product that it began as.
      stage: what has been computed of it.
      scale, softcap: the score is ``scale * product``, or ``softcap * tanh(scale / softcap * product)``.
      capped: whether the tanh has been taken and still has its factor ahead.
      hidden: the conditions of each mask, the score elsewhere, and whether that is added to the score.
      biases: what was added.
      over: the axis of the keys, once the softmax has been taken over it.
    """

    dims: Dims
    product: Product
    stage: Stage = Stage.SCORES
    scale: float = 1.0
    softcap: float | None = None
    capped: bool = False
    hidden: tuple[tuple[Condition, float, bool], ...] = ()
    biases: tuple[View, ...] = ()
    over: Axis | None = None

    def without_values(self) -> Linear:
        """Returns a value of the same dims, to align others with."""
        return Linear(self.dims, 0, {axis: 1 for group in self.dims for axis in group})

    def alike(self, other: Scores) -> bool:
        """Whether both are computed alike from one product, apart from their stage."""
        same = lambda x: (x.product, x.scale, x.softcap, x.capped, x.hidden, x.biases)
        return bool(same(self) == same(other))


@dataclass(frozen=True)
class Lost:
    """Scores after an operation that :func:`jaxpar.attention` does not have.

    Attributes:
      product: the product that it began as.
      reason: the operation.
      softmax: whether exponentials were taken of it.
    """

    product: Product
    reason: str
    softmax: bool = False


Value = View | Linear | Conditional | Scores | Lost
