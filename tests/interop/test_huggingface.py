"""Hugging Face checkpoints: logits and greedy tokens of transformers, round trips, and every tensor accounted for.

``benchmarks/interop/make_golden.py`` writes the golden files with transformers.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import jaxpar as jp
from jaxpar.errors import CheckpointError, ConfigError
from jaxpar.interop import huggingface
from jaxpar.interop.families import to_config, to_fields
from jaxpar.interop.safetensors import read_tensors
from jaxpar.models import make_decoder
from jaxpar.models.llama import LlamaConfig
from jaxpar.models.llama.decode import cached_llama

GOLDEN = Path(__file__).parents[1] / "golden" / "huggingface"
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "answers.npz").is_file())
MORE_RULES = {"experts": None, "expert_mlp": None, "latent": None, "dense_layers": None}
TOKENS = {"dp": 1, "fsdp_tp": 4}
"""Rows of a batch that the layout divides."""


@pytest.fixture(scope="module")
def layouts(layout_of: Callable[..., jp.Layout]) -> dict[str, jp.Layout]:
    """``dp`` on one device, and ``fsdp_tp`` on 8, with rules for experts and latent attention."""
    found = {"dp": layout_of("dp", jax.devices()[:1]), "fsdp_tp": layout_of("fsdp_tp")}
    more = {"dp": MORE_RULES, "fsdp_tp": {**MORE_RULES, "expert_mlp": "model"}}
    return {name: jp.Layout(layout.mesh, layout.rules.replace(**more[name])) for name, layout in found.items()}


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


def check_logits(case: str, layout: jp.Layout) -> None:
    config = huggingface.read_config(GOLDEN / case)
    params = huggingface.load(layout, GOLDEN / case)
    wanted, rows = answers(case), TOKENS["dp" if layout.mesh.size == 1 else "fsdp_tp"]
    found = np.asarray(runner(layout, config)(params, np.tile(wanted["tokens"], (rows, 1))))
    assert np.ptp(wanted["logits"]) > 2
    np.testing.assert_allclose(found, np.tile(wanted["logits"], (rows, 1, 1)), atol=1e-4, rtol=0)


QUICK = ("deepseek_v3", "llama3", "mistral", "qwen2", "qwen3_moe")


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_logits_are_those_of_transformers(case: str, layouts: dict[str, jp.Layout]) -> None:
    check_logits(case, layouts["fsdp_tp"])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_on_one_device_are_those_of_transformers(case: str, layouts: dict[str, jp.Layout]) -> None:
    check_logits(case, layouts["dp"])


CACHED = [case for case in CASES if case != "deepseek_v3"]


def check_greedy(case: str, layout: jp.Layout) -> None:
    config = huggingface.read_config(GOLDEN / case)
    wanted, rows = answers(case), TOKENS["dp" if layout.mesh.size == 1 else "fsdp_tp"]
    prompts = wanted["tokens"][:, :8].tolist() * rows
    generator = jp.Generator(layout, make_decoder(config), cached_llama(config), batch=rows, slots=64)
    params = generator.prepare(huggingface.load(layout, GOLDEN / case))
    found = generator.generate(params, prompts, most=50)
    assert found == [wanted["greedy"].tolist()] * rows


@pytest.mark.parametrize("case", ["mistral", "qwen2"])
def test_greedy_tokens_are_those_of_transformers(case: str, layouts: dict[str, jp.Layout]) -> None:
    check_greedy(case, layouts["dp"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "fsdp_tp"])
@pytest.mark.parametrize("case", CACHED)
def test_greedy_tokens_of_every_family(case: str, layout: str, layouts: dict[str, jp.Layout]) -> None:
    check_greedy(case, layouts[layout])


@pytest.mark.slow
def test_a_window_ends_between_the_slots_of_two_devices(layouts: dict[str, jp.Layout]) -> None:
    rules = layouts["dp"].rules.replace(cache_seq="context")
    check_greedy("mistral", jp.Layout(jp.MeshSpec(data=2, context=4).build(), rules))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "fsdp_tp"])
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


@pytest.mark.parametrize("layout", ["dp", "fsdp_tp"])
@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_is_bitwise(case: str, layout: str, layouts: dict[str, jp.Layout], tmp_path: Path) -> None:
    config = huggingface.read_config(GOLDEN / case)
    params = huggingface.load(layouts[layout], GOLDEN / case)
    huggingface.export(tmp_path / "one", params, config, file_bytes=5_000)
    assert tensor_bytes(tmp_path / "one") == tensor_bytes(GOLDEN / case)
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 2
    assert huggingface.read_config(tmp_path / "one") == config
    again = huggingface.load(layouts["dp"], tmp_path / "one")
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), params, again)


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
    with pytest.raises(CheckpointError) as error:
        huggingface.load(layouts["dp"], folder)
    wanted = "model.layers.0.mlp.up_proj.weight; the nearest unexpected name is model.layers.0.mlp.pu_proj.weight"
    assert str(error.value).splitlines() == [
        f"{folder} does not hold the tensors of the model that its config.json describes:",
        *(f"- missing: model.layers.*.self_attn.{name}_proj.bias (2 tensors)" for name in "qkv"),
        f"- missing: {wanted}",
        "- unexpected: model.layers.0.mlp.pu_proj.weight [16, 16]",
        "- shape: model.embed_tokens.weight must be [40, 16], got [32, 16]",
        "- shape: lm_head.weight must be [40, 16], got [32, 16]",
        "- dtype: model.norm.weight must be one of F64, F32, F16, BF16, got I32",
        "Remedy: config.json and weights of one model; dequantize weights in 8 bits first.",
    ]


@pytest.mark.parametrize(
    ("case", "fields", "text"),
    [
        ("llama2", {"model_type": "lama"}, "got 'lama'. Did you mean 'llama'?"),
        ("llama2", {"model_type": "falcon"}, "model_type must be one of llama, mistral, qwen2, qwen3, mixtral"),
        ("llama2", {"attention_bias": True}, "not implemented: attention_bias must be False, got True"),
        ("llama2", {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ("llama2", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ("llama2", {"hidden_size": "many"}, "hidden_size must be a number, got 'many'"),
        ("llama2", {"rope_parameters": {"rope_type": "yarn"}}, "got rope_type 'yarn'"),
        ("llama3", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor': None"),
        ("llama2", {"num_key_value_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None},
            "layer_types has both",
        ),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise must be 0.0, got 0.1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers must be [], got [1]"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
    ],
)
def test_what_is_not_implemented_is_an_error(case: str, fields: dict[str, Any], text: str) -> None:
    before = json.loads((GOLDEN / case / "config.json").read_text())
    with pytest.raises(ConfigError) as error:
        to_config({**before, **fields})
    assert text in str(error.value)


def test_older_configurations_are_read() -> None:
    old = json.loads((GOLDEN / "llama3" / "config.json").read_text())
    rope = old.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    new = to_config(json.loads((GOLDEN / "llama3" / "config.json").read_text()))
    assert to_config({**old, "rope_theta": theta, "rope_scaling": rope}) == new
    rope["type"] = rope.pop("rope_type")
    assert to_config({**old, "rope_theta": theta, "rope_scaling": rope, "unsloth": "x"}, ignore=["unsloth"]) == new
    assert (new.rope_theta, new.rope_factor, new.rope_original_seq) == (500.0, 8.0, 32)


def test_a_window_of_all_layers_is_read() -> None:
    fields = json.loads((GOLDEN / "qwen2" / "config.json").read_text())
    del fields["layer_types"]
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    assert to_config({**fields, **window}).sliding_window == 8
    assert to_config(fields).sliding_window is None


@pytest.mark.parametrize("case", CASES)
def test_the_family_is_found(case: str) -> None:
    fields = json.loads((GOLDEN / case / "config.json").read_text())
    assert to_fields(to_config(fields))["model_type"] == fields["model_type"]


def test_what_no_family_can_express_is_an_error(tmp_path: Path) -> None:
    config = LlamaConfig(qk_norm=True, qkv_bias=True)
    with pytest.raises(ConfigError, match="export: no family can express this configuration"):
        to_fields(config)
    with pytest.raises(ConfigError, match="export: mistral cannot express"):
        to_fields(LlamaConfig(qk_norm=True), "mistral")
    with pytest.raises(ConfigError, match="family must be one of llama, .* got 'lama'. Did you mean 'llama'"):
        to_fields(config, "lama")


def fields_of(case: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((GOLDEN / case / "config.json").read_text())
    return fields


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**20),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(
        st.sampled_from(["rope_type", "rope_theta", "factor"]), st.none() | st.text(max_size=2), max_size=2
    ),
)


@examples(60)
@given(st.data())
def test_no_field_raises_another_error(data: st.DataObject) -> None:
    fields = fields_of(data.draw(st.sampled_from(CASES)))
    for key in data.draw(st.lists(st.sampled_from(sorted({*fields, "layer_types", "rope_scaling"})), max_size=3)):
        fields[key] = data.draw(ODD)
    try:
        to_config(fields)
    except ConfigError as error:
        assert len(str(error)) < 1000


SMALL = {"hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}
SMALL |= {"bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.40.1", "torch_dtype": "bfloat16"}
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("intermediate_size",)
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"rope_type": "llama3"}  # type: ignore[dict-item]
QWEN = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 24, "rope_theta": 1e6}
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "Llama 2 7B": (
        {"model_type": "llama", "pretraining_tp": 1, "rope_scaling": None},
        (32_000, 4096, 32, 32, 32, 11_008),
        6_738_415_616,
    ),
    "Llama 3.2 1B": (
        {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3, "head_dim": 64, "tie_word_embeddings": True},
        (128_256, 2048, 16, 32, 8, 8192),
        1_235_814_400,
    ),
    "Mistral 7B": ({"model_type": "mistral", "sliding_window": 4096}, (32_000, 4096, 32, 32, 8, 14_336), 7_241_732_096),
    "Qwen2.5 0.5B": (
        {"model_type": "qwen2", **QWEN, "use_mrope": False, "tie_word_embeddings": True},
        (151_936, 896, 24, 14, 2, 4864),
        494_032_768,
    ),
    "Qwen3 0.6B": (
        {"model_type": "qwen3", **QWEN, "sliding_window": None, "head_dim": 128, "tie_word_embeddings": True},
        (151_936, 1024, 28, 16, 8, 3072),
        596_049_920,
    ),
    "Mixtral 8x7B": (
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        (32_000, 4096, 32, 32, 8, 14_336),
        46_702_792_704,
    ),
    "Qwen3 30B A3B": (
        {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"head_dim": 128, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], **QWEN},
        (151_936, 2048, 48, 32, 4, 6144),
        30_532_122_624,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_number_of_parameters(name: str) -> None:
    own, sizes, params = PUBLISHED[name]
    config = to_config({**SMALL, **dict(zip(SIZES, sizes, strict=True)), **own})
    assert config.params == params
    assert to_config(to_fields(config)) == config
