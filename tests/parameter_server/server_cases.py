"""Small models and runs that the tests of parameter servers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar as jp
from jaxpar.parameter_server import ServerConfig, SparseTable, TrainingProgram
from jaxpar.parameter_server.cluster import ThreadCluster
from jaxpar.parameter_server.run import ServerRun, ServerRunResult
from jaxpar.parameter_server.transport import ServerLost, ThreadTransport
from jaxpar.training.model import leaves_with_paths, show

FEATURES, CLASSES, ROWS = 5, 3, 4
PLAIN = jp.Rules(batch="data", unannotated="replicate")


class Classifier(nnx.Module):
    """A model that names none of its dims."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(FEATURES, 7, rngs=rngs)
        self.last = nnx.Linear(7, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jax.nn.relu(self.first(x)))


class LinenClassifier(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(CLASSES)(nn.tanh(nn.Dense(7)(x)))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def nnx_loss(model: Any, batch: Any) -> jax.Array:
    return cross_entropy(model(batch["x"]), batch["y"])


def linen_loss(variables: Any, batch: Any) -> jax.Array:
    return cross_entropy(LinenClassifier().apply(variables, batch["x"]), batch["y"])


def batches(worker: int, workers: int) -> Callable[[int], Any]:
    def batch(step: int) -> Any:
        random = np.random.default_rng(1000 * worker + step)
        x = random.standard_normal((ROWS, FEATURES)).astype(np.float32)
        return {"x": x, "y": (x[:, :CLASSES] + 0.3 * x[:, 2:]).argmax(1).astype(np.int32)}

    return batch


def one_device(devices: int = 1) -> Callable[[], jp.Layout]:
    return lambda: jp.Layout(jp.MeshSpec(data=devices).build(jax.devices()[:devices]), PLAIN)


def nnx_program(tx: optax.GradientTransformation, devices: int = 1, **fields: Any) -> TrainingProgram:
    make_model = lambda key: Classifier(nnx.Rngs(key))
    made = TrainingProgram(one_device(devices), make_model, nnx_loss, tx, batches)
    return dataclasses.replace(made, **fields)


def linen_program(tx: optax.GradientTransformation, **fields: Any) -> TrainingProgram:
    make_model = lambda key: LinenClassifier().init(key, jnp.zeros((1, FEATURES)))
    made = TrainingProgram(one_device(), make_model, linen_loss, tx, batches)
    return dataclasses.replace(made, **fields)


def named(tree: Any) -> dict[str, np.ndarray]:
    return {show(("params", *path)): np.asarray(x) for path, x in leaves_with_paths(tree)}


def one_process(program: TrainingProgram, steps: int, workers: Callable[[int], Sequence[int]]) -> dict[str, np.ndarray]:
    """The parameters that one process on one device has after the same steps, with plain optax.

    Each parameter is updated by a program of its own. XLA:CPU rounds AdamW's bias corrections otherwise in a program
    that updates all of them.
    """
    layout = program.layout()
    state = jp.init(layout, program.make_model, optax.set_to_zero(), seed=program.seed)
    measure = jp.train_step(layout, program.loss_fn, return_grads=True, donate=False)
    tx, read = program.tx, [program.batches(worker, max(workers(0)) + 1) for worker in range(8)]
    params, structure = jax.tree.flatten(state.params)
    states = [tx.init(x) for x in params]

    @jax.jit
    def update(grad: Any, opt_state: Any, param: Any) -> Any:
        updates, opt_state = tx.update(grad, opt_state, param)
        return optax.apply_updates(param, updates), opt_state

    for step in range(steps):
        here = jax.tree.unflatten(structure, params)
        at = dataclasses.replace(state, params=here, step=jnp.asarray(step, jnp.int32))
        grads = [jax.tree.leaves(measure(at, read[worker](step))[1]["grads"]) for worker in workers(step)]
        for i, parts in enumerate(zip(*grads, strict=True)):
            total = np.asarray(parts[0])
            for part in parts[1:]:
                total = total + np.asarray(part)
            params[i], states[i] = update(total / np.float32(len(parts)), states[i], params[i])
    return named(jax.tree.unflatten(structure, params))


def same(one: Mapping[str, np.ndarray], two: Mapping[str, np.ndarray]) -> bool:
    """Whether two sets of parameters are equal bit by bit."""
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def run(program: TrainingProgram, config: ServerConfig, steps: int, folder: Path, **options: Any) -> ServerRunResult:
    with ServerRun(program, config, steps=steps, folder=folder, cluster="threads", **options) as going:
        return going.wait()


class Killed(Exception):
    """A server that was killed."""


class _Dead:
    def __getattr__(self, name: str) -> Any:
        raise Killed


class MortalTransport(ThreadTransport):
    """Servers that a test can kill: what they hold in memory is gone, and calls in flight get no answer."""

    def _ask(self, server: int, name: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return super()._ask(server, name, arguments)
        except Killed:
            return ServerLost("it was killed")

    def kill(self, server: int) -> None:
        service: Any = self.services.pop(server)
        with service._changed:
            service._shard.close()
            service._shard = _Dead()
            service._changed.notify_all()


def mortal(going: ServerRun) -> tuple[MortalTransport, Callable[[int], None]]:
    """Makes the servers of a run mortal; returns their transport, and how to start one again."""
    cluster: Any = going.cluster
    assert isinstance(cluster, ThreadCluster)
    cluster._transport.__class__ = MortalTransport
    return cluster._transport, cluster.launch_server  # type: ignore[return-value]


def table_program(rows: int, capacity: int, sparse: bool) -> TrainingProgram:
    """A table of item vectors whose scores are trained, as a sparse table or as an ordinary parameter."""
    table = SparseTable("params/items", rows, ids=("items",), stddev=0.1, pieces=3, seed=5)

    def make_model(key: jax.Array) -> Any:
        from jaxpar.parameter_server.row_values import initial_rows

        items = np.zeros((capacity, 4)) if sparse else initial_rows(table, np.arange(rows), 4)
        return {"items": jnp.asarray(items, jnp.float32), "w": jnp.linspace(-1.0, 1.0, 4)}

    def loss(model: Any, batch: Any) -> jax.Array:
        scores = jnp.take(model["items"], batch["items"], axis=0) @ model["w"]
        return ((scores - batch["y"]) ** 2).mean()

    def read(worker: int, workers: int) -> Callable[[int], Any]:
        def batch(step: int) -> Any:
            random = np.random.default_rng(77 * worker + step)
            items = random.integers(0, rows, 6)
            return {"items": items, "y": np.sin(items).astype(np.float32)}

        return batch

    tx = optax.sgd(0.1, momentum=None)
    return TrainingProgram(one_device(), make_model, loss, tx, read, tables=(table,) if sparse else ())
