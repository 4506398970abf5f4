"""The memory estimate for operations that it cannot follow, and the bytes of gradients by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covers import covering
from flax import linen as nn
from flax import nnx
from jax.extend.core import Primitive
from memory_cases import LAYOUT, MIB, explained, rows, square

import jaxpar as jp
from jaxpar.analysis.memory.jaxpr import Reader
from jaxpar.analysis.memory.walk import MemoryWalk
from jaxpar.linen import axes as linen_axes
from jaxpar.nnx import axes as nnx_axes

mystery = Primitive("mystery")
mystery.multiple_results = True
mystery.def_abstract_eval(lambda x: [x.update(shape=(2 * x.shape[0], 3)), x.update(shape=(), weak_type=False)])


def mysterious(hint: bool) -> Any:
    """A loss that multiplies the batch by the result of an operation without a rule, with or without named dims."""

    def loss(model: Any, batch: jax.Array) -> jax.Array:
        made, scalar = mystery.bind(jnp.tanh(batch))
        made = jp.hint(made, "batch", None) if hint else made
        return jnp.mean(batch @ model["w"]) * scalar + jnp.mean(jnp.exp(made))

    return loss


def test_an_unknown_operation_does_not_stop_the_estimate_and_its_remedy_helps() -> None:
    batch = rows(2**18, 512)
    report = jp.explain(LAYOUT, square, optax.sgd(0.1), batch=batch, loss_fn=mysterious(False))
    assert report.memory is not None and report.memory.assumed == ("mystery",) and report.memory.total is not None
    text = (
        "memory estimate: an upper bound. It counts large results of 'mystery' as replicated, because it has no "
        "sharding rule for them. Remedy: name the dims of the result, for example with jp.hint(x, 'batch', "
        "'embed')."
    )
    assert report.notes == (text,)
    named = explained(square, mysterious(True), batch)
    assert named.assumed == () and named.total is not None and named.total <= report.memory.total


class Wide(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        make = nnx_axes(nnx.initializers.lecun_normal())
        self.up = nnx.Linear(256, 512, kernel_init=make("embed", "mlp"), use_bias=False, rngs=rngs)
        self.down = nnx.Linear(512, 256, kernel_init=make("mlp", "embed"), use_bias=False, rngs=rngs)
        self.count = nnx.BatchStat(jnp.zeros((999, 3)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


class Deep(nn.Module):
    """A Linen model with trained kernels and one frozen kernel in another collection."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        make = linen_axes(nn.initializers.lecun_normal())
        frozen = self.variable("frozen", "kernel", lambda: jnp.ones((256, 256)))
        first, second = jnp.split(
            nn.Dense(512, use_bias=False, kernel_init=make("embed", "mlp"))(x @ frozen.value), 2, -1
        )
        return nn.Dense(256, use_bias=False, kernel_init=make("mlp", "embed"))(nn.relu(jnp.stack([first, second])[0]))


def tree(key: jax.Array) -> dict[str, Any]:
    w = jax.random.normal(key, (2, 256, 512))
    return {"stack": jp.tag(w, None, "embed", "mlp"), "half": jp.tag(w[0].astype(jnp.bfloat16), "embed", "mlp")}


def unpacking(model: Any, batch: jax.Array) -> jax.Array:
    a, b = model["stack"]
    c, d = jnp.stack([batch @ a, batch @ b])
    return jnp.mean(c * d * (batch @ model["half"]))


FROZEN = optax.partition({"no": optax.set_to_zero(), "yes": optax.adam(1e-3)}, {"stack": "no", "half": "yes"})
MODELS = {
    "nnx": (
        lambda key: Wide(nnx.Rngs(key)),
        lambda model, x: jnp.mean(model(x) ** 2),
        optax.adam(1e-3),
        2 * 256 * 512 * 4,
    ),
    "linen": (
        lambda key: Deep().init(key, jnp.ones((1, 256))),
        lambda model, x: jnp.mean(Deep().apply(model, x) ** 2),
        optax.adam(1e-3),
        (256 * 512 + 256 * 256) * 4,
    ),
    "tree": (tree, unpacking, optax.adam(1e-3), 2 * 256 * 512 * 4 + 256 * 512 * 2),
    # optax does not update a frozen part, but its gradient is computed for the global norm.
    "frozen": (tree, unpacking, FROZEN, 2 * 256 * 512 * 4 + 256 * 512 * 2),
}


@pytest.mark.parametrize(
    ("name", "batch", "sharded", "accumulate"), covering(MODELS, [16, 16384], [False, True], [1, 4], keep=4)
)
def test_gradients_by_hand(name: str, batch: int, sharded: bool, accumulate: int) -> None:
    make, loss, tx, expected = MODELS[name]
    rules = LAYOUT.rules.replace(unannotated="replicate", params={"embed": "data"} if sharded else {})
    layout = jp.Layout(LAYOUT.mesh, rules)
    step = {"grad_accum_steps": accumulate} if accumulate > 1 else None
    memory = jp.explain(layout, make, tx, batch=rows(batch, 256), loss_fn=loss, step=step).memory
    assert memory is not None and memory.unknown == memory.assumed == ()
    assert memory.gradients == expected // (4 if sharded else 1)
    # A microbatch's gradient may be alive at the same time as the sum of all.
    assert memory.parts["gradients"] <= memory.gradients * (1 if accumulate == 1 else 2)
    shown = dict(memory.cells(str))
    if memory.parts["gradients"] < memory.gradients:
        assert shown[f"gradients alive at the peak (of {memory.gradients})"] == str(memory.parts["gradients"])
    else:
        assert shown["gradients"] == str(memory.parts["gradients"])


def test_sums_of_gradients_that_a_loop_over_microbatches_carries_are_gradients() -> None:
    def loss(model: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(batch @ model["w"]))

    batch = rows(16384, 512)
    memory = jp.explain(LAYOUT, square, optax.sgd(0.1), batch=batch, loss_fn=loss, step={"grad_accum_steps": 4}).memory
    assert memory is not None and memory.parts["gradients"] == memory.gradients == MIB


def lookup(table: jax.Array, places: jax.Array) -> jax.Array:
    """The gradient of a table whose rows are looked up."""
    return jax.vjp(lambda t: t[places], table)[1](jnp.ones((*places.shape, *table.shape[1:])))[0]


def choice(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The gradient of logits of which each token's label is taken, as in optax's cross-entropy."""
    taken = lambda x: jnp.take_along_axis(x, labels[..., None], -1)
    return jax.vjp(taken, logits)[1](jnp.ones((*labels.shape, 1)))[0]


BY_BATCH = (("data",), ())


@pytest.mark.parametrize(
    ("gradient", "shape", "spec", "expected"),
    [(choice, (8, 16, 64), (*BY_BATCH, ()), (*BY_BATCH, ())), (lookup, (64, 32), ((), ("model",)), ((), ()))],
)
def test_gradients_of_lookups_are_sharded_as_their_places(gradient: Any, shape: Any, spec: Any, expected: Any) -> None:
    args = jax.ShapeDtypeStruct(shape, np.float32), jax.ShapeDtypeStruct((8, 16), np.int32)
    jaxpr = jax.make_jaxpr(gradient)(*args).jaxpr
    program = Reader({"data": 4, "model": 2}).read(jaxpr, [spec, BY_BATCH])
    assert any(op.name == "scatter-add" for op in program.ops)
    assert [value.spec for value in program.results] == [expected]


def test_rows_that_are_added_to_zeros_keep_the_sharding_of_their_columns() -> None:
    add = lambda rows, places: jnp.zeros((64, 32)).at[places].add(rows)
    jaxpr = jax.make_jaxpr(add)(np.zeros((8, 16, 32), np.float32), np.zeros((8, 16), np.int32)).jaxpr
    program = Reader({"data": 4, "model": 2}).read(jaxpr, [(*BY_BATCH, ("model",)), BY_BATCH])
    assert [value.spec for value in program.results] == [((), ("model",))]


def traced() -> Iterator[tuple[str, Any]]:
    """Programs of the public functions of jax.numpy, jax.lax, jax.nn and similar modules on one or two matrices, one
    for each new primitive."""
    x, seen = jax.ShapeDtypeStruct((1024, 1024), np.float32), set[str]()
    whole = jax.ShapeDtypeStruct((1024, 1024), np.int32)
    names = [(module, name) for module in (jnp, jax.lax, jax.nn, jnp.linalg, jnp.fft) for name in sorted(dir(module))]
    for module, name in names:
        f = getattr(module, name)
        if name.startswith("_") or not callable(f) or isinstance(f, type):
            continue
        for args in ((x,), (x, x), (whole, whole), ([x, x],), (x, 0), (x, (1, 0))):
            arrays, rest = [a for a in jax.tree.leaves(args) if a in (x, whole)], args
            put = lambda *given, f=f, rest=rest: f(*_filled(rest, iter(given)))
            try:
                jaxpr = jax.make_jaxpr(put)(*arrays).jaxpr
            except (
                TypeError,
                ValueError,
                LookupError,
                ArithmeticError,
                AttributeError,
                AssertionError,
                NotImplementedError,
            ):
                continue  # the function takes other arguments
            primitives = set(_primitives(jaxpr))
            if primitives - seen:
                yield f"{name} of {len(arrays)}", jaxpr
            seen |= primitives
            break
    assert len(seen) > 110 and {"stack", "unstack", "dot_general", "sort", "fft", "custom_jvp_call"} <= seen


def _filled(args: Any, given: Iterator[Any]) -> Any:
    return jax.tree.map(lambda a: next(given) if isinstance(a, jax.ShapeDtypeStruct) else a, args)


def _primitives(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                yield from (
                    _primitives(inner.jaxpr if hasattr(inner, "jaxpr") else inner) if hasattr(inner, "eqns") else ()
                )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_operation_of_jax_is_followed_or_taken_as_replicated() -> None:
    for name, jaxpr in traced():
        for spec in ((("data",), ("model",)), ((), ("data", "model"))):
            reader = Reader({"data": 4, "model": 2})
            program = reader.read(jaxpr, [spec] * len(jaxpr.invars))
            assert MemoryWalk(program).peak().bytes >= 0, name
            for op in program.ops:
                for value in op.makes:
                    axes = [axis for dim in value.spec or () for axis in dim]
                    assert len(axes) == len(set(axes)) and (
                        value.spec is None or len(value.spec) == len(value.shape)
                    ), name
                    assert op.followed or not axes, (name, op.name)
