"""``workload``: what one step of a model computes and keeps, from traces of its loss that know no mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax

from jaxpar.parallel.experts.options import ExpertCall
from jaxpar.planning.layers.find import RepeatedLayers, find_layers
from jaxpar.planning.layers.remat import applicable, recomputed
from jaxpar.planning.names.annotate import trace_loss
from jaxpar.planning.names.primitive_rules import TracedValue
from jaxpar.planning.names.program import NamedProgram
from jaxpar.planning.names.propagate import Visited
from jaxpar.planning.search.fsdp import StoredArray
from jaxpar.planning.search.outside_loops import FusedResiduals, opened_calls
from jaxpar.planning.search.plan import LAYERS
from jaxpar.planning.search.workload import (
    Backward,
    ExpertLayers,
    Factor,
    Factors,
    KeptArray,
    Matmul,
    OutsideLoops,
    Workload,
)
from jaxpar.training.loss import LossFn, LossProgram
from jaxpar.training.model import MakeModel, ModelParts, build_shapes, leaves_with_paths, part_of, show
from jaxpar.training.remat import RematPolicy
from jaxpar.utils.arrays import itemsize
from jaxpar.utils.jaxprs import opened

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_RECOMPUTED = ("checkpoint", "remat2")
_ONE_LAYER: Factor = (LAYERS, 1)
"""Marks what is in one of several separate layers."""

_CHOICES_RANK = 4
"""The most factors of an array of choices: layers, batch, sequence and choice. Rows have their numbers beside them."""

Rewrite = Callable[[LossProgram], LossProgram]


def workload(
    make_model: MakeModel,
    loss_fn: LossFn,
    batch: Any,
    tx: optax.GradientTransformation,
    *,
    models: Mapping[str, MakeModel] | None = None,
    remat: bool = False,
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
      remat: whether to look at the recomputation policies that apply to the loss's repeated layers.
      flash: whether attention runs in tiles.
      compute_bytes: bytes of an element of the activations; by default those of most of the kept ones.
      reduce_bytes: bytes of an element of reduced gradients.

    Raises:
      AnnotationError, ModelError: as for :func:`jaxpar.annotate`.
    """
    program = trace_loss(make_model, loss_fn, batch)
    layers = _layers(program)
    matmuls = tuple(_matmuls(program, _inside(layers)))
    params = tuple(
        _kept_array(program, path, value, aval.dtype.itemsize, layers=int(_separate(layers, path)))
        for (path, value), aval in zip(program.inputs.items(), program.jaxpr.in_avals, strict=True)
        if part_of(path) == "params"
    )
    variants = {name: _Variant(make, loss_fn, batch) for name, make in {"": make_model, **(models or {})}.items()}
    policies = applicable(program.jaxpr, layers) if remat else ()
    variants |= {policy: _Variant(make_model, loss_fn, batch, _recomputing(policy)) for policy in policies}
    backward = {name: _backward(variant, matmuls) for name, variant in variants.items()}
    experts = tuple(_experts(program, _inside(layers)))
    # A policy that keeps no rows computes experts again anyway.
    in_pieces = {
        name: _backward(replace(variants[name], in_pieces=True), matmuls) if _keeps_rows(back) else back
        for name, back in backward.items()
        if experts
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
    parts = build_shapes(make_model)
    shapes = parts.params
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(tx.init, shapes)))
    kept = next(iter(backward.values())).kept
    items = compute_bytes or max((2, 4), key=lambda n: sum(h.bytes for h in kept if h.itemsize == n))
    total = max(sum(p.bytes for p in params), 1)
    for name, size in (f for p in params for f in p.factors):
        # A name may be one that the user gave to a part of a class, such as heads that are kv_heads too.
        if name is not None and (name, size) != _ONE_LAYER:
            sizes[name] = max(sizes.get(name, 1), size)
    given = (name for dims, _ in program.given.values() for name in dims if name is not None)
    names = tuple(sorted({*sizes, *program.hinted, *given}))
    separate = max((found.count for found in layers if not found.stacked), default=0)
    if separate > sizes.get(LAYERS, 1):
        sizes[LAYERS] = separate
    return Workload(
        matmuls,
        params,
        backward,
        state / total,
        sizes,
        names,
        layers,
        flash,
        compute_bytes=items,
        reduce_bytes=reduce_bytes,
        experts=experts,
        in_pieces=in_pieces,
        stored=stored_arrays(parts),
    )


def stored_arrays(parts: ModelParts) -> tuple[StoredArray, ...]:
    """Returns the parameters of a model by their dims; one that is not annotated has dims without names."""
    names = dict(parts.dims)
    arrays = ((path, x, names.get(("params", *path), (None,) * x.ndim)) for path, x in leaves_with_paths(parts.params))
    return tuple(
        StoredArray(show(path), tuple(zip(own, x.shape, strict=True)), itemsize(x.dtype)) for path, x, own in arrays
    )


@dataclass(frozen=True)
class _Variant:
    """A loss with one recomputation policy.

    Attributes:
      make_model, loss_fn, batch: as for :func:`workload`.
      rewrite: adds the policy.
      in_pieces: whether the backward pass computes experts again.
    """

    make_model: MakeModel
    loss_fn: LossFn
    batch: Any
    rewrite: Rewrite = lambda run: run
    in_pieces: bool = False

    def trace(self, transform: Rewrite) -> NamedProgram:
        """Returns the trace of a transformation of it."""
        run = lambda plain: transform(self.rewrite(plain))
        return trace_loss(self.make_model, self.loss_fn, self.batch, transform=run, in_pieces=self.in_pieces)


def _keeps_rows(back: Backward) -> bool:
    return any(kept.rows and len(kept.factors) > _CHOICES_RANK for kept in back.kept)


def _recomputing(policy: str) -> Rewrite:
    return lambda run: recomputed(run, RematPolicy(policy))


def _layers(program: NamedProgram) -> tuple[RepeatedLayers, ...]:
    return find_layers(opened(program.jaxpr), list(program.inputs))


def _inside(layers: Sequence[RepeatedLayers]) -> dict[int, int]:
    """The numbers of the equations in layers, and of a scan the number of its layers, else 1."""
    return {
        number: found.count if found.stacked else 1
        for found in layers
        for start, end in found.spans
        for number in range(start, end)
    }


def _separate(layers: Sequence[RepeatedLayers], path: str) -> bool:
    """Whether a parameter is one of a separate layer's."""
    return any(path.startswith(found.path[:-1]) for found in layers if not found.stacked)


def _steps(program: NamedProgram, inside: Container[int]) -> Iterator[tuple[Visited, int, bool]]:
    """As :func:`walk`; ``inside`` has the numbers of equations in layers."""
    for number, step in enumerate(program.visited):
        yield from walk(program, (step,), layered=number in inside)


def _experts(program: NamedProgram, inside: Container[int]) -> Iterator[ExpertLayers]:
    """The calls of experts, equal ones together."""
    found = Counter[tuple[ExpertCall, bool]]()
    for step, times, layered in _steps(program, inside):
        call = ExpertCall.of(step.eqn.params["name"]) if step.eqn.primitive.name == "name" else None
        if call is not None:
            found[call, layered] += times
    for (call, layered), times in found.items():
        yield ExpertLayers(call, times, layered)


def _matmuls(program: NamedProgram, inside: Container[int] = ()) -> Iterator[Matmul]:
    """The matmuls of a traced program, in order; ``inside`` has the numbers of equations in layers."""
    sources: dict[int, int] = {}
    for step, times, layered in _steps(program, inside):
        if step.eqn.primitive.name not in _PRODUCTS:
            continue
        left, right, *_ = step.reads
        weight = left.weight or right.weight
        if left.weight and not right.weight:
            left, right = right, left
        swapped = left is step.reads[1]
        shared, rows, columns, summed = (_factors(program, dims) for dims in _parts(step, swapped))
        source = sources.setdefault(id(left), len(sources))
        groups = _factors(program, (right.dims[i] for i in _groups(step)))
        yield Matmul(shared, rows, columns, summed, weight, layered, times, source, groups)


def _groups(step: Visited) -> tuple[int, ...]:
    """The dims of the right operand of which each row takes one matrix."""
    return tuple(getattr(step.eqn.params.get("ragged_dot_dimension_numbers"), "rhs_group_dimensions", ()))


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
    columns = [d for i, d in enumerate(right.dims) if i not in (*right_sum, *right_batch, *_groups(step))]
    if swapped:
        rows, columns = columns, rows
    return [left.dims[i] for i in left_batch], rows, columns, [left.dims[i] for i in left_sum]


def walk(
    program: NamedProgram, visited: Iterable[Visited], times: int = 1, layered: bool = False
) -> Iterator[tuple[Visited, int, bool]]:
    """Every equation, how often it runs, and whether it is inside the scan over layers."""
    for step in visited:
        yield step, times, layered
        scan = step.eqn.primitive.name == "scan"
        inside = layered or (scan and _scans_layers(program, step))
        for _, _, inner in step.inner:
            yield from walk(program, inner, times * (step.eqn.params["length"] if scan else 1), inside)


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


def _kept_array(program: NamedProgram, path: str, value: TracedValue, itemsize: int, *, layers: int) -> KeptArray:
    own = program.given.get(path)
    if own is not None:
        factors = tuple(zip(own[0], value.shape, strict=True))
    else:
        factors = _factors(program, value.dims)
    if layers == 1:
        factors = (_ONE_LAYER, *factors)
    elif layers and factors and factors[0][1] == layers:  # also of layers that the model keeps apart
        factors = ((LAYERS, layers), *factors[1:])
    return KeptArray(path.removeprefix("params/"), factors, itemsize)


def _backward(variant: _Variant, forward: tuple[Matmul, ...]) -> Backward:
    """What the backward pass keeps and does, from the traces of the loss's linearization and of its gradient."""
    kept = variant.trace(_residuals)
    outputs = zip(kept.outputs, kept.jaxpr.out_avals, strict=True)
    # What does not depend on the batch, such as a mask, is computed again or not at all.
    activations = {id(value): (value, aval) for value, aval in outputs if value.data and value.shape}
    layers = _layers(kept)
    layered = {
        id(value): count
        for number, count in _inside(layers).items()
        for value in _of_layers(kept.visited[number], count)
    }
    rows = _row_atoms(kept)

    def array(value: TracedValue, size: int) -> KeptArray:
        found = _kept_array(kept, "", value, size, layers=layered.get(id(value), 0))
        return replace(found, rows=any(atom in rows for dim in value.dims for atom in kept.names.classes.flat(dim)))

    held = tuple(array(value, aval.dtype.itemsize) for value, aval in activations.values())
    passes = variant.trace(_gradient)
    alone = None
    if not any(found.stacked for found in layers):
        fused = FusedResiduals.of(kept.visited, [value for value, _ in activations.values()])
        own, again = (tuple(array(*pair) for pair in pairs) for pairs in (fused.kept, fused.again))
        alone = OutsideLoops(own, again, not _recomputes_weights(passes))
    once, outside, total = ({True: 0.0, False: 0.0} for _ in range(3))
    for one in forward:
        once[one.weight or not one.shared] += one.flops
        if not one.layered and any(other.layered for other in forward):
            outside[one.weight or not one.shared] += one.flops
    for one in _matmuls(passes):
        total[not one.shared] += one.flops
    # What is outside of the layers is not recomputed.
    pairs = {kind: (total[kind] - 3.0 * outside[kind], once[kind] - outside[kind]) for kind in total}
    ratio = {kind: more / least if least else 3.0 for kind, (more, least) in pairs.items()}
    return Backward(held, ratio[True], ratio[False], alone)


def _recomputes_weights(program: NamedProgram) -> bool:
    """Whether a gradient recomputes anything that reads weights, which XLA keeps apart from the forward pass."""
    steps = (step for step, _, _ in walk(program, program.visited))
    return any(step.eqn.primitive.name in _RECOMPUTED and any(x.weight for x in step.reads) for step in steps)


def _row_atoms(program: NamedProgram) -> set[int]:
    """The factors without a name along which the rows of experts are more than the tokens."""
    steps = (step for step, _, _ in walk(program, program.visited) if _groups(step))
    atoms = {atom for step in steps for atom in program.names.classes.flat(step.reads[0].dims[0])}
    return {atom for atom in atoms if program.names.of((atom,)).name is None}


def _of_layers(step: Visited, count: int) -> list[TracedValue]:
    """The results of an equation in a layer; of a scan over layers those that have a row for each."""
    if count == 1:
        return [value for one in opened_calls((step,)) for value in one.makes]
    inner = opened(step.eqn.params["jaxpr"]).outvars
    rank = lambda atom: len(getattr(atom.aval, "shape", ()))
    pairs = zip(step.makes, step.eqn.outvars, inner, strict=True)
    return [value for value, var, one in pairs if rank(var) > rank(one)]


def _residuals(run: LossProgram) -> LossProgram:
    """The arrays that the backward pass of a loss keeps."""

    def kept(params: Any, *rest: Any) -> Any:
        return jax.tree.leaves(jax.vjp(lambda p: run(p, *rest)[0], params)[1])

    return kept


def _gradient(run: LossProgram) -> LossProgram:
    def gradient(params: Any, *rest: Any) -> Any:
        return jax.grad(lambda p: run(p, *rest)[0])(params)

    return gradient
