"""``TrainingProgram``: what a worker trains, as functions that each worker calls in its own process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optax

from jaxpar.parameter_server.config import ServerConfig
from jaxpar.parameter_server.piece_optimizer import check_pieces
from jaxpar.parameter_server.pieces import ParamPiece, ParamSpec, SparseTable, cut, server_params
from jaxpar.sharding.layout import Layout
from jaxpar.training.loss import LossFn
from jaxpar.training.model import MakeModel, build_shapes, leaves_with_paths, show

type BatchFn = Callable[[int], Any]
"""The batch of a step: equal in each call, because a worker that was killed computes its step again."""


@dataclass(frozen=True)
class TrainingProgram:
    """A model, its loss, its data and its optimizer.

    Attributes:
      layout: returns the layout of a worker; called in the worker's process, whose devices it uses. A worker is one
        process.
      make_model, loss_fn: as for :func:`jaxpar.init` and :func:`jaxpar.train_step`.
      tx: the optimizer. Servers run it, except that with ``local_sgd`` each worker does.
      batches: ``batches(worker, workers)`` returns ``step -> batch``, where a batch is a pytree of arrays, on the host
        or placed with :func:`jaxpar.shard_array`.
      seed: of the initial parameters, equal in all workers; a ``loss_fn`` with a ``key`` draws other numbers in each.
      tables: parameters of which workers pull and push only the rows that a batch touches.
      step_options: keyword arguments of :func:`jaxpar.train_step`. ``clip_norm`` clips each worker's own gradient.
      heldout: returns batches for evaluation.
      eval_loss_fn: the loss on them; by default ``loss_fn``.
      eval_every: steps between two evaluations by the first worker; 0 evaluates at the end only.
      finish: called in the first worker at the end, with the state with the final parameters.
    """

    layout: Callable[[], Layout]
    make_model: MakeModel
    loss_fn: LossFn
    tx: optax.GradientTransformation
    batches: Callable[[int, int], BatchFn]
    seed: int = 0
    tables: tuple[SparseTable, ...] = ()
    step_options: Mapping[str, Any] = field(default_factory=dict)
    heldout: Callable[[], Sequence[Any]] | None = None
    eval_loss_fn: LossFn | None = None
    eval_every: int = 0
    finish: Callable[[Any], None] | None = None

    @functools.cached_property
    def model_params(self) -> dict[str, ParamSpec]:
        """The parameters of a worker's model; nothing is computed."""
        return params_of(build_shapes(self.make_model).params)

    def server_tx(self, config: ServerConfig) -> optax.GradientTransformation:
        """Returns the optimizer that the servers run."""
        if config.mode != "local_sgd":
            return self.tx
        return optax.sgd(config.outer_learning_rate, config.outer_momentum or None, nesterov=config.outer_momentum > 0)

    def pieces(self, config: ServerConfig) -> list[ParamPiece]:
        """Returns what the servers hold.

        Raises:
          ConfigError: a table is not a matrix of the model, or the optimizer does not update pieces on their own.
        """
        params = server_params(self.model_params, self.tables)
        found = cut(params, config.piece_bytes, table_pieces={table.path: table.pieces for table in self.tables})
        check_pieces(self.server_tx(config), params, found)
        return found


def params_of(tree: Any) -> dict[str, ParamSpec]:
    """Returns shapes and dtypes of parameters, by path."""
    return {show(("params", *path)): ParamSpec(tuple(x.shape), str(x.dtype)) for path, x in leaves_with_paths(tree)}
