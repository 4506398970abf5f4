"""A traced program as a flat list of operations on values with known sharding.

Calls (jit, remat, custom derivatives, ``shard_map``) are inlined. The bodies of loops and branches remain separate
programs. Nothing is compiled: the shardings follow from those of the arguments and from the ``sharding_constraint``
operations (:mod:`jaxpar.analysis.memory.propagate`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Literal

from jaxpar.analysis.memory.propagate import Spec, UnknownSharding, propagate, without
from jaxpar.analysis.units import axes_of_dims, device_bytes, shard_count
from jaxpar.parallel.zero.sharded_matmul import GATHERED
from jaxpar.utils.arrays import item_bytes
from jaxpar.utils.jaxprs import scan_counts

_OPENED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr"}
_OPENED |= {"eval_jaxpr": "call_jaxpr"}  # jax 0.12's name of a closed call
_OPENED |= {"checkpoint": "jaxpr", "custom_vjp_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
# Their inner programs work on single elements, or in a device's fast on-chip memory.
_OWN_CODE = frozenset(
    ("pallas_call", "reduce", "reduce_window", "select_and_scatter", "scatter", "scatter-add", "scatter_add")
    + ("scatter-mul", "scatter_mul", "scatter-min", "scatter_min", "scatter-max", "scatter_max", "scatter-apply")
)
_NAMED = ("name", "reduce_precision", "reshape", "convert_element_type")
"""Operations between the name of a gathered weight and the value that a loop keeps; they preserve the weight."""
SMALL = 2**20
"""The sharding of values of fewer bytes is irrelevant to the estimate."""


@dataclass(eq=False, slots=True)
class Value:
    """An array of the program.

    Attributes:
      shape: the global shape, or the per-device shape inside of a ``shard_map``.
      itemsize: bytes of one element.
      spec: the mesh axes of each dim; ``None`` for a constant, which may have any sharding.
      sizes: mesh axis → size.
      open: whether it is a constant that comes out of a ``shard_map``. Only the manual axes of its sharding are fixed.
      gathered: whether it carries the checkpoint name of gathered weights.
      gradient: whether it becomes a gradient of the parameters.
      assumed: the operation that makes it, if its sharding cannot be followed and is taken as replicated; else empty.
    """

    shape: tuple[int, ...]
    itemsize: float
    spec: Spec | None
    sizes: Mapping[str, int]
    open: bool = False
    gathered: bool = False
    gradient: bool = False
    assumed: str = ""

    @property
    def bytes(self) -> int:
        """Bytes on one device."""
        spec = self.spec or ((),) * len(self.shape)
        return device_bytes(self.shape, self.itemsize, [shard_count(axes, self.sizes) for axes in spec])


@dataclass(eq=False, slots=True)
class JaxprOp:
    """One operation.

    Attributes:
      name: the primitive.
      reads, makes: its operands and results.
      bodies: the programs of a loop or a branch.
      consts, carries: of a loop, the number of operands that are constants and that are carried.
      followed: false if no rule determines the sharding of its large results.
    """

    name: str
    reads: list[Value]
    makes: list[Value]
    bodies: list[TracedProgram] = field(default_factory=list)
    consts: int = 0
    carries: int = 0
    followed: bool = True


@dataclass(eq=False, slots=True)
class TracedProgram:
    """Operations in trace order, which compute ``results`` from ``inputs``."""

    inputs: list[Value]
    ops: list[JaxprOp]
    results: list[Value]


class Reader:
    """Reads jaxprs into programs.

    A large result of an operation without a propagation rule counts as replicated, unless a ``sharding_constraint``
    follows.
    """

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = dict(sizes)
        self._assumed: list[Value] = []

    def assumed(self) -> tuple[str, ...]:
        """Returns the operations whose large results count as replicated."""
        return tuple(sorted({value.assumed for value in self._assumed if value.assumed}))

    def read(self, jaxpr: Any, specs: Iterable[Spec | None], opened: Iterable[int] = ()) -> TracedProgram:
        """Returns the program of a jaxpr.

        Args:
          jaxpr: a jaxpr, not a ``ClosedJaxpr``.
          specs: the sharding of each argument.
          opened: the indices of the arguments that are constants from a ``shard_map`` (see :attr:`Value.open`).
        """
        inputs = [self._value(var.aval, spec) for var, spec in zip(jaxpr.invars, specs, strict=True)]
        for i in opened:
            inputs[i].open = True
        ops: list[JaxprOp] = []
        results = self._open(jaxpr, inputs, ops)
        return TracedProgram(inputs, ops, results)

    def _value(self, aval: Any, spec: Spec | None) -> Value:
        shape = tuple(getattr(aval, "shape", ()))
        itemsize = item_bytes(aval.dtype) if hasattr(aval, "dtype") else 0
        return Value(shape, itemsize, spec if spec is None else axes_of_dims(spec, len(shape)), self.sizes)

    def _open(self, jaxpr: Any, inputs: Sequence[Value], ops: list[JaxprOp]) -> list[Value]:
        values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= {var: self._value(var.aval, None) for var in jaxpr.constvars}

        def get(var: Any) -> Value:
            return self._value(var.aval, None) if isinstance(var, Literal) else values[var]

        for eqn in jaxpr.eqns:
            reads = [get(var) for var in eqn.invars]
            values.update(zip(eqn.outvars, self._eqn(eqn, reads, ops), strict=True))
        return [get(var) for var in jaxpr.outvars]

    def _eqn(self, eqn: Any, reads: list[Value], ops: list[JaxprOp]) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        if name in _OPENED:
            inner = params[_OPENED[name]]
            return self._open(getattr(inner, "jaxpr", inner), reads, ops)
        if name == "shard_map":
            return self._shard_map(eqn, reads, ops)
        if name == "scan":
            return self._scan(eqn, reads, ops)
        if name in ("while", "cond"):
            return self._branches(eqn, reads, ops)
        inner = None if name in _OWN_CODE else _called(eqn)
        if inner is not None:
            return self._open(inner, reads, ops)
        makes = [self._value(var.aval, None) for var in eqn.outvars]
        followed = self._propagate(eqn, reads, makes)
        if name in _NAMED:
            for value in (*reads, *makes):
                value.gathered |= params.get("name") == GATHERED or reads[0].gathered
        ops.append(JaxprOp(name, reads, makes, followed=followed))
        return makes

    def _propagate(self, eqn: Any, reads: list[Value], makes: list[Value]) -> bool:
        """Set the specs of an operation's results; return whether a rule determines them."""
        name, followed = eqn.primitive.name, True
        try:
            specs = propagate(name, eqn.params, reads, makes, self.sizes)
            for value, spec in zip(makes, specs, strict=True):
                if spec is not None and len(spec) != len(value.shape):
                    raise UnknownSharding(name)
        except (UnknownSharding, LookupError, TypeError, ValueError):
            # No rule, or a rule that does not know these parameters.
            specs = [None] * len(makes)
            large = [value for value in makes if value.bytes > SMALL]
            if large and any(any(v.spec or ()) for v in reads):
                followed, specs = False, [((),) * len(value.shape) for value in makes]
                self._assumed += large
                for value in large:
                    value.assumed = name
        for value, spec in zip(makes, specs, strict=True):
            value.spec = spec
        if name == "sharding_constraint" and reads[0].assumed:
            reads[0].spec, reads[0].assumed = makes[0].spec, ""
        return followed

    def _shard_map(self, eqn: Any, reads: list[Value], ops: list[JaxprOp]) -> list[Value]:
        """Inline a ``shard_map``. Values inside have per-device shapes, and only the other axes shard them further."""
        inner, manual = eqn.params["jaxpr"], frozenset(eqn.params["newly_manual_axes"])
        inputs = []
        for value, spec, var in zip(reads, eqn.params["in_specs"], inner.invars, strict=True):
            inside_spec = axes_of_dims(spec, len(value.shape))
            rest = None if value.open else without(value.spec, manual)
            local = self._value(var.aval, rest)
            moved = value.spec is not None and inside_spec != tuple(
                tuple(axis for axis in axes if axis in manual) for axes in value.spec
            )
            ops.append(JaxprOp("reshard" if moved else "local", [value], [local]))
            inputs.append(local)
        results = self._open(inner, inputs, ops)
        outer = []
        for value, spec, var in zip(results, eqn.params["out_specs"], eqn.outvars, strict=True):
            rest = without(value.spec, manual) or ((),) * len(value.shape)
            joined = tuple((*axes, *more) for axes, more in zip(axes_of_dims(spec, len(rest)), rest, strict=True))
            outer.append(self._value(var.aval, joined))
            outer[-1].open = value.spec is None and value.bytes > SMALL
            ops.append(JaxprOp("local", [value], [outer[-1]]))
        return outer

    def _scan(self, eqn: Any, reads: list[Value], ops: list[JaxprOp]) -> list[Value]:
        inner = eqn.params["jaxpr"].jaxpr
        consts, carries = scan_counts(eqn)
        specs = [v.spec for v in reads[: consts + carries]]
        specs += [None if v.spec is None else v.spec[1:] for v in reads[consts + carries :]]
        opened = [i for i in range(consts, consts + carries) if reads[i].open]
        body = self._loop_body(inner, specs, consts, carries, opened)
        for value, spec in zip(reads[consts : consts + carries], specs[consts:], strict=False):
            if value.open:  # the compiler creates it in the sharding that the loop needs
                value.spec = spec
        makes = []
        for i, (result, var) in enumerate(zip(body.results, eqn.outvars, strict=True)):
            spec = specs[consts + i] if i < carries else None if result.spec is None else ((), *result.spec)
            makes.append(self._value(var.aval, spec))
        ops.append(JaxprOp("scan", reads, makes, [body], consts, carries))
        return [
            *(self._resharded_copy(v, body, r, ops) for v, r in zip(makes[:carries], body.results, strict=False)),
            *makes[carries:],
        ]

    def _loop_body(
        self, jaxpr: Any, specs: list[Spec | None], consts: int, carries: int, opened: Sequence[int] = ()
    ) -> TracedProgram:
        """Returns a loop's body. In ``specs``, a carry without a sharding takes that of the body's result."""
        before = len(self._assumed)
        body = self.read(jaxpr, specs, opened)
        for _ in range(2):
            merged = list(specs)
            for i, result in enumerate(body.results[:carries], consts):
                if specs[i] is None or (i in opened and not result.open):
                    merged[i] = result.spec
            if merged == specs:
                break
            specs[:] = merged
            opened = [i for i in opened if body.results[i - consts].open]
            del self._assumed[before:]
            body = self.read(jaxpr, specs, opened)
        return body

    def _resharded_copy(self, value: Value, body: TracedProgram, result: Value, ops: list[JaxprOp]) -> Value:
        """Returns a loop's result, or a copy of it if the loop fills it along an inner dim.

        Such a result has the loop's own layout in memory, so a later reader needs a copy.
        """
        made_by = {made: op for op in body.ops for made in op.makes}
        op = made_by.get(result)
        while op is not None and op.name == "sharding_constraint":
            op = made_by.get(op.reads[0])
        if op is None or op.name != "dynamic_update_slice":
            return value
        base, piece = op.reads[0], op.reads[1]
        dim = next((d for d, (a, b) in enumerate(zip(base.shape, piece.shape, strict=True)) if a != b), 0)
        outer = device_bytes(base.shape[:dim], 1, [shard_count(axes, self.sizes) for axes in (base.spec or ())[:dim]])
        if outer == 1 or base.spec is None:
            return value
        copy = Value(value.shape, value.itemsize, value.spec, self.sizes)
        ops.append(JaxprOp("relayout", [value], [copy]))
        return copy

    def _branches(self, eqn: Any, reads: list[Value], ops: list[JaxprOp]) -> list[Value]:
        params = eqn.params
        if eqn.primitive.name == "cond":
            bodies = [self.read(b.jaxpr, [v.spec for v in reads[1:]]) for b in params["branches"]]
            makes = [
                self._value(var.aval, result.spec) for var, result in zip(eqn.outvars, bodies[0].results, strict=True)
            ]
            ops.append(JaxprOp("cond", reads, makes, bodies))
            return makes
        skip, consts = params["cond_nconsts"], params["body_nconsts"]
        inside = reads[skip:]
        specs = [v.spec for v in inside]
        body = self._loop_body(params["body_jaxpr"].jaxpr, specs, consts, len(specs) - consts)
        makes = [self._value(var.aval, spec) for var, spec in zip(eqn.outvars, specs[consts:], strict=True)]
        ops.append(JaxprOp("while", inside, makes, [body], consts, len(makes)))
        return makes


def _called(eqn: Any) -> Any:
    """Returns the program that an operation calls on its operands, if there is one."""
    found = [value for value in eqn.params.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
    inner = getattr(found[0], "jaxpr", found[0]) if len(found) == 1 else None
    counts = None if inner is None else (len(inner.invars), len(inner.outvars))
    return inner if counts == (len(eqn.invars), len(eqn.outvars)) else None
