"""The mean of the pushes of a round, summed in worker order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxpar.errors import StateError
from jaxpar.parameter_server.messages import Contribution, QuantizedDelta, RowGrads
from jaxpar.parameter_server.pieces import ParamPiece
from jaxpar.parameter_server.quantized_deltas import dequantize

type MeanGrad = np.ndarray | RowGrads | None


def mean(pushes: Sequence[tuple[float, Contribution]]) -> MeanGrad:
    """Returns the weighted mean of gradients, or ``None`` if all weights are 0.

    The sum runs in the order of ``pushes``, in fp32 or wider. Equal weights are not multiplied in, so the result is
    the sum divided by the number of workers.

    >>> mean([(1.0, np.float32([1, 2])), (1.0, np.float32([3, 4]))]).tolist()
    [2.0, 3.0]
    """
    given = [(weight, grad) for weight, grad in pushes if weight > 0 and grad is not None]
    if not given:
        return None
    equal = len({weight for weight, _ in given}) == 1
    total = float(len(given)) if equal else sum(weight for weight, _ in given)
    parts = [(1.0 if equal else weight, grad) for weight, grad in given]
    if isinstance(parts[0][1], RowGrads):
        return _mean_rows(parts, total)
    found: np.ndarray | None = None
    for weight, grad in parts:
        values = _wide(dequantize(grad) if isinstance(grad, QuantizedDelta) else np.asarray(grad))
        values = values if weight == 1.0 else values * values.dtype.type(weight)
        found = values if found is None else found + values
    assert found is not None
    return found if total == 1.0 else found / found.dtype.type(total)


def _mean_rows(parts: Sequence[tuple[float, Contribution]], total: float) -> RowGrads:
    rows = [(weight, grad) for weight, grad in parts if isinstance(grad, RowGrads)]
    ids = np.unique(np.concatenate([grad.ids for _, grad in rows]))
    sums = np.zeros((len(ids), *rows[0][1].values.shape[1:]), _wide(rows[0][1].values).dtype)
    for weight, grad in rows:
        values = _wide(grad.values)
        sums[np.searchsorted(ids, grad.ids)] += values if weight == 1.0 else values * values.dtype.type(weight)
    return RowGrads(ids, sums if total == 1.0 else sums / sums.dtype.type(total))


def _wide(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


def check_contribution(piece: ParamPiece, worker: int, grad: Contribution) -> None:
    """Raises if a push does not fit its piece.

    Raises:
      StateError: another shape, or rows that the piece does not hold.
    """
    if grad is None:
        return
    if isinstance(grad, RowGrads):
        if not piece.spec.sparse or (len(grad.ids) and not piece.start <= grad.ids[0] <= grad.ids[-1] < piece.stop):
            raise StateError(
                f"worker {worker} pushed rows {grad.ids[:1].tolist()} to {grad.ids[-1:].tolist()} to {piece.key}, "
                "which does not hold them."
            )
        shape: tuple[int, ...] = (len(grad.ids), *piece.spec.shape[1:])
        given = grad.values.shape
    else:
        shape, given = piece.spec.shape, grad.shape
    if tuple(given) != shape:
        raise StateError(f"worker {worker} pushed {list(given)} to {piece.key}, which needs {list(shape)}.")
