"""The attention of a named program: what is recognised, with the names of its dims, and what is not and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxpar.planning.attention.attention import FoundAttention, NamesOf, NotAttentionError
from jaxpar.planning.attention.axes import Dims, Group
from jaxpar.planning.attention.find import ScoreReader, find
from jaxpar.planning.attention.positions import constant
from jaxpar.planning.attention.values import Conditional, Linear, Product, Value, View
from jaxpar.planning.names.primitive_rules import TracedValue
from jaxpar.planning.names.propagate import NamesOfValue, Visited
from jaxpar.sharding.names import Names
from jaxpar.utils.jaxprs import needed_equations, opened, scan_counts

Known = Mapping[Any, Value]
"""What is known of variables."""


OWN_DERIVATIVE = "it is in a function with a derivative of its own, which runs as it is"


@dataclass(frozen=True)
class AttentionSite:
    """Attention in one place of a program.

    Attributes:
      text: its sizes, masks and options.
      attention: the attention; ``None`` if it is left as it is.
      reason: why it is left as it is; empty otherwise.
      q_dims, kv_dims: the names of the dims ``[batch, seq, heads, head_dim]`` of queries, and of keys and values.
      count: how often it runs, as in a scan over layers.
    """

    text: str
    attention: FoundAttention | None = None
    reason: str = ""
    q_dims: Names = ()
    kv_dims: Names = ()
    count: int = 1


@dataclass(frozen=True)
class BodyAttention:
    """The attention in the equations of a jaxpr, without that in the bodies of loops and branches.

    Attributes:
      sites: the attention.
      reader: what is known of the jaxpr's values.
    """

    sites: tuple[AttentionSite, ...]
    reader: ScoreReader

    @classmethod
    def of(cls, jaxpr: Jaxpr, visited: Sequence[Visited], names_of: NamesOfValue, known: Known) -> Self:
        """Find attention.

        Args:
          jaxpr: the traced program, inlined.
          visited: its equations with their values.
          names_of: the names of a value's dims.
          known: masks and positions among its arguments and constants.
        """
        values: dict[Any, TracedValue] = {}
        for step in visited:
            pairs = (*zip(step.eqn.outvars, step.makes, strict=True), *zip(step.eqn.invars, step.reads, strict=True))
            values |= {atom: value for atom, value in pairs if isinstance(atom, Var)}

        names = lambda var: names_of(values[var]) if var in values else (None,) * len(var.aval.shape)
        is_data = lambda atom: isinstance(atom, Var) and atom in values and values[atom].data
        reader = find(jaxpr, is_data, known)
        return cls(tuple(_sites(jaxpr, reader, names)), reader)

    def known_inside(self, eqn: JaxprEqn, inside: Any) -> Known:
        """Returns what is known of the constants of a body, and of its arguments that are the same in all its runs.

        Args:
          eqn: the call, loop, branch or recomputed function.
          inside: the body, one of its parameters.
        """
        name, params = eqn.primitive.name, eqn.params
        first, count = int(name == "cond"), len(eqn.invars)
        if name == "scan":
            count = scan_counts(eqn)[0]
        elif name == "while":
            first, count = params["cond_nconsts"], params["body_nconsts"]
        values = (self.reader.value(atom) for atom in eqn.invars[first : first + count])
        pairs = zip(opened(inside).invars, values, strict=False)
        known = {var: x for var, x in pairs if isinstance(x, Linear | Conditional) and not _arrays_of(x)}
        return {**known, **known_constants(inside)}


def known_constants(jaxpr: Any) -> Known:
    """Returns the masks and positions among the constants of a jaxpr."""
    pairs = zip(opened(jaxpr).constvars, getattr(jaxpr, "consts", ()), strict=True)
    return {var: known for var, x in pairs if (known := constant(x)) is not None}


def all_sites(
    jaxpr: Jaxpr, visited: Sequence[Visited], names_of: NamesOfValue, known: Known, count: int = 1
) -> Iterator[AttentionSite]:
    """Yields the attention of a program and of the bodies of its loops and branches."""
    body = BodyAttention.of(jaxpr, visited, names_of, known)
    yield from (replace(site, count=count) for site in body.sites)
    for step in visited:
        name, params = step.eqn.primitive.name, step.eqn.params
        times = count * (params["length"] if name == "scan" else 1)
        for key, index, inner in step.inner:
            inside = params[key] if index is None else params[key][index]
            sites = all_sites(opened(inside), inner, names_of, body.known_inside(step.eqn, inside), times)
            if name.startswith("custom_"):
                sites = (replace(site, attention=None, reason=OWN_DERIVATIVE) for site in sites)
            yield from sites


def _sites(jaxpr: Jaxpr, reader: ScoreReader, names: NamesOf) -> Iterator[AttentionSite]:
    found = dict[Product, FoundAttention]()
    for weighted in reader.found:
        try:
            found[weighted.scores.product] = FoundAttention.of(weighted, reader, names)
        except NotAttentionError as error:
            reader.lost[weighted.scores.product] = str(error)
    needed = {id(eqn) for eqn in needed_with(jaxpr, {id(one.eqn): one for one in found.values()})}
    for product, one in found.items():
        if id(product.eqn) in needed:
            reader.lost[product] = "its scores are used elsewhere too"
        elif product not in reader.lost:
            yield AttentionSite(one.describe(), one, "", *_names(one, names))
    for product, reason in reader.lost.items():
        shapes = " and ".join("x".join(map(str, cast(Any, atom.aval).shape)) for atom in product.eqn.invars)
        yield AttentionSite(f"scores of {shapes}", reason=reason)


def _arrays_of(x: Linear | Conditional) -> bool:
    return isinstance(x, Conditional) and any(isinstance(part, View) for part in x.condition)


def needed_with(jaxpr: Jaxpr, attention: Mapping[int, FoundAttention]) -> list[JaxprEqn]:
    """Returns the equations that a program's results and effects depend on.

    Args:
      jaxpr: the program.
      attention: what runs instead of equations, by their id.
    """
    reads_of = lambda eqn: attention[id(eqn)].variables() if id(eqn) in attention else eqn.invars
    return needed_equations(jaxpr, jaxpr.outvars, reads_of)


def _names(one: FoundAttention, names: NamesOf) -> tuple[Names, Names]:
    """The names of the dims of queries, and of keys and values."""
    q, k = (_by_axis(operand.dims, names(operand.var)) for operand in (one.q, one.k))
    first = lambda known, group: next((known[axis] for axis in group if known.get(axis)), None)
    return (
        (first(q, one.batch), q.get(one.seq), first(q, one.heads), None),
        (first(k, one.batch), k.get(one.keys), first(k, one.kv_heads), None),
    )


def _by_axis(dims: Dims, names: Names) -> dict[Any, str | None]:
    pairs: list[tuple[Group, str | None]] = list(zip(dims, names, strict=True))
    return {axis: name for group, name in pairs for axis in group[:1]}
