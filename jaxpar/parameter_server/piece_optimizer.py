"""``PieceOptimizer``: an optax transform that updates each piece on its own, with one program for each kind of piece.

A piece is updated by the same program wherever it lies, so the number of servers changes no bit of a result, and a log
that is replayed gives the same bits again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.errors import ConfigError
from jaxpar.parameter_server.pieces import ParamPiece, Params

type Leaves = list[np.ndarray]
"""The leaves of a piece's optimizer state."""


class PieceOptimizer:
    """Updates pieces; the state of each piece is a list of arrays.

    Args:
      tx: any optax transform that computes the update of an element from that element alone; see :func:`check_pieces`.
    """

    def __init__(self, tx: optax.GradientTransformation):
        self._tx = optax.with_extra_args_support(tx)

    def init(self, piece: ParamPiece, value: np.ndarray) -> Leaves:
        """Returns the state for a piece with this value."""
        return _arrays(jax.jit(self._tx.init)(_tree(piece.name, jnp.asarray(value))))

    def update(
        self, piece: ParamPiece, value: np.ndarray, state: Leaves, grad: np.ndarray
    ) -> tuple[np.ndarray, Leaves]:
        """Returns value and state after an update with a gradient of the same shape."""
        new, leaves = self._program(piece.name, value.shape, value.dtype.name)(value, state, grad)
        return np.asarray(new), [np.asarray(x) for x in leaves]

    @functools.lru_cache(maxsize=4096)  # noqa: B019 (as long-lived as the server)
    def _program(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        like = jax.eval_shape(self._tx.init, _tree(name, jax.ShapeDtypeStruct(shape, dtype)))
        structure = jax.tree.structure(like)

        def update(value: Any, leaves: Any, grad: Any) -> Any:
            params, grads = _tree(name, value), _tree(name, grad.astype(value.dtype))
            updates, state = self._tx.update(grads, jax.tree.unflatten(structure, leaves), params)
            return jax.tree.leaves(optax.apply_updates(params, updates))[0], jax.tree.leaves(state)

        return jax.jit(update)

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def row_leaves(self, name: str, features: int, dtype: str) -> tuple[bool, ...]:
        """For each leaf of a table's state, whether it has a row for each row of the table."""
        few, more = (
            jax.tree.leaves(
                jax.eval_shape(self._tx.init, _tree(name, jax.ShapeDtypeStruct((rows, features), jnp.dtype(dtype))))
            )
            for rows in (3, 5)
        )
        return tuple(a.shape[:1] == (3,) and b.shape[:1] == (5,) for a, b in zip(few, more, strict=True))

    def update_rows(
        self, piece: ParamPiece, rows: np.ndarray, state: Leaves, grad: np.ndarray
    ) -> tuple[np.ndarray, Leaves]:
        """Returns some rows of a table and their state after an update.

        The number of rows is padded to a power of two, so that few programs are compiled.
        """
        count, has_rows = len(rows), self.row_leaves(piece.name, rows.shape[1], rows.dtype.name)
        more = (1 << max(count - 1, 0).bit_length()) - count
        pad = lambda x: np.concatenate([x, np.repeat(x[:1], more, 0)]) if more else x
        padded = [pad(x) if rowwise else x for x, rowwise in zip(state, has_rows, strict=True)]
        grads = np.concatenate([grad, np.zeros((more, *grad.shape[1:]), grad.dtype)])
        new, leaves = self.update(piece, pad(rows), padded, grads)
        return new[:count], [x[:count] if rowwise else x for x, rowwise in zip(leaves, has_rows, strict=True)]


def check_pieces(tx: optax.GradientTransformation, params: Params, pieces: Sequence[ParamPiece]) -> None:
    """Raises if the optimizer computes an update from several parameters, or from several rows of one that is cut.

    It updates small arrays with the parameters' paths, once together and once in pieces.

    Raises:
      ConfigError: the two differ.
    """
    counts: dict[str, int] = {}
    for piece in pieces:
        counts[piece.name] = counts.get(piece.name, 0) + (2 if piece.spec.sparse else 1)
    random = np.random.default_rng(0)
    shapes = {name: tuple(min(n, 4) for n in spec.shape) for name, spec in params.items()}
    trees = [{n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()} for _ in range(3)]
    tx = optax.with_extra_args_support(tx)
    cut_names = [name for name in params if counts.get(name, 1) > 1 and shapes[name][0] > 1]

    @jax.jit
    def results(trees: Any) -> Any:
        alone = {n: _two_updates(tx, *({n: tree[n]} for tree in trees))[n] for n in params}
        halves = {
            n: [_two_updates(tx, *({n: tree[n][part]} for tree in trees))[n] for part in _HALVES] for n in cut_names
        }
        return _two_updates(tx, *trees), alone, halves

    whole, alone, halves = results(trees)
    for name in params:
        if not np.allclose(whole[name], alone[name], rtol=1e-5, atol=1e-7):
            raise ConfigError(
                f"the optimizer computes the update of {name} also from other parameters, which other servers may "
                "hold. Remedy: an optimizer that updates each parameter on its own; workers clip their own gradients "
                "(clip_norm)."
            )
        if name in halves and not np.allclose(whole[name], np.concatenate(halves[name]), rtol=1e-5, atol=1e-7):
            raise ConfigError(
                f"the optimizer computes the update of a row of {name} also from other rows, but its "
                f"{params[name].shape[0]:,} rows are cut into pieces. Remedy: a larger piece_bytes than "
                f"{params[name].nbytes:,}, or an optimizer that updates each element on its own."
            )


_HALVES = (slice(None, 1), slice(1, None))


def _two_updates(tx: Any, params: Mapping[str, Any], *grads: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters after an update with each of ``grads``."""
    tree = _nest(params)
    state = tx.init(tree)
    for grad in grads:
        updates, state = tx.update(_nest(grad), state, tree)
        tree = optax.apply_updates(tree, updates)
    return {name: functools.reduce(lambda t, key: t[key], _path(name), tree) for name in params}


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict of paths with slashes, as a model's parameters are (masks read these paths)."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, last = _path(name)
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = value
    return tree


def _path(name: str) -> list[str]:
    """The path of a parameter in the tree that an optimizer of a training step gets, without ``params``."""
    return name.removeprefix("params/").split("/")


def _tree(name: str, value: Any) -> dict[str, Any]:
    return _nest({name: value})


def _arrays(tree: Any) -> Leaves:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]
