"""``disk_offloaded_train_step``: a train step whose optimizer state is on disk, for state that exceeds host memory.

After ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857). One program computes loss and gradients. The step then
updates the parameters piece by piece (a layer of a stacked parameter, or an unstacked parameter). It reads the moments
of the next pieces ahead, updates moments and weights on the device, and writes the moments back in the background. The
disk holds two generations of the moments (:mod:`jaxpar.parallel.offload.disk_store`); the new one is valid once it is
complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.errors import ConfigError, DiskError
from jaxpar.parallel.explicit_axes import without_explicit_axes
from jaxpar.parallel.offload.disk_io import Staging
from jaxpar.parallel.offload.disk_store import Entry, Store
from jaxpar.sharding.layout import Layout, to_spec, tracing_under, with_sharding
from jaxpar.training.gradients import place_gradients
from jaxpar.training.loss import LossFn, Metrics
from jaxpar.training.offload.disk_state import LeafGroup, MomentLeaf, disk_of, groups_of, is_stored, offered, zeros
from jaxpar.training.state import TrainState, place
from jaxpar.training.step import check_same, keep_unless_finite, measure, place_state, step_config
from jaxpar.training.step_call import StepCall, partitioned
from jaxpar.training.weight_changes import changed, is_narrow, share
from jaxpar.utils.arrays import placeholder
from jaxpar.utils.checks import is_count

AHEAD = 2
"""The default number of pieces that are read ahead of the one being updated."""
_ALIGN = 64  # bytes; JAX makes a CPU array of a buffer aligned like this without a copy


def gradient_step(
    layout: Layout, loss_fn: LossFn, *, clip_norm: float | None = None, skip_nonfinite: bool = True, **options: Any
) -> jax.stages.Wrapped:
    """Returns the first program of :func:`disk_offloaded_train_step`.

    Args:
      layout, loss_fn, clip_norm, skip_nonfinite: as for :func:`jaxpar.train_step`.
      options: its ``grad_accum_steps``, ``weight_gather``, ``grad_reduction``, ``precision`` and ``fusion``.

    Returns:
      A jitted ``(state, batch) -> (carried, grads, metrics, finite)``. ``carried`` is a dict of the next state's
      ``step``, ``variables`` and ``loss_scale``; ``grads`` are clipped.

    Raises:
      ConfigError, LayoutError, ModelError: as for :func:`jaxpar.train_step`.
    """
    config = step_config(skip_nonfinite=skip_nonfinite, **options)
    compiler_options = config.fusion.compiler_options(layout) if isinstance(layout.mesh, Mesh) else {}

    def gradients(state: TrainState, batch: Any) -> tuple[dict[str, Any], Any, Metrics, jax.Array]:
        with tracing_under(layout):
            return partitioned(layout, run, state, batch)

    def run(state: TrainState, batch: Any) -> tuple[dict[str, Any], Any, Metrics, jax.Array]:
        batch = without_explicit_axes(layout, batch)
        found, grads, norm, finite = measure(layout, loss_fn, state, batch, config, clip_norm)
        new = replace(state, step=state.step + 1, variables=found.variables)
        kept: Metrics = {}
        check_same(state, new)
        if skip_nonfinite:
            new, kept = keep_unless_finite(state, new, finite, config, ("variables",))
        new = place_state(layout, new)
        carried = {"step": new.step, "variables": new.variables, "loss_scale": new.loss_scale}
        metrics = {"loss": found.loss, "grad_norm": norm, **found.metrics, **kept}
        return carried, place_gradients(layout, state, grads), metrics, finite | (not skip_nonfinite)

    return cast(jax.stages.Wrapped, StepCall(jax.jit(gradients, compiler_options=compiler_options or None)))


def disk_offloaded_train_step(
    layout: Layout,
    loss_fn: LossFn,
    state: TrainState,
    *,
    ahead: int = AHEAD,
    restore: str | Path | None = None,
    donate: bool = True,
    note: Callable[[str, int], None] = lambda what, group: None,
    **options: Any,
) -> DiskOffloadedStep:
    """Returns ``step(state, batch) -> (state, metrics)`` like :func:`jaxpar.train_step`, with optimizer state on disk.

    Args:
      layout, loss_fn: as for :func:`jaxpar.train_step`.
      state: made by :func:`jaxpar.init` with ``jp.offload.to_disk(tx, path)``, or restored. At step 0, if the folder
        has no record, the moments are created; otherwise those of the state's step are read from the folder.
      ahead: how many pieces are read before their turn; 0 reads, updates and writes one after the other.
      restore: a folder written by :meth:`DiskOffloadedStep.snapshot`, whose moments replace those in the path.
      donate: donate the old parameters' memory to the new ones. If a step then fails, the parameters are lost; without
        ``donate``, the step can be repeated.
      note: callback with an event (``reading``, ``read``, ``update`` or ``written``) and the number of the piece.
      options: the other arguments of :func:`jaxpar.train_step`, except ``return_grads`` and ``pipeline``.

    Returns:
      A context manager that can be called as a step; outside of ``with``, call its ``close``.

    Raises:
      ConfigError: the optimizer's state cannot be on disk.
      DiskError: the folder is in use, belongs to another run or step, is damaged, or has no space left.

    >>> import tempfile, jax, numpy, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data", embed=None))
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (16, 4)), "embed", None)}
    >>> loss_fn = lambda model, x: ((x @ model["w"]) ** 2).mean()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = jp.init(layout, make_model, jp.offload.to_disk(optax.adam(1e-3), folder, min_bytes=0))
    ...     with disk_offloaded_train_step(layout, loss_fn, state) as step:
    ...         state, metrics = step(state, numpy.ones((8, 16), "float32"))
    ...         step.bytes_on_disk, int(state.step)
    (512, 1)
    """
    if not is_count(ahead, 0):
        raise ConfigError(f"disk_offloaded_train_step: ahead must be a non-negative integer, got {ahead!r}.")
    return DiskOffloadedStep(
        layout, gradient_step(layout, loss_fn, **options), state, ahead=ahead, restore=restore, donate=donate, note=note
    )


class DiskOffloadedStep:
    """The step that :func:`disk_offloaded_train_step` returns.

    The host runs the step, so it is not a jitted function. When a step returns, its moments are committed to disk. If
    the process is killed, the disk holds the moments of the previous step, of this one, or both; a restart uses those
    that belong to its state.
    """

    def __init__(
        self,
        layout: Layout,
        gradients: jax.stages.Wrapped,
        state: TrainState,
        *,
        ahead: int,
        restore: str | Path | None,
        donate: bool,
        note: Callable[[str, int], None],
    ):
        self._groups = groups_of(layout, state)
        tx = disk_of(state)
        assert tx is not None
        self._layout, self._tx, self._slots, self._donate, self._note = layout, tx.inner, ahead + 1, donate, note
        self._gradients: Any = gradients
        params = [t for t in place(layout, state) if t.role == "params"]
        self._param_shardings = [NamedSharding(layout.mesh, to_spec(t.resolved)) for t in params]
        # A row holds each distinct shard of this process once, one after the other.
        self._parts = {m.number: _parts(m) for group in self._groups for m in group.stored}
        self._first = np.cumsum([0, *(len(group.stored) for group in self._groups)]).tolist()
        self._pieces = [(g, row) for g, group in enumerate(self._groups) for row in range(group.rows)]
        self._updates = [self._update_of(state, group) for group in self._groups]
        self._tail, self._step = self._tail_of(state), int(state.step)
        self.peak_staged = 0
        """The most bytes of moments that the host held in transit at any time."""
        entries = [_entry(m, group.rows, self._parts[m.number]) for group in self._groups for m in group.stored]
        mesh = {axis: size for axis, size in layout.sizes.items() if size > 1}
        about = {"mesh": mesh or "one device", "process": f"{jax.process_index()} of {jax.process_count()}"}
        self._store = Store(Path(tx.path) / f"process{jax.process_index()}", entries, about)
        try:
            self._open(state, restore)
        except BaseException:
            self._store.close()
            raise

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of one generation of moments of this process; the disk holds two generations."""
        return self._store.bytes

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes read and bytes written since this object was created."""
        return self._store.bytes_read, self._store.bytes_written

    def compile(self, state: TrainState, batch: Any, compiler_options: Any = None) -> None:
        """Compiles the gradients' program now.

        Args:
          state, batch: arrays or placed shapes, as the step receives them.
          compiler_options: XLA options, as for ``jax.stages.Lowered.compile``.
        """
        self._gradients = self._gradients.lower(state, batch).compile(compiler_options)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Runs one step.

        Returns:
          The new state and the metrics of :func:`jaxpar.train_step`.

        Raises:
          DiskError: ``state`` is at another step than the disk, the disk has damaged bytes, or it is full. The moments
            of the previous step stay intact.
        """
        number = int(state.step)
        if number != self._step:
            raise DiskError(
                f"{self._store.path} is at step {self._step}, but the training state is at step {number}. Remedy: "
                "continue with the state that the last step returned, or create a disk_offloaded_train_step with this "
                "state."
            )
        sizes = [sum(self._parts[m.number][0] for m in self._groups[g].stored) for g, _ in self._pieces]
        staging = Staging(sizes, self._read, self._write, slots=self._slots, note=self._note)
        with staging:  # reads the first pieces while the device computes the gradients
            carried, grads, metrics, finite = self._gradients(state, batch)
            if not bool(finite):
                self._store.skip(number + 1)
                self._step = number + 1
                return replace(state, **carried), metrics
            self._store.begin()
            params, opt_state, count = self._apply(staging, state, grads, metrics["loss"])
            staging.finish()
            self._store.commit(number + 1)
        self.peak_staged = max(self.peak_staged, staging.peak)
        self._step = number + 1
        metrics |= share(count, sum(x.size for x in jax.tree.leaves(params) if is_narrow(x)))
        return replace(state, params=params, opt_state=opt_state, **carried), metrics

    def snapshot(self, folder: str | Path) -> None:
        """Saves the current moments in a folder, as hard links where the file system has them; see ``restore``.

        Raises:
          DiskError: the folder already holds a snapshot, or the disk is full.
        """
        self._store.snapshot(Path(folder) / self._store.path.name)

    def rewind(self, state: TrainState, folder: str | Path) -> None:
        """Goes back to a restored state: replaces the current moments with those of a snapshot, without recompiling.

        Args:
          state: the restored state.
          folder: the folder that :meth:`snapshot` wrote at the state's step.

        Raises:
          DiskError: the snapshot is damaged, or belongs to another run or step than the state.
        """
        self._store.restore(Path(folder) / self._store.path.name)
        self._step = int(state.step)
        self._store.open(self._step)

    def moments(self, path: str) -> list[np.ndarray]:
        """Reads one array from disk.

        Args:
          path: the array's path, such as ``opt_state/0/mu/w``.

        Returns:
          Each shard of this process, with all layers.

        Raises:
          KeyError: nothing on disk has this path.
          DiskError: damaged bytes.
        """
        names = [entry.name for entry in self._store.entries]
        if path not in names:
            raise KeyError(f"{path!r} is not on disk. Arrays on disk: {', '.join(names)}.")
        number = names.index(path)
        m = next(m for group in self._groups for m in group.stored if m.tensor.path == path)
        rows = [self._store.read(number, row) for row in range(self._store.entries[number].rows)]
        shards = self._parts[m.number][1]
        return [np.concatenate([_view(row, at, shape, m.dtype) for row in rows]) for *_, at, shape in shards]

    def close(self) -> None:
        """Stops using the folder, so that another step can open it."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self, state: TrainState, restore: str | Path | None) -> None:
        if restore is not None:
            self._store.restore(Path(restore) / self._store.path.name)
        if self._step or self._store.exists():
            self._store.open(self._step)
            return
        self._store.create()
        weights, zero = jax.tree.leaves(state.params), zeros(self._tx.init, state.params)
        for g, group in enumerate(self._groups):
            if all(zero[m.number] for m in group.stored):
                continue  # new files are zeros already
            begin = self._init_of(state, group)
            for row in range(group.rows):
                self._write(self._pieces.index((g, row)), begin(row, weights[group.parameter]))
        self._store.commit(self._step)

    def _read(self, piece: int) -> list[jax.Array]:
        g, row = self._pieces[piece]
        stored = self._groups[g].stored
        return [self._array(m, self._store.read(self._first[g] + n, row)) for n, m in enumerate(stored)]

    def _write(self, piece: int, made: Sequence[jax.Array]) -> None:
        g, row = self._pieces[piece]
        for n, (m, x) in enumerate(zip(self._groups[g].stored, made, strict=True)):
            self._store.write(self._first[g] + n, row, self._bytes(m, x))

    def _array(self, m: MomentLeaf, buffer: np.ndarray) -> jax.Array:
        shards = [
            jax.device_put(_view(buffer, at, shape, m.dtype), device)
            for _, devices, at, shape in self._parts[m.number][1]
            for device in devices
        ]
        return jax.make_array_from_single_device_arrays(m.shape, m.sharding, shards)

    def _bytes(self, m: MomentLeaf, x: jax.Array) -> np.ndarray:
        size, shards = self._parts[m.number]
        buffer, found = np.zeros(size, np.uint8), {shard.device: shard.data for shard in x.addressable_shards}
        for _, devices, at, shape in shards:
            _view(buffer, at, shape, m.dtype)[...] = np.asarray(found[devices[0]])
        return buffer

    def _apply(self, staging: Staging, state: TrainState, grads: Any, loss: jax.Array) -> tuple[Any, Any, Any]:
        weights, structure = jax.tree.flatten(state.params)
        gradients = jax.tree.leaves(grads)
        states, state_structure = jax.tree.flatten(state.opt_state, is_leaf=is_stored)
        old, counts = list(states), []
        for piece, (g, row) in enumerate(self._pieces):
            group = self._groups[g]
            w, kept = weights[group.parameter], [states[m.number] for m in group.kept]
            if not self._donate and not row:
                w, kept = jnp.copy(w), [jnp.copy(x) for x in kept]
            moments = staging.get(piece)
            self._note("update", piece)
            free = [x for i, x in enumerate(old) if i in self._free]
            w, made, kept, count = self._updates[g](row, w, gradients[group.parameter], moments, kept, free, loss)
            weights[group.parameter] = w
            for m, x in zip(group.kept, kept, strict=True):
                states[m.number] = x
            staging.put(piece, made)
            counts.append(count)
            del moments, made
        # Last: it donates the counts that the other updates read.
        rest = ((weights, self._ungrouped), (gradients, self._ungrouped), (old, self._staying))
        new_w, new_s, count = self._tail(*([xs[i] for i in some] for xs, some in rest), loss)
        for i, x in zip(self._ungrouped, new_w, strict=True):
            weights[i] = x
        for i, x in zip(self._staying, new_s, strict=True):
            states[i] = x
        return jax.tree.unflatten(structure, weights), jax.tree.unflatten(state_structure, states), sum(counts, count)

    def _update_of(self, state: TrainState, group: LeafGroup) -> Any:
        """Returns the program that updates one row of a group; it donates weights and moments in memory."""
        update = self._optimizer_update(state)
        numbers = [m.number for m in (*group.stored, *group.kept)]
        spec, sharding = group.stored[0].sharding.spec, self._param_shardings[group.parameter]

        def run(
            row: jax.Array, w: Any, g: Any, moments: list[Any], kept: list[Any], free: list[Any], loss: jax.Array
        ) -> tuple[Any, list[Any], list[Any], jax.Array]:
            part = lambda x: _row(x, row, group)
            # During the update the parameter is sharded like its moments.
            shard_row = lambda x: with_sharding(self._layout.mesh, part(x), spec)
            with tracing_under(self._layout):
                slices = dict(zip(numbers, [*moments, *map(part, kept)], strict=True))
                given = slices | dict(zip(self._free, free, strict=True))
                new_w, new_s = update({group.parameter: shard_row(w)}, {group.parameter: shard_row(g)}, given, loss)
                new = with_sharding(self._layout.mesh, new_w[group.parameter], sharding.spec)
                count = changed(part(w), new) if is_narrow(w) else jnp.zeros(())
                new_moments = [new_s[m.number] for m in group.stored]
                stay = [_put_row(x, new_s[m.number], row, group) for m, x in zip(group.kept, kept, strict=True)]
                return _put_row(w, new, row, group), new_moments, stay, count

        whole = NamedSharding(self._layout.mesh, PartitionSpec())
        out_shardings = (sharding, [m.sharding for m in group.stored], [m.sharding for m in group.kept], whole)
        return jax.jit(run, donate_argnums=(1, 4), out_shardings=out_shardings)

    def _tail_of(self, state: TrainState) -> Any:
        """Returns the program that updates the rest: parameters without moments on disk, and counts."""
        leaves = jax.tree.leaves(state.opt_state, is_leaf=is_stored)
        grouped = {m.number for group in self._groups for m in (*group.stored, *group.kept)}
        grouped_params = {group.parameter for group in self._groups}
        self._ungrouped = [i for i in range(len(self._param_shardings)) if i not in grouped_params]
        self._staying = [i for i in range(len(leaves)) if i not in grouped]
        params = [i for i in self._staying if leaves[i].ndim]
        self._free = [i for i in self._staying if i not in params]
        update, ungrouped, staying = self._optimizer_update(state), self._ungrouped, self._staying
        # The group's own program places the moments that stay in memory.
        own = {m.tensor.path for group in self._groups for m in group.kept}
        others = [t for t in place(self._layout, state) if t.role == "opt_state" and t.path not in own]
        state_shardings = [NamedSharding(self._layout.mesh, to_spec(t.resolved)) for t in others]

        def run(weights: list[Any], gradients: list[Any], states: list[Any], loss: jax.Array) -> Any:
            with tracing_under(self._layout):
                leaves_by_number = (dict(zip(ungrouped, xs, strict=True)) for xs in (weights, gradients))
                new_w, new_s = update(*leaves_by_number, dict(zip(staying, states, strict=True)), loss)
                pairs = [(w, new_w[i]) for w, i in zip(weights, ungrouped, strict=True) if is_narrow(w)]
                count = sum((changed(*pair) for pair in pairs), jnp.zeros(()))
                return [new_w[i] for i in ungrouped], [new_s[i] for i in staying], count

        whole = NamedSharding(self._layout.mesh, PartitionSpec())
        out_shardings = ([self._param_shardings[i] for i in ungrouped], state_shardings, whole)
        return jax.jit(run, donate_argnums=(0, 2) if self._donate else (), out_shardings=out_shardings)

    def _init_of(self, state: TrainState, group: LeafGroup) -> Any:
        """Returns the program that makes the initial moments of one row of a group."""
        shapes, structure = jax.tree.flatten(jax.eval_shape(lambda p: p, state.params))

        def run(row: jax.Array, w: Any) -> list[Any]:
            with tracing_under(self._layout):
                some = {group.parameter: _row(w, row, group)}
                params = [some[i] if i in some else placeholder(x) for i, x in enumerate(shapes)]
                made = jax.tree.leaves(self._tx.init(jax.tree.unflatten(structure, params)))
                return [made[m.number] for m in group.stored]

        return jax.jit(run, out_shardings=[m.sharding for m in group.stored])

    def _optimizer_update(self, state: TrainState) -> Callable[..., tuple[list[Any], list[Any]]]:
        """Returns the optimizer's update of some leaves, by number; the others are placeholders that nothing reads."""
        shapes, structure = jax.tree.flatten(jax.eval_shape(lambda p: p, state.params))
        leaves, state_structure = jax.tree.flatten(state.opt_state, is_leaf=is_stored)
        states = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

        def run(weights: Any, gradients: Any, given: Any, loss: jax.Array) -> tuple[list[Any], list[Any]]:
            filled = lambda some, shapes: [some[i] if i in some else placeholder(x) for i, x in enumerate(shapes)]
            p, g = (jax.tree.unflatten(structure, filled(some, shapes)) for some in (weights, gradients))
            s = jax.tree.unflatten(state_structure, filled(given, states))
            updates, s = self._tx.update(g, s, p, **offered(self._tx, loss, g))
            return jax.tree.leaves(optax.apply_updates(p, updates)), jax.tree.leaves(s)

        return run


type Shard = tuple[tuple[tuple[int, int], ...], list[Any], int, tuple[int, ...]]


def _parts(m: MomentLeaf) -> tuple[int, list[Shard]]:
    """Returns the bytes of a row and its distinct shards: bounds in the row, devices, byte offset, shape."""
    found: dict[Any, list[Any]] = {}
    for device, index in m.sharding.addressable_devices_indices_map(m.shape).items():
        bounds = tuple((s.indices(size)[0], s.indices(size)[1]) for s, size in zip(index or (), m.shape, strict=True))
        found.setdefault(bounds, []).append(device)
    at, parts = 0, list[Shard]()
    for bounds, devices in sorted(found.items()):
        shape = tuple(stop - start for start, stop in bounds)
        parts.append((bounds, devices, at, shape))
        at += -(-int(np.prod(shape)) * m.dtype.itemsize // _ALIGN) * _ALIGN
    return at, parts


def _entry(m: MomentLeaf, rows: int, parts: tuple[int, Any]) -> Entry:
    spec = ", ".join("+".join(axes) or "·" for axes in m.tensor.resolved.axes)
    shards = [list(bounds) for bounds, *_ in parts[1]]
    about = {"dtype": str(m.dtype), "shape": list(m.tensor.shape), "spec": f"over ({spec})", "shards": shards}
    return Entry(m.tensor.path, rows, parts[0], about)


def _view(buffer: np.ndarray, at: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return buffer[at : at + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)


def _row(x: Any, row: Any, group: LeafGroup) -> Any:
    return jax.lax.dynamic_slice_in_dim(x, row, 1, 0) if group.rows > 1 else x


def _put_row(x: Any, new: Any, row: Any, group: LeafGroup) -> Any:
    return jax.lax.dynamic_update_slice_in_dim(x, new, row, 0) if group.rows > 1 else new
