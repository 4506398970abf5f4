"""``annotate``: the dims of an unannotated model named, from one trace of its loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxpar.parallel.unsharded import unsharded
from jaxpar.planning.names.annotation import Annotation
from jaxpar.planning.names.given import Given, Patterns, match
from jaxpar.planning.names.program import NamedProgram
from jaxpar.sharding.names import Names
from jaxpar.training.arguments import check_loss
from jaxpar.training.batch import shapes_of_batch
from jaxpar.training.loss import LossFn, LossProgram, loss_program, wants_key
from jaxpar.training.model import FoundNames, MakeModel, NamedModel, Tagged, build_shapes, leaves_with_paths, show
from jaxpar.utils.contexts import experts_traced, hint_observer


def annotate(make_model: MakeModel, loss_fn: LossFn, batch: Any, *, names: Patterns | None = None) -> Annotation:
    """Names the dims of a model that names none, or only some: batch, seq, embed, heads, mlp, vocab and so on.

    The loss is traced once, for shapes alone. Dims that the program makes one are one class, repeated layers are
    folded together, and a class is named after what the program does with it: ``vocab`` is what the batch's numbers
    look up or choose from, ``heads`` what attention keeps apart, ``embed`` what most weights contract and produce.

    Args:
      make_model: as for :func:`jaxpar.init`. Names that the model has are kept.
      loss_fn: as for :func:`jaxpar.train_step`.
      batch: a pytree of arrays or shapes, whose first dims are the batch. A leaf of :func:`jaxpar.tag` keeps its names.
      names: path pattern → a name or ``None`` for each dim, as in ``{"blocks/*/attn/q/kernel": ("embed", "heads",
        "head_dim")}``. ``*`` stands for one part of a path, ``**`` for any number. Such names are kept, and name
        the same dims of other arrays too.

    Returns:
      An :class:`Annotation`: the model and the loss with names, and a table that prints why each name was chosen, what
      each pattern matches, and which attention runs as :func:`jaxpar.attention` under a layout that shards its
      sequence.

    Raises:
      AnnotationError: a pattern matches no parameter, or has another number of names than the parameter has dims.
      ModelError: as :func:`jaxpar.init` and :func:`jaxpar.train_step` raise.

    After Alpa and TOAST (arXiv:2201.12023, arXiv:2508.15010), which find such classes in order to search for shardings.

    >>> import jax, optax
    >>> import jax.numpy as jnp
    >>> import jaxpar as jp
    >>> make_model = lambda key: {"up": jax.random.normal(key, (8, 32)), "down": jnp.zeros((32, 8))}
    >>> loss_fn = lambda p, batch: jnp.mean((batch["x"] + jax.nn.relu(batch["x"] @ p["up"]) @ p["down"]) ** 2)
    >>> found = jp.annotate(make_model, loss_fn, {"x": jax.ShapeDtypeStruct((16, 8), "float32")})
    >>> found.names, found.batch_dims
    (('batch', 'embed', 'mlp'), {'x': ('batch', 'embed')})
    >>> layout = jp.Layout(jp.MeshSpec(data=4, model=2).build(), found.rules(batch="data", mlp="model"))
    >>> state = jp.init(layout, found.make_model, optax.sgd(0.1))
    >>> state.params["up"].sharding.spec
    P(None, 'model')
    """
    arrays = (program := trace_loss(make_model, loss_fn, batch, names=names)).arrays()
    found = {array.path: array.names for array in arrays if array.path.startswith(("params/", "variables/"))}
    by_path = tuple(
        (tuple(path.split("/")), dims if path in program.given else FoundNames(dims)) for path, dims in found.items()
    )
    return Annotation(
        make_model=lambda key: NamedModel(make_model(key), by_path),
        loss_fn=AnnotatedLoss(loss_fn, {array.path: array.names for array in arrays}),
        arrays=arrays,
        unknown=dict(program.unknown),
        notes=program.notes,
        attention=program.attention_sites(),
        hinted=program.hinted,
        matched={
            pattern: tuple(path for path, (_, origin) in program.given.items() if origin == _origin(pattern))
            for pattern in names or {}
        },
    )


def trace_loss(
    make_model: MakeModel,
    loss_fn: LossFn,
    batch: Any,
    *,
    names: Patterns | None = None,
    transform: Callable[[LossProgram], LossProgram] = lambda run: run,
    in_pieces: bool = False,
) -> NamedProgram:
    """Returns the trace of a loss, or of a transformation of it, with the names of its dims.

    Args:
      make_model, loss_fn, batch, names: as for :func:`annotate`.
      transform: takes and returns a function of the model's parameters and variables, the batch, and a dict with the
        key, if the loss takes one.
      in_pieces: whether the backward pass computes experts again, as where devices process tokens in pieces.

    Raises:
      AnnotationError, ModelError: as for :func:`annotate`.
    """
    check_loss(loss_fn)
    parts = build_shapes(make_model)
    plain, batch_names = _without_tags(batch)
    shapes = {show(path): leaf.shape for path, leaf in leaves_with_paths(parts.params)}
    given: dict[str, tuple[Names, str]] = {show(path): (dims, "named in the model") for path, dims in parts.dims}
    for path, (dims, pattern) in match(names or {}, shapes).items():
        given[f"params/{path}"] = dims, _origin(pattern)
    given |= batch_names
    extra = {"key": jax.eval_shape(lambda: jax.random.key(0))} if wants_key(loss_fn) else {}
    run = transform(loss_program(loss_fn, parts.kind, {}))
    hinted: set[str | None] = set()
    experts = experts_traced("pieces" if in_pieces else "whole")
    with unsharded(), experts, hint_observer(lambda site, dims, x, resolved: hinted.update(dims)):
        program = NamedProgram.of(run, (parts.params, parts.variables, plain, extra), given)
    return replace(program, hinted=frozenset(name for name in hinted if name is not None))


def _origin(pattern: str) -> str:
    return f"given by the pattern {pattern!r}"


class AnnotatedLoss:
    """A loss that puts constraints on the weights and results of its matmuls, wherever the names fit the rules.

    Args:
      loss_fn: the user's loss.
      names: of the arrays of the model and the batch, by path.
    """

    def __init__(self, loss_fn: LossFn, names: Mapping[str, Names]):
        functools.update_wrapper(self, loss_fn)
        self.loss_fn, self._names = loss_fn, names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the user's loss, without constraints."""
        return self.loss_fn(*args, **kwargs)

    def with_loss(self, loss_fn: LossFn) -> AnnotatedLoss:
        """Returns another loss of the same arrays with their names, such as this one with recomputed layers."""
        return AnnotatedLoss(loss_fn, self._names)

    def rewrite(self, run: LossProgram) -> LossProgram:
        """Returns the loss as a function of arrays, with the constraints; a step calls this."""

        inner = getattr(self.loss_fn, "rewrite", None)
        run = run if inner is None else inner(run)

        def rewritten(*args: Any) -> Any:
            given = {path: (names, "annotated") for path, names in self._names.items()}
            return NamedProgram.of(run, args, given).run_constrained(args)

        return rewritten


def _without_tags(batch: Any) -> tuple[Any, Given]:
    """The shapes of a batch, and the names of its tagged leaves by path."""
    leaves = leaves_with_paths(batch, is_leaf=lambda x: isinstance(x, Tagged))
    given = {show(("batch", *path)): (leaf.dims, "tagged") for path, leaf in leaves if isinstance(leaf, Tagged)}
    return shapes_of_batch(batch), given
