"""What layers keep for their backward where the first of a stage keep their input alone: slots of one layer's size.

Microbatches and layers share them, so that all stages, whose buffers are equally large in one program, have as many as the stage with most has
pairs of a microbatch on its way and a layer that keeps its residuals. A layer that recomputes has residuals too, while its backward runs.
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
"""For each layer the slots where a forward writes its input or its residuals, where a backward reads its input to make residuals (``a``)
again, and where it reads those."""


@dataclass(frozen=True, eq=False)
class Kept:
    """Slots of layers.

    Attributes:
      slots: int32 [ticks, stages, 5, layers], the second last in the order of ``LAYERED``. The slot after the last is for what nobody reads.
      inputs, residuals: how many slots there are, of each kind.
      again: how many layers the stage with most computes again in a backward.
      rounds: the same of all stages' backwards, summed.
    """

    slots: np.ndarray
    inputs: int
    residuals: int
    again: int
    rounds: int


def kept_of(schedule: Schedule, recompute: tuple[int, ...], counts: np.ndarray) -> Kept:
    """The slots of a schedule whose stage s recomputes the first ``recompute[s]`` layers of each of its pieces.

    Args:
      recompute: [stages].
      counts: [stages, chunks], how many layers each piece has.

    Raises:
      ScheduleError: the slots do not do what they should, which :func:`replay` would find.
    """
    most, pieces, when = int(counts.max()), schedule.pieces, schedule.ticks.when
    lives: dict[str, list[list[Live]]] = {name: [[] for _ in range(pieces.stages)] for name in ("inputs", "residuals")}
    works = [(m, piece, *pieces.place(piece)) for m in range(schedule.microbatches) for piece in range(pieces.count)]
    for m, piece, stage, chunk in works:
        forward, backward = time(when["F", m, piece], FORWARD), time(when["B", m, piece], BACKWARD)
        for layer in range(counts[stage, chunk]):
            again, key = layer < recompute[stage], (m, chunk, layer)
            if again:
                lives["inputs"][stage].append(Live(forward, backward, key))
            lives["residuals"][stage].append(Live(backward if again else forward, backward, key))
    sizes, slots = {}, {}
    for name, stages in lives.items():
        found = [allocate(stage) for stage in stages]
        sizes[name], slots[name] = max(count for count, _ in found), [where for _, where in found]
    shape = len(schedule.ticks.rows), pieces.stages, most
    table = {name: np.full(shape, sizes[name[2:]], np.int32) for name in LAYERED}
    for m, piece, stage, chunk in works:
        at = {"f": when["F", m, piece], "b": when["B", m, piece]}
        for layer in range(counts[stage, chunk]):
            again, key = layer < recompute[stage], (m, chunk, layer)
            # What recomputes has no residuals before its backward; what does not, no input.
            for name in (
                ("f_inputs", "b_inputs", "a_residuals", "b_residuals") if again else ("f_residuals", "b_residuals")
            ):
                table[name][at["f" if name[0] == "f" else "b"], stage, layer] = slots[name[2:]][stage][key]
    backwards = [[op.kind == "B" for op in row].count(True) for tick in schedule.ticks.rows for row in tick]
    each = np.minimum(np.asarray(recompute), counts.max(axis=1))
    rounds = int((np.reshape(backwards, shape[:2]).sum(axis=0) * each).sum())
    kept = Kept(
        np.stack([table[n] for n in LAYERED], axis=2), sizes["inputs"], sizes["residuals"], int(each.max()), rounds
    )
    replay(schedule, kept, recompute, counts)
    return kept


def replay(schedule: Schedule, kept: Kept, recompute: tuple[int, ...], counts: np.ndarray) -> None:
    """Carry out the slots with labels in the place of tensors, as an executor would.

    Raises:
      ScheduleError: a slot read does not hold what it should, something alive is overwritten or left; naming tick, stage, layer and slot.
    """
    sizes = {"inputs": kept.inputs, "residuals": kept.residuals}
    held: list[dict[tuple[str, int], tuple[int, int, int]]] = [{} for _ in range(schedule.stages)]
    tick = 0

    def fail(text: str) -> Never:
        raise ScheduleError(
            f"schedule {schedule.name!r}, recompute {list(recompute)}, tick {tick}: {text}. Remedy: slots as kept_of() makes them."
        )

    def write(stage: int, name: str, slot: int, label: tuple[int, int, int]) -> None:
        if slot not in range(sizes[name]):
            fail(f"stage {stage} writes {name} of layer {label[2]} to slot {slot} of {sizes[name]}")
        if (name, slot) in held[stage]:
            fail(
                f"stage {stage} writes {name} of layer {label[2]} to slot {slot}, over those of {held[stage][name, slot]}"
            )
        held[stage][name, slot] = label

    def take(stage: int, name: str, slot: int, label: tuple[int, int, int]) -> None:
        found = held[stage].pop((name, slot), None)
        if found != label:
            fail(
                f"stage {stage} reads {name} of layer {label[2]} from slot {slot}, where {found or 'nothing'} is, not {label}"
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
            # All layers of a loop write, also where there is nothing to keep, and in a tick of other stages' work.
            for name, kind in (("f_inputs", "F"), ("f_residuals", "F"), ("a_residuals", "B")):
                chunk = next((op.chunk for op in ops if op.kind == kind), None)
                for layer, slot in enumerate(columns[name]):
                    there = chunk is not None and layer < counts[stage, chunk]
                    if slot != sizes[name[2:]] and not (
                        there and (layer < recompute[stage]) is (name != "f_residuals")
                    ):
                        fail(
                            f"stage {stage} writes {name[2:]} of layer {layer}, of which it keeps none, to slot {slot}"
                        )
    for stage, slots in enumerate(held):
        for (name, slot), label in slots.items():
            fail(f"stage {stage} still holds {name} of {label} in slot {slot}")
