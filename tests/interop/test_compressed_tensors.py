"""Quantized checkpoints out and in: the packed numbers by their published layout, read back exactly, in any layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from error_texts import raises
from jax.sharding import NamedSharding, PartitionSpec
from one_step import drawn
from profiles import few

import jaxpar as jp
from jaxpar.compression import QuantizeConfig, bytes_of, dequantize, quantize
from jaxpar.errors import ConfigError, DamagedError
from jaxpar.interop import huggingface
from jaxpar.interop.compressed_tensors import packed_writes, quantization_fields
from jaxpar.interop.huggingface import LoadReport
from jaxpar.interop.quantized_tensors import FIELD
from jaxpar.interop.safetensors import STORED_DTYPES, create_files, lay_out, read_tensors, write_bytes
from jaxpar.interop.tensor_map import TensorRule, tensor_rules
from jaxpar.models import make_decoder
from jaxpar.models.llama import LlamaConfig
from jaxpar.models.llama.decode import quantized_weights
from jaxpar.models.moe.config import preset
from jaxpar.parallel.precision.quantized_array import DTYPES, QuantizedArray
from jaxpar.training.model import build_shapes

CONFIG = LlamaConfig(vocab=64, embed=48, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=96)


def layout(data: int, model: int = 1, config: LlamaConfig = CONFIG) -> jp.Layout:
    names = {name: None for _, dims in build_shapes(make_decoder(config)).dims for name in dims if name}
    rules = jp.Rules(**{**names, "heads": "model", "mlp": "model", "embed": "data"})
    return jp.Layout(jp.MeshSpec(data=data, model=model).build(jax.devices()[: data * model]), rules)


def params_of(here: jp.Layout, config: LlamaConfig = CONFIG) -> Any:
    return drawn(jp.abstract_state(here, make_decoder(config), optax.identity()).params, scale=0.2)


def tensor(folder: Path, name: str) -> np.ndarray:
    stored = read_tensors(folder)[name]
    data = stored.file.read_bytes()[stored.start : stored.start + stored.size]
    return np.frombuffer(data, STORED_DTYPES[stored.dtype]).reshape(stored.shape)


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """One number after the other, each by its own shift."""
    per, words = 32 // bits, packed.astype(np.int64) & 0xFFFFFFFF
    columns = [(words[:, i // per] >> (bits * (i % per))) % 2**bits for i in range(words.shape[1] * per)]
    return np.stack(columns, 1) - 2 ** (bits - 1)


@pytest.mark.parametrize(
    ("bits", "group"), few([(4, 32), (8, None), (4, 16)], 1, names=2), ids=["int4 32", "int8", "int4 16"]
)
def test_a_file_is_what_the_format_says_and_comes_back_exactly(tmp_path: Path, bits: int, group: int | None) -> None:
    """Groups of 32 are two heads of the attention's output; shards of 12 rows cut groups."""
    here = layout(4, 2)
    chosen: dict[str, Any] = {"skip": ("blocks/attention/k",)}
    if group == 32:
        chosen = {"targets": ("attention/o", "mlp/down")}
    made = quantize(params_of(here), quantized_weights(CONFIG, bits, group, **chosen))
    huggingface.export(tmp_path / "out", made, CONFIG)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())[FIELD]
    weights = fields["config_groups"]["group_0"]["weights"]
    assert (fields["quant_method"], fields["format"], weights["num_bits"]) == (
        "compressed-tensors",
        "pack-quantized",
        bits,
    )
    assert (weights["strategy"], weights["group_size"]) == ("channel" if group is None else "group", group)
    assert "lm_head" in fields["ignore"] and "model.layers.1.self_attn.k_proj" in fields["ignore"]
    assert ("model.layers.0.self_attn.o_proj" in fields["ignore"]) is False
    base = "model.layers.1.self_attn.o_proj"
    own = made["blocks"]["attention"]["o"]
    want = np.asarray(own.values, np.int8)[1].reshape(64, 48).T
    np.testing.assert_array_equal(unpacked(tensor(tmp_path / "out", f"{base}.weight_packed"), bits), want)
    scales = tensor(tmp_path / "out", f"{base}.weight_scale")
    assert scales.shape == (48, 1 if group is None else 64 // group)
    np.testing.assert_array_equal(tensor(tmp_path / "out", f"{base}.weight_shape"), [48, 64])
    np.testing.assert_array_equal(
        want * np.repeat(scales, 64 // scales.shape[1], 1), np.asarray(own.astype(jnp.float32))[1].reshape(64, 48).T
    )
    size = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert size < bytes_of(made) + 12_000
    for there in (layout(1), layout(2, 4)):
        read = list[LoadReport]()
        found = huggingface.load(there, tmp_path / "out", report=read.append)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(dequantize(made)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert read[0].bytes_read <= size


@pytest.mark.slow
def test_pruned_weights_stay_zero(tmp_path: Path) -> None:
    here = layout(2)
    tx = jp.compression.prune(optax.sgd(0.0), jp.compression.PruneConfig(pattern=(2, 4), targets=("mlp/*",)))
    params = params_of(here)
    changes, _ = jax.jit(tx.update)(params, tx.init(params), params)
    pruned = optax.apply_updates(params, changes)
    huggingface.export(tmp_path / "out", pruned, CONFIG)
    huggingface.export(tmp_path / "small", quantize(pruned, quantized_weights(CONFIG, 4, 16)), CONFIG)
    for name in ("gate", "up", "down"):
        zeros = np.asarray(pruned["blocks"]["mlp"][name]) == 0
        assert zeros.mean() == 0.5
        for folder in ("out", "small"):
            found = np.asarray(huggingface.load(here, tmp_path / folder)["blocks"]["mlp"][name])
            assert not found[zeros].any()
            exact = np.asarray(pruned["blocks"]["mlp"][name])
            assert folder == "small" or (found == exact).all()


def as_fp8(folder: Path, config: LlamaConfig, params: Any, block: int) -> dict[str, np.ndarray]:
    """Write a checkpoint with weights in fp8 blocks by hand; returns what they stand for."""
    huggingface.export(folder / "plain", params, config)
    tensors = {name: tensor(folder / "plain", name) for name in read_tensors(folder / "plain")}
    stands_for, written = dict(tensors), dict[str, np.ndarray]()
    for name, w in tensors.items():
        if w.ndim != 2 or "layers" not in name or "gate.weight" in name:
            written[name] = w
            continue
        counts = [-(-size // block) for size in w.shape]
        scales = np.abs(np.random.default_rng(0).normal(size=counts)).astype(np.float32) + 0.1
        wide = np.repeat(np.repeat(scales, block, 0), block, 1)[: w.shape[0], : w.shape[1]]
        written[name] = (w / wide).astype(ml_dtypes.float8_e4m3fn)
        written[name.removesuffix(".weight") + ".weight_scale_inv"] = scales
        stands_for[name] = written[name].astype(np.float32) * wide
    spelled = {dtype: name for name, dtype in STORED_DTYPES.items()}
    (folder / "fp8").mkdir()
    stored = lay_out(folder / "fp8", {n: (spelled[x.dtype], x.shape) for n, x in written.items()}, 10**9)
    create_files(stored.values())
    with stored[next(iter(stored))].file.open("r+b") as file:
        for name, x in written.items():
            write_bytes(file.fileno(), stored[name], 0, memoryview(np.ascontiguousarray(x).reshape(-1).view(np.uint8)))
    fields = json.loads((folder / "plain" / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    (folder / "fp8" / "config.json").write_text(json.dumps({**fields, FIELD: quantization}))
    return stands_for


@pytest.mark.slow
def test_fp8_in_blocks_is_read_as_floats(tmp_path: Path) -> None:
    """The form of DeepSeek-V3: blocks cut heads, experts and the shards of devices."""
    config = preset("deepseek_v3", "tiny")
    params = params_of(layout(1, config=config), config)
    stands_for = as_fp8(tmp_path, config, params, 24)
    found = huggingface.load(layout(2, 2, config), tmp_path / "fp8", config=huggingface.read_config(tmp_path / "fp8"))
    leaves = {"/".join(k.key for k in path): x for path, x in jax.tree_util.tree_leaves_with_path(found)}
    huggingface.export(tmp_path / "again", found, config)
    assert len(leaves) == len(tensor_rules(config))
    for name, want in stands_for.items():
        np.testing.assert_array_equal(tensor(tmp_path / "again", name), want.astype(np.float32), name)


OUT = TensorRule("blocks/attention/o", "layers.{layer}.o_proj.weight", "e (h d) -> h d e")


def stored(tile: tuple[int, ...], bits: int = 4, shape: tuple[int, ...] = (1, 2, 16, 3)) -> QuantizedArray:
    """An output projection ``[layers, heads, head_dim, embed]`` of integers, with scales of 1."""
    values = jnp.asarray(np.random.default_rng(0).integers(-8, 8, shape), DTYPES[bits])
    return QuantizedArray(values, jnp.ones([n // t for n, t in zip(shape, tile, strict=True)]), tile)


@pytest.mark.parametrize(
    ("rule", "leaf", "name"),
    [
        (TensorRule("embedding", "embed.weight", "v e -> v e"), stored((1, 4), shape=(2, 8)), "export: embedding"),
        (OUT, stored((1, 1, 1, 3)), "[1, 1"),
        (OUT, stored((1, 2, 8, 1)), "1]"),
        (OUT, stored((1, 2, 12, 1), shape=(1, 2, 12, 3)), "12"),
    ],
    ids=["embedding", "outputs", "part of a row", "not divisible"],
)
def test_forms_that_cannot_be_written(rule: TensorRule, leaf: QuantizedArray, name: str) -> None:
    with raises(ConfigError, name):
        quantization_fields([rule], {rule.path: leaf})


def test_targets_that_are_quantized_differently_cannot_be_written() -> None:
    rules = [OUT, replace(OUT, path="blocks/attention/v")]
    leaves = {rules[0].path: stored((1, 2, 16, 1)), rules[1].path: stored((1, 1, 8, 1))}
    with raises(ConfigError, "blocks/attention/v", "export"):
        quantization_fields(rules, leaves)


@pytest.mark.parametrize("devices", [1, 4])
def test_integers_are_packed_where_they_are(devices: int) -> None:
    """16 inputs are 2 words, which 4 devices do not divide."""
    leaf = stored((1, 2, 16, 1))
    if devices > 1:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
        spread = NamedSharding(mesh, PartitionSpec(None, None, "data", None))
        leaf = replace(leaf, values=jax.device_put(leaf.values, spread))
    ((_, words), (_, scales)), shapes = packed_writes(OUT, leaf)
    numbers = np.asarray(words)[0].reshape(4, 3).T
    np.testing.assert_array_equal(unpacked(numbers, 4), np.asarray(leaf.values, np.int8)[0].reshape(32, 3).T)
    assert scales is leaf.scales and [x.tolist() for x in shapes.values()] == [[3, 32]]


def broken(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    fields[FIELD] = {**fields[FIELD], **changes}
    file.write_text(json.dumps(fields))


@pytest.mark.slow
def test_what_cannot_be_read_or_written_is_an_error(tmp_path: Path) -> None:
    here, params = layout(1), params_of(layout(1))
    huggingface.export(tmp_path / "out", quantize(params, quantized_weights(CONFIG, 4, 16)), CONFIG)
    asymmetric = {"group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": False}}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"quant_method": "gptq"}, "gptq"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"config_groups": asymmetric}, "'symmetric': False"),
    ]
    for changes, name in cases:
        broken(tmp_path / "out", **{"quant_method": "compressed-tensors", "format": "pack-quantized", **changes})
        with raises(ConfigError, name):
            huggingface.load(here, tmp_path / "out")
    eight = {"group_0": {"weights": {"num_bits": 8, "type": "int", "symmetric": True}}}
    broken(tmp_path / "out", format="pack-quantized", config_groups=eight)
    with pytest.raises(DamagedError, match="4 numbers"):
        huggingface.load(here, tmp_path / "out")
    wrong = {
        "blocks/attention/q": QuantizeConfig(("attention/q",), 4),
        "embedding": QuantizeConfig(("embedding",), 8, axis=-1),
    }
    for name, how in wrong.items():
        with raises(ConfigError, name):
            huggingface.export(tmp_path / "no", quantize(params, how), CONFIG)
    two = quantize(quantize_only(params, "q", 4), quantized_weights(CONFIG, 8, targets=("attention/o",)))
    with raises(ConfigError, "blocks/attention/q, blocks/attention/o"):
        huggingface.export(tmp_path / "no", two, CONFIG)


def quantize_only(params: Any, name: str, bits: int) -> Any:
    return quantize(params, quantized_weights(CONFIG, bits, targets=(f"attention/{name}",)))
