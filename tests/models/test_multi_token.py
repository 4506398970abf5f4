"""Multi-token prediction: against a model by hand on one device, and in layouts against one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var
from one_step import BOUND, SGD, check_grads
from test_moe import CASES, ONE, SMALL, batch, config_of, maker, reference, step

import jaxpar as jp
from jaxpar.models.llama.decode import cached_llama
from jaxpar.models.llama.layers import TokenInfo, rope_table
from jaxpar.models.losses import next_token_loss, token_loss
from jaxpar.models.moe.config import MoEConfig, preset
from jaxpar.models.moe.multi_token import further_targets
from jaxpar.training.model import leaves_with_paths

DEPTH, WEIGHT = 2, 0.7


def config_with(family: str = "deepseek_v3", **changes: Any) -> MoEConfig:
    return config_of(family, mtp_depth=DEPTH, mtp_weight=WEIGHT, **changes)


def by_hand(model: Any, batch: Any) -> jax.Array:
    """The loss with all sequences cut to the positions that predict a token, instead of masks."""
    config, (rows, seq) = model.config, batch["tokens"].shape
    after = np.concatenate([batch["tokens"], batch["targets"][:, -1:]], 1)  # all tokens: 0 to seq

    def nll(h: jax.Array, targets: np.ndarray) -> jax.Array:
        logits = jax.nn.log_softmax(h @ model.head[...])
        return -jnp.sum(jnp.take_along_axis(logits, targets[..., None], -1)) / (rows * seq)

    norm = lambda layer, x: x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + config.norm_eps) * layer.scale[...]
    h, scalars = model.hidden(batch["tokens"])
    loss, more = nll(h, batch["targets"]) + scalars["loss"], []
    for k, layer in enumerate(model.mtp, 1):
        length = seq - k  # position i predicts token i + k + 1 from token i + k
        positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
        e = model.embedding[...][after[:, k : k + length]]
        pair = jnp.concatenate([norm(layer.token_norm, e), norm(layer.hidden_norm, h[:, :length])], -1)
        x, _ = layer.block(pair @ layer.projection[...], TokenInfo(rope_table(positions, config)))
        h = norm(layer.norm, x)
        more.append(nll(h, after[:, k + 1 : k + 1 + length]))
    return loss + WEIGHT * sum(more) / DEPTH


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_the_loss_is_that_of_sequences_cut_by_hand(family: str) -> None:
    """Without the routers' own losses, which also count the positions that predict nothing."""
    config = config_with(family, balance_loss=0.0, z_loss=0.0, bias_rate=None)
    layout, data = ONE.layout(), batch(4)

    def losses(params: Any, loss: Any) -> Any:
        value = loss(state.metadata.kind.merge(params, state.variables), data)
        return value[0] if isinstance(value, tuple) else value

    with jax.default_matmul_precision("highest"), layout:
        state = jp.init(layout, maker(config), SGD)
        (got, grads), (want, same) = (
            jax.jit(jax.value_and_grad(lambda p, loss=loss: losses(p, loss)))(state.params)
            for loss in (next_token_loss, by_hand)
        )
        plain = maker(config_of(family, balance_loss=0.0, z_loss=0.0, bias_rate=None))
        without = jp.init(layout, plain, SGD)
        heldout = float(losses(state.params, token_loss))
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    check_grads(jax.device_get(grads), jax.device_get(same), 2 * BOUND)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(jax.device_get(grads["mtp"])))
    assert float(got) - heldout > WEIGHT  # of two depths, each near log(64)
    assert set(state.params) - set(without.params) == {"mtp"}


def test_only_the_training_loss_reads_the_layers_of_further_tokens() -> None:
    """Of every depth it reads every weight, and it is one number beside the metrics; traced, not compiled."""
    config = config_with("mixtral", layers=1)
    with ONE.layout():
        like = jp.abstract_state(ONE.layout(), maker(config), SGD)
        leaves, tree = jax.tree.flatten(like.params)
        model = lambda xs: like.metadata.kind.merge(jax.tree.unflatten(tree, xs), like.variables)
        read = {}
        for loss in (next_token_loss, token_loss):
            traced, shapes = jax.make_jaxpr(lambda xs, loss=loss: loss(model(xs), batch(4)), return_shape=True)(leaves)
            used = {var for eqn in traced.jaxpr.eqns for var in eqn.invars if isinstance(var, Var)}
            unread = [x not in used for x in traced.jaxpr.invars]
            paths = [path for path, _ in leaves_with_paths(like.params)]
            read[loss] = {path for path, gone in zip(paths, unread, strict=True) if gone}, shapes
    assert read[next_token_loss][0] == set()
    assert read[token_loss][0] == {path for path in paths if path[0] == "mtp"} != set()
    value, metrics = read[next_token_loss][1]
    assert value.shape == metrics["mtp_loss"].shape == read[token_loss][1].shape == ()


LAYOUTS = (
    "ep tp sp",
    "ep ring forced",
    "accumulated",
    "pp fsdp",
    "pp tp",
    "pp ring",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_is_that_of_one_device(name: str) -> None:
    case = CASES[name]
    base, config = config_with(), config_with(**case.config)
    want, got = reference(base), step(case, config, base)
    assert want[0]["mtp_loss"] > 3
    for key, value in want[0].items():
        if key != "expert_load_max":
            assert got[0][key] == pytest.approx(value, rel=2e-6, abs=2e-6), key
    check_grads(got[1], want[1], BOUND)


@pytest.mark.slow
def test_generation_does_not_use_the_layers_of_further_tokens() -> None:
    layout = jp.Layout(ONE.layout().mesh, ONE.layout().rules.replace(cache_seq=None))
    found = []
    for config in (config_with("mixtral"), config_of("mixtral")):
        state = jp.init(layout, maker(config_with("mixtral")), SGD)
        params = state.params if config.mtp_depth else {k: w for k, w in state.params.items() if k != "mtp"}
        generator = jp.Generator(layout, maker(config), cached_llama(config), batch=2, slots=16)
        found.append(generator.generate(generator.prepare(params), batch(2)["tokens"][:, :6].tolist(), most=8))
    assert found[0] == found[1]


def test_targets_end_with_their_row_and_their_document() -> None:
    data = {
        "targets": jnp.array([[1, 2, 3, 4, 5, 6]]),
        "loss_mask": jnp.array([[1, 1, 1, 1, 0, 1]]),
        "segment_ids": jnp.array([[0, 0, 0, 1, 1, 1]]),
    }
    found = {name: x.tolist()[0] for name, x in further_targets(data, 2).items()}
    assert found == {
        "mtp_targets_1": [2, 3, 4, 5, 6, 0],
        "mtp_mask_1": [1, 1, 0, 0, 1, 0],
        "mtp_targets_2": [3, 4, 5, 6, 0, 0],
        "mtp_mask_2": [1, 0, 0, 1, 0, 0],
    }
    short = further_targets({"targets": jnp.ones((1, 2), int)}, 3)
    assert short["mtp_mask_3"].tolist() == [[0, 0]]


def test_sizes_count_the_layers_of_further_tokens() -> None:
    config = config_with()
    shapes = jax.eval_shape(lambda: jax.tree.leaves(jax.tree.map(jnp.asarray, _state(config))))
    assert config.params == sum(x.size for x in shapes)
    one = preset("deepseek_v3", "deepseek_v3_671b", mtp_depth=1)
    assert 11.0e9 < one.params - preset("deepseek_v3", "deepseek_v3_671b").params < 12.0e9
    assert SMALL["layers"] == 2


def _state(config: MoEConfig) -> Any:
    from flax import nnx

    return nnx.to_pure_dict(nnx.state(maker(config)(jax.random.key(0)), nnx.Param))
