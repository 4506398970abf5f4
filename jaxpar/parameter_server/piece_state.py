"""A piece on a server: its value, optimizer state, version, and how many pushes of each worker it contains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpar.parameter_server.config import DeltaBits
from jaxpar.parameter_server.messages import Contribution, QuantizedDelta, RowGrads
from jaxpar.parameter_server.piece_optimizer import Leaves, PieceOptimizer
from jaxpar.parameter_server.pieces import ParamPiece, SparseTable
from jaxpar.parameter_server.quantized_deltas import add, quantize
from jaxpar.parameter_server.row_values import initial_rows
from jaxpar.parameter_server.update_log import LogRecord


@dataclass
class DenseState:
    """A dense piece.

    Attributes:
      piece: which one.
      value: the newest value.
      leaves: the optimizer's state.
      previous: the value before the last round. A worker that was killed in that round reads it once more, so that it
        computes the same gradients again.
      delta: with ``compression``, how the last round changed ``previous`` into ``value``.
      error: with ``compression``, what the optimizer's updates come to beyond ``value`` [shape of the piece, fp32];
        it is part of the next change.
      version: the number of rounds, or of pushes, that it contains.
      clocks: for each worker the step of its next push.
      pending: pushes of rounds that are not complete, with their weights, by step and worker. They are not durable, and
        not acknowledged.
    """

    piece: ParamPiece
    value: np.ndarray
    leaves: Leaves
    previous: np.ndarray | None = None
    delta: QuantizedDelta | None = None
    error: np.ndarray | None = None
    version: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    pending: dict[int, dict[int, tuple[float, Contribution]]] = field(default_factory=dict)

    def apply(self, optimizer: PieceOptimizer, grad: np.ndarray) -> None:
        """Update the value."""
        self.value, self.leaves = optimizer.update(self.piece, self.value, self.leaves, grad)

    def apply_quantized(self, optimizer: PieceOptimizer, grad: np.ndarray, bits: DeltaBits) -> None:
        """Update the value by a change that so many bits express; what they leave out is part of the next one."""
        new, self.leaves = optimizer.update(self.piece, self.value, self.leaves, grad)
        exact = new.astype(np.float32)
        if self.error is not None:
            exact = exact + self.error
        self.delta = quantize(exact - self.value.astype(np.float32), bits)
        self.value = add(self.value, self.delta)
        self.error = exact - self.value.astype(np.float32)

    def remember(self, grad: np.ndarray | None) -> None:
        """Keep the present value as the previous one, before a round with this gradient."""
        self.previous, self.delta = self.value, None

    def read(self, ids: np.ndarray | None, *, previous: bool) -> np.ndarray:
        """Returns the value, or the previous one."""
        return self.previous if previous and self.previous is not None else self.value

    def to_record(self) -> LogRecord:
        """Returns everything that is durable."""
        arrays = {"value": self.value} | {f"leaf{i}": x for i, x in enumerate(self.leaves)}
        if self.previous is not None:
            arrays["previous"] = self.previous
        if self.delta is not None:
            arrays |= {"delta": self.delta.values, "delta_scales": self.delta.scales}
        if self.error is not None:
            arrays["error"] = self.error
        bits = {} if self.delta is None else {"delta_bits": self.delta.bits}
        return LogRecord("adopt", _fields(self) | bits, arrays)


@dataclass
class TableState:
    """The rows of a sparse piece that were updated at least once; other rows have their initial values.

    Attributes:
      piece, version, clocks, pending: as of :class:`DenseState`.
      table: how rows begin.
      slots: the slot of each stored row.
      rows: the stored rows [slots, features].
      leaves: the optimizer's state: arrays with a row for each slot where ``rowwise``, and shared ones.
      before: the rows that the last round changed, as they were before.
    """

    piece: ParamPiece
    table: SparseTable
    rows: np.ndarray
    leaves: Leaves
    rowwise: tuple[bool, ...]
    slots: dict[int, int] = field(default_factory=dict)
    before: RowGrads | None = None
    version: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    pending: dict[int, dict[int, tuple[float, Contribution]]] = field(default_factory=dict)

    def apply(self, optimizer: PieceOptimizer, grad: RowGrads) -> None:
        """Update the rows that the gradients are of."""
        if not len(grad.ids):
            return
        at = self._slots_of(grad.ids, optimizer)
        state = [x[at] if row else x for x, row in zip(self.leaves, self.rowwise, strict=True)]
        rows, leaves = optimizer.update_rows(self.piece, self.rows[at], state, grad.values)
        self.rows[at] = rows
        for i, (new, row) in enumerate(zip(leaves, self.rowwise, strict=True)):
            if row:
                self.leaves[i][at] = new
            else:
                self.leaves[i] = new

    def _slots_of(self, ids: np.ndarray, optimizer: PieceOptimizer) -> np.ndarray:
        """The slots of rows; rows without one get one."""
        new = np.array([i for i in ids.tolist() if i not in self.slots], np.int64)
        if len(new):
            first = len(self.slots)
            values = self._initial(new)
            start = optimizer.init(self.piece, values)
            self.rows = _grown(self.rows, first, values)
            parts = zip(self.leaves, start, self.rowwise, strict=True)
            self.leaves = [_grown(old, first, x) if row else old for old, x, row in parts]
            self.slots.update({int(i): first + n for n, i in enumerate(new)})
        return np.array([self.slots[i] for i in ids.tolist()], np.int64)

    def _initial(self, ids: np.ndarray) -> np.ndarray:
        return initial_rows(self.table, ids, self.rows.shape[1]).astype(self.rows.dtype)

    def remember(self, grad: RowGrads | None) -> None:
        """Keep the rows that a round with this gradient will change."""
        ids = np.zeros(0, np.int64) if grad is None else grad.ids
        self.before = RowGrads(ids, self.read(ids, previous=False))

    def read(self, ids: np.ndarray | None, *, previous: bool) -> np.ndarray:
        """Returns rows, or as they were before the last round."""
        if ids is None:
            raise ValueError(f"{self.piece.key} is a part of a table: its rows are read by their numbers.")
        found = np.empty((len(ids), self.rows.shape[1]), self.rows.dtype)
        at = np.array([self.slots.get(i, -1) for i in ids.tolist()], np.int64)
        stored = at >= 0
        found[stored] = self.rows[at[stored]]
        if not stored.all():
            found[~stored] = self._initial(ids[~stored])
        if previous and self.before is not None and len(self.before.ids):
            where = np.searchsorted(self.before.ids, ids).clip(max=len(self.before.ids) - 1)
            changed = self.before.ids[where] == ids
            found[changed] = self.before.values[where[changed]]
        return found

    def to_record(self) -> LogRecord:
        """Returns everything that is durable."""
        count = len(self.slots)
        ids = np.fromiter(self.slots, np.int64, count)
        arrays = {"ids": ids, "rows": self.rows[:count]}
        parts = enumerate(zip(self.leaves, self.rowwise, strict=True))
        arrays |= {f"leaf{i}": x[:count] if row else x for i, (x, row) in parts}
        if self.before is not None:
            arrays |= {"before_ids": self.before.ids, "before": self.before.values}
        return LogRecord("adopt", {**_fields(self), "rowwise": list(self.rowwise)}, arrays)


type PieceState = DenseState | TableState


def new_state(
    piece: ParamPiece, value: np.ndarray | None, optimizer: PieceOptimizer, tables: Mapping[str, SparseTable]
) -> PieceState:
    """Returns the state of a piece before the first update; a sparse piece needs no value."""
    if value is None:
        rows = np.zeros((0, piece.spec.shape[1]), jnp.dtype(piece.spec.dtype))
        rowwise = optimizer.row_leaves(piece.name, rows.shape[1], rows.dtype.name)
        return TableState(piece, tables[piece.name], rows, optimizer.init(piece, rows), rowwise)
    return DenseState(piece, value, optimizer.init(piece, value))


def from_record(record: LogRecord, tables: Mapping[str, SparseTable]) -> PieceState:
    """Returns the state that ``to_record`` wrote."""
    fields, arrays = record.fields, record.arrays
    piece = ParamPiece.from_list(fields["piece"])
    clocks = {int(worker): step for worker, step in fields["clocks"].items()}
    leaves = [arrays[f"leaf{i}"] for i in range(sum(name.startswith("leaf") for name in arrays))]
    common: dict[str, Any] = {"version": fields["version"], "clocks": clocks}
    if not piece.spec.sparse:
        delta = None
        if "delta" in arrays:
            shape, bits = arrays["value"].shape, fields["delta_bits"]
            delta = QuantizedDelta(arrays["delta"], arrays["delta_scales"], shape, bits)
        return DenseState(piece, arrays["value"], leaves, arrays.get("previous"), delta, arrays.get("error"), **common)
    slots = {int(i): n for n, i in enumerate(arrays["ids"])}
    before = RowGrads(arrays["before_ids"], arrays["before"]) if "before" in arrays else None
    writable = [np.array(x) for x in leaves]
    rows, rowwise = np.array(arrays["rows"]), tuple(fields["rowwise"])
    return TableState(piece, tables[piece.name], rows, writable, rowwise, slots, before, **common)


def _fields(state: PieceState) -> dict[str, Any]:
    clocks = {str(worker): step for worker, step in state.clocks.items()}
    return {"piece": state.piece.to_list(), "version": state.version, "clocks": clocks}


def _grown(old: np.ndarray, used: int, new: np.ndarray) -> np.ndarray:
    """The array with rows appended after the first ``used``; its size at least doubles when it must grow."""
    if used + len(new) > len(old):
        wider = np.zeros((max(2 * len(old), used + len(new)), *old.shape[1:]), old.dtype)
        wider[:used] = old[:used]
        old = wider
    old[used : used + len(new)] = new
    return old
