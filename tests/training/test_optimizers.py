"""Tests every optax transform: the sharding of its state, the reasons for replicated state, and its steps."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from covers import covering
from error_texts import raises
from jax.sharding import PartitionSpec as P
from one_step import initial
from profiles import few

import jaxpar as jp
from jaxpar.errors import ConfigError, ModelError
from jaxpar.training.model import to_path

LR = 1e-2


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim == 2, params)


def as_matrices(params: Any) -> Any:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


def labels(params: Any) -> Any:
    return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "other", params)


def pair() -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    return optax.adam(LR), optax.sgd(LR, momentum=0.9)


# Transforms that need more arguments than a learning rate, or whose typical state exists only with these arguments.
SPECIAL: dict[str, Callable[[], Any]] = {
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(LR), 2),
    "adafactor": lambda: optax.adafactor(LR, min_dim_size_to_factor=8, momentum=0.9),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, key=0),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(LR), 2),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), *pair()),
    "clip": lambda: optax.clip(0.01),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.01),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.01),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.adam(LR), lambda step: step > 0),
    "conditionally_transform": lambda: optax.conditionally_transform(optax.adam(LR), lambda step: step > 0),
    "differentially_private_aggregate": lambda: optax.contrib.differentially_private_aggregate(1.0, 0.1, key=0),
    "dpsgd": lambda: optax.contrib.dpsgd(LR, 1.0, 0.1, seed=0, momentum=0.9),
    "ema": lambda: optax.ema(0.9),
    "flatten": lambda: optax.flatten(optax.adam(LR)),
    "freeze": lambda: optax.freeze({"block": True, "square": False, "temperature": False}),
    "galore": lambda: optax.contrib.galore(LR, rank=4),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(LR),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adamw)(LR),
    "lbfgs": lambda: optax.lbfgs(memory_size=3),
    "lookahead": lambda: optax.lookahead(optax.adam(LR), 2, 0.5),
    "masked": lambda: optax.masked(optax.adam(LR), matrices),
    "measure_with_ema": lambda: optax.measure_with_ema(lambda grads: grads, 0.9),
    "mechanize": lambda: optax.contrib.mechanize(optax.adam(LR)),
    "monitor": lambda: optax.monitor({"ema": optax.measure_with_ema(lambda grads: grads, 0.9)}),
    "multi_transform": lambda: optax.multi_transform(dict(zip(("matrix", "other"), pair(), strict=True)), labels),
    "named_chain": lambda: optax.named_chain(*zip(("first", "second"), pair(), strict=True)),
    "noisy_sgd": lambda: optax.noisy_sgd(LR, key=0),
    "partition": lambda: optax.partition(dict(zip(("matrix", "other"), pair(), strict=True)), labels),
    "sam": lambda: optax.contrib.sam(optax.adam(LR), optax.sgd(LR)),
    "scale": lambda: optax.scale(-LR),
    "scale_by_backtracking_linesearch": lambda: optax.scale_by_backtracking_linesearch(5, store_grad=True),
    "scale_by_distance_over_gradients": lambda: optax.masked(  # It turns scalars into vectors.
        optax.scale_by_distance_over_gradients(), matrices
    ),
    "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=8),
    "scale_by_galore": lambda: optax.contrib.scale_by_galore(rank=4),
    "scale_by_muon": lambda: optax.masked(optax.contrib.scale_by_muon(weight_dimension_numbers=as_matrices), matrices),
    "scale_by_schedule": lambda: optax.scale_by_schedule(optax.constant_schedule(-LR)),
    "scale_by_zoom_linesearch": lambda: optax.chain(optax.scale(-1.0), optax.scale_by_zoom_linesearch(5)),
    "scale_by_sm3": lambda: optax.masked(optax.scale_by_sm3(), matrices),  # It fails on scalars.
    "schedule_free": lambda: optax.contrib.schedule_free(optax.adam(LR, b1=0.0), LR),
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(LR), freeze_mask={"block": True, "square": False, "temperature": False}
    ),
    "sgd": lambda: optax.sgd(LR, momentum=0.9),
    "sm3": lambda: optax.masked(optax.sm3(LR), matrices),
    "snapshot": lambda: optax.snapshot("grads", lambda grads: grads),
    "sophia": lambda: optax.contrib.sophia(LR, update_interval=1),
    "split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(optax.adam(LR)),
    "stateless": lambda: optax.stateless(lambda grads, _: grads),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda grad, _: grad),
    "trace": lambda: optax.trace(0.9),
    "with_extra_args_support": lambda: optax.with_extra_args_support(optax.adam(LR)),
}
# Public functions without a return annotation that return no transform.
OTHERS = {
    "bias_correction",
    "matrix_inverse_pth_root",
    "schedule_free_eval_params",
    "sigmoid_binary_cross_entropy",
    "update_infinity_moment",
    "update_moment",
    "update_moment_per_elem_norm",
}
# Transforms whose update needs what a train step does not provide, and the reason.
NOT_STEPPED = {
    "differentially_private_aggregate": "wants a gradient of each example, not the gradient of their mean",
    "dpsgd": "wants a gradient of each example, not the gradient of their mean",
    "monitor": (
        "gives its state another structure at the first update, so the step compiled for the first does not take it"
    ),
}
# These transforms train the model on their own, because their updates depend on the current parameters.
TRAINED = ("adafactor", "adamw", "lbfgs", "lookahead", "muon", "sam", "schedule_free", "sophia")

# Transforms whose update runs inside another one, as its core or as the same function. They are not stepped twice.
CORES = {
    "add_noise": "noisy_sgd",
    "multi_transform": "partition",
    "scale": "scale_by_learning_rate",
    "scale_by_belief": "adabelief",
    "scale_by_factored_rms": "adafactor",
    "scale_by_learning_rate": "adam",
    "scale_by_optimistic_gradient": "optimistic_gradient_descent",
    "scale_by_polyak": "polyak_sgd",
    "scale_by_rms": "rmsprop",
    "scale_by_rss": "adagrad",
    "scale_by_sign": "sign_sgd",
    "scale_by_trust_ratio": "lamb",
    "trace": "sgd",
}


def constructors() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields public functions of optax and optax.contrib that return a transform or have no return annotation."""
    for module in (optax, optax.contrib):
        for name, value in inspect.getmembers(module, inspect.isfunction):
            returns = inspect.signature(value).return_annotation
            silent = returns is inspect.Signature.empty and name not in OTHERS
            if not name.startswith("_") and ("GradientTransformation" in str(returns) or silent):
                yield name, value
    yield "MultiSteps", optax.MultiSteps


CONSTRUCTORS = dict(constructors())
EVERY = pytest.mark.parametrize("name", few(CONSTRUCTORS, len(CONSTRUCTORS) // 3))


def build(name: str) -> Any:
    make = SPECIAL.get(name)
    if make is None:
        parameters = inspect.signature(CONSTRUCTORS[name]).parameters.values()
        wanted = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        assert wanted in ([], ["learning_rate"]), f"optax.{name} wants {wanted}: give it an entry in SPECIAL"
        make = functools.partial(CONSTRUCTORS[name], *[LR] * len(wanted))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Deprecated transforms are tested too.
        return make()


def test_the_lists_of_exceptions_name_what_exists() -> None:
    public = {*dir(optax), *dir(optax.contrib)}
    assert {*SPECIAL, *NOT_STEPPED, *TRAINED} <= set(CONSTRUCTORS)
    assert public >= OTHERS
    for core, optimizer in CORES.items():
        one, other = CONSTRUCTORS[core], CONSTRUCTORS[optimizer]
        assert one is other or f".{core}(" in inspect.getsource(other) or f" {core}(" in inspect.getsource(other), core


def assert_valid(sharding: jax.sharding.NamedSharding, shape: tuple[int, ...]) -> None:
    axes = [entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec if entry is not None]
    flat = [axis for entry in axes for axis in entry]
    assert len(flat) == len(set(flat))
    assert len(sharding.spec) <= len(shape)
    for size, entry in zip(shape, sharding.spec, strict=False):
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        assert size % math.prod(sharding.mesh.shape[axis] for axis in names) == 0


def owner(path: tuple[str, ...], params: dict[tuple[str, ...], Any]) -> Any:
    """Returns the parameter whose path is contained in ``path``, or None."""
    ends = [p for p in params for i in range(len(path)) if path[i : i + len(p)] == p]
    return params[max(ends, key=len)] if ends else None


def leaves(tree: Any) -> dict[tuple[str, ...], Any]:
    return {to_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@EVERY
def test_state_under_fsdp_lies_as_its_parameters(name: str, mlp: Any) -> None:
    state = jp.abstract_state(mlp.layout(), mlp.make, build(name))
    params = leaves(state.params)
    for path, leaf in leaves(state.opt_state).items():
        assert_valid(leaf.sharding, leaf.shape)
        parameter = owner(path, params)
        if parameter is not None and leaf.shape == parameter.shape:
            assert leaf.sharding == parameter.sharding, path


@EVERY
def test_state_under_zero_1_is_split_or_says_why_not(name: str, mlp: Any) -> None:
    rules = jp.Rules(batch="data", embed=None, mlp=None, optimizer=jp.over("data", min_bytes=0))
    layout = mlp.layout(rules)
    for path, leaf in leaves(jp.abstract_state(layout, mlp.make, build(name)).opt_state).items():
        assert_valid(leaf.sharding, leaf.shape)
        divides = any(size and size % 8 == 0 for size in leaf.shape)
        assert divides is any(entry is not None for entry in leaf.sharding.spec), path


@pytest.mark.parametrize(
    ("name", "role"), covering(CONSTRUCTORS, ["params", "optimizer"], keep=len(CONSTRUCTORS) // 3, strength=1)
)
def test_explain_gives_a_reason_for_every_array_left_whole(name: str, role: str, mlp: Any) -> None:
    overlay = {"params": {"embed": "data"}, "optimizer": jp.over("data", min_bytes="1KiB")}[role]
    rules = jp.Rules(batch="data", embed=None, mlp=None, **{role: overlay})
    report = jp.explain(mlp.layout(rules), mlp.make, build(name))
    assert not report.problems
    whole = [row for row in report.rows if row.part == "opt_state" and row.shape and row.replicated]
    assert [row.path for row in whole if not "".join(row.why)] == []


def test_state_of_other_shapes_is_placed_by_the_dims_it_shares_with_its_parameter(mlp: Any) -> None:
    """Covers factored moments of adafactor and the history of L-BFGS; state of an unrelated shape is replicated."""
    factored, history = (
        leaves(jp.abstract_state(mlp.layout(), mlp.make, build(name)).opt_state) for name in ("adafactor", "lbfgs")
    )
    specs = {path[-3:]: (leaf.shape, leaf.sharding.spec) for path, leaf in (factored | history).items()}
    assert specs["v_row", "block", "up"] == ((16,), P("data"))
    assert specs["v_col", "block", "up"] == ((24,), P(None))
    assert specs["v_row", "block", "down"] == ((16,), P("data"))
    assert specs["diff_params_memory", "block", "up"] == ((3, 16, 24), P(None, "data", None))
    report = jp.explain(mlp.layout(), mlp.make, build("adafactor"))
    (square,) = [row for row in report.rows if row.path.endswith("v_row/square")]
    assert (square.replicated, square.why) == (True, ("its shape does not follow from square [16, 16]",))


def side_by_side(names: Sequence[str]) -> optax.GradientTransformationExtraArgs:
    """Combines many transforms in one program and stores the updates of each; plain SGD changes the parameters."""
    txs = {name: build(name) for name in names}

    def init(params: Any) -> Any:
        return {name: (tx.init(params), jax.tree.map(jnp.zeros_like, params)) for name, tx in txs.items()}

    def update(grads: Any, state: Any, params: Any, **offered: Any) -> Any:
        news = {}
        for name, tx in txs.items():
            wanted = inspect.signature(tx.update).parameters
            extra = offered if "extra_args" in wanted else {k: v for k, v in offered.items() if k in wanted}
            news[name] = tx.update(grads, state[name][0], params, **extra)[::-1]
        return jax.tree.map(lambda g: -LR * g, grads), news

    return optax.GradientTransformationExtraArgs(init, update)


def train(layout: jp.Layout, mlp: Any, tx: Any) -> dict[tuple[str, ...], np.ndarray]:
    """Returns the state after two steps, on the host. It uses fp64, because most optimizers divide by small numbers."""
    with jax.enable_x64(True):
        shapes = jp.abstract_state(layout, mlp.make, tx)
        lowered = jp.train_step(layout, mlp.loss, donate=False).lower(shapes, mlp.batch())
        step = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})  # It compiles in half the time.
        state = initial(shapes, mlp.make, mlp.rules, tx)
        for i in range(2):
            state, _ = step(state, mlp.batch(i))
        assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float64"}
        return leaves(jax.device_get(jax.tree.map(plain, {"params": state.params, "opt_state": state.opt_state})))


def plain(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def assert_close(got: dict[tuple[str, ...], np.ndarray], want: dict[tuple[str, ...], np.ndarray]) -> None:
    """Compares within 1e-9 of the largest entry, or within a few last bits of the parameters."""
    assert got.keys() == want.keys()
    for path, value in want.items():
        atol = 1e-9 * np.abs(value).max(initial=0) + 1e-14
        np.testing.assert_allclose(got[path], value, rtol=0, atol=atol, err_msg="/".join(path))


def stepped() -> list[str]:
    """Returns the transforms to step together: not in ``TRAINED``, and no core of another transform."""
    cores = {*CORES, *(f"scale_by_{name}" for name in CONSTRUCTORS)}
    return [name for name in CONSTRUCTORS if name not in {*NOT_STEPPED, *TRAINED, *cores}]


@pytest.mark.parametrize("part", few(range(8), 1))
def test_updates_equal_one_device(part: int, mlp: Any) -> None:
    """The first part, which runs by default, is the smallest."""
    first, others = stepped()[::16], [name for i, name in enumerate(stepped()) if i % 16]
    tx = side_by_side(first if part == 0 else others[part - 1 :: 7])
    assert_close(train(mlp.layout(), mlp, tx), train(mlp.one_device, mlp, tx))


@pytest.mark.slow
@pytest.mark.parametrize("name", few(TRAINED, 1))
def test_training_equals_one_device(name: str, mlp: Any) -> None:
    tx = build(name)
    assert_close(train(mlp.layout(), mlp, tx), train(mlp.one_device, mlp, tx))


@pytest.mark.slow
def test_lookahead_keeps_its_slow_parameters_in_its_state(mlp: Any) -> None:
    """Steps equal optax's own loop with fast and slow parameters; slow parameters are sharded as the fast ones."""
    with jax.enable_x64(True):
        for tx in (
            optax.lookahead(optax.adam(LR), 2, 0.5),
            optax.chain(optax.clip(0.01), optax.lookahead(optax.sgd(LR), 2, 0.3)),
        ):
            state = jp.init(mlp.layout(), mlp.make, tx)
            assert jax.tree.map(lambda x: x.sharding, state.opt_state.slow) == jax.tree.map(
                lambda x: x.sharding, state.params
            )
            step = jp.train_step(mlp.layout(), mlp.loss, return_grads=True, donate=False)
            first = jax.device_get(state.params)
            both, own = optax.LookaheadParams(first, first), tx.init(first)

            @jax.jit
            def by_optax(grads: Any, own: Any, both: Any, tx: Any = tx) -> tuple[Any, Any]:
                updates, own = tx.update(grads, own, both)
                return optax.apply_updates(both, updates), own

            for i in range(3):
                state, metrics = step(state, mlp.batch(i))
                both, own = by_optax(jax.device_get(metrics["grads"]), own, both)
                assert_close(leaves(jax.device_get(state.params)), leaves(both.fast))
                assert_close(leaves(jax.device_get(state.opt_state.slow)), leaves(both.slow))
            apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), both.fast, both.slow)
            assert max(jax.tree.leaves(apart)) > 1e-4


def test_fast_and_slow_parameters_of_a_script_are_refused() -> None:
    def both(key: jax.Array) -> Any:
        return optax.LookaheadParams.init_synced({"w": jp.tag(jnp.ones(8), "embed")})

    layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data", embed=None))
    for tx in (optax.lookahead(optax.sgd(LR), 2, 0.5), optax.sgd(LR)):
        with raises(ModelError, "make_model", "optax.LookaheadParams"):
            jp.init(layout, both, tx)


def test_lookahead_where_it_cannot_be_is_named(mlp: Any, tmp_path: Any) -> None:
    lookahead = optax.lookahead(optax.sgd(LR), 2, 0.5)
    inside = optax.chain(optax.add_decayed_weights(0.1), lookahead)
    with raises(ConfigError, "optimizer: optax"):
        jp.abstract_state(mlp.layout(), mlp.make, inside)
    with raises(ConfigError, "offload: optax"):
        jp.abstract_state(mlp.layout(), mlp.make, jp.offload.to_disk(lookahead, path=tmp_path))


@pytest.mark.parametrize("name", NOT_STEPPED)
def test_an_optimizer_whose_update_fits_no_step_is_named(name: str) -> None:
    make = lambda key: {"w": jp.tag(jax.random.normal(key, (16, 8)), "embed", "mlp")}
    layout = jp.Layout(jp.MeshSpec(data=8).build(), jp.Rules(batch="data", embed="data", mlp=None))
    state = jp.abstract_state(layout, make, build(name))
    step = jp.train_step(layout, lambda params, batch: ((batch @ params["w"]) ** 2).mean())
    with raises(ModelError, "ema/w" if name == "monitor" else "dpsgd"):
        step.trace(state, np.ones((8, 16), np.float32))


def test_an_update_of_another_shape_is_named() -> None:
    """Otherwise the update would be broadcast."""
    tx = optax.stateless(lambda grads, _: jax.tree.map(lambda g: -g.mean(0), grads))
    make = lambda key: {"w": jp.tag(jax.random.normal(key, (16, 8)), "embed", "mlp")}
    layout = jp.Layout(jp.MeshSpec(data=8).build(), jp.Rules(batch="data", embed="data", mlp=None))
    step = jp.train_step(layout, lambda params, batch: ((batch @ params["w"]) ** 2).mean())
    with raises(ModelError, "params/w", "[8]"):
        step.trace(jp.abstract_state(layout, make, tx), np.ones((8, 16), np.float32))
