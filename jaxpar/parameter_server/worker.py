"""A worker: pulls parameters, runs an ordinary train step on its own mesh, and pushes gradients or changes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp
from jaxpar.errors import ConfigError, DataError
from jaxpar.parameter_server.client import ServerClient, Traffic
from jaxpar.parameter_server.config import ServerConfig
from jaxpar.parameter_server.messages import RowGrads
from jaxpar.parameter_server.pieces import SparseTable
from jaxpar.parameter_server.program import TrainingProgram
from jaxpar.parameter_server.transport import Transport
from jaxpar.parameter_server.worker_memory import WorkerMemory
from jaxpar.training.model import leaves_with_paths, show, to_path
from jaxpar.training.weight_changes import WEIGHTS_CHANGED, is_narrow, share_changed_on_host


@dataclass
class WorkerReport:
    """What a worker did since its process started.

    Attributes:
      worker: its number.
      steps: the step after its last one.
      losses: by step.
      heldout: the mean loss on held-out batches, by step.
      traffic: bytes, and the largest staleness.
    """

    worker: int
    steps: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    heldout: dict[int, float] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)


class WorkerPrograms:
    """The compiled programs of the workers of a process, and the lock under which they run.

    Workers that share devices run one at a time: programs that communicate could otherwise wait for each other.

    Args:
      program: what to train.
      config: the run's configuration.

    Attributes:
      layout: of the workers.
      tx: the optimizer that a worker runs itself.
      clip: the largest norm of a gradient that is pushed.
      lock: held while a program runs.

    Raises:
      ConfigError: tables in a mode that cannot train them.
    """

    def __init__(self, program: TrainingProgram, config: ServerConfig):
        self._local = config.mode == "local_sgd"
        if self._local and program.tables:
            raise ConfigError(
                f"table {program.tables[0].path}: mode local_sgd exchanges whole parameters "
                f"{config.schedule}, and cannot train a sparse table. Remedy: another mode."
            )
        options = dict(program.step_options)
        self.program, self.lock = program, threading.RLock()
        self.clip: float | None = None if self._local else options.pop("clip_norm", None)
        self.layout = program.layout()
        self.tx = program.tx if self._local else optax.set_to_zero()
        self._precision = options.get("precision")
        options |= {"donate": self._local, "return_grads": not self._local}
        self._step = jp.train_step(self.layout, program.loss_fn, **options)
        self._evaluate = jp.eval_step(self.layout, program.eval_loss_fn or program.loss_fn, precision=self._precision)

    def init(self) -> Any:
        """Returns the initial state."""
        with self.lock:
            make_model, seed = self.program.make_model, self.program.seed
            state = jp.init(self.layout, make_model, self.tx, seed=seed, precision=self._precision)
            return jax.block_until_ready(state)

    def step(self, state: Any, batch: Any) -> Any:
        """Returns the state after a step, and its metrics."""
        with self.lock:
            return jax.block_until_ready(self._step(state, batch))

    @functools.cached_property
    def heldout(self) -> list[tuple[dict[str, np.ndarray], Any]]:
        """The held-out batches, as :func:`look_up` returns them."""
        with self.lock:
            batches = [] if self.program.heldout is None else list(self.program.heldout())
        return [look_up(batch, self.program.tables) for batch in batches]

    def evaluate(self, state: Any, batch: Any) -> Any:
        """Returns the metrics of a held-out batch."""
        with self.lock:
            return jax.block_until_ready(self._evaluate(state, batch))


class ParameterServerWorker:
    """A worker, ready to run: its state is made, and the servers hold the same model.

    Args:
      programs: what it runs.
      config: the run's configuration.
      transport: reaches the servers.
      worker: its number.
      folder: keeps what a restart needs beside the parameters.

    Raises:
      ModelError: the servers hold another model.
    """

    def __init__(self, programs: WorkerPrograms, config: ServerConfig, transport: Transport, worker: int, folder: Path):
        program = programs.program
        self._programs, self._program, self._config = programs, program, config
        self._transport, self._worker, self._local = transport, worker, config.mode == "local_sgd"
        self._schedule, self._bits = config.schedule, config.delta_bits
        self._state = programs.init()
        key = jax.random.fold_in(self._state.key, worker)
        self._key = np.asarray(jax.random.key_data(key)), jax.random.key_impl(key)
        self._shardings = jax.tree.map(lambda x: x.sharding, self._state.params)
        self._client = ServerClient(transport, worker, program.model_params, program.tables, config.patience)
        self._memory = WorkerMemory(folder)
        self._narrow: dict[str, np.ndarray] = {}  # the weights of 16 bits that were pulled last
        self.report = WorkerReport(worker, traffic=self._client.traffic)

    def run(self, steps: int) -> WorkerReport:
        """Train to the end, or until it is dismissed; a worker that was killed goes on where it was.

        Args:
          steps: the number of steps of each worker, where a round ends.
        """
        clock = self._client.start(self._initial)
        self._restore(clock)
        batches = self._program.batches(self._worker, self._config.workers)
        while (begin := self._schedule.first_step(clock)) < steps:
            if self._local:
                metrics = self._round(clock, batches)
            else:
                metrics = self._gradient_step(clock, batches(clock))
            clock += 1
            self.report.steps = done = self._schedule.first_step(clock)
            metrics |= self._evaluate(begin, done, steps)
            if not self._transport.coordinator("report", self._worker, done, metrics):
                break
        return self.report

    def finish(self, steps: int) -> dict[str, float]:
        """Evaluate the final parameters, and hand them to the program."""
        found = self._heldout()
        if self._program.finish is not None:
            self._load(self._client.pull(None, bits=self._bits))
            self._program.finish(replace(self._state, step=jnp.asarray(steps, jnp.int32)))
        return found

    # One step

    def _gradient_step(self, step: int, batch: Any) -> dict[str, float]:
        ids, batch = look_up(batch, self._program.tables)
        values = self._client.pull(step, ids)
        changed = self._changed(values)
        self._load(values, ids)
        self._state, metrics = self._programs.step(self._at(step), batch)
        self.report.losses[step] = loss = float(metrics["loss"])
        if bool(metrics.get("skipped", False)):
            self._client.push(step, None, prepared=lambda: self._keep(step + 1))
            return {"loss": loss, "skipped": 1.0, **changed}
        grads = metrics["grads"]
        norm = float(metrics["grad_norm"])
        clip = self._programs.clip
        if clip is not None and norm > clip:
            scale = clip / norm
            grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        weight, rows = float(metrics.get("weight", 1.0)), _rows(_named(grads), ids)
        self._client.push(step, rows, weight=weight, prepared=lambda: self._keep(step + 1))
        return {"loss": loss, "grad_norm": norm, **changed}

    def _round(self, clock: int, batches: Callable[[int], Any]) -> dict[str, float]:
        """Steps of the worker's own optimizer up to the next exchange, and a push of how the parameters changed."""
        steps = self._schedule.steps_of(clock)
        start = self._client.pull(clock, bits=self._bits)
        self._load(start)
        self._state = self._at(steps[0])
        losses, shares = [], []
        for step in steps:
            self._state, metrics = self._programs.step(self._state, batches(step))
            losses.append(metrics["loss"])
            shares += [metrics[WEIGHTS_CHANGED]] if WEIGHTS_CHANGED in metrics else []
        for step, loss in zip(steps, losses, strict=True):
            self.report.losses[step] = float(loss)
        end = _named(self._state.params)
        # The outer optimizer goes down, so the "gradient" is start minus end.
        change = {name: value.astype(np.float32) - end[name].astype(np.float32) for name, value in start.items()}
        self._client.push(clock, change, bits=self._bits, prepared=lambda: self._keep(clock + 1))
        means = {"loss": losses} | ({WEIGHTS_CHANGED: shares} if shares else {})
        return {name: float(np.mean([float(x) for x in values])) for name, values in means.items()}

    def _changed(self, values: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The share of the weights of 16 bits that the servers changed since the last pull, without sparse tables."""
        tables, before = {table.path for table in self._program.tables}, self._narrow
        self._narrow = {name: x for name, x in values.items() if name not in tables and is_narrow(x)}
        return share_changed_on_host(before, self._narrow)

    def _at(self, step: int) -> Any:
        """The state at a step, with the key of this worker."""
        data, impl = self._key
        key = jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
        return replace(self._state, step=jnp.asarray(step, jnp.int32), key=key)

    # Parameters

    def _initial(self) -> dict[str, np.ndarray]:
        tables = {table.path for table in self._program.tables}
        return {name: value for name, value in _named(self._state.params).items() if name not in tables}

    def _load(self, values: Mapping[str, np.ndarray], ids: Mapping[str, np.ndarray] | None = None) -> None:
        """Put pulled parameters into the state; of a table, the first rows."""

        def one(path: Any, old: jax.Array, sharding: Any) -> jax.Array:
            name = show(("params", *to_path(path)))
            value = values[name]
            if value.shape != old.shape:
                value = np.concatenate([value, np.zeros((old.shape[0] - len(value), *old.shape[1:]), value.dtype)])
            return jax.device_put(value, sharding)

        for name, rows in (ids or {}).items():
            capacity = self._program.model_params[name].shape[0]
            if len(rows) > capacity:
                raise DataError(
                    f"a batch touches {len(rows):,} rows of {name}, but the worker's model has {capacity:,} there. "
                    "Remedy: a smaller batch, or a model with at least as many rows."
                )
        params = jax.tree_util.tree_map_with_path(one, self._state.params, self._shardings)
        self._state = replace(self._state, params=params)

    # What a restart needs

    def _keep(self, clock: int) -> None:
        """Keep what the next round needs, before the push after which it may begin."""
        self._memory.save(clock, self._carried())

    def _carried(self) -> list[np.ndarray]:
        """The arrays that only this worker has: optimizer state, carried variables, rounding errors."""
        own = (self._state.opt_state, self._state.variables, self._state.loss_scale)
        return [np.asarray(x) for x in jax.tree.leaves(own)] + list(self._residuals().values())

    def _residuals(self) -> dict[str, np.ndarray]:
        return dict(sorted(self._client.residuals.items()))

    def _restore(self, clock: int) -> None:
        found = self._memory.load(clock)
        if found is None:
            return
        own = (self._state.opt_state, self._state.variables, self._state.loss_scale)
        leaves, structure = jax.tree.flatten(own)
        placed = [jax.device_put(x, old.sharding) for x, old in zip(found, leaves, strict=False)]
        opt_state, variables, scale = jax.tree.unflatten(structure, placed)
        self._state = replace(self._state, opt_state=opt_state, variables=variables, loss_scale=scale)
        keys = sorted(piece.key for piece in self._client.pieces)
        self._client.residuals = dict(zip(keys, found[len(leaves) :], strict=False))

    # Evaluation

    def _evaluate(self, begin: int, done: int, steps: int) -> dict[str, float]:
        """Evaluate after the round of the steps from ``begin`` to ``done``, if that is due."""
        every = self._program.eval_every
        if not every or done >= steps or done // every == begin // every or self._worker:
            return {}
        return self._heldout()

    def _heldout(self) -> dict[str, float]:
        """Returns the mean loss on the held-out batches, of the newest parameters."""
        batches = self._programs.heldout
        if not batches:
            return {}
        rows = {t.path: np.unique(np.concatenate([ids[t.path] for ids, _ in batches])) for t in self._program.tables}
        # All rows at once: other workers may change them between two pulls.
        values = self._client.pull(None, rows, bits=self._bits)
        metrics: list[Any] = []
        for ids, batch in batches:
            if ids or not metrics:
                of_batch = {name: values[name][np.searchsorted(rows[name], some)] for name, some in ids.items()}
                self._load({**values, **of_batch}, ids)
            metrics.append(self._programs.evaluate(self._state, batch))
        weights = [float(each.get("weight", 1)) for each in metrics]
        loss = float(np.average([float(each["loss"]) for each in metrics], weights=weights))
        self.report.heldout[self.report.steps] = loss
        return {"heldout_loss": loss}


def look_up(batch: Any, tables: tuple[SparseTable, ...]) -> tuple[dict[str, np.ndarray], Any]:
    """Returns the rows of each table that a batch touches, ascending, and the batch with their numbers instead of ids.

    Raises:
      DataError: the batch lacks an array of ids, or one has an id that the table does not have.
    """
    if not tables:
        return {}, batch
    leaves, structure = jax.tree.flatten(batch)
    names = [show(path) for path, _ in leaves_with_paths(batch)]
    found = {}
    for table in tables:
        missing = [name for name in table.ids if name not in names]
        if missing:
            raise DataError(
                f"table {table.path}: the batch has no array {missing[0]!r}. Remedy: ids of {', '.join(names)}."
            )
        arrays = {name: np.asarray(leaves[names.index(name)]) for name in table.ids}
        rows = np.unique(np.concatenate([x.reshape(-1) for x in arrays.values()])).astype(np.int64)
        if len(rows) and not 0 <= rows[0] <= rows[-1] < table.rows:
            raise DataError(
                f"table {table.path}: the batch has ids from {rows[0]} to {rows[-1]}, but the table has "
                f"{table.rows:,} rows. Remedy: ids from 0 to {table.rows - 1:,}."
            )
        for name, x in arrays.items():
            leaves[names.index(name)] = np.searchsorted(rows, x).astype(np.int32)
        found[table.path] = rows
    return found, jax.tree.unflatten(structure, leaves)


def _named(tree: Any) -> dict[str, np.ndarray]:
    return {show(("params", *path)): np.asarray(x) for path, x in leaves_with_paths(tree)}


def _rows(grads: Mapping[str, np.ndarray], ids: Mapping[str, np.ndarray]) -> dict[str, np.ndarray | RowGrads]:
    return {name: RowGrads(ids[name], grad[: len(ids[name])]) if name in ids else grad for name, grad in grads.items()}
