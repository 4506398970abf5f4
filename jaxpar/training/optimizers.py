"""Adapts optax transforms to the train step, and checks their updates.

The step has one set of parameters, so ``optax.lookahead`` keeps its slow parameters in the optimizer's state.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import ConfigError, ModelError
from jaxpar.parallel.offload.placement import OnDisk
from jaxpar.sharding.names import Names
from jaxpar.training.model import Path, leaves_with_paths, show
from jaxpar.utils.contexts import param_dims


class Lookahead(NamedTuple):
    """The optimizer's state if the optimizer contains ``optax.lookahead`` (Zhang et al. 2019, arXiv:1907.08610).

    Attributes:
      state: the state of the optimizer itself.
      slow: the slow parameters, a tree like the parameters, for evaluation and inference. ``TrainState.params`` are the
        fast ones.
    """

    state: Any
    slow: Any


def with_slow_parameters(tx: Any, params: Any, dims: tuple[tuple[Path, Names], ...] = ()) -> tuple[Any, Any]:
    """Returns ``tx`` in the form that a step calls, and its initial state.

    ``optax.lookahead`` takes fast and slow parameters together. A step has only the fast ones, so the slow ones are
    part of the optimizer's state. Every other optimizer is returned unchanged.

    Args:
      tx: any optax transform.
      params: the initial parameters.
      dims: their logical dims, which the optimizer's ``init`` may read.

    Raises:
      ConfigError: another transform of the optimizer does not take fast and slow parameters together, or the state is
        on disk.
    """
    with _no_advice(), param_dims(dims):
        state = tx.init(params)
    looks = lambda x: isinstance(x, optax.LookaheadState)
    if not any(looks(x) for x in jax.tree.leaves(state, is_leaf=looks)):
        return tx, state
    if isinstance(tx, OnDisk):
        raise ConfigError(
            "offload: optax.lookahead keeps slow parameters in addition to its state, and these cannot be on disk. "
            "Remedy: use to='host', or leave offload out."
        )
    tx = _adapted(tx)
    with _no_advice(), param_dims(dims):
        return tx, tx.init(params)


@functools.lru_cache(maxsize=64)  # equal optimizers stay equal in jit's cache key
def _adapted(tx: Any) -> Any:
    adapter = _Adapter(tx)
    return tx._replace(init=adapter.init, update=adapter.update)


@dataclass(frozen=True)
class _Adapter:
    tx: Any

    def init(self, params: Any) -> Lookahead:
        state = Lookahead(self.tx.init(params), jax.tree.map(jnp.array, params))
        try:
            jax.eval_shape(self.update, params, state, params)
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                "optimizer: optax.lookahead updates fast and slow parameters together, which another transform around "
                f"it does not support ({type(error).__name__}). Remedy: make lookahead the outermost transform, as in "
                "optax.lookahead(optax.chain(...), sync_period=5, slow_step_size=0.5)."
            ) from error
        return state

    def update(self, updates: Any, state: Lookahead, params: Any, **offered: Any) -> tuple[Any, Lookahead]:
        both = optax.LookaheadParams(fast=params, slow=state.slow)
        found, inner = self.tx.update(updates, state.state, both, **accepted(self.tx, offered))
        return found.fast, Lookahead(inner, optax.apply_updates(state.slow, found.slow))


def accepted(tx: Any, offered: dict[str, Any]) -> dict[str, Any]:
    """Returns those of the ``offered`` extra arguments that ``tx.update`` accepts."""
    known = inspect.signature(tx.update).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    return {name: value for name, value in offered.items() if takes_any or name in known}


@contextmanager
def _no_advice() -> Iterator[None]:
    """Suppresses the warning of ``optax.lookahead`` about missing slow parameters; it gets them with every update."""
    logger, other = logging.getLogger("absl"), lambda record: "only fast parameters" not in record.getMessage()
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def check_steps(state: Any) -> None:
    """Raises if the optimizer needs something that no step provides.

    Raises:
      ModelError: it needs a gradient of each example.
    """
    contrib = sys.modules.get("optax.contrib")
    private = getattr(contrib, "DifferentiallyPrivateAggregateState", ())
    is_private = lambda x: isinstance(x, private)
    if any(is_private(x) for x in jax.tree.leaves(state, is_leaf=is_private)):
        raise ModelError(
            "optax.contrib.differentially_private_aggregate (dpsgd) requires one gradient per example, but a step "
            "passes the optimizer a single gradient, that of the mean loss, whose first dim would be taken for the "
            "examples. Remedy: use another optimizer."
        )


def check_update(params: Any, updates: Any, before: Any, after: Any) -> None:
    """Raises if an optimizer's update does not fit its parameters, or its state does not fit the next step.

    Args:
      params: the parameters.
      updates: what ``tx.update`` returned for them.
      before, after: the optimizer's states.

    Raises:
      ModelError: with the paths of the parameters, or of the state's arrays.
    """
    shapes_of = lambda tree: {path: tuple(jnp.shape(x)) for path, x in leaves_with_paths(tree)}
    shapes, expected = shapes_of(updates), shapes_of(params)
    wrong = [path for path, shape in expected.items() if shapes.get(path) != shape]
    if wrong:
        given = {path: f"an update {list(shape)}" for path, shape in shapes.items()}
        shown = "; ".join(f"{show(('params', *p))} {list(expected[p])}: {given.get(p, 'none')}" for p in wrong[:4])
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise ModelError(
            f"the optimizer's updates do not have the shapes of their parameters ({shown}{more}). Remedy: use an "
            "optimizer that returns an update for every element of its parameters."
        )
    was, now = ({path for path, _ in leaves_with_paths(tree)} for tree in (before, after))
    if was != now:
        paths = ", ".join(show(("opt_state", *path)) for path in sorted(was ^ now)[:4])
        raise ModelError(
            f"the optimizer's update adds or removes arrays of its state ({paths}), but the next step requires the "
            "same arrays as this one. Remedy: use an optimizer whose init creates all of them (optax.monitor does "
            "not)."
        )
