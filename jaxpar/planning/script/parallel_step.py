"""``ParallelStep``: a script's train step on many devices, with its state placed, saved and restored."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
from flax import nnx

from jaxpar.analysis.layout.notes import wrongly_partitioned
from jaxpar.analysis.units import aligned, html_table, show_bytes
from jaxpar.checkpoint.manager import CheckpointManager
from jaxpar.errors import ConfigError, ModelError, StateError
from jaxpar.planning.names.annotation import Annotation
from jaxpar.planning.names.fold import folded
from jaxpar.planning.script.arguments import Name, places_of, take_apart
from jaxpar.planning.script.carry import Continued
from jaxpar.planning.script.choose import ChosenLayout
from jaxpar.planning.script.held_state import HeldState
from jaxpar.planning.script.naming import NamedStep
from jaxpar.planning.script.placed import PlacedStep
from jaxpar.planning.script.placed_array import PlacedArray
from jaxpar.planning.script.trace import StepTrace, shape_of
from jaxpar.sharding.layout import Layout, to_spec
from jaxpar.training.weight_changes import WEIGHTS_CHANGED

_COLUMNS = ("array", "shape", "dims", "sharded over", "a device")


class ParallelStep:
    """A train step on the devices of a layout; made by :func:`jaxpar.parallelize`. Call it like the script's own.

    Attributes:
      choice: the layout and why it was chosen.
      steps: the number of steps taken, those before a restored checkpoint included.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        step: NamedStep,
        choice: ChosenLayout,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        manager: CheckpointManager | None = None,
        donate: bool = True,
        axis_name: str | None = None,
        state: Continued | None = None,
    ):
        self._axis_name, self._named_state = axis_name, state
        self._train_step, self._first, self._donate = train_step, step, donate
        self.choice, self.steps, self._manager = choice, 0, manager
        self._programs: list[PlacedStep] = []
        self._metrics: Mapping[str, jax.Array] = {}
        placed = self._placed(step)
        call, arrays = self._take_apart(args, kwargs)
        trace, paths = step.trace, step.trace.call.paths
        self._objects = {place: x for place, x in places_of(args, kwargs).items() if place in call.objects}
        self._others = {
            path: x for i, (path, x) in enumerate(zip(paths, arrays, strict=True)) if i not in trace.updates
        }
        self._held = HeldState(trace, {paths[i]: placed.put(i, arrays[i]) for i in self._to_place(trace)})
        if manager is not None:
            self._restore(placed, manager)
        self._update_objects(self._objects)

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.choice.layout

    @property
    def annotation(self) -> Annotation:
        """The names that were found, with reasons."""
        return self._first.annotation

    @property
    def placed(self) -> tuple[PlacedArray, ...]:
        """The arrays that the step reads, with their places."""
        return self._programs[0].placed

    @property
    def state(self) -> Any:
        """The newest state, on its devices: the step's arguments that it changes, a tuple if there are several.

        Objects of NNX are the script's own.

        Raises:
          StateError: it is open which results continue which arguments; the second call shows it, or ``state=``.
        """
        self._held.check("train_step.state")
        call, held = self._first.trace.call, self._held
        changed = {path.split("/")[0] for path in held.arrays} | self._first.trace.empty
        shapes = zip(call.paths, self._first.trace.shapes, strict=True)
        plain = call.plain_arguments([held.arrays.get(path, self._others.get(path, shape)) for path, shape in shapes])
        places = [place for place, name in call.names if name in changed and (place in plain or place in self._objects)]
        arguments = [self._objects[place] if place in self._objects else plain[place] for place in places]
        return arguments[0] if len(arguments) == 1 else tuple(arguments)

    @property
    def weights_changed(self) -> float | None:
        """The share of the weights of 16 bits that the last step changed; ``None`` before it, or without such weights.

        The step returns what the script's own returns, so this metric of :func:`jaxpar.train_step` is here.
        """
        return float(self._metrics[WEIGHTS_CHANGED]) if self._metrics else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step: as the script's own, with arrays on the devices of the layout.

        NumPy arrays are sharded. Objects of NNX are changed in place; other state is returned, and what was passed is
        overwritten.

        Raises:
          LayoutError: the batch does not divide over the devices.
          StateError: an array of the state was overwritten by an earlier call, or a checkpoint was saved and this call
            shows that its arrays are others.
          ModelError: it is called inside of a transformation such as ``jax.jit``.
        """
        call, arrays = self._take_apart(args, kwargs)
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            raise ModelError(
                "train_step runs on devices of its own and is compiled already, so it cannot be called inside of "
                "jax.jit, grad, vmap or scan. Remedy: call it by itself; or pass the whole function to parallelize."
            )
        if self._held.verify(call.paths, arrays):
            self._programs.clear()
        program = self._program(call, arrays, args, kwargs)
        trace = program.step.trace
        gone = [call.paths[i] for i, x in enumerate(arrays) if isinstance(x, jax.Array) and x.is_deleted()]
        if gone:
            raise StateError(
                f"train_step: {gone[0]} was overwritten by an earlier call ({len(gone)} arrays are gone). Remedy: pass "
                "the state that the last call returned, at first train_step.state; or parallelize(donate=False), which "
                "keeps both in memory."
            )
        outputs, self._metrics = program.run([program.put(i, x) for i, x in enumerate(arrays)])
        self._held.take(trace, outputs)
        arguments: dict[Name, Any] = places_of(args, kwargs)
        self._update_objects(arguments)
        self.steps += 1
        if self._manager is not None and self._manager.due(self.steps):
            self._save(self._manager)
        return trace.returned.result(outputs[call.in_objects :], arguments)

    def save(self) -> None:
        """Save the newest state as a checkpoint, and wait until it is complete.

        Raises:
          ConfigError: ``parallelize`` was given no ``checkpoints``.
          StateError: as for :attr:`state`.
        """
        if self._manager is None:
            raise ConfigError("save: there is no folder. Remedy: parallelize(..., checkpoints='runs/one').")
        self._save(self._manager)
        self._manager.wait()

    def close(self) -> None:
        """Wait for a pending checkpoint, and release the folder for another run."""
        if self._manager is not None:
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def shard(self, batch: Any) -> Any:
        """Returns a batch, such as one to evaluate, with its first dims sharded as those of the training batch.

        Raises:
          LayoutError: the batch does not divide over the devices.
        """
        names = lambda x: ("batch", *[None] * (len(x.shape) - 1)) if x.shape else ()
        return jax.tree.map(lambda x: jax.device_put(x, self.layout.sharding(names(x), x.shape, path="batch")), batch)

    def _take_apart(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return take_apart(self._train_step, args, kwargs, numbers=self._first.trace.numbers)

    def _program(self, call: Any, arrays: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> PlacedStep:
        """The program for arguments of these shapes; another shape of the batch is traced anew."""
        shapes = [(s.shape, s.dtype) for s in map(shape_of, arrays)]
        for known in self._programs:  # compared and not hashed: a static attribute of a module may be a list
            trace = known.step.trace
            if shapes == [(s.shape, s.dtype) for s in trace.shapes] and call == trace.call:
                return known
        results = self._held.known() if self._named_state is None and self._held.calls else self._named_state
        trace = StepTrace.of(self._train_step, args, kwargs, self._axis_name, results)
        return self._placed(NamedStep.of(trace, self._first.names))

    def _placed(self, step: NamedStep) -> PlacedStep:
        self._programs.append(PlacedStep(step, self.layout, donate=self._donate))
        return self._programs[-1]

    def _to_place(self, trace: StepTrace) -> list[int]:
        """The indices of the arrays of a state that is not restored."""
        return [*range(trace.call.in_objects), *(i for part in trace.parts for i in part.arrays)]

    def _restore(self, placed: PlacedStep, manager: CheckpointManager) -> None:
        """Take the newest checkpoint, if there is one. Of arrays that may be data, those are state that it has."""
        trace = placed.step.trace
        stored = manager.paths() if self._named_state is None else ()
        state = [i for i, path in enumerate(trace.call.paths) if i in trace.updates or path in stored]
        struct = lambda i: jax.ShapeDtypeStruct(
            trace.shapes[i].shape, trace.shapes[i].dtype, sharding=placed.shardings[i]
        )
        restored = manager.restore_latest({trace.call.paths[i]: struct(i) for i in state})
        if restored is not None:
            self.steps = restored.step
            self._held.restored(restored.state)

    def _save(self, manager: CheckpointManager) -> None:
        self._held.check(f"checkpoint of step {self.steps}")
        manager.save(self.steps, self._held.arrays, layout=self.layout)
        self._held.saved = self.steps

    def _update_objects(self, arguments: Mapping[Name, Any]) -> None:
        call = self._first.trace.call
        if call.objects:
            arrays = [self._held.arrays[path] for path in call.paths[: call.in_objects]]
            nnx.update(tuple(arguments[place] for place in call.objects), jax.tree.unflatten(call.graph_tree, arrays))

    def _head(self) -> list[str]:
        devices = self.layout.mesh.devices.flat
        kind = "simulated CPU devices" if devices[0].platform == "cpu" else devices[0].device_kind
        mesh = " × ".join(f"{axis} {size}" for axis, size in self.layout.sizes.items() if size > 1) or "one device"
        repaired = dict.fromkeys(repaired for program in self._programs for repaired in program.repaired)
        total = lambda find: show_bytes(sum(find(a) for a in self.placed if a.role != "activations"))
        return [
            f"{self.choice.name} on {len(devices)} {kind} (mesh: {mesh})",
            f"why: {self.choice.reason}",
            *([self.choice.sharded] if self.choice.sharded else []),
            f"state: {total(lambda a: a.bytes)}, of which a device has {total(lambda a: a.device_bytes(self.layout))}",
            *wrongly_partitioned(repaired),
        ]

    def _rows(self) -> list[tuple[str, ...]]:
        return folded(
            (
                a.path,
                " × ".join(map(str, a.shape)),
                ", ".join(name or "·" for name in a.names),
                ", ".join("·" if own is None else str(own) for own in to_spec(a.resolved)),
                show_bytes(a.device_bytes(self.layout)),
            )
            for a in self.placed
            if a.shape
        )

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", *aligned([_COLUMNS, *self._rows()])])

    def _repr_html_(self) -> str:
        return f"<div>{'<br>'.join(map(html.escape, self._head()))}{html_table(self._rows(), _COLUMNS)}</div>"


def manager_of(
    checkpoints: str | os.PathLike[str] | CheckpointManager | None, save_interval_steps: int | None
) -> CheckpointManager | None:
    """Returns the manager of a folder; a manager is returned as it is.

    Raises:
      ConfigError: there is an interval, but no folder to save to.
    """
    if checkpoints is None or isinstance(checkpoints, CheckpointManager):
        if save_interval_steps is not None:
            raise ConfigError(
                "parallelize: save_interval_steps needs a folder. Remedy: checkpoints='runs/one', and no manager."
            )
        return checkpoints
    return CheckpointManager(checkpoints, save_interval_steps=save_interval_steps)
