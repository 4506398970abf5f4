"""``Workload``: what one step of a model computes and keeps, by logical dim, from traces that know no mesh.

From it the cost of any layout follows without another trace: how many FLOPs a device does, how many bytes it holds,
and what it sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import optax

from jaxpar.planning.names.annotate import trace_loss
from jaxpar.planning.names.program import NamedProgram
from jaxpar.planning.names.propagate import TracedValue, Visited
from jaxpar.planning.search.plan import BATCH, EMBED, LAYERS, SEQ
from jaxpar.training.loss import LossFn, LossProgram
from jaxpar.training.model import MakeModel, build_shapes

type Factor = tuple[str | None, int]
"""A factor of a dim: its name, if it has one, and its size."""
type Factors = tuple[Factor, ...]

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


@dataclass(frozen=True)
class Matmul:
    """A matmul or convolution of the forward pass.

    Attributes:
      shared: factors that both operands and the result have.
      rows: further factors of the activation, which the result has.
      columns: those of the weight, or of the second activation.
      summed: the factors that are summed over.
      weight: whether one operand is a weight.
      layered: whether it runs once for each layer of a scanned stack.
      times: how often it runs in a step.
      source: a number that matmuls of the same activation share.
    """

    shared: Factors
    rows: Factors
    columns: Factors
    summed: Factors
    weight: bool
    layered: bool
    times: int
    source: int

    @property
    def attends(self) -> bool:
        """Whether it is one of the two matmuls of attention: queries with keys, or scores with values."""
        return not self.weight and [n for n, _ in (*self.rows, *self.columns, *self.summed)].count(SEQ) > 1

    @property
    def flops(self) -> float:
        """FLOPs in a step, without a mesh."""
        return 2.0 * self.times * count(self.shared, self.rows, self.columns, self.summed)


@dataclass(frozen=True)
class KeptArray:
    """An array by its named factors and the bytes of one element.

    Attributes:
      path: a parameter's path; "" for an activation.
      factors: of its dims.
      itemsize: bytes of an element.
    """

    path: str
    factors: Factors
    itemsize: int

    @property
    def bytes(self) -> int:
        """Bytes, without a mesh."""
        return count(self.factors) * self.itemsize


@dataclass(frozen=True)
class Backward:
    """What the backward pass of one recomputation policy keeps and does.

    Attributes:
      kept: the activations that it keeps.
      weight_passes: FLOPs of a whole step divided by those of its forward pass, for the layers' matmuls with weights.
      attention_passes: the same for matmuls of two activations.
    """

    kept: tuple[KeptArray, ...]
    weight_passes: float
    attention_passes: float


@dataclass(frozen=True)
class Workload:
    """One step of a model over all devices.

    Attributes:
      matmuls: of the forward pass.
      params: the parameters.
      backward: recomputation policy → what it keeps and does.
      state_bytes: bytes of optimizer state for each byte of parameters.
      sizes: logical dim → its largest size.
      names: all logical dims, those of hints included.
      flash: whether attention runs in tiles, which skip masked pairs and write no scores.
      compute_bytes: bytes of an element of activations and gathered weights.
      reduce_bytes: bytes of an element of reduced gradients.
    """

    matmuls: tuple[Matmul, ...]
    params: tuple[KeptArray, ...]
    backward: Mapping[str, Backward]
    state_bytes: float
    sizes: Mapping[str, int]
    names: tuple[str, ...] = ()
    flash: bool = False
    compute_bytes: int = 2
    reduce_bytes: int = 4

    @cached_property
    def param_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(p.bytes for p in self.params)

    @cached_property
    def param_count(self) -> int:
        """The number of parameters."""
        return sum(count(p.factors) for p in self.params)

    @property
    def model_flops(self) -> float:
        """FLOPs of the matmuls of a step that recomputes nothing, without a mesh."""
        return 3.0 * sum(m.flops for m in self.matmuls)

    def of_batch(self, batch: int) -> Workload:
        """Returns the step of another number of sequences over all devices."""
        own = self.sizes[BATCH]

        def scaled(factors: Factors) -> Factors:
            return tuple((name, size * batch // own if name == BATCH else size) for name, size in factors)

        matmuls = tuple(
            replace(
                m,
                shared=scaled(m.shared),
                rows=scaled(m.rows),
                columns=scaled(m.columns),
                summed=scaled(m.summed),
            )
            for m in self.matmuls
        )
        backward = {
            name: replace(back, kept=tuple(replace(kept, factors=scaled(kept.factors)) for kept in back.kept))
            for name, back in self.backward.items()
        }
        sizes = {**self.sizes, BATCH: batch}
        return replace(self, matmuls=matmuls, backward=backward, sizes=sizes)

    @property
    def embed_share(self) -> float:
        """The fraction of the parameters' bytes that has the dim ``embed``."""
        have = sum(p.bytes for p in self.params if any(name == EMBED for name, _ in p.factors))
        return have / max(self.param_bytes, 1)


def count(*factors: Factors) -> int:
    """Returns the product of the sizes of all factors."""
    return math.prod(size for group in factors for _, size in group)


def workload(
    make_model: MakeModel,
    loss_fn: LossFn,
    batch: Any,
    tx: optax.GradientTransformation,
    *,
    models: Mapping[str, MakeModel] | None = None,
    flash: bool = False,
    compute_bytes: int | None = None,
    reduce_bytes: int = 4,
) -> Workload:
    """Returns the workload of a model whose dims have names.

    Args:
      make_model: as for :func:`jaxpar.init`; its recomputation policy is called "".
      loss_fn: as for :func:`jaxpar.train_step`.
      batch: a pytree of ``jp.tag(jax.ShapeDtypeStruct(...), *dims)``.
      tx: the optimizer.
      models: further recomputation policies, and the model with each of them.
      flash: whether attention runs in tiles.
      compute_bytes: bytes of an element of the activations; by default those of most of the kept ones.
      reduce_bytes: bytes of an element of reduced gradients.

    Raises:
      AnnotationError, ModelError: as for :func:`jaxpar.annotate`.
    """
    program = trace_loss(make_model, loss_fn, batch)
    matmuls = tuple(_matmuls(program))
    params = tuple(
        _kept_array(program, path, value, aval.dtype.itemsize)
        for (path, value), aval in zip(program.inputs.items(), program.jaxpr.in_avals, strict=True)
        if path.startswith("params/")
    )
    backward = {
        name: _backward(make, loss_fn, batch, matmuls) for name, make in {"": make_model, **(models or {})}.items()
    }
    sizes: dict[str, int] = {}
    for name, size in (f for m in matmuls for f in (*m.shared, *m.rows, *m.columns, *m.summed)):
        if name is not None:
            sizes[name] = max(sizes.get(name, 1), size)
    for value in program.inputs.values():
        for dim in value.dims:
            name, size = program.names.of(dim).name, program.names.classes.size(dim)
            if name is not None:
                sizes[name] = max(sizes.get(name, 1), size)
    shapes = build_shapes(make_model).params
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(tx.init, shapes)))
    kept = next(iter(backward.values())).kept
    items = compute_bytes or max((2, 4), key=lambda n: sum(h.bytes for h in kept if h.itemsize == n))
    total = max(sum(p.bytes for p in params), 1)
    for name, size in (f for p in params for f in p.factors):
        if name is not None:  # a name that the user gave to a part of a class, such as heads that are kv_heads too
            sizes[name] = max(sizes.get(name, 1), size)
    given = (name for dims, _ in program.given.values() for name in dims if name is not None)
    names = tuple(sorted({*sizes, *program.hinted, *given}))
    return Workload(matmuls, params, backward, state / total, sizes, names, flash, items, reduce_bytes)


def _matmuls(program: NamedProgram) -> Iterator[Matmul]:
    """The matmuls of a traced program, in order."""
    sources: dict[int, int] = {}
    for step, times, layered in _walk(program, program.visited):
        if step.eqn.primitive.name not in _PRODUCTS:
            continue
        left, right, *_ = step.reads
        weight = left.weight or right.weight
        if left.weight and not right.weight:
            left, right = right, left
        swapped = left is step.reads[1]
        shared, rows, columns, summed = (_factors(program, dims) for dims in _parts(step, swapped))
        source = sources.setdefault(id(left), len(sources))
        yield Matmul(shared, rows, columns, summed, weight, layered, times, source)


def _parts(step: Visited, swapped: bool) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """The dims that both operands have, those of the left one, those of the right one, and those summed over."""
    left, right = step.reads[:2]
    if step.eqn.primitive.name == "conv_general_dilated":
        out = step.makes[0].dims
        spec = step.eqn.params["dimension_numbers"]
        feature = spec.out_spec[1]
        rows = [dim for i, dim in enumerate(out) if i != feature]
        return [], rows, [out[feature]], [right.dims[i] for i in spec.rhs_spec[1:]]
    numbers = step.eqn.params.get("dimension_numbers") or step.eqn.params["ragged_dot_dimension_numbers"]
    numbers = getattr(numbers, "dot_dimension_numbers", numbers)
    (left_sum, right_sum), (left_batch, right_batch) = numbers
    rows = [d for i, d in enumerate(left.dims) if i not in (*left_sum, *left_batch)]
    columns = [d for i, d in enumerate(right.dims) if i not in (*right_sum, *right_batch)]
    if swapped:
        rows, columns = columns, rows
    return [left.dims[i] for i in left_batch], rows, columns, [left.dims[i] for i in left_sum]


def _walk(
    program: NamedProgram, visited: Iterable[Visited], times: int = 1, layered: bool = False
) -> Iterator[tuple[Visited, int, bool]]:
    """Every equation, how often it runs, and whether it is inside the scan over layers."""
    for step in visited:
        yield step, times, layered
        scan = step.eqn.primitive.name == "scan"
        inside = layered or (scan and _scans_layers(program, step))
        for _, _, inner in step.inner:
            yield from _walk(program, inner, times * (step.eqn.params["length"] if scan else 1), inside)


def _scans_layers(program: NamedProgram, step: Visited) -> bool:
    length = step.eqn.params["length"]
    stacked = [x for x in step.reads if x.weight and x.shape and x.shape[0] == length and x.dims[0]]
    return any(program.names.of(x.dims[0]).name == LAYERS for x in stacked)


def _factors(program: NamedProgram, dims: Iterable[Any]) -> Factors:
    """The named factors of dims; those of one name next to each other are one, as tiles of a sequence."""
    found: list[Factor] = []
    for dim in dims:
        start = len(found)
        for atom in program.names.classes.flat(dim):
            name, size = program.names.of((atom,)).name, program.names.classes.sizes[atom]
            if len(found) > start and name is not None and found[-1][0] == name:
                found[-1] = name, found[-1][1] * size
            else:
                found.append((name, size))
    return tuple(found)


def _kept_array(program: NamedProgram, path: str, value: TracedValue, itemsize: int) -> KeptArray:
    own = program.given.get(path)
    if own is not None:
        factors = tuple(zip(own[0], value.shape, strict=True))
    else:
        factors = _factors(program, value.dims)
    return KeptArray(path.removeprefix("params/"), factors, itemsize)


def _backward(make_model: MakeModel, loss_fn: LossFn, batch: Any, forward: tuple[Matmul, ...]) -> Backward:
    """What the backward pass keeps and does, from the traces of the loss's linearization and of its gradient."""
    kept = trace_loss(make_model, loss_fn, batch, transform=_residuals)
    outputs = zip(kept.outputs, kept.jaxpr.out_avals, strict=True)
    activations = {id(value): (value, aval) for value, aval in outputs if not value.weight and value.shape}
    held = tuple(_kept_array(kept, "", value, aval.dtype.itemsize) for value, aval in activations.values())
    passes = trace_loss(make_model, loss_fn, batch, transform=_gradient)
    total = {kind: 0.0 for kind in (True, False)}
    once = dict(total)
    for one in forward:
        once[one.weight or not one.shared] += one.flops
    for one in _matmuls(passes):
        total[not one.shared] += one.flops
    ratio = {kind: total[kind] / once[kind] if once[kind] else 3.0 for kind in total}
    return Backward(held, ratio[True], ratio[False])


def _residuals(run: LossProgram) -> LossProgram:
    """The arrays that the backward pass of a loss keeps."""

    def kept(params: Any, *rest: Any) -> Any:
        return jax.tree.leaves(jax.vjp(lambda p: run(p, *rest)[0], params)[1])

    return kept


def _gradient(run: LossProgram) -> LossProgram:
    def gradient(params: Any, *rest: Any) -> Any:
        return jax.grad(lambda p: run(p, *rest)[0])(params)

    return gradient
