"""Which parameters decay: by words, patterns and logical dims, for stacked layers, NNX, Linen and pytrees."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from flax import nnx

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.models import make_decoder
from jaxpar.models.llama import LlamaConfig
from jaxpar.parameter_server.piece_optimizer import PieceOptimizer
from jaxpar.parameter_server.pieces import ParamPiece, ParamSpec
from jaxpar.training.model import show

SMALL = LlamaConfig(vocab=32, embed=8, layers=2, heads=2, kv_heads=2, head_dim=4, mlp=16)


def stacked(key: jax.Array) -> dict[str, Any]:
    del key
    return {
        "up": jp.tag(jnp.ones((2, 8, 16)), "layers", "embed", "mlp"),
        "b": jp.tag(jnp.ones((2, 16)), "layers", "mlp"),
        "g": jp.tag(jnp.ones((2, 8)), "layers", "embed"),
        "table": jp.tag(jnp.ones((32, 8)), "vocab", "embed"),
    }


class Plain(nn.Module):
    """Linen, without names: the paths say what a parameter is."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Embed(16, 8)(x)
        return nn.Dense(4)(nn.LayerNorm()(x))


def linen(key: jax.Array) -> Any:
    return Plain().init(key, jnp.zeros((1, 2), int))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(8, rngs=rngs)
        self.up = nnx.Linear(8, 4, rngs=rngs)


@pytest.mark.parametrize(
    ("make_model", "exclude", "without"),
    [
        (stacked, ("vectors",), {"b", "g"}),
        (stacked, ("embed",), {"g"}),  # the dim of a vector, not one of the three dims of `up`
        (stacked, ("mlp", "tab*"), {"b", "table"}),
        (
            linen,
            ("norm", "bias", "embed"),
            {"LayerNorm_0/scale", "LayerNorm_0/bias", "Dense_0/bias", "Embed_0/embedding"},
        ),
        (linen, ("*/bias",), {"LayerNorm_0/bias", "Dense_0/bias"}),
        (linen, ("Dense_0/?ias",), {"Dense_0/bias"}),
        (lambda key: Net(nnx.Rngs(key)), ("NORM", "bias"), {"norm1/scale", "norm1/bias", "up/bias"}),
        (
            make_decoder(SMALL),
            ("norm", "embed"),
            {"blocks/attention_norm/scale", "blocks/mlp_norm/scale", "norm/scale", "embedding"},
        ),
    ],
)  # fmt: skip
def test_a_rule_excludes_by_words_patterns_and_dims(
    make_model: Any, exclude: tuple[str, ...], without: set[str]
) -> None:
    mask = jp.optimizers.decay_mask(make_model, exclude)
    assert {show(path) for path, word in mask.excluded if word is not None} == without
    assert {word for _, word in mask.excluded if word is not None} == set(exclude)


def test_only_what_decays_shrinks_in_a_step_of_a_sharded_model() -> None:
    layout = jp.Layout(jp.MeshSpec(data=2, model=2).build(jax.devices()[:4]), jp.Rules(
        batch="data", layers=None, embed="data", mlp="model", vocab=None))  # fmt: skip
    mask = jp.optimizers.decay_mask(stacked, ["vectors", "table"])
    state = jp.init(layout, stacked, optax.adamw(0.1, weight_decay=0.5, mask=mask))
    zero = lambda model, x: sum(0 * w.sum() for w in jax.tree.leaves(model)) + x.mean()
    state, _ = jp.train_step(layout, zero)(state, jnp.ones((4, 1)))
    assert {name: float(w.mean()) for name, w in state.params.items()} == pytest.approx(
        {"up": 0.95, "b": 1.0, "g": 1.0, "table": 1.0}
    )


@pytest.mark.parametrize(
    ("exclude", "name"),
    [
        (
            ("norm",),
            "'b'"
        ),
        (("vocab",), "vocab"),
        (("vectors", "up", "table"),
         "vectors"),
        ("norm", "got 'norm'"),
        ((), "decay: exclude"),
    ],
)  # fmt: skip
def test_an_entry_without_an_effect_is_an_error(exclude: Any, name: str) -> None:
    with raises(ConfigError, name):
        jp.optimizers.decay_mask(stacked, exclude)


def test_servers_that_hold_single_parameters_use_the_rule() -> None:
    mask = jp.optimizers.decay_mask(linen, ["norm", "bias", "embed"])
    servers = PieceOptimizer(optax.adamw(0.1, weight_decay=0.5, mask=mask))
    moved = {}
    for name, decays in (("Dense_0/kernel", True), ("Dense_0/bias", False), ("LayerNorm_0/scale", False)):
        value = np.ones((4, 3), np.float32)
        piece = ParamPiece(f"params/{name}", 0, 4, ParamSpec((4, 3), "float32"))
        new, _ = servers.update(piece, value, servers.init(piece, value), np.zeros_like(value))
        moved[name] = bool((new != value).any()) == decays
    assert all(moved.values())


def test_a_mask_of_another_model_is_an_error() -> None:
    mask = jp.optimizers.decay_mask(stacked, ["vectors"])
    with raises(ConfigError, "optimizer.decay: w"):
        optax.adamw(0.1, mask=mask).init({"w": jnp.ones(2)})
