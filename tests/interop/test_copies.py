"""Tensors that are skipped as copies of others are compared: what differs is read, or is an error."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.errors import CheckpointError
from jaxpar.interop import copies, huggingface
from jaxpar.interop.safetensors import DTYPES, SPELLED, read_tensors
from jaxpar.models import make_decoder
from jaxpar.models.moe.config import preset
from jaxpar.training.model import build_shapes

GOLDEN = Path(__file__).parents[1] / "golden" / "huggingface"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DIMS = ("embed", "norm", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers")
DIMS += ("experts", "expert_mlp", "latent", "dense_layers")


@pytest.fixture(scope="module")
def layout() -> jp.Layout:
    return jp.Layout(
        jp.MeshSpec(data=2).build(jax.devices()[:2]),
        jp.Rules(batch="data", **dict.fromkeys(DIMS), params={"embed": "data"}),
    )


def arrays(folder: Path) -> dict[str, np.ndarray]:
    read = lambda t: t.file.read_bytes()[t.start : t.start + t.size]
    return {n: np.frombuffer(read(t), DTYPES[t.dtype]).reshape(t.shape) for n, t in read_tensors(folder).items()}


def write(folder: Path, tensors: dict[str, np.ndarray], fields: dict[str, Any]) -> Path:
    """Writes a checkpoint by the published layout, without a line of jaxpar."""
    folder.mkdir()
    header, at = {}, 0
    for name, value in tensors.items():
        place = [at, at + value.nbytes]
        header[name] = {"dtype": SPELLED[value.dtype.name], "shape": list(value.shape), "data_offsets": place}
        at += value.nbytes
    text = json.dumps(header).encode()
    data = b"".join(value.tobytes() for value in tensors.values())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def tied(folder: Path, head: Callable[[np.ndarray], np.ndarray]) -> tuple[Path, dict[str, np.ndarray]]:
    """Llama 3 with ``tie_word_embeddings: true``, and a head of its own beside the embedding."""
    tensors = arrays(GOLDEN / "llama3")
    assert HEAD not in tensors
    tensors[HEAD] = head(tensors[EMBEDDING].copy())
    return write(folder, tensors, json.loads((GOLDEN / "llama3" / "config.json").read_text())), tensors


def changed(at: tuple[int, int], value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(x: np.ndarray) -> np.ndarray:
        x[at] = value
        return x

    return change


def test_a_head_that_is_the_embedding_is_skipped(layout: jp.Layout, tmp_path: Path) -> None:
    """A copy may have a dtype that holds the same values."""
    folder, _ = tied(tmp_path / "one", lambda x: x.astype(np.float64))
    reports: list[huggingface.LoadReport] = []
    params = huggingface.load(layout, folder, report=reports.append)
    assert huggingface.read_config(folder).tie_embeddings and "head" not in params
    plain = huggingface.LoadReport(reports[0].bytes_read, reports[0].tensors, (HEAD,))
    assert reports == [plain] and reports[0].bytes_read > 32 * 16 * (4 + 8)


@pytest.mark.parametrize("at", [(0, 0), (31, 15)])
def test_another_head_is_read_as_transformers_does(layout: jp.Layout, at: tuple[int, int], tmp_path: Path) -> None:
    folder, tensors = tied(tmp_path / "one", changed(at, 7.0))
    config = huggingface.read_config(folder)
    assert not config.tie_embeddings
    assert huggingface.read_config(folder, tie_embeddings=True).tie_embeddings
    params = huggingface.load(layout, folder, config=config)
    np.testing.assert_array_equal(np.asarray(params["head"]).T, tensors[HEAD])
    np.testing.assert_array_equal(np.asarray(params["embedding"]), tensors[EMBEDDING])


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (changed((31, 15), 7.0), "[31, 15]"),
        (changed((20, 3), np.nan), "[20, 3]"),
        (lambda x: x[:-1], "F32"),
    ],
)
def test_a_head_that_is_not_dropped_in_silence(
    layout: jp.Layout, head: Callable[[np.ndarray], np.ndarray], name: str, tmp_path: Path
) -> None:
    """Also with a configuration that ties the head."""
    folder, _ = tied(tmp_path / "one", head)
    config = huggingface.read_config(folder, tie_embeddings=True)
    with raises(CheckpointError, name):
        huggingface.load(layout, folder, config=config)


def test_all_rows_are_compared(layout: jp.Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that ``read_config`` does not look at, and each by one process."""
    folder, _ = tied(tmp_path / "one", changed((17, 2), 7.0))
    monkeypatch.setattr(copies, "_SAMPLE_BYTES", 8 * 16 * 5)
    assert huggingface.read_config(folder).tie_embeddings
    with raises(CheckpointError, "model.embed_tokens.weight", "0.187621"):
        huggingface.load(layout, folder)
    stored, copy = read_tensors(folder), [copies.Copy(HEAD, EMBEDDING)]
    failed = []
    for k in range(3):
        try:
            copies.check_copies(copy, stored, folder, (k, 3))
        except CheckpointError:
            failed.append(k)
    assert failed == [1]  # rows 10 to 20


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rotary_frequencies_are_those_of_the_configuration(layout: jp.Layout, dtype: str, tmp_path: Path) -> None:
    """Older files have them, with the precision of their dtype."""
    fields = json.loads((GOLDEN / "llama2" / "config.json").read_text())
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    frequencies = lambda theta: (theta ** -(np.arange(0, 4, 2) / 4)).astype(DTYPES[SPELLED[dtype]])
    folder = write(tmp_path / "one", {**arrays(GOLDEN / "llama2"), name: frequencies(1e4)}, fields)
    huggingface.load(layout, folder)
    folder = write(tmp_path / "two", {**arrays(GOLDEN / "llama2"), name: frequencies(1e6)}, fields)
    with raises(CheckpointError, "rope_theta"):
        huggingface.load(layout, folder)
    frequencies(1e6).astype(float).min()


def test_copies_in_layers_for_further_tokens_are_compared(layout: jp.Layout, tmp_path: Path) -> None:
    config = preset("deepseek_v3", layers=2, embed=16, mlp=8, expert_mlp=8, vocab=32, heads=2, kv_heads=2, mtp_depth=1)
    rng = np.random.default_rng(0)
    draw = lambda leaf: jax.device_put(rng.normal(size=leaf.shape).astype("float32"))
    huggingface.export(tmp_path / "one", jax.tree.map(draw, build_shapes(make_decoder(config)).params), config)
    fields = json.loads((tmp_path / "one" / "config.json").read_text())
    for name, original in (("embed_tokens", EMBEDDING), ("shared_head.head", HEAD)):
        tensors, copy = arrays(tmp_path / "one"), f"model.layers.2.{name}.weight"
        np.testing.assert_array_equal(tensors[copy], tensors[original])
        tensors[copy] = changed((3, 4), 7.0)(tensors[copy].copy())
        folder = write(tmp_path / name, tensors, fields)
        with raises(CheckpointError, copy):
            huggingface.load(layout, folder)
    params = huggingface.load(layout, folder, config=huggingface.read_config(folder, mtp_depth=0))
    assert "mtp" not in params
    without = huggingface.read_config(folder, ignore=["num_nextn_predict_layers"])
    assert without == huggingface.read_config(folder, mtp_depth=0) != huggingface.read_config(folder)
