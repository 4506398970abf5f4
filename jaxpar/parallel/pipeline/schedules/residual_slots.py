"""Slots for layer inputs and residuals, where the first layers of a stage recompute their residuals.

A slot holds the data of one layer, and all microbatches and layers of a stage share the slots. In one program all
stages have buffers of equal size. Their size is therefore the largest number, on any stage, of pairs of a microbatch in
flight and a layer that stores its residuals. A layer that recomputes also needs a slot for residuals while its backward
runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Never

import numpy as np

from jaxpar.errors import ScheduleError
from jaxpar.parallel.pipeline.schedules.buffer_slots import BACKWARD, FORWARD, Live, allocate, time

if TYPE_CHECKING:
    from jaxpar.parallel.pipeline.schedules.schedule import Schedule

LAYERED = ("f_inputs", "f_residuals", "b_inputs", "a_residuals", "b_residuals")
"""The slots of a layer in a tick.

A forward writes the layer's input (``f_inputs``) or its residuals (``f_residuals``). A backward that recomputes reads
the input (``b_inputs``) and writes the residuals (``a_residuals``). Every backward reads the residuals
(``b_residuals``).
"""


@dataclass(frozen=True, eq=False)
class Kept:
    """The slots of all layers in all ticks.

    Attributes:
      slots: int32 [ticks, stages, 5, layers]; the third dim is in the order of ``LAYERED``. One slot past the last one
        stands for data that nothing reads.
      inputs, residuals: the number of slots for inputs and for residuals.
      again: the largest number of layers that any stage recomputes in one backward.
      rounds: the number of recomputed layers, summed over the backwards of all stages.
    """

    slots: np.ndarray
    inputs: int
    residuals: int
    again: int
    rounds: int


def kept_of(schedule: Schedule, recompute: tuple[int, ...], counts: np.ndarray) -> Kept:
    """Allocates the slots, if stage s recomputes the first ``recompute[s]`` layers of each of its pieces.

    Args:
      schedule: the schedule.
      recompute: [stages].
      counts: [stages, chunks], the number of layers in each piece.

    Raises:
      ScheduleError: :func:`replay` finds an error in the slots.
    """
    most, pieces, when = int(counts.max()), schedule.pieces, schedule.ticks.when
    lives: dict[str, list[list[Live]]] = {name: [[] for _ in range(pieces.stages)] for name in ("inputs", "residuals")}
    uses: list[tuple[str, int, int, tuple[int, int, int]]] = []  # name, tick, stage and tensor
    for m, piece in np.ndindex(schedule.microbatches, pieces.count):
        stage, chunk = pieces.place(piece)
        f_tick, b_tick = when["F", m, piece], when["B", m, piece]
        forward, backward = time(f_tick, FORWARD), time(b_tick, BACKWARD)
        for layer in range(counts[stage, chunk]):
            again, key = layer < recompute[stage], (m, chunk, layer)
            # A layer that recomputes has no residuals before its backward. The other layers store no input.
            if again:
                lives["inputs"][stage].append(Live(forward, backward, key))
                uses += [("f_inputs", f_tick, stage, key), ("b_inputs", b_tick, stage, key)]
            lives["residuals"][stage].append(Live(backward if again else forward, backward, key))
            uses.append(("a_residuals", b_tick, stage, key) if again else ("f_residuals", f_tick, stage, key))
            uses.append(("b_residuals", b_tick, stage, key))
    sizes, slots = {}, {}
    for name, stages in lives.items():
        found = [allocate(stage) for stage in stages]
        sizes[name], slots[name] = max(count for count, _ in found), [slot_of for _, slot_of in found]
    shape = len(schedule.ticks.rows), pieces.stages, most
    table = {name: np.full(shape, sizes[name[2:]], np.int32) for name in LAYERED}
    for name, tick, stage, key in uses:
        table[name][tick, stage, key[2]] = slots[name[2:]][stage][key]
    backwards = [[op.kind == "B" for op in row].count(True) for tick in schedule.ticks.rows for row in tick]
    each = np.minimum(np.asarray(recompute), counts.max(axis=1))
    rounds = int((np.reshape(backwards, shape[:2]).sum(axis=0) * each).sum())
    kept = Kept(
        np.stack([table[n] for n in LAYERED], axis=2), sizes["inputs"], sizes["residuals"], int(each.max()), rounds
    )
    replay(schedule, kept, recompute, counts)
    return kept


def replay(schedule: Schedule, kept: Kept, recompute: tuple[int, ...], counts: np.ndarray) -> None:
    """Checks the slots by executing them with labels instead of tensors.

    Raises:
      ScheduleError: a slot that is read holds other data, live data is overwritten, or data is never read. The message
        has the tick, the stage, the layer and the slot.
    """
    sizes = {"inputs": kept.inputs, "residuals": kept.residuals}
    held: list[dict[tuple[str, int], tuple[int, int, int]]] = [{} for _ in range(schedule.stages)]
    tick = 0

    def fail(text: str) -> Never:
        raise ScheduleError(
            f"schedule {schedule.name!r}, recompute {list(recompute)}, tick {tick}: {text}. Remedy: use the slots "
            "that kept_of() returns."
        )

    def write(stage: int, name: str, slot: int, label: tuple[int, int, int]) -> None:
        what = f"stage {stage} writes {name} of layer {label[2]} to slot {slot}"
        if slot not in range(sizes[name]):
            fail(f"{what} of {sizes[name]}")
        if (name, slot) in held[stage]:
            fail(f"{what}, which still holds {held[stage][name, slot]}")
        held[stage][name, slot] = label

    def take(stage: int, name: str, slot: int, label: tuple[int, int, int]) -> None:
        if (found := held[stage].pop((name, slot), None)) != label:
            fail(
                f"stage {stage} reads {name} of layer {label[2]} from slot {slot}, which holds {found or 'nothing'}, "
                f"not {label}"
            )

    for tick, row in enumerate(schedule.ticks.rows):
        for stage, ops in enumerate(row):
            columns = dict(zip(LAYERED, kept.slots[tick, stage].tolist(), strict=True))
            for op in (op for op in ops if op.kind in ("F", "B")):
                layers = [(op.microbatch, op.chunk, i) for i in range(counts[stage, op.chunk])]
                again = layers[: recompute[stage]]
                if op.kind == "F":
                    for label in layers:
                        name = "inputs" if label in again else "residuals"
                        write(stage, name, columns[f"f_{name}"][label[2]], label)
                    continue
                for label in again:
                    take(stage, "inputs", columns["b_inputs"][label[2]], label)
                    write(stage, "residuals", columns["a_residuals"][label[2]], label)
                for label in reversed(layers):
                    take(stage, "residuals", columns["b_residuals"][label[2]], label)
            # In a tick all layers of a loop write, on all stages. Those with nothing to store must use the slot past
            # the end.
            for name, kind in (("f_inputs", "F"), ("f_residuals", "F"), ("a_residuals", "B")):
                chunk = next((op.chunk for op in ops if op.kind == kind), None)
                for layer, slot in enumerate(columns[name]):
                    exists = chunk is not None and layer < counts[stage, chunk]
                    if slot != sizes[name[2:]] and not (
                        exists and (layer < recompute[stage]) is (name != "f_residuals")
                    ):
                        fail(
                            f"stage {stage} writes {name[2:]} of layer {layer} to slot {slot}, but this layer stores "
                            "none"
                        )
    for stage, slots in enumerate(held):
        for (name, slot), label in slots.items():
            fail(f"stage {stage} still holds {name} of {label} in slot {slot}")
