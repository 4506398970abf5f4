"""The training state, which one jitted function builds directly in its sharded form.

:func:`place` decides the sharding of every leaf; ``init``, ``train_step``, ``explain`` and ``check`` all read it.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxpar.errors import ConfigError, LayoutError
from jaxpar.parallel.explicit_axes import without_explicit_axes
from jaxpar.parallel.offload.placement import KIND, hosted, hosted_layers, no_layers
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.precision.policy import Precision, PrecisionLike
from jaxpar.sharding import messages
from jaxpar.sharding.hardware.topology import platform_of
from jaxpar.sharding.layout import Layout, to_spec, tracing_under
from jaxpar.sharding.names import LAYERS, Names
from jaxpar.sharding.resolve import Resolved, ResolvedDim
from jaxpar.training.arguments import check_layout, check_optimizer
from jaxpar.training.model import Kind, MakeModel, Path, build_with_or_without_mesh, leaves_with_paths, show
from jaxpar.training.model.fixed_order import FIXED, ONE_CODE, Causes
from jaxpar.training.model.lora import LoraKind
from jaxpar.training.model.parts import FROZEN, FoundNames
from jaxpar.training.optimizers import with_slow_parameters
from jaxpar.training.self_reducing import SelfReducing
from jaxpar.utils.arrays import strong
from jaxpar.utils.contexts import hint_observer
from jaxpar.utils.executables import compile_once


@dataclasses.dataclass(frozen=True)
class StateMetadata:
    """The parts of a state that are not arrays.

    Attributes:
      kind: how to rebuild the model from its arrays.
      tx: the optimizer.
      dims: the logical dims of each leaf of the model, by path.
    """

    kind: Kind
    tx: optax.GradientTransformation
    dims: tuple[tuple[Path, Names], ...]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "variables", "key", "loss_scale"],
    meta_fields=["metadata"],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step reads and writes, an ordinary pytree of arrays.

    Attributes:
      step: int32 scalar, the number of steps taken.
      params: nested dict of the trained arrays.
      opt_state: what ``tx.init(params)`` returned.
      variables: nested dict of the carried arrays (NNX variables other than ``nnx.Param``, Linen collections).
      key: the PRNG key that a ``loss_fn`` with a ``key`` argument draws from.
      metadata: the parts that are not arrays.
      loss_scale: the loss scale and its counters (:class:`jaxpar.parallel.precision.policy.LossScale`); ``None``
        without one.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=8).abstract(), jp.Rules(embed="data"))
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (16,)), "embed")}
    >>> state = jp.abstract_state(layout, make_model, optax.adam(1e-3))
    >>> state.params["w"].shape, len(jax.tree.leaves(state))
    ((16,), 6)
    """

    step: Any
    params: Any
    opt_state: Any
    variables: Any
    key: Any
    metadata: StateMetadata
    loss_scale: Any = None

    @property
    def model(self) -> Any:
        """The model with these parameters, as ``loss_fn`` receives it."""
        return self.metadata.kind.merge(self.params, self.variables)


@dataclasses.dataclass(frozen=True)
class PlacedLeaf:
    """One leaf with its sharding and memory; one row of ``explain``'s table.

    Attributes:
      role: ``params``, ``variables``, ``opt_state``, or another field of :class:`TrainState`.
      path: the leaf's path in the state, with slashes.
      shape: the leaf's global shape.
      dtype: the leaf's dtype.
      names: its logical dims, or ``None`` if it has none.
      resolved: the sharding that the rules give it, with any problems.
      note: why it has no logical dims, or why it is not on the host.
      host: the leaf is in host memory.
    """

    role: str
    path: str
    shape: tuple[int, ...]
    dtype: Any
    names: Names | None
    resolved: Resolved
    note: str = ""
    host: bool = False

    @property
    def problems(self) -> tuple[str, ...]:
        return self.resolved.problems

    @property
    def is_weight(self) -> bool:
        """Whether the leaf is a parameter, trained or frozen."""
        return self.role == "params" or self.path.startswith(f"variables/{FROZEN}/")


def init(
    layout: Layout,
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    *,
    seed: int = 0,
    precision: PrecisionLike = None,
) -> TrainState:
    """Returns model and optimizer state, built in shards by one jitted function, so no device holds a full array.

    Parameters are bitwise equal in every layout: float sums in an initializer, such as ``w - w.mean(0)``, are evaluated
    in a fixed order (:mod:`jaxpar.training.model.fixed_order`). A few other operations, such as matmuls, have no fixed
    order; :func:`jaxpar.explain` lists the parameters that depend on them.

    ``make_model`` is traced in every call; a program that an earlier call compiled is not compiled again.

    Args:
      layout: mesh and rules. Its mesh holds devices.
      make_model: ``make_model(key)`` returns an NNX module, Linen variables or a (tagged) pytree. It is traced.
      tx: any optax transform.
      seed: ``make_model`` receives ``jax.random.split(jax.random.key(seed))[0]``; the other half is the state's key.
      precision: as for :func:`jaxpar.train_step`; with a loss scale, the state carries it.

    Returns:
      The state at step 0.

    Raises:
      LayoutError: the rules cannot place some tensors; the error lists all of them.
      ModelError: ``make_model`` returned something that holds no parameters.
      AnnotationError: ``make_model`` returned a malformed annotation.
      ConfigError: ``precision`` has no valid value, or the optimizer offloads parameters to host memory, but no
        parameter is a stack of layers.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(embed="data", mlp=None))
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (16, 4)), "embed", "mlp")}
    >>> init(layout, make_model, optax.adam(1e-3)).params["w"].sharding.spec
    P('data', None)
    """
    return init_program(layout, make_model, tx, precision)(jax.random.key(seed))


@dataclasses.dataclass(frozen=True)
class InitProgram:
    """The program ``key -> state`` that :func:`init` calls; ``lower(key)`` shows that it materializes no full array.

    Attributes:
      leaves: the jitted function from the key to the leaves of the state.
      structure: of the state. It holds the optimizer and the model's static parts, so the executable does not.
      key: what the program's text does not say; see :func:`jaxpar.utils.executables.compile_once`.
    """

    leaves: jax.stages.Wrapped
    structure: Any
    key: Hashable

    def lower(self, key: jax.Array) -> jax.stages.Lowered:
        return self.leaves.lower(key)

    def __call__(self, key: jax.Array) -> TrainState:
        made = compile_once(self.lower(key), self.key)(key)
        return jax.tree.unflatten(self.structure, made)


def init_program(
    layout: Layout, make_model: MakeModel, tx: optax.GradientTransformation, precision: PrecisionLike = None
) -> InitProgram:
    """Returns the program ``key -> state`` that :func:`init` calls.

    Args:
      layout, make_model, tx, precision: as for :func:`init`.

    Raises:
      LayoutError: the rules cannot place some tensors; the error lists all of them.
    """
    abstract, causes = _abstract(layout, make_model, tx, precision)
    shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(abstract))

    def build(key: jax.Array) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(_build(layout, make_model, tx, Precision.of(precision), key)))

    # XLA:CPU vectorises by the shape of a shard, and its vector erf_inv and log differ from the scalar ones in the last
    # bit. Only unoptimised code makes the parameters bitwise equal in every layout.
    options: dict[str, Any] = {}
    if layout.mesh.devices.flat[0].platform == "cpu":
        options["xla_backend_optimization_level"] = 0
        if any(names & FIXED for names in causes.values()):
            options |= ONE_CODE
    program = jax.jit(build, out_shardings=shardings, compiler_options=options or None)
    return InitProgram(program, jax.tree.structure(abstract), (shardings, tuple(options.items())))


def abstract_state(
    layout: Layout, make_model: MakeModel, tx: optax.GradientTransformation, precision: PrecisionLike = None
) -> TrainState:
    """Returns the state that :func:`init` would build, as ``ShapeDtypeStruct`` leaves with shardings. Needs no devices.

    Args:
      layout, make_model, tx, precision: as for :func:`init`; the mesh may be abstract.

    Raises:
      LayoutError: the rules cannot place some tensors; the error lists all of them.
      ModelError, AnnotationError, ConfigError: as for :func:`init`.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=4096).abstract(), jp.Rules(embed="data", mlp=None))
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (8192, 512)), "embed", "mlp")}
    >>> abstract_state(layout, make_model, optax.adam(1e-3)).params["w"].sharding.spec
    P('data', None)
    """
    return _abstract(layout, make_model, tx, precision)[0]


def _abstract(
    layout: Layout, make_model: MakeModel, tx: optax.GradientTransformation, precision: PrecisionLike
) -> tuple[TrainState, dict[str, Causes]]:
    """Returns :func:`abstract_state`, and the order-dependent primitives of each parameter that has any."""
    shapes, causes = shape_state_and_causes(layout, make_model, tx, precision)
    tensors = place(layout, shapes)
    if problems := problems_of(layout, tensors):
        raise LayoutError(problems)
    if missing := no_layers(tx, any(tensor.host and tensor.is_weight for tensor in tensors)):
        raise ConfigError(missing)
    simulated = isinstance(layout.mesh, Mesh) and platform_of(layout.mesh) == "cpu"
    if simulated and any(tensor.host for tensor in tensors):
        text = (
            "offload: simulated CPU devices use host memory, so offloading saves no memory; the results are the same."
        )
        warnings.warn(text, stacklevel=3)
    leaves, treedef = jax.tree.flatten(shapes)
    placed = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(layout, tensor))
        for leaf, tensor in zip(leaves, tensors, strict=True)
    ]
    return jax.tree.unflatten(treedef, placed), causes


def _sharding(layout: Layout, tensor: PlacedLeaf) -> NamedSharding:
    sharding = NamedSharding(layout.mesh, to_spec(tensor.resolved))
    return sharding.with_memory_kind(KIND) if tensor.host else sharding


def shape_state(
    layout: Layout, make_model: MakeModel, tx: optax.GradientTransformation, precision: PrecisionLike = None
) -> TrainState:
    """Returns the state as ``ShapeDtypeStruct`` leaves without shardings."""
    return shape_state_and_causes(layout, make_model, tx, precision)[0]


def shape_state_and_causes(
    layout: Layout, make_model: MakeModel, tx: optax.GradientTransformation, precision: PrecisionLike = None
) -> tuple[TrainState, dict[str, Causes]]:
    """Returns the state as shapes, and for each parameter the order-dependent primitives that it depends on, by path.

    See :mod:`jaxpar.training.model.fixed_order`.
    """
    check_layout(layout, "init(layout, make_model, tx)")
    check_optimizer(tx, make_model)
    found: dict[str, Causes] = {}
    build = functools.partial(_build, layout, make_model, tx, Precision.of(precision), causes=found)
    return jax.eval_shape(build, jax.eval_shape(lambda: jax.random.key(0))), found


def _build(
    layout: Layout,
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    precision: Precision,
    key: jax.Array,
    causes: dict[str, Causes] | None = None,
    params: Any = None,
) -> TrainState:
    with tracing_under(layout), nnx.use_eager_sharding(False), hint_observer(_ignore):
        model_key, step_key = jax.random.split(without_explicit_axes(layout, key))
        parts, found = build_with_or_without_mesh(make_model, model_key)
        parts = parts if params is None else dataclasses.replace(parts, params=params)
        if isinstance(tx, SelfReducing):
            opt_state: Any = tx.init(parts.params, dict(parts.dims))
        else:
            tx, opt_state = with_slow_parameters(tx, parts.params, parts.dims)
    if causes is not None:
        causes |= found
    static, step = StateMetadata(parts.kind, tx, parts.dims), jnp.zeros((), jnp.int32)
    scale = None if precision.scale is None else precision.scale.start()
    return strong(TrainState(step, parts.params, opt_state, parts.variables, step_key, static, scale))


def _ignore(*_: Any) -> None:
    """Ignores every problem. It is one module-level function because jit's cache key includes the observer."""


def place(layout: Layout, state: TrainState) -> list[PlacedLeaf]:
    """Returns the sharding of every leaf of ``state``, in the order of ``jax.tree.leaves(state)``.

    Problems are not raised; they are texts in the returned leaves, which :func:`problems_of` collects.
    """
    dims = dict(state.metadata.dims)
    leaves = leaves_with_paths(state)
    params = {path[1:]: leaf.shape for path, leaf in leaves if path[0] == "params"}
    tx: Any = state.metadata.tx
    # Of a model with adapters, the weights that may be in host memory are the frozen ones.
    weights = ("variables", FROZEN) if isinstance(state.metadata.kind, LoraKind) else ("params",)
    placed = {
        path: _model_tensor(layout, path, dims.get(path), leaf, tx if path[: len(weights)] == weights else None)
        for path, leaf in leaves
        if path[0] != "opt_state"
    }
    reduces = isinstance(tx, SelfReducing)
    for path, leaf in leaves:
        if path[0] == "opt_state":
            found = tx.place(layout, path[1:], leaf.shape, params, dims) if reduces else None
            if found is not None:
                placed[path] = PlacedLeaf("opt_state", show(path), leaf.shape, leaf.dtype, *found)
                continue
            owner, names, note = moment_names(path[1:], leaf.shape, params, dims)
            known = (None,) * len(leaf.shape) if names is None else names
            resolved = layout.resolve(known, leaf.shape, role="optimizer", dtype=leaf.dtype, path=show(path))
            if owner is not None and placed["params", *owner].problems:
                # The parameter reports this problem; repeating it for each moment would bury the others.
                resolved = dataclasses.replace(resolved, problems=())
            if reduces and path[1] == "mu":  # report it once: every parameter has one mu
                found_too = tx.problems(layout, path[2:], leaf.shape, dims)
                resolved = dataclasses.replace(resolved, problems=(*resolved.problems, *found_too))
            host = hosted(state.metadata.tx, leaf.shape, leaf.dtype)
            placed[path] = PlacedLeaf("opt_state", show(path), leaf.shape, leaf.dtype, names, resolved, note, host)
    return [placed[path] for path, _ in leaves]


def problems_of(layout: Layout, tensors: Sequence[PlacedLeaf]) -> list[str]:
    """Returns the problems of all leaves, each text once.

    All parameters without annotations are one problem, and so are all stacks that the pipeline's stages do not divide.
    """
    unannotated = {t.path: t.shape for t in tensors if t.is_weight and t.names is None and t.problems}
    grouped = (_unannotated(list(unannotated.items())),) if unannotated else ()
    stages = layout.sizes.get(AXIS, 1)
    stacks: dict[ResolvedDim, list[str]] = {}
    for tensor in tensors:
        if _undivided(tensor, stages):
            stacks.setdefault(tensor.resolved.dims[0], []).append(f"{tensor.path} {list(tensor.shape)}")

    def one(tensor: PlacedLeaf) -> Sequence[str]:
        if tensor.path in unannotated:
            return grouped
        if not _undivided(tensor, stages):
            return tensor.problems
        layers = tensor.resolved.dims[0]
        text = _undivided_layers(stacks[layers], layers.size or 0, layers.why, layers.rule, stages)
        return (text, *(other for other in tensor.problems if f": {layers.why} (rule" not in other))

    texts = list(dict.fromkeys(text for tensor in tensors for text in one(tensor)))
    hints = [t.names.doubt(t.path) for t in tensors if isinstance(t.names, FoundNames) and "claimed" in str(t.problems)]
    return [*texts[:-1], f"{texts[-1]} {hints[0]}"] if hints else texts


def _undivided(tensor: PlacedLeaf, stages: int) -> bool:
    """Whether the tensor is a stack of layers whose number the pipeline's stages do not divide."""
    if not tensor.problems or stages == 1 or (tensor.names or ())[:1] != (LAYERS,):
        return False
    first = tensor.resolved.dims[0]
    return messages.no_multiple(LAYERS, first.size or 0, {AXIS: stages}) == first.why


def _model_tensor(layout: Layout, path: Path, names: Names | None, leaf: Any, tx: Any) -> PlacedLeaf:
    """Places a leaf of the model, the step counter or the key: by its annotation, or replicated if it has none.

    ``tx`` is the optimizer if it may keep the leaf in host memory, else ``None``.
    """
    part, full, shape, dtype = path[0], show(path), leaf.shape, leaf.dtype
    if names is not None:
        resolved = layout.resolve(names, shape, role="params", dtype=dtype, path=full)
        host, why = hosted_layers(tx, names, shape, dtype)
        return PlacedLeaf(part, full, shape, dtype, names, resolved, why, host)
    if part == "params" or path[:2] == ("variables", FROZEN):
        # Only an `over` rule can shard a parameter without annotations.
        resolved = layout.resolve((None,) * len(shape), shape, role="params", dtype=dtype, path=full)
        if shape and layout.rules.unannotated == "error":
            resolved = dataclasses.replace(resolved, problems=(_unannotated([(full, shape)]),))
        return PlacedLeaf(part, full, shape, dtype, None, resolved, "not annotated" if shape else "")
    why = "carried by the model, not annotated"
    resolved = Resolved(tuple(ResolvedDim(None, size, why=why) for size in shape))
    return PlacedLeaf(part, full, shape, dtype, None, resolved, why if part == "variables" else "")


def moment_names(
    path: Path, shape: tuple[int, ...], params: Mapping[Path, tuple[int, ...]], dims: Mapping[Path, Names]
) -> tuple[Path | None, Names | None, str]:
    """Returns the logical dims of an optimizer leaf, derived from the parameter it belongs to.

    A leaf belongs to the parameter whose path is the longest one contained in the leaf's path. Its dims follow from the
    two shapes: equal (moments); one more leading dim (histories, as in lbfgs); a dim kept at size 1 (sm3); a dim
    dropped (factored moments, as in adafactor). Any other leaf has no dims, and a note with the reason.

    Args:
      path: the leaf's path in the optimizer state.
      shape: the leaf's shape.
      params: parameter path → shape.
      dims: ("params", *path) → logical dims.

    Returns:
      The owner's path (or None), the dims (or None), and the reason if there are none.
    """
    if not shape:
        return None, None, ""
    spans = [path[i:j] for i in range(len(path)) for j in range(len(path), i, -1)]
    owner = max((span for span in spans if span in params), key=len, default=() if () in params else None)
    if owner is None:
        return None, None, "belongs to no parameter"
    names = dims.get(("params", *owner))
    if names is None:
        return owner, None, "its parameter is not annotated"
    related = relate(params[owner], names, shape)
    note = "" if related is not None else f"its shape does not follow from {show(owner)} {list(params[owner])}"
    return owner, related, note


def relate(param: tuple[int, ...], names: Names, shape: tuple[int, ...]) -> Names | None:
    """Returns the names of ``shape``, derived from a parameter's shape and names; ``None`` when they are ambiguous.

    >>> relate((8, 4), ("embed", "mlp"), (10, 8, 4))
    (None, 'embed', 'mlp')
    >>> relate((8, 4), ("embed", "mlp"), (4,))
    ('mlp',)
    >>> relate((8, 8), ("embed", "mlp"), (8,)) is None
    True
    """
    if len(names) != len(param):  # the annotation is wrong, and reported at the parameter
        return None
    if len(shape) == len(param) and all(got in (want, 1) for got, want in zip(shape, param, strict=True)):
        return tuple(name if got == want else None for name, got, want in zip(names, shape, param, strict=True))
    if shape[1:] == param:
        return (None, *names)
    dropped = {names[:i] + names[i + 1 :] for i in range(len(param)) if param[:i] + param[i + 1 :] == shape}
    return dropped.pop() if len(dropped) == 1 else None


def _undivided_layers(stacks: Sequence[str], size: int, why: str, rule: str, stages: int) -> str:
    """Reports stacks of ``size`` layers that the pipeline stages do not divide, and offers uneven stages."""
    fits = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
    text = (
        f"{stacks[0]}{f' and {len(stacks) - 1} more' if len(stacks) > 1 else ''}: {why} (rule {rule}). Remedy: use a "
        f"number of stages that divides {size} ({fits})"
    )
    if size < stages:
        return f"{text}."
    low, more = divmod(size, stages)
    each = (*(low + 1,) * more, *(low,) * (stages - more))
    return (
        f"{text}; or use stages of different sizes, where every stage stores all layers of every stack: "
        f"Rules(indivisible={{'layers': 'replicate'}}) and jp.Pipeline(schedule, layers_per_stage={each}), one number "
        f"for each piece of the model; in YAML rules: {{indivisible: {{layers: replicate}}}} and parallel: {{pipeline: "
        f"{{layers_per_stage: {list(each)}}}}}."
    )


def _unannotated(tensors: Sequence[tuple[str, Sequence[int]]], most: int = 4) -> str:
    """Reports all parameters without names as one problem: usually, either all have names or none has."""
    shown = ", ".join(f"{path} {list(shape)}" for path, shape in tensors[:most])
    rest = f" and {len(tensors) - most} more" if len(tensors) > most else ""
    what, it = f"{len(tensors)} parameters have no logical dims: {shown}{rest}", "them"
    if len(tensors) == 1:
        what, it = f"{shown} has no logical dims", "it"
    return (
        f"{what}. Remedy: annotate {it} (jaxpar.nnx.axes, jaxpar.linen.axes, jp.tag), or allow "
        f"replication with unannotated='replicate' in the rules; over(axis) and jp.Zero then still shard {it}."
    )
