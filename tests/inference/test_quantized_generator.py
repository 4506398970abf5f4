"""Generation with weights in int8 and int4, by channel and by group: tokens of one device, bytes, and errors."""

from __future__ import annotations

from typing import Any

import generators
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from generators import CONFIG, TIED, one_device
from profiles import few

import jaxpar as jp
from jaxpar.compression import QuantizeConfig, QuantizedArray, bytes_of, dequantize, quantize
from jaxpar.models.llama import make_llama
from jaxpar.models.llama.decode import CONTRACTING_DIMS, cached_llama, quantized_weights

RULES = generators.RULES.replace(seq="context", residual_seq="context", layers=None)
PROMPTS, MOST = generators.PROMPTS[:3], generators.MOST[:3]
ALL = ("*blocks/*", "embedding", "head")


def generator(mesh: Any, how: QuantizeConfig | None, config: Any = CONFIG) -> jp.Generator:
    return generators.generator(mesh, RULES, config, {} if how is None else {"weights": how})


def initial(config: Any) -> Any:
    return jp.init(jp.Layout(one_device(), RULES), make_llama(config), optax.identity()).params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "config"),
    few(
        [
            (quantized_weights(CONFIG, 4, 16, targets=ALL), CONFIG),
            (quantized_weights(TIED, 8, None, targets=("*blocks/*", "embedding")), TIED),
        ],
        1,
        names=2,
    ),
    ids=["int4 in groups", "int8 by channel, tied"],
)
def test_tokens_are_those_of_the_dequantized_model_in_every_layout(how: QuantizeConfig, config: Any) -> None:
    """Groups of 16 of the 32 inputs lie across the 8 rows that a device has."""
    params = initial(config)
    made = quantize(params, how)
    one = generator(one_device(), None, config)
    want = one.generate(dequantize(made, "float32"), PROMPTS, most=MOST)
    assert len({token for tokens in want for token in tokens}) > 3, "tokens that say something"
    model = generator(jp.MeshSpec(data=4, model=2).build(), how, config)
    kept = model.prepare(jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, model.params))
    assert [x.sharding for x in jax.tree.leaves(kept)] == [x.sharding for x in jax.tree.leaves(model.prepared)]
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(made), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    assert model.generate(kept, PROMPTS, most=MOST) == want
    # Parameters that are integers already are taken as they are.
    own = generator(one_device(), how, config)
    assert own.generate(own.prepare(made), PROMPTS, most=MOST) == want


def test_the_report_counts_half_a_byte_for_each_int4() -> None:
    how = quantized_weights(CONFIG, 4, 16)
    dense, made = (generator(jp.MeshSpec(model=2).abstract(2), h) for h in (None, how))
    report = made.explain()
    row = report["params/blocks/attention/q/values"]
    assert (row.dtype, row.bytes, row.device_bytes) == ("int4", 2 * 32 * 4 * 8 // 2, 2 * 32 * 4 * 8 // 4)
    assert report["params/blocks/attention/q/scales"].shape == (2, 2, 4, 8)
    assert report["params/blocks/attention/o/scales"].shape == (2, 2, 1, 32)
    assert report.total("params").bytes == bytes_of(made.prepared)
    layers = sum(x.size for x in jax.tree.leaves(dense.prepared["blocks"]) if x.ndim > 2)
    saved = dense.explain().total("params").bytes - report.total("params").bytes
    assert saved == layers * 4 - layers // 2 - layers // 16 * 4


def test_the_program_holds_int4_in_half_a_byte() -> None:
    model = generator(one_device(), quantized_weights(CONFIG, 4, 16, targets=ALL))
    program = model.decode.lower(model.prepared, model.abstract).compile()
    held = jp.audit(program, mesh=model.layout.mesh).memory["argument"]
    assert held < model.explain().total("params", "cache").device_bytes + 200


@pytest.mark.slow
def test_gathers_are_of_integers() -> None:
    model = generator(jp.MeshSpec(data=4, model=2).build(), quantized_weights(CONFIG, 4, 8))
    program = model.decode.lower(model.prepared, model.abstract).compile()
    gathers = [c for c in jp.audit(program, mesh=model.layout.mesh).collectives if c.kind == "all-gather"]
    matrices = 2 * 32 * 4 * 8 + 2 * 32 * 2 * 8 + 3 * 32 * 48
    integers = sum(c.result_bytes * c.count for c in gathers if c.dtype in ("s4", "s8"))
    assert 0 < integers <= CONFIG.layers * matrices // 2, gathers
    # Scales are an eighth as many as integers, in four bytes; embedding and head are fp32.
    others = sum(c.result_bytes * c.count for c in gathers if c.dtype not in ("s4", "s8"))
    assert others <= CONFIG.layers * matrices // 2 // 8 * 4 + 2 * 64 * 32 * 4, gathers


def test_a_model_of_ones_own_decodes_with_integers() -> None:
    """A bigram table in Linen's form, by channel; its decoder is a user's own."""
    table = jax.random.normal(jax.random.key(0), (16, 16))
    make_model = lambda key: {"params": {"table": jp.tag(table, None, "vocab")}}
    decoder = jp.inference.DecoderFns(
        cache=lambda batch, slots: {},
        prefill=lambda model, tokens, slots: (jnp.take(model["params"]["table"].astype("float32"), tokens, axis=0), {}),
        step=lambda model, tokens, at, cache: (model["params"]["table"].astype("float32")[tokens], cache),
        logits=lambda model, x: x,
        vocab=16,
        quantize=QuantizeConfig(("table",), bits=8),
    )
    layout = jp.Layout(jp.MeshSpec(model=2).build(jax.devices()[:2]), jp.Rules(batch=None, vocab="model", seq=None))
    model = jp.Generator(layout, make_model, decoder, batch=1, slots=16)
    assert isinstance(model.prepared["table"], QuantizedArray)
    params = jp.init(layout, make_model, optax.identity()).params
    (made,) = model.generate(model.prepare(params), [[3]], most=5)
    want, token = [], 3
    for _ in range(5):
        token = int(np.argmax(table[token]))
        want.append(token)
    assert made == want


@pytest.mark.slow
def test_targets_and_dims_of_built_in_models() -> None:
    how = quantized_weights(CONFIG)
    assert how.axis is CONTRACTING_DIMS and how.skip == ("*norm/scale",)
    made = quantize(initial(CONFIG), how)
    found = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, x in jax.tree_util.tree_leaves_with_path(made, is_leaf=lambda x: isinstance(x, QuantizedArray))
        if isinstance(x, QuantizedArray)
    ]
    assert found == [
        f"blocks/{name}"
        for name in (*(f"attention/{n}" for n in "koqv"), *(f"mlp/{n}" for n in ("down", "gate", "up")))
    ]
    assert cached_llama(CONFIG, weights=how).quantize is how
