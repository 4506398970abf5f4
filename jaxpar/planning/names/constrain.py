"""Puts sharding constraints into a traced program: on the weights and results of matmuls whose dims have names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import AxisType, PartitionSpec

from jaxpar.parallel.zero.gather import gather_weight
from jaxpar.planning.names.propagate import TracedValue, Visited
from jaxpar.sharding.layout import current_layout, with_sharding
from jaxpar.sharding.names import Names
from jaxpar.sharding.resolve import resolve
from jaxpar.utils.jaxprs import opened

MATMULS = frozenset(("dot_general", "conv_general_dilated", "ragged_dot_general", "gather"))
"""Primitives that read weights; of ``gather`` those that look up rows of a table."""

RESIDUAL_SEQ = "residual_seq"
"""The sequence of the residual stream between layers, which sequence parallelism shards over the tensor axis.

Rules without this name shard the residual stream as they shard ``seq``.
"""


class NamesOf(Protocol):
    """What the program's values are called."""

    def __call__(self, value: TracedValue) -> Names:
        """Returns the names of a value's dims, ``None`` for those that are not known."""

    def is_residual(self, value: TracedValue) -> bool:
        """Whether a value is of the width of the residual stream."""


def constrained(jaxpr: Jaxpr, visited: Sequence[Visited], names_of: NamesOf) -> Jaxpr:
    """Returns a jaxpr in which matmuls gather their weights, and shard their results by the rules of activations.

    The bodies of loops, branches, recomputed layers and jitted functions are rewritten too. Those of custom derivatives
    and of ``shard_map`` remain as they are.

    Args:
      jaxpr: the traced program; unchanged.
      visited: its equations, as :meth:`Propagation.run` returns them.
      names_of: the names of a value's dims.
    """
    eqns: list[JaxprEqn] = []
    replaced: dict[Any, Any] = {}
    gathered: dict[Var, Var] = {}
    for step in visited:
        reads = [replaced.get(atom, atom) if isinstance(atom, Var) else atom for atom in step.eqn.invars]
        matmul = step.eqn.primitive.name in MATMULS and step.makes[0].data
        weighted = matmul and any(value.weight for value in step.reads)
        for i, (atom, value) in enumerate(zip(reads, step.reads, strict=True) if weighted else ()):
            if isinstance(atom, Var) and atom not in gathered:
                if value.weight:
                    gathered[atom] = _insert(eqns, _gather(names_of(value)), atom, step.eqn)
                elif value.data and _separate_residual() and names_of.is_residual(value):
                    gathered[atom] = _insert(eqns, _shard(names_of(value)), atom, step.eqn)
            reads[i] = gathered.get(atom, atom) if isinstance(atom, Var) else atom
        eqns.append(step.eqn.replace(invars=reads, params={**step.eqn.params, **_rewritten(step, names_of)}))
        if matmul and any(names := names_of(step.makes[0])):
            out = step.eqn.outvars[0]
            if weighted and _separate_residual() and names_of.is_residual(step.makes[0]):
                names = tuple(RESIDUAL_SEQ if name == "seq" else name for name in names)
            replaced[out] = _insert(eqns, _shard(names), out, step.eqn)
    outvars = [replaced.get(atom, atom) if isinstance(atom, Var) else atom for atom in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outvars)


def _separate_residual() -> bool:
    return RESIDUAL_SEQ in current_layout().rules.table


def _rewritten(step: Visited, names_of: NamesOf) -> dict[str, Any]:
    """The parameters of an equation that are jaxprs, with their constraints."""
    changed: dict[str, Any] = {}
    if step.eqn.primitive.name.startswith("custom_"):
        return changed
    for key, index, visited in step.inner:
        before = step.eqn.params[key] if index is None else step.eqn.params[key][index]
        body = constrained(opened(before), visited, names_of)
        # Before jax 0.12 a ClosedJaxpr contains a Jaxpr; since then both are one class.
        after = body if isinstance(before, Jaxpr) else ClosedJaxpr(body, before.consts)
        changed[key] = after if index is None else (*changed.get(key, ()), after)
    return changed


def _insert(eqns: list[JaxprEqn], function: Callable[[jax.Array], jax.Array], var: Any, matmul: JaxprEqn) -> Any:
    """Append the equations of ``function(var)``, and return the variable of its result."""
    traced = opened(jax.make_jaxpr(function)(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)))
    (start,), (end,) = traced.invars, traced.outvars
    eqns += [
        eqn.replace(invars=[var if atom is start else atom for atom in eqn.invars], source_info=matmul.source_info)
        for eqn in traced.eqns
    ]
    return var if end is start else end


def _shard(names: Names) -> Callable[[jax.Array], jax.Array]:
    """Shards an array by its names, and leaves dims that have no name, or do not fit the rules, to the compiler."""

    def shard(x: jax.Array) -> jax.Array:
        layout, context = current_layout(), jax.sharding.get_abstract_mesh()
        fitting = _fitting(names, x.shape)
        sizes = {axis: size for axis, size in layout.sizes.items() if axis not in context.manual_axes}
        axes = resolve(layout.rules, sizes, fitting, x.shape, itemsize=x.dtype.itemsize).axes
        free = None if AxisType.Explicit in layout.mesh.axis_types else PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*(free if name is None else own for name, own in zip(fitting, axes, strict=True)))
        sharded: jax.Array = with_sharding(context if context.manual_axes else layout.mesh, x, spec)
        return sharded

    return shard


def _gather(names: Names) -> Callable[[jax.Array], jax.Array]:
    def gather(w: jax.Array) -> jax.Array:
        return gather_weight(w, *_fitting(names, w.shape))

    return gather


def _fitting(names: Names, shape: Sequence[int]) -> Names:
    """The names that the rules know and that fit an array together; ``None`` for the others."""
    layout, kept = current_layout(), [None] * len(names)  # type: Any, list[str | None]
    for i, name in enumerate(names):
        trial = [*kept[:i], name, *kept[i + 1 :]]
        if not layout.resolve(trial, shape).problems:
            kept[i] = name
    return tuple(kept)
