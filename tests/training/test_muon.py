"""Muon finds the matrices of a model by their logical dims, and computes in every layout what one device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from flax import nnx
from one_step import layout_of
from optax.contrib import MuonDimensionNumbers as Numbers
from profiles import few

import jaxpar as jp
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.errors import ConfigError
from jaxpar.optimizers import MuonConfig, matrices_of, muon

VOCAB, WIDTH, HEADS, DEPTH, HIDDEN = 24, 16, 4, 6, 20
CONFIGS = Path(__file__).parents[2] / "configs"


def dense(inputs: Any, outputs: Any, dims: tuple[str, ...], rngs: nnx.Rngs, outer: int = 1) -> nnx.LinearGeneral:
    """A layer of Flax with Flax's own annotations; the last ``outer`` dims are those of its outputs and its bias."""
    named = nnx.with_partitioning
    kernel, bias = nnx.initializers.lecun_normal(), nnx.initializers.normal(0.1)
    axis = tuple(range(-len(dims) + outer, 0))
    return nnx.LinearGeneral(
        inputs, outputs, axis=axis, kernel_init=named(kernel, dims), bias_init=named(bias, dims[-outer:]), rngs=rngs
    )


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.q = dense(WIDTH, (HEADS, DEPTH), ("width", "heads", "depth"), rngs, outer=2)
        self.o = dense((HEADS, DEPTH), WIDTH, ("heads", "depth", "width"), rngs)
        self.up, self.down = (
            dense(WIDTH, HIDDEN, ("width", "hidden"), rngs),
            dense(HIDDEN, WIDTH, ("hidden", "width"), rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.o(jnp.tanh(self.q(x)))
        return x + self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
    """A model as others write it: its layers are not stacked, and its names are its own."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(1.0), ("vocab", "width"))
        self.table = nnx.Embed(VOCAB, WIDTH, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.table.attend(x)


def make_model(key: jax.Array) -> Model:
    return Model(nnx.Rngs(key))


def loss_fn(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])
    return jnp.mean(losses)


def batch_of() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.integers(0, VOCAB, (16, 5)) for name in ("tokens", "targets")}


def test_the_matrices_of_layers_are_found_by_their_dims() -> None:
    block = {
        "down/kernel": Numbers((0,), (1,)),
        "o/kernel": Numbers((0, 1), (2,)),
        "q/kernel": Numbers((0,), (1, 2)),
        "up/kernel": Numbers((0,), (1,)),
    }
    assert matrices_of(make_model) == {
        f"blocks/{n}/{path}": numbers for n in range(2) for path, numbers in block.items()
    }
    chosen = MuonConfig(targets=("q/*", "table/embedding"), inputs={"q/kernel": 2})
    assert matrices_of(make_model, chosen) == {
        "blocks/0/q/kernel": Numbers((0, 1), (2,)),
        "blocks/1/q/kernel": Numbers((0, 1), (2,)),
        "table/embedding": Numbers((0,), (1,)),
    }


def test_stacked_layers_and_experts_are_matrices_each() -> None:
    make = make_job(load_run(CONFIGS / "quickstart.yaml")).make_model
    one, two = Numbers((1,), (2,)), Numbers((1,), (2, 3))
    assert matrices_of(make) == {
        "blocks/attention/k": two,
        "blocks/attention/o": Numbers((1, 2), (3,)),
        "blocks/attention/q": two,
        "blocks/attention/v": two,
        "blocks/mlp/down": one,
        "blocks/mlp/gate": one,
        "blocks/mlp/up": one,
    }
    tag = lambda shape, *dims: jp.tag(jnp.zeros(shape), *dims)
    stack = lambda key: {
        "up": tag((3, 2, 8, 4), "layers", "moe", "embed", "mlp"),
        "patches": tag((8, 12), None, "embed"),
    }
    assert matrices_of(stack, MuonConfig(stacked=("layers", "moe"))) == {"up": Numbers((2,), (3,))}


ERRORS = {
    "vectors": (
        lambda key: {
            "w": jp.tag(jnp.zeros((2, 4)), "layers", "embed"),
            "v": jp.tag(jnp.zeros((8, 4)), "vocab", "embed"),
        },
        MuonConfig(),
        "dense_layers",
    ),
    "no names": (lambda key: {"w": jnp.zeros((8, 4))}, MuonConfig(), "dense_layers"),
    "pattern": (make_model, MuonConfig(targets=("blocks/0/up", "blocks/0/up/bias")), "blocks/0/up"),
    "inputs": (make_model, MuonConfig(inputs={"o/kernel": 3}), "blocks/0/o/kernel"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_models_without_matrices_and_wrong_patterns_are_named(case: str) -> None:
    make, config, text = ERRORS[case]
    with raises(ConfigError, text):
        muon(make, 0.1, config=config)


def test_a_list_that_is_a_text_is_named() -> None:
    with raises(ConfigError, "muon: targets", "blocks/*"):
        MuonConfig(targets="blocks/*")  # type: ignore[arg-type]


WHOLE = jp.Rules(batch="data", width=None, heads=None, depth=None, hidden=None, vocab=None)
LAYOUTS = {
    "data": (WHOLE, {"data": 8}),
    "zero 1": (jp.Zero(1, min_bytes=0).rules(WHOLE), {"data": 8}),
    "fsdp": (WHOLE.replace(params={"width": "data"}), {"data": 8}),
    "tensor": (
        WHOLE.replace(heads="model", hidden="model", vocab="model", params={"width": "data"}),
        {"data": 4, "model": 2},
    ),
}


def tx_of() -> optax.GradientTransformation:
    return muon(make_model, 0.05, adam_learning_rate=0.01, weight_decay=0.1)


def states(rules: jp.Rules, sizes: dict[str, int], first: Any = None, **options: Any) -> list[Any]:
    """The first state, and those after each of two steps; with ``first``, each step begins from its states."""
    layout, tx = layout_of(rules, sizes), tx_of()
    shapes = jp.abstract_state(layout, make_model, tx)
    structure = jax.tree.structure(shapes)

    def put(state: Any) -> Any:
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True)
        return jax.tree.unflatten(structure, [jax.device_put(x, like.sharding) for x, like in pairs])

    with jax.default_matmul_precision("highest"):
        step = jp.train_step(layout, loss_fn, donate=False, **options).lower(shapes, batch_of())
        # Each program runs twice, so compiling it with optimizations takes longer than running it.
        compiled = step.compile(compiler_options={"xla_backend_optimization_level": 0})
        found = [jp.init(layout, make_model, tx) if first is None else put(first[0])]
        for n in range(2):
            found.append(compiled(found[-1] if first is None else put(first[n]), batch_of())[0])
    return found


@pytest.fixture(scope="module")
def one_device() -> list[Any]:
    return states(WHOLE, {"data": 1})


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_steps_are_those_of_one_device(name: str, one_device: list[Any]) -> None:
    rules, sizes = LAYOUTS[name]
    options = jp.Zero(1, min_bytes=0).step if name == "zero 1" else {}
    found = states(rules, sizes, one_device, **options)
    for n in (1, 2):
        parts = lambda state: jax.device_get((state.params, state.opt_state))
        trees = [parts(found[n]), parts(one_device[n]), parts(one_device[n - 1])]
        for (path, got), want, before in zip(
            jax.tree_util.tree_leaves_with_path(trees[0]), *map(jax.tree.leaves, trees[1:]), strict=True
        ):
            name = jax.tree_util.keystr(path)
            assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max(), name
            # Measured: up to 1e-5 of what the step changed.
            assert np.abs(got - want).max() <= 5e-5 * np.abs(want - before).max(), name


@pytest.mark.parametrize("name", few(LAYOUTS, 2))
def test_momenta_are_sharded_as_their_matrices_by_the_rules_for_the_optimizer(name: str) -> None:
    layout = layout_of(*LAYOUTS[name])
    rows = {row.path: row for row in jp.explain(layout, make_model, tx_of()).rows}
    matrices = matrices_of(make_model)
    for kind in ("muon", "adam"):
        found = {
            path.partition("/mu/")[2]
            for path in rows
            if path.startswith(f"opt_state/inner_states/{kind}/") and "/mu/" in path
        }
        others = {path.removeprefix("params/") for path in rows if path.startswith("params/")} - matrices.keys()
        assert found == (set(matrices) if kind == "muon" else others)
    (q,) = [row for path, row in rows.items() if path.endswith("/mu/blocks/0/q/kernel")]
    wanted = {"data": ((), (), ()), "tensor": (("data",), ("model",), ())}
    assert q.spec == wanted.get(name, (("data",), (), ()))
    assert q.dims == ("width", "heads", "depth")
