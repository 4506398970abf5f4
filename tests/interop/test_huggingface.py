"""Hugging Face checkpoints: logits and greedy tokens of transformers, round trips, and every tensor accounted for.

``benchmarks/interop/make_golden.py`` writes the golden files with transformers.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.errors import CheckpointError
from jaxpar.interop import huggingface
from jaxpar.interop.safetensors import read_tensors
from jaxpar.models import make_decoder
from jaxpar.models.llama import LlamaConfig
from jaxpar.models.llama.decode import cached_llama
from jaxpar.models.moe.config import preset

GOLDEN = Path(__file__).parents[1] / "golden" / "huggingface"
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "answers.npz").is_file())
MORE_RULES = {"experts": None, "expert_mlp": None, "latent": None, "dense_layers": None}
TOKENS = {"dp": 1, "fsdp_tp": 4, "fsdp_tp_context": 2}
"""Rows of a batch that the layout divides."""


@pytest.fixture(scope="module")
def layouts(layout_of: Callable[..., jp.Layout]) -> dict[str, jp.Layout]:
    """``dp`` on one device, and the others on 8, with rules for experts and latent attention."""
    sharded = layout_of("fsdp_tp").rules.replace(**{**MORE_RULES, "expert_mlp": "model"})
    split = sharded.replace(seq="context", residual_seq="context", cache_seq="context")
    return {
        "dp": jp.Layout(layout_of("dp", jax.devices()[:1]).mesh, layout_of("dp").rules.replace(**MORE_RULES)),
        "fsdp_tp": jp.Layout(layout_of("fsdp_tp").mesh, sharded),
        "fsdp_tp_context": jp.Layout(jp.MeshSpec(data=2, context=2, model=2).build(), split),
    }


@functools.cache
def answers(case: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / case / "answers.npz") as found:
        return dict(found)


def runner(layout: jp.Layout, config: LlamaConfig) -> Callable[[Any, Any], jax.Array]:
    """``(params, tokens) -> logits``, compiled."""
    kind = jp.abstract_state(layout, make_decoder(config), optax.identity()).metadata.kind
    run = jax.jit(lambda params, tokens: kind.merge(params, {})(tokens))

    def call(params: Any, tokens: Any) -> jax.Array:
        with layout:
            return run(params, tokens)

    return call


def in_turn(cases: Sequence[str], first: int = 0) -> list[tuple[str, str]]:
    """Each case with one of the layouts, in turn from the ``first``."""
    return [(case, [*TOKENS][(first + number) % len(TOKENS)]) for number, case in enumerate(cases)]


def check_logits(case: str, layout: jp.Layout, rows: int) -> None:
    config = huggingface.read_config(GOLDEN / case)
    params = huggingface.load(layout, GOLDEN / case)
    wanted = answers(case)
    found = np.asarray(runner(layout, config)(params, np.tile(wanted["tokens"], (rows, 1))))
    assert np.ptp(wanted["logits"]) > 2
    np.testing.assert_allclose(found, np.tile(wanted["logits"], (rows, 1, 1)), atol=1e-4, rtol=0)


QUICK = {"deepseek_v3": "dp", "gemma3": "dp", "llama3": "dp"}
"""tests/training/test_parity.py compares layouts, and a program for one device compiles in half the time."""


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *QUICK.items(),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in in_turn(CASES) if pair not in QUICK.items()),
    ],
)
def test_logits_are_those_of_transformers(case: str, layout: str, layouts: dict[str, jp.Layout]) -> None:
    check_logits(case, layouts[layout], TOKENS[layout])


CACHED = [case for case in CASES if case != "deepseek_v3"]


def check_greedy(case: str, layout: jp.Layout, rows: int) -> None:
    config = huggingface.read_config(GOLDEN / case)
    wanted = answers(case)
    prompts = wanted["tokens"][:, :8].tolist() * rows
    generator = jp.Generator(layout, make_decoder(config), cached_llama(config), batch=rows, slots=64)
    params = generator.prepare(huggingface.load(layout, GOLDEN / case))
    found = generator.generate(params, prompts, most=50)
    assert found == [wanted["greedy"].tolist()] * rows


@pytest.mark.parametrize(
    ("case", "layout"),
    [("mistral", "dp"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in in_turn(CACHED, 1))],
)
def test_greedy_tokens_are_those_of_transformers(case: str, layout: str, layouts: dict[str, jp.Layout]) -> None:
    """Another layout for each family than that of its logits."""
    check_greedy(case, layouts[layout], TOKENS[layout])


@pytest.mark.slow
def test_a_window_ends_between_the_slots_of_two_devices(layouts: dict[str, jp.Layout]) -> None:
    rules = layouts["dp"].rules.replace(cache_seq="context")
    check_greedy("mistral", jp.Layout(jp.MeshSpec(data=2, context=4).build(), rules), rows=4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp_tp"])
def test_greedy_tokens_without_a_cache(layout: str, layouts: dict[str, jp.Layout]) -> None:
    """Latent attention has no cache here, so each token takes a forward pass of all tokens."""
    config, rows = huggingface.read_config(GOLDEN / "deepseek_v3"), TOKENS[layout]
    params, run = huggingface.load(layouts[layout], GOLDEN / "deepseek_v3"), runner(layouts[layout], config)
    wanted = answers("deepseek_v3")
    tokens = np.zeros((rows, 64), np.int32)
    tokens[:, :8] = wanted["tokens"][:, :8]
    for at in range(8, 58):
        tokens[:, at] = np.asarray(jnp.argmax(run(params, tokens)[:, at - 1], -1))
    np.testing.assert_array_equal(tokens[:, 8:58], np.tile(wanted["greedy"], (rows, 1)))


def tensor_bytes(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (t.dtype, t.shape, t.file.read_bytes()[t.start : t.start + t.size])
        for name, t in read_tensors(folder).items()
    }


@pytest.mark.parametrize(("case", "layout"), in_turn(CASES, 1))
def test_a_round_trip_is_bitwise(case: str, layout: str, layouts: dict[str, jp.Layout], tmp_path: Path) -> None:
    config = huggingface.read_config(GOLDEN / case)
    params = huggingface.load(layouts[layout], GOLDEN / case)
    huggingface.export(tmp_path / "one", params, config, file_bytes=5_000)
    assert tensor_bytes(tmp_path / "one") == tensor_bytes(GOLDEN / case)
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 2
    assert huggingface.read_config(tmp_path / "one") == config
    again = huggingface.load(layouts["dp"], tmp_path / "one")
    chex.assert_trees_all_equal(params, again)


@pytest.mark.slow
def test_a_state_is_that_of_init_with_other_parameters(layouts: dict[str, jp.Layout]) -> None:
    layout, tx = layouts["fsdp_tp"], optax.adam(1e-3)
    config = huggingface.read_config(GOLDEN / "llama3")
    state = huggingface.load(layout, GOLDEN / "llama3", tx, seed=3)
    wanted = jp.init(layout, make_decoder(config), tx, seed=3)
    assert jax.tree.structure(state) == jax.tree.structure(wanted)
    assert [x.sharding for x in jax.tree.leaves(state)] == [x.sharding for x in jax.tree.leaves(wanted)]
    np.testing.assert_array_equal(jax.random.key_data(state.key), jax.random.key_data(wanted.key))
    embedding = tensor_bytes(GOLDEN / "llama3")["model.embed_tokens.weight"]
    assert np.asarray(state.params["embedding"]).tobytes() == embedding[2]
    assert int(state.step) == 0 and not np.asarray(state.opt_state[0].mu["embedding"]).any()


def test_values_are_cast_as_asked(layouts: dict[str, jp.Layout], tmp_path: Path) -> None:
    config = huggingface.read_config(GOLDEN / "qwen2", dtype="bfloat16", remat="full")
    assert (config.dtype, config.param_dtype, config.remat) == ("bfloat16", "bfloat16", "full")
    layout, fp32 = layouts["dp"], huggingface.load(layouts["dp"], GOLDEN / "qwen2")
    params = huggingface.load(layout, GOLDEN / "qwen2", config=config)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype("bfloat16")), params, fp32)
    huggingface.export(tmp_path / "one", params, config)
    assert {stored.dtype for stored in read_tensors(tmp_path / "one").values()} == {"BF16"}
    assert huggingface.read_config(tmp_path / "one", remat="full") == config
    huggingface.export(
        tmp_path / "two", fp32, replace(config, dtype="float32", param_dtype="float32"), dtype="bfloat16"
    )
    assert tensor_bytes(tmp_path / "one") == tensor_bytes(tmp_path / "two")


def changed(folder: Path, case: str, fields: dict[str, Any]) -> Path:
    """A copy of a golden checkpoint with other fields in its config.json."""
    shutil.copytree(GOLDEN / case, folder)
    before = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**before, **fields}))
    return folder


def test_every_tensor_is_accounted_for(layouts: dict[str, jp.Layout], tmp_path: Path) -> None:
    folder = changed(tmp_path / "one", "mistral", {"vocab_size": 40, "model_type": "qwen2"})
    data = (folder / "model.safetensors").read_bytes()
    data = data.replace(b"0.mlp.up_proj", b"0.mlp.pu_proj").replace(
        b'model.norm.weight":{"dtype":"F32","shape":[16]', b'model.norm.weight":{"dtype":"I32","shape":[16]'
    )
    (folder / "model.safetensors").write_bytes(data)
    with raises(CheckpointError, "model.norm.weight", "lm_head.weight"):
        huggingface.load(layouts["dp"], folder)


@pytest.mark.slow
def test_layers_of_further_tokens_are_written_and_read(tmp_path: Path, layouts: dict[str, jp.Layout]) -> None:
    config = preset("deepseek_v3", layers=2, embed=32, mlp=48, expert_mlp=24, vocab=64, mtp_depth=2)
    state = jp.init(layouts["dp"], make_decoder(config), optax.identity())
    huggingface.export(tmp_path / "one", state.params, config)
    names = {name for name in read_tensors(tmp_path / "one") if name.startswith("model.layers.3.")}
    own = {name.removeprefix("model.layers.3.") for name in names}
    assert {"eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"} < own
    assert {"embed_tokens.weight", "shared_head.head.weight", "mlp.experts.7.up_proj.weight"} < own
    assert json.loads((tmp_path / "one" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    assert huggingface.read_config(tmp_path / "one").mtp_depth == 2
    reports: list[Any] = []
    again = huggingface.load(layouts["fsdp_tp"], tmp_path / "one", report=reports.append)
    chex.assert_trees_all_equal(jax.device_get(again), jax.device_get(state.params))
    assert len(reports[0].ignored) == 2 * 2  # copies of the embedding and of the head
    without = huggingface.read_config(tmp_path / "one", mtp_depth=0)
    plain = huggingface.load(layouts["dp"], tmp_path / "one", config=without)
    assert set(state.params) - set(plain) == {"mtp"}
