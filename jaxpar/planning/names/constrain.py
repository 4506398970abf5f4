"""Puts sharding constraints into a traced program: on the weights and results of matmuls whose dims have names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import AxisType, PartitionSpec

from jaxpar.parallel.zero.gather import gather_weight, sharded_dot
from jaxpar.planning.attention.attention import FoundAttention
from jaxpar.planning.attention.run import attend, shapes, shards_sequence
from jaxpar.planning.names.attention_sites import AttentionSite, BodyAttention, Known, needed_with
from jaxpar.planning.names.primitive_rules import TracedValue
from jaxpar.planning.names.propagate import Visited
from jaxpar.sharding.layout import current_layout, with_sharding
from jaxpar.sharding.names import Names
from jaxpar.sharding.resolve import resolve
from jaxpar.utils.call_site import traced_site
from jaxpar.utils.contexts import hint_observer
from jaxpar.utils.jaxprs import opened, spliced

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

    def role(self, value: TracedValue) -> str:
        """Returns the role whose rules shard the result of a matmul."""

    def is_residual(self, value: TracedValue) -> bool:
        """Whether a value is of the width of the residual stream."""


def constrained(jaxpr: Jaxpr, visited: Sequence[Visited], names_of: NamesOf, known: Known) -> Jaxpr:
    """Returns a jaxpr in which matmuls gather their weights, and shard their results by the rules of activations.

    Matmuls of one activation with several weights are one :func:`jaxpar.sharded_dot`. The bodies of loops, branches,
    recomputed layers and jitted functions are rewritten too. Those of custom derivatives and of ``shard_map`` remain as
    they are. Attention whose sequence the ambient layout shards becomes :func:`jaxpar.attention`.

    Args:
      jaxpr: the traced program; unchanged.
      visited: its equations, as :meth:`Propagation.run` returns them.
      names_of: the names of a value's dims.
      known: masks and positions among its arguments and constants.
    """
    attention = BodyAttention.of(jaxpr, visited, names_of, known)
    found = [site for site in attention.sites if site.attention and shards_sequence(*_attention_dims(site))]
    sites = {id(_attention_dims(site)[0].eqn): site for site in found}
    if sites:
        needed = needed_with(jaxpr, {key: _attention_dims(site)[0] for key, site in sites.items()})
        kept = {id(eqn) for eqn in needed}
        jaxpr, visited = jaxpr.replace(eqns=needed), [step for step in visited if id(step.eqn) in kept]
    body = _Body(names_of, attention)
    ordered = _weights_first(jaxpr, visited)
    together = _products(ordered, names_of)
    for step in ordered:
        group = together.get(id(step.eqn))
        if id(step.eqn) in sites:
            body.add_attention(step, sites[id(step.eqn)])
        elif group is None:
            body.add(step)
        elif group[0] is step:
            body.add_products(group)
    return jaxpr.replace(eqns=body.eqns, outvars=[body.read(atom) for atom in jaxpr.outvars])


class _Body:
    """The equations of a jaxpr while it is rewritten."""

    def __init__(self, names_of: NamesOf, attention: BodyAttention):
        self.names_of, self.attention = names_of, attention
        self.eqns: list[JaxprEqn] = []
        self.replaced: dict[Any, Any] = {}
        self.gathered: dict[Any, Any] = {}

    def read(self, atom: Any) -> Any:
        """Returns the variable that now holds what ``atom`` held."""
        return self.replaced.get(atom, atom) if isinstance(atom, Var) else atom

    def add(self, step: Visited) -> None:
        """Add an equation; of a matmul or lookup also the gathers of its weights and the constraint on its result."""
        reads = [self.read(atom) for atom in step.eqn.invars]
        reading = step.eqn.primitive.name in MATMULS and step.makes[0].data
        weighted = reading and any(value.weight for value in step.reads)
        if weighted:
            reads = [self._gather(atom, value, step) for atom, value in zip(reads, step.reads, strict=True)]
        self.eqns.append(step.eqn.replace(invars=reads, params={**step.eqn.params, **self._rewritten(step)}))
        if reading:
            self._shard_result(step, step.eqn.outvars[0], weighted=weighted)

    def add_products(self, group: Sequence[Visited]) -> None:
        """Add the matmuls of one activation with several weights."""
        first = group[0]
        x = self._gather(self.read(first.eqn.invars[0]), first.reads[0], first)
        weights = [self.read(step.eqn.invars[1]) for step in group]
        names = [self.names_of(step.reads[1]) for step in group]
        (contracted, _), _ = first.eqn.params["dimension_numbers"]

        def products(x: jax.Array, *ws: jax.Array) -> tuple[jax.Array, ...]:
            dims = (_fitting(own, w.shape) for own, w in zip(names, ws, strict=True))
            return sharded_dot(x, *zip(ws, dims, strict=True), summed=len(contracted))

        for step, out in zip(group, self._insert(products, [x, *weights], first), strict=True):
            self._shard_result(step, out, weighted=True)

    def add_attention(self, step: Visited, site: AttentionSite) -> None:
        """Add attention in place of the product of its weights and values."""
        attention, q_dims, kv_dims = _attention_dims(site)
        reads = [self.read(atom) for atom in attention.variables()]
        (self.replaced[step.eqn.outvars[0]],) = self._insert(attend(attention, q_dims, kv_dims), reads, step)

    def _gather(self, atom: Any, value: TracedValue, step: Visited) -> Any:
        """The variable of a gathered weight, or of an activation of the residual stream in full sequences."""
        if not isinstance(atom, Var):
            return atom
        if atom not in self.gathered:
            if value.weight:
                (self.gathered[atom],) = self._insert(_gather(self.names_of(value)), [atom], step)
            elif value.data and _separate_residual() and self.names_of.is_residual(value):
                (self.gathered[atom],) = self._insert(_shard(self.names_of(value), _site(step)), [atom], step)
        return self.gathered.get(atom, atom)

    def _shard_result(self, step: Visited, var: Any, *, weighted: bool) -> None:
        names, out, role = self.names_of(step.makes[0]), step.eqn.outvars[0], self.names_of.role(step.makes[0])
        if weighted and _separate_residual() and self.names_of.is_residual(step.makes[0]):
            names = tuple(RESIDUAL_SEQ if name == "seq" else name for name in names)
        self.replaced[out] = self._insert(_shard(names, _site(step), role), [var], step)[0] if any(names) else var

    def _rewritten(self, step: Visited) -> dict[str, Any]:
        """The parameters of an equation that are jaxprs, with their constraints."""
        changed: dict[str, Any] = {}
        if step.eqn.primitive.name.startswith("custom_"):
            return changed
        for key, index, visited in step.inner:
            before = step.eqn.params[key] if index is None else step.eqn.params[key][index]
            body = constrained(opened(before), visited, self.names_of, self.attention.known_inside(step.eqn, before))
            # Before jax 0.12 a ClosedJaxpr contains a Jaxpr; since then both are one class.
            after = body if isinstance(before, Jaxpr) else ClosedJaxpr(body, before.consts)
            changed[key] = after if index is None else (*changed.get(key, ()), after)
        return changed

    def _insert(self, function: Callable[..., Any], reads: Sequence[Any], step: Visited) -> list[Any]:
        """Add the equations of ``function(*reads)``, and return the variables of its results."""
        eqns, results = spliced(function, reads, step.eqn.source_info)
        self.eqns += eqns
        return results


def _attention_dims(site: AttentionSite) -> tuple[FoundAttention, Names, Names]:
    """Attention, and the names of its dims that fit the rules."""
    attention = cast(FoundAttention, site.attention)
    q, k = shapes(attention)
    return attention, _fitting(site.q_dims, q), _fitting(site.kv_dims, k)


def _weights_first(jaxpr: Jaxpr, visited: Sequence[Visited]) -> list[Visited]:
    """The equations with those first that depend on no part of the batch, so that all weights are at hand."""
    ready: set[Any] = {*jaxpr.invars, *jaxpr.constvars}
    first: list[Visited] = []
    later: list[Visited] = []
    for step in visited:
        known = all(not isinstance(atom, Var) or atom in ready for atom in step.eqn.invars)
        if known and step.makes and not any(value.data for value in (*step.reads, *step.makes)):
            first.append(step)
            ready |= set(step.eqn.outvars)
        else:
            later.append(step)
    return [*first, *later]


def _products(steps: Sequence[Visited], names_of: NamesOf) -> dict[int, list[Visited]]:
    """The matmuls of an activation with weights, by id of their equation: those that read the same activation.

    Only products that :func:`jaxpar.sharded_dot` computes as they are: the last dims of the activation with the first
    of the weight, in their own dtype and with the default precision.
    """
    groups: dict[Any, list[Visited]] = {}
    for step in steps:
        if step.eqn.primitive.name != "dot_general" or not (step.reads[0].data and step.reads[1].weight):
            continue
        (left, right), batch = step.eqn.params["dimension_numbers"]
        count = len(left)
        x, w, out = (cast(Any, atom.aval) for atom in (*step.eqn.invars, *step.eqn.outvars))
        as_dot = [*left] == [*range(len(x.shape) - count, len(x.shape))] and [*right] == [*range(count)]
        same = x.dtype == w.dtype == out.dtype and step.eqn.params["precision"] is None
        if as_dot and same and not any(batch) and names_of(step.reads[0])[0] == "batch" and len(x.shape) > count:
            groups.setdefault((step.eqn.invars[0], count), []).append(step)
    return {id(step.eqn): group for group in groups.values() for step in group}


def _separate_residual() -> bool:
    return RESIDUAL_SEQ in current_layout().rules.table


def _site(step: Visited) -> str:
    """The line of the model that an operation comes from."""
    return traced_site(step.eqn.source_info.traceback)


def _shard(names: Names, site: str, role: str = "activations") -> Callable[[jax.Array], jax.Array]:
    """Shards an array by its names, and leaves dims that have no name, or do not fit the rules, to the compiler."""

    def shard(x: jax.Array) -> jax.Array:
        layout, context = current_layout(), jax.sharding.get_abstract_mesh()
        if not set(layout.sizes) - set(context.manual_axes):
            return x  # inside of a shard_map over all axes each device has its own shard
        fitting = _fitting(names, x.shape, role)
        sizes = {axis: size for axis, size in layout.sizes.items() if axis not in context.manual_axes}
        resolved = resolve(layout.rules, sizes, fitting, x.shape, role=role, itemsize=x.dtype.itemsize)
        if hint_observer.value is not None:
            hint_observer.value(site, fitting, x, resolved)
        free = None if AxisType.Explicit in layout.mesh.axis_types else PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*(free if dim is None else own for dim, own in zip(fitting, resolved.axes, strict=True)))
        return with_sharding(context if context.manual_axes else layout.mesh, x, spec)

    return shard


def _gather(names: Names) -> Callable[[jax.Array], jax.Array]:
    def gather(w: jax.Array) -> jax.Array:
        return gather_weight(w, *_fitting(names, w.shape))

    return gather


def _fitting(names: Names, shape: Sequence[int], role: str = "activations") -> Names:
    """The names that the rules know and that fit an array together; ``None`` for the others."""
    layout, kept = current_layout(), [None] * len(names)  # type: Any, list[str | None]
    for i, name in enumerate(names):
        trial = [*kept[:i], name, *kept[i + 1 :]]
        if not layout.resolve(trial, shape, role=role).problems:
            kept[i] = name
    return tuple(kept)
