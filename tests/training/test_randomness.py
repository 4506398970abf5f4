"""Tests docs/reference/randomness.md: each cell of its table is true, and every test that it names exists."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from one_step import SGD, initial
from profiles import few_pairs

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.nnx import stacked

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "randomness.md").read_text(encoding="utf-8")
ROWS, WIDTH, LAYERS = 8, 4, 2
RULES = jp.Rules(batch="data", embed=None, layers="pipeline")
QUICK = {"xla_backend_optimization_level": 0}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(rngs.normal((WIDTH, WIDTH)) / 2, logical_dims=("embed", None))


class Model(nnx.Module):
    """Layers behind a dropout that carries keys, or behind a normalization that carries statistics."""

    def __init__(self, rngs: nnx.Rngs, own: str = ""):
        make = nnx.vmap(Block, transform_metadata=stacked("layers"))
        self.blocks = nnx.split_rngs(splits=LAYERS)(lambda rngs: make(rngs))(rngs)
        self.head = nnx.Param(rngs.normal((WIDTH,)), logical_dims=("embed",))
        self.drop = nnx.Dropout(0.5, rngs=rngs) if own == "keys" else None
        statistics = own == "statistics"
        self.norm = nnx.BatchNorm(WIDTH, use_scale=False, use_bias=False, rngs=rngs) if statistics else None


def layer(block: Block, x: jax.Array, side: Any) -> jax.Array:
    return x + jnp.tanh(x @ block.w[...])


def noisy(block: Block, x: jax.Array, side: Any, keys: jax.Array) -> jax.Array:
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (WIDTH,)))(keys)
    return layer(block, jnp.where(keep, 2 * x, 0), side)


def errors_of(model: Model, x: jax.Array, batch: Any) -> jax.Array:
    return jnp.sum(jnp.mean((x * model.head[...] - batch["y"]) ** 2, 1) * batch["count"]) / jnp.sum(batch["count"])


def linear(model: Model, x: jax.Array, batch: Any) -> Any:
    found = errors_of(model, x, batch)
    return found, {"weight": jnp.sum(batch["count"]), "doubled": 2 * found}


STAGED = jp.pipeline.PipelineLoss("blocks", lambda model, batch: batch["x"], layer, linear)


def keyed(model: Model, batch: Any, key: jax.Array) -> Any:
    return STAGED(model, {**batch, "x": batch["x"] + jax.random.normal(key, batch["x"].shape)})


def unweighted(model: Model, x: jax.Array, batch: Any) -> Any:
    return errors_of(model, x, batch)


def curved(model: Model, x: jax.Array, batch: Any) -> Any:
    loss, found = linear(model, x, batch)
    return jnp.log(loss), found


before = lambda f: dataclasses.replace(STAGED, embed=f)
of_rows = dataclasses.replace(STAGED, layer=noisy, keys=True)
# The state that the model carries, the loss, and the implementation of the state's key.
KINDS: dict[str, tuple[str, Any, str]] = {
    "the argument `key`": ("", keyed, "threefry2x32"),
    "`nnx.Dropout(rate, rngs=rngs)`": ("keys", before(lambda model, batch: model.drop(batch["x"])), "threefry2x32"),
    "`PipelineLoss(keys=True)`": ("", of_rows, "threefry2x32"),
    "`PipelineLoss(keys=True)`, keys of kind `rbg`": ("", of_rows, "rbg"),
    "`nnx.BatchNorm`": ("statistics", before(lambda model, batch: model.norm(batch["x"])), "threefry2x32"),
    "a mean with its `weight`": ("", STAGED, "threefry2x32"),
    "a mean without its `weight`": ("", dataclasses.replace(STAGED, head=unweighted), "threefry2x32"),
    "a loss that is not linear in rows": ("", dataclasses.replace(STAGED, head=curved), "threefry2x32"),
}
PIPED = jp.Pipeline(jp.pipeline.schedule("1f1b", stages=2, microbatches=2))
# The columns of the table: mesh, ZeRO stage, step options.
MODES: dict[str, tuple[dict[str, int], int, dict[str, Any]]] = {
    "compiler": ({"data": 4}, 3, {}),
    "microbatches": ({"data": 2}, 0, {"grad_accum_steps": 2, "grad_reduction": "per_microbatch"}),
    "own sums": ({"data": 2}, 1, {"grad_accum_steps": 2}),
    "pipeline": ({"pipeline": 2, "data": 2}, 0, {"pipeline": PIPED}),
}


def cells() -> dict[tuple[str, str], str]:
    """Parses the page's first table: (row, column) → the first word of the cell."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    columns = [cell.strip("*") for cell in head[1:5]]
    assert columns == list(MODES)
    found = {}
    for name, *values in rows:
        found |= {(name, column): value.split()[0].strip(",:") for column, value in zip(columns, values, strict=False)}
    return found


def batch_of() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    x, y = random.normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": y, "count": np.arange(1, ROWS + 1, dtype=np.float32)}


@functools.cache
def maker(own: Any) -> Any:
    return lambda key: Model(nnx.Rngs(0), own)


def run(kind: str, sizes: dict[str, int], stage: int = 0, **options: Any) -> list[np.ndarray]:
    """Returns the loss, the parameters and the floating-point variables after one step."""
    own, loss, impl = KINDS[kind]
    zero = jp.Zero(stage, min_bytes=0)
    layout = jp.Layout(
        jp.MeshSpec(**sizes).build(jax.devices()[: int(np.prod(list(sizes.values())))]),
        zero.rules(RULES) if stage else RULES,
    )
    with jax.default_matmul_precision("highest"), layout:
        key = jax.random.key(5, impl=impl)
        shapes = dataclasses.replace(jp.abstract_state(layout, maker(own), SGD), key=key)
        state = dataclasses.replace(initial(shapes, maker(own), RULES), key=key)
        step = jp.train_step(layout, loss, donate=False, **{**(zero.step if stage else {}), **options})
        state, metrics = step.lower(shapes, batch_of()).compile(compiler_options=QUICK)(state, batch_of())
    floats = [x for x in jax.tree.leaves(state.variables) if jnp.issubdtype(x.dtype, jnp.floating)]
    return [np.asarray(x) for x in (metrics["loss"], *jax.tree.leaves(state.params), *floats)]


@functools.cache
def one_device(kind: str) -> list[np.ndarray]:
    return run(kind, {"data": 1})


@pytest.mark.parametrize(("kind", "mode"), few_pairs(KINDS, MODES, 1))
def test_every_cell_of_the_table(kind: str, mode: str) -> None:
    said, (sizes, stage, options) = cells()[kind, mode], MODES[mode]
    if said == "error":
        with pytest.raises(JaxparError):
            run(kind, sizes, stage, **options)
        return
    got, want = run(kind, sizes, stage, **options), one_device(kind)
    close = [np.abs(a - b).max() <= 1e-5 * np.abs(b).max() for a, b in zip(got, want, strict=True)]
    assert said in ("same", "other")
    assert all(close) if said == "same" else not close[0]


def test_the_page_names_tests_that_are_there() -> None:
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", PAGE)
    assert len(named) > 10
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), test
    rows = {name for name, _ in cells()}
    assert set(KINDS) <= rows


@pytest.mark.slow
def test_the_key_of_an_evaluation_is_that_of_the_step() -> None:
    """``eval_step`` computes the batch in one piece; under a pipeline, each row gets the draws of training."""
    layout = jp.Layout(jp.MeshSpec(data=4).build(jax.devices()[:4]), RULES)
    piped = jp.Layout(jp.MeshSpec(pipeline=2, data=2).build(jax.devices()[:4]), RULES)
    seen: list[float] = []
    evals: list[tuple[jp.Layout, Callable[..., Any]]] = [
        (layout, jp.eval_step(layout, of_rows)),
        (piped, jp.eval_step(piped, of_rows, pipeline=PIPED)),
    ]
    for where, step in evals:
        with jax.default_matmul_precision("highest"), where:
            state = jp.init(where, lambda key: Model(nnx.Rngs(0)), optax.sgd(0.1))
            state = dataclasses.replace(state, key=jax.random.key(5))
            seen.append(float(step(state, batch_of())["loss"]))
    want = float(one_device("`PipelineLoss(keys=True)`")[0])
    assert seen == pytest.approx([want, want], rel=1e-5)
