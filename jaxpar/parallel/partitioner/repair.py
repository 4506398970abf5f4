"""Traces a step, and replaces the equations that the partitioner would compute wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.sharding import AbstractMesh, PartitionSpec

from jaxpar.parallel.partitioner.faults import Fault, repair
from jaxpar.parallel.partitioner.shards import MayShard
from jaxpar.utils.call_site import traced_site
from jaxpar.utils.contexts import repair_observer
from jaxpar.utils.jaxprs import explicit_sharding, opened, sizes_of, spliced


@dataclass(frozen=True)
class Repaired:
    """An operation of a program that the partitioner would compute wrongly.

    Attributes:
      site: the line of the model.
      shapes: of its operands.
      fault: what would be wrong.
      axes: the axes that shard the dims in question.
      how: what the step does instead.
    """

    site: str
    shapes: tuple[tuple[int, ...], ...]
    fault: Fault
    axes: tuple[str, ...]
    how: str

    def __str__(self) -> str:
        shapes = " and ".join(str(list(shape)) for shape in self.shapes if shape)
        return f"{self.fault.name} in {self.site}, {shapes}, over {'+'.join(self.axes)}: {self.how}"


def by_kind(repaired: Iterable[Repaired]) -> list[tuple[Fault, str, list[Repaired]]]:
    """Returns the operations that have one fault and one repair together."""
    kinds: dict[tuple[Fault, str], list[Repaired]] = {}
    for one in repaired:
        kinds.setdefault((one.fault, one.how), []).append(one)
    return [(fault, how, ones) for (fault, how), ones in kinds.items()]


@contextmanager
def noting_repairs() -> Iterator[dict[Repaired, None]]:
    """Collects what steps avoid that are traced inside, each operation once."""
    notes: dict[Repaired, None] = {}
    with repair_observer(lambda repaired: notes.setdefault(repaired)):
        yield notes


def avoid_faults(run: Callable[..., Any], specs: Sequence[PartitionSpec | None] = ()) -> Callable[..., Any]:
    """Returns ``run`` with other operations in place of those that the partitioner would compute wrongly.

    It must run under a mesh, while jit traces it. Operations keep their results. The table is in
    :mod:`jaxpar.parallel.partitioner.faults`.

    Args:
      run: a function of pytrees of arrays, gradients included: what it returns is not differentiated again.
      specs: how its arrays are sharded, in the order of ``jax.tree.leaves``; ``None`` for those that are not known to
        be. Constraints inside are read as well.
    """

    def correct(*args: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if max(mesh.axis_sizes, default=1) == 1:
            return run(*args)
        closed, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
        jaxpr = _Rewriting(mesh, MayShard(opened(closed), specs)).jaxpr(opened(closed))
        if jaxpr is not opened(closed):
            closed = jaxpr if isinstance(closed, Jaxpr) else ClosedJaxpr(jaxpr, closed.consts)
        return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(closed)(*jax.tree.leaves(args)))

    return correct


def _on_auto_axes(run: Callable[..., Any], eqn: JaxprEqn) -> Callable[..., Any]:
    """Returns what runs in place of an equation so that its results have the shardings of their types, if any."""
    shardings = [explicit_sharding(var) for var in eqn.outvars]
    return run if None in shardings else jax.sharding.auto_axes(run, out_sharding=shardings)


@dataclass
class _Rewriting:
    """Rewrites a program and the bodies inside it.

    Attributes:
      mesh: of operations that were traced under none, as those of a script.
      shards: the axes that may shard each dim.
      bodies: those that were visited, before and after, by their identity.
    """

    mesh: AbstractMesh
    shards: MayShard
    bodies: dict[int, tuple[Jaxpr, Jaxpr]] = field(default_factory=dict)

    def jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        """Returns the jaxpr with other equations, or the same object if none is computed wrongly."""
        eqns: list[JaxprEqn] = []
        renamed: dict[Any, Any] = {}
        read = lambda atom: renamed.get(atom, atom) if isinstance(atom, Var) else atom
        changed = False
        for eqn in jaxpr.eqns:
            mesh = self.mesh if eqn.ctx.cur_abstract_mesh.empty else eqn.ctx.cur_abstract_mesh
            live = {axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in mesh.manual_axes}
            instead = repair(eqn, self.shards, live)
            reads = [*map(read, eqn.invars)]
            if instead is None:
                params = self._params(eqn)
                changed |= params is not None
                eqns.append(eqn.replace(invars=reads, params=params or eqn.params))
                continue
            changed = True
            if repair_observer.value is not None:
                shapes = tuple(sizes_of(atom) for atom in eqn.invars)
                site, axes = traced_site(eqn.source_info.traceback), tuple(a for a in live if a in instead.axes)
                repair_observer.value(Repaired(site, shapes, instead.fault, axes, instead.how))
            with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
                new, results = spliced(_on_auto_axes(instead.run, eqn), reads, eqn.source_info)
            eqns += new
            renamed |= zip(eqn.outvars, results, strict=True)
        return jaxpr.replace(eqns=eqns, outvars=[*map(read, jaxpr.outvars)]) if changed else jaxpr

    def _params(self, eqn: JaxprEqn) -> dict[str, Any] | None:
        """The parameters of an equation with rewritten bodies, or ``None`` if they stay as they are."""
        if eqn.primitive.name == "pallas_call":  # its program runs on one device
            return None
        changed: dict[str, Any] = {}
        for key, value in eqn.params.items():
            several = isinstance(value, tuple | list)
            bodies = [self._body(x) for x in (value if several else (value,))]
            if any(a is not b for a, b in zip(bodies, value if several else (value,), strict=True)):
                changed[key] = jax.tree.unflatten(jax.tree.structure(value), bodies) if several else bodies[0]
        return {**eqn.params, **changed} if changed else None

    def _body(self, x: Any) -> Any:
        if not isinstance(x, Jaxpr | ClosedJaxpr):
            return x
        before = opened(x)
        if id(before) not in self.bodies:
            self.bodies[id(before)] = before, self.jaxpr(before)
        after = self.bodies[id(before)][1]
        # Before jax 0.12 a ClosedJaxpr contains a Jaxpr; since then both are one class.
        return x if after is before else after if isinstance(x, Jaxpr) else ClosedJaxpr(after, x.consts)
