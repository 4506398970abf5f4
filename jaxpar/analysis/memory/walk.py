"""The peak memory of a traced program, by a walk that assumes how a compiler behaves.

The assumptions come from what XLA:TPU was observed to keep (``docs/explanation/memory.md``):

- Matmuls, convolutions, kernels, gathers, scatters, collectives, loops and changes of sharding create arrays in memory.
- Everything else is fused into its readers. If a later operation needs a fused value, the program keeps either the
  value or the arrays that it is computed from, whichever is smaller.
- Operations run in trace order. Updates are in place. Donated arguments give their memory to the results.
- The arrays of a loop's body take no main memory if all of them fit into the chip's vector memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from jaxpar.analysis.memory.jaxpr import JaxprOp, TracedProgram, Value

_MAKES_ARRAY = frozenset(
    ("dot_general", "conv_general_dilated", "gather", "scatter", "scatter-add", "sort", "top_k", "pallas_call")
    + ("all_gather", "all_to_all", "psum_scatter", "reduce_scatter", "ppermute", "scan", "while", "cond", "cumsum")
    + ("custom_call", "ffi_call", "random_bits", "psum", "psum_invariant", "all_gather_invariant", "cholesky", "fft")
    + ("reshard", "relayout")
)
_KERNELS = frozenset(("pallas_call", "custom_call", "ffi_call", "scan", "while", "sort"))
_IN_PLACE = frozenset(("dynamic_update_slice", "optimization_barrier", "scatter", "scatter-add", "local"))
_LOOPS = ("scan", "while")
_SUMS = frozenset(("psum", "psum_invariant", "psum_scatter", "reduce_scatter"))


@dataclass(frozen=True)
class Held:
    """An array in memory at the peak.

    Attributes:
      value: the array.
      depth: the number of enclosing loops.
      slice: the part of it that one iteration of its loop computes, if a loop fills it; else ``None``.
    """

    value: Value
    depth: int
    slice: Value | None


@dataclass(frozen=True)
class Moment:
    """Everything in memory at the peak, without the arguments of the program."""

    bytes: int
    held: tuple[Held, ...]


class MemoryWalk:
    """Liveness analysis of one program. The body of a loop is walked separately and contributes its own peak.

    Args:
      program: the program.
      placed: results that take the memory of donated arguments.
      vector: bytes of vector memory.
      depth: the number of enclosing loops.
      carries: the inputs of a loop's body that are carried; these count, unlike the other inputs.
    """

    def __init__(
        self,
        program: TracedProgram,
        *,
        placed: Iterable[Value] = (),
        vector: int = 0,
        depth: int = 0,
        carries: slice | None = None,
    ):
        self.program, self.vector, self.depth = program, vector, depth
        self.maker: dict[Value, JaxprOp] = {value: op for op in program.ops for value in op.makes}
        self.free = set(program.inputs)
        if carries is not None:
            self.free -= set(program.inputs[carries])
        self.placed = list(placed)
        self.ops = _needed(program)
        # The arrays in memory that represent each value; none for constants.
        self.parts: dict[Value, frozenset[Value]] = defaultdict(frozenset)
        self.parts |= {value: frozenset((value,)) for value in program.inputs if value not in self.free}
        kernel_reads = {v for op in self.ops if op.name in _KERNELS for v in op.reads}
        for op in self.ops:
            for n, value in enumerate(op.makes):
                self.parts[value] = self._parts_of(op, n, value in kernel_reads)

    def peak(self) -> Moment:
        """Returns the moment at which most bytes are in memory."""
        first, last = self._lifetimes()
        starts: dict[int, set[Value]] = {}
        ends: dict[int, set[Value]] = {}
        for value, i in first.items():
            starts.setdefault(i, set()).add(value)
            ends.setdefault(last[value], set()).add(value)
        alive = starts.get(-1, set()).copy()
        total = sum(value.bytes for value in alive)
        best = total
        held: tuple[frozenset[Value], tuple[Held, ...]] = (frozenset(alive), ())
        for i, op in enumerate(self.ops):
            dying = ends.get(i, set())
            # A fused operation can overwrite its last-read operands; an operation that creates arrays cannot.
            before, after = (set(), dying) if _makes_array(op) else (dying, set())
            new = starts.get(i, set())
            total += sum(v.bytes for v in new - alive) - sum(v.bytes for v in before & alive)
            alive = (alive - before) | new
            inner, own = self._inside(op, dying)
            here = total + inner.bytes - sum(v.bytes for v in own & alive)
            if here > best:
                best, held = here, (frozenset(alive - own), inner.held)
            alive -= after
            total -= sum(v.bytes for v in after)
        if self.depth and best <= self.vector:
            return Moment(0, ())
        return Moment(best, (*self._describe(held[0]), *held[1]))

    def _inside(self, op: JaxprOp, dying: set[Value]) -> tuple[Moment, set[Value]]:
        """Returns the peak inside an operation, and the outer arrays that it counts: those that a loop carries."""
        inside = partial(MemoryWalk, vector=self.vector, depth=self.depth + 1, carries=_carried(op))
        walks = (inside(body).peak() for body in op.bodies)
        worst = max(walks, key=lambda moment: moment.bytes, default=Moment(0, ()))
        if op.name not in _LOOPS:
            return worst, set()
        given = {part for v in op.reads[op.consts : op.consts + op.carries] for part in self.parts[v]}
        return worst, set(op.makes[: op.carries]) | (given & dying)

    def _parts_of(self, op: JaxprOp, n: int, read_by_kernel: bool) -> frozenset[Value]:
        value = op.makes[n]
        if op.name in _IN_PLACE:
            source = self.parts[op.reads[n if op.name == "optimization_barrier" else 0]]
            if source:
                return source
        if op.name == "reshape" and _without_ones(op.reads[0].shape) == _without_ones(value.shape):
            # Only leading dims of 1 change, such as the stage dim that a mesh axis leaves: no new array.
            return self.parts[op.reads[0]]
        # The compiler creates a constant where it is read.
        if _makes_array(op) or (read_by_kernel and value.spec is not None):
            return frozenset((value,))
        made = frozenset(part for v in op.reads for part in self.parts[v])
        # A scalar operand, such as the norm for gradient clipping, is no reason to create a new array.
        return frozenset((value,)) if value.bytes < sum(v.bytes for v in made if v.shape) else made

    def _lifetimes(self) -> tuple[dict[Value, int], dict[Value, int]]:
        """Returns the first and the last operation of each array in memory."""
        first: dict[Value, int] = {v: -1 for v in self.program.inputs if v not in self.free}
        last: dict[Value, int] = dict.fromkeys(first, -1)
        made = {value: i for i, op in enumerate(self.ops) for value in op.makes}

        def use(value: Value, i: int) -> None:
            for part in self.parts[value]:
                first.setdefault(part, made.get(part, -1))
                last[part] = max(last.get(part, -1), i)

        for i, op in enumerate(self.ops):
            for value in (*op.reads, *op.makes):
                use(value, i)
        for value in self.program.results:
            if value not in self.placed:
                use(value, len(self.ops))
        return first, last

    def _describe(self, values: Iterable[Value]) -> tuple[Held, ...]:
        makers = {v: self.maker.get(v) for v in values if v.bytes}
        return tuple(Held(v, self.depth, None if op is None else _slice(op, v)) for v, op in makers.items())

    def mark_gradients(self, made: Iterable[Value] = ()) -> None:
        """Mark the arrays that the placed results and ``made`` consist of; in a train step these are the gradients.

        The walk also marks per-device gradients before their sum over devices, and the accumulators of a loop over
        microbatches.
        """
        for value in (*self.placed, *made):
            self._mark(value)
        for op in reversed(self.ops):
            if op.name in _SUMS:
                for value, total in zip(op.reads, op.makes, strict=False):
                    if total.gradient:
                        self._mark(value)
            if op.name in _LOOPS:
                body = MemoryWalk(op.bodies[-1], carries=_carried(op))
                summed = [i for i, v in enumerate(op.makes[: op.carries]) if v.gradient]
                for i in summed:
                    body.program.inputs[op.consts + i].gradient = True
                body.mark_gradients([body.program.results[i] for i in summed])

    def _mark(self, value: Value) -> None:
        for part in self.parts[value]:
            part.gradient = bool(part.shape)

    def copies_of_inputs(self) -> frozenset[Value]:
        """Returns the arrays that are computed from inputs only, by fused operations: parameters in another dtype."""
        return frozenset(
            v
            for op in self.ops
            for v in op.makes
            if not _makes_array(op) and op.reads and self.parts[v] == {v} and not any(self.parts[r] for r in op.reads)
        )


def _slice(op: JaxprOp, made: Value) -> Value | None:
    """Returns the slice of this array that one iteration of its loop computes, or ``None``."""
    stacks = op.makes[op.carries :] if op.name == "scan" else []
    return op.bodies[0].results[op.makes.index(made)] if made in stacks else None


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without leading dims of 1."""
    first = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]


def _carried(op: JaxprOp) -> slice | None:
    return slice(op.consts, op.consts + op.carries) if op.name in _LOOPS else None


def _makes_array(op: JaxprOp) -> bool:
    if not op.followed:
        return True
    if op.name == "sharding_constraint":
        return op.reads[0].spec is not None and op.reads[0].spec != op.makes[0].spec
    return op.name in _MAKES_ARRAY


def _needed(program: TracedProgram) -> list[JaxprOp]:
    """Returns the operations that the results depend on, and loops without their unread stacked results."""
    needed = set(program.results)
    kept = []
    for op in reversed(program.ops):
        if not needed & set(op.makes):
            continue
        if op.name == "scan":
            op = _trimmed(op, needed)
        needed |= set(op.reads)
        kept.append(op)
    return kept[::-1]


def _trimmed(op: JaxprOp, needed: set[Value]) -> JaxprOp:
    """Returns a loop without its unread stacked results and the operands that only those need."""
    body = op.bodies[0]
    pairs = list(zip(op.makes, body.results, strict=True))
    pairs = pairs[: op.carries] + [pair for pair in pairs[op.carries :] if pair[0] in needed]
    results = [result for _, result in pairs]
    trimmed = TracedProgram(body.inputs, body.ops, results)
    read = {v for inner in _needed(trimmed) for v in inner.reads} | set(results)
    carried = range(op.consts, op.consts + op.carries)
    keep = [i for i, v in enumerate(body.inputs) if v in read or i in carried]
    consts = sum(i < op.consts for i in keep)
    trimmed = TracedProgram([body.inputs[i] for i in keep], body.ops, results)
    return JaxprOp(op.name, [op.reads[i] for i in keep], [make for make, _ in pairs], [trimmed], consts, op.carries)
