"""``ParallelStep``: a script's train step on many devices, with its state placed, saved and restored."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
from flax import nnx

from jaxpar.analysis.units import aligned, html_table, show_bytes
from jaxpar.checkpoint.manager import CheckpointManager
from jaxpar.errors import ConfigError, StateError
from jaxpar.planning.names.annotation import Annotation
from jaxpar.planning.names.fold import folded
from jaxpar.planning.script.arguments import Name, places_of, take_apart
from jaxpar.planning.script.choose import ChosenLayout
from jaxpar.planning.script.naming import NamedStep
from jaxpar.planning.script.placed import PlacedArray, PlacedStep
from jaxpar.planning.script.trace import StepTrace, shape_of
from jaxpar.sharding.layout import Layout, to_spec

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
    ):
        self._axis_name = axis_name
        self._train_step, self._first, self._donate = train_step, step, donate
        self.choice, self.steps, self._manager = choice, 0, manager
        self._programs: list[PlacedStep] = []
        placed = self._placed(step)
        _, arrays = self._take_apart(args, kwargs)
        self._arrays = self._restored(placed, arrays)
        self._example: dict[Name, Any] = places_of(args, kwargs)
        self._update_objects(self._example, self._arrays)

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
        """
        call, trace = self._first.trace.call, self._first.trace
        names = dict(call.names)
        changed = {path.split("/")[0] for path in (call.paths[i] for i in trace.updates)}
        arrays = [self._arrays.get(i, shape) for i, shape in enumerate(trace.shapes)]
        plain = call.plain_arguments(arrays)
        found = [
            self._example[place] if place in call.objects else plain[place]
            for place in self._example
            if names[place] in changed
        ]
        return found[0] if len(found) == 1 else tuple(found)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step: as the script's own, with arrays on the devices of the layout.

        NumPy arrays are sharded. Objects of NNX are changed in place; other state is returned, and what was passed is
        overwritten.

        Raises:
          LayoutError: the batch does not divide over the devices.
          StateError: an array of the state was overwritten by an earlier call.
        """
        call, arrays = self._take_apart(args, kwargs)
        program = self._program(call, arrays, args, kwargs)
        trace = program.step.trace
        gone = [call.paths[i] for i, x in enumerate(arrays) if isinstance(x, jax.Array) and x.is_deleted()]
        if gone:
            raise StateError(
                f"train_step: {gone[0]} was overwritten by an earlier call ({len(gone)} arrays are gone). Remedy: pass "
                "the state that the last call returned, at first train_step.state; or parallelize(donate=False), which "
                "keeps both in memory."
            )
        outputs = program.run(*(program.put(i, x) for i, x in enumerate(arrays)))
        self._arrays = {i: outputs[j] for i, j in trace.updates.items()}
        arguments: dict[Name, Any] = places_of(args, kwargs)
        self._update_objects(arguments, self._arrays)
        self.steps += 1
        if self._manager is not None and self._manager.due(self.steps):
            self._manager.save(self.steps, self._by_path(), layout=self.layout)
        return trace.returned.result(outputs[call.in_objects :], arguments)

    def save(self) -> None:
        """Save the newest state as a checkpoint, and wait until it is complete.

        Raises:
          ConfigError: ``parallelize`` was given no ``checkpoints``.
        """
        if self._manager is None:
            raise ConfigError("save: there is no folder. Remedy: parallelize(..., checkpoints='runs/one').")
        self._manager.save(self.steps, self._by_path(), layout=self.layout)
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
        trace = StepTrace.of(self._train_step, args, kwargs, self._axis_name)
        return self._placed(NamedStep.of(trace, self._first.names))

    def _placed(self, step: NamedStep) -> PlacedStep:
        self._programs.append(PlacedStep(step, self.layout, donate=self._donate))
        return self._programs[-1]

    def _restored(self, placed: PlacedStep, arrays: Sequence[Any]) -> dict[int, Any]:
        """The state of the newest checkpoint, or the script's own, on its devices."""
        trace = placed.step.trace
        if self._manager is not None:
            like = {
                trace.call.paths[i]: jax.ShapeDtypeStruct(
                    trace.shapes[i].shape, trace.shapes[i].dtype, sharding=placed.shardings[i]
                )
                for i in trace.updates
            }
            found = self._manager.restore_latest(like)
            if found is not None:
                self.steps = found.step
                return {i: found.state[trace.call.paths[i]] for i in trace.updates}
        return {i: placed.put(i, arrays[i]) for i in trace.updates}

    def _by_path(self) -> dict[str, Any]:
        return {self._first.trace.call.paths[i]: x for i, x in self._arrays.items()}

    def _update_objects(self, arguments: Mapping[Name, Any], arrays: Mapping[int, Any]) -> None:
        call = self._first.trace.call
        if call.objects:
            state = jax.tree.unflatten(call.graph_tree, [arrays[i] for i in range(call.in_objects)])
            nnx.update(tuple(arguments[place] for place in call.objects), state)

    def _head(self) -> list[str]:
        devices = self.layout.mesh.devices.flat
        kind = "simulated CPU devices" if devices[0].platform == "cpu" else devices[0].device_kind
        mesh = " × ".join(f"{axis} {size}" for axis, size in self.layout.sizes.items() if size > 1) or "one device"
        total = lambda find: show_bytes(sum(find(a) for a in self.placed if a.role != "activations"))
        return [
            f"{self.choice.name} on {len(devices)} {kind} (mesh: {mesh})",
            f"why: {self.choice.reason}",
            *([self.choice.sharded] if self.choice.sharded else []),
            f"state: {total(lambda a: a.bytes)}, of which a device has {total(lambda a: a.device_bytes(self.layout))}",
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
