"""Whole models in several dimensions equal one device, and what explain and ``jaxpar tensor`` say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from flax import nnx
from one_step import one_step

import jaxpar as jp
from jaxpar.app.cli import main
from jaxpar.models import next_token_loss, preset
from jaxpar.models.llama.model import make_llama
from jaxpar.nnx import axes
from tests.profiles import few

LAYOUTS = Path(__file__).parents[3] / "configs" / "layouts"
FILES = {"2d": "tp_2d", "2.5d": "tp_25d", "3d": "tp_3d"}
MESHES = [
    ("2d", {"x": 2, "y": 4}),
    ("2d", {"x": 2, "y": 2, "data": 2}),
    ("2.5d", {"x": 2, "y": 2, "z": 2}),
    ("3d", {"x": 2, "y": 2, "z": 2}),
]
CONFIG = preset(
    "tiny", layers=2, dtype="float32", heads=8, kv_heads=4, embed=48, mlp=88, vocab=264, head_dim=6, remat="full"
)


def file_rules(kind: str) -> jp.Rules:
    return jp.Layout.from_yaml(LAYOUTS / f"{FILES[kind]}.yaml", devices=64).rules


MAKE = make_llama(CONFIG)


def gradients(layout: jp.Layout) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab, (8, 14))
    metrics, grads, _ = one_step(layout, next_token_loss, MAKE, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves} | {"loss": np.asarray(metrics["loss"])}


@pytest.fixture(scope="module")
def of_one_device() -> dict[str, np.ndarray]:
    return gradients(jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), file_rules("2d")))


@pytest.mark.parametrize(("kind", "mesh"), few(MESHES, 1, names=2))
def test_a_llama_has_the_gradients_of_one_device(kind: str, mesh: dict[str, int], of_one_device: Any) -> None:
    found = gradients(jp.Layout(jp.MeshSpec(**mesh).build(), file_rules(kind)))
    assert found.keys() == of_one_device.keys()
    for name, expected in of_one_device.items():
        assert np.abs(found[name] - expected).max() <= 3e-6 * np.abs(expected).max(), name


@pytest.mark.parametrize("kind", FILES)
def test_the_files_hold_the_rules(kind: Any) -> None:
    base = jp.Layout.from_yaml(LAYOUTS / "dp.yaml", devices=8).rules
    assert jp.tensor.rules(kind, base) == file_rules(kind)


class PlainMlp(nnx.Module):
    """A model of somebody else: plain matmuls, and names for its dims."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.2)
        self.up = nnx.Param(axes(init)("embed", "mlp")(rngs.params(), (24, 40)))
        self.down = nnx.Param(axes(init)("mlp", "embed")(rngs.params(), (40, 24)))

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jp.hint(jnp.tanh(x @ self.up[...]), "batch", "mlp")
        return jp.hint(hidden @ self.down[...], "batch", "embed")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mesh"), few(MESHES, 1, names=2))
def test_a_model_of_plain_matmuls_runs_by_rules_alone(kind: Any, mesh: dict[str, int]) -> None:
    x = np.random.default_rng(0).normal(size=(8, 24)).astype(np.float32)
    rules = jp.tensor.rules(kind, jp.Rules(batch="data", embed=None, mlp=None))
    found = []
    for built in (jp.MeshSpec(**mesh).build(), jp.MeshSpec().build(jax.devices()[:1])):
        layout = jp.Layout(built, rules)
        state = jp.init(layout, lambda key: PlainMlp(nnx.Rngs(key)), optax.sgd(1.0))
        step = jp.train_step(layout, lambda model, batch: jnp.mean(model(batch) ** 2))
        with jax.default_matmul_precision("highest"):
            state, metrics = step(state, x)
        found.append([np.asarray(leaf) for leaf in (*jax.tree.leaves(state.params), metrics["loss"])])
    for a, b in zip(*found, strict=True):
        assert np.abs(a - b).max() <= 1e-6 * np.abs(b).max()


@pytest.mark.parametrize(
    ("kind", "devices", "depth", "sizes"),
    [
        ("1d", 6, None, {"model": 6}),
        ("2d", 9, None, {"x": 3, "y": 3}),
        ("2.5d", 8, None, {"x": 2, "y": 2, "z": 2}),
        ("2.5d", 64, None, {"x": 4, "y": 4, "z": 4}),
        ("2.5d", 64, 1, {"x": 8, "y": 8, "z": 1}),
        ("2.5d", 18, None, {"x": 3, "y": 3, "z": 2}),
        ("3d", 343, None, {"x": 7, "y": 7, "z": 7}),
    ],
)
def test_grids(kind: Any, devices: int, depth: int | None, sizes: dict[str, int]) -> None:
    assert jp.tensor.grid(kind, devices, depth=depth) == sizes


@pytest.mark.parametrize(
    ("kind", "devices", "depth", "near"),
    [
        ("2d", 48, None, "36 or 49"),
        ("2.5d", 6, None, "8"),
        ("2.5d", 64, 3, "48 or 75"),
        ("3d", 32, None, "27 or 64"),
        ("3d", 0, None, "8"),
    ],
)
def test_numbers_of_devices_that_form_no_grid(kind: Any, devices: int, depth: int | None, near: str) -> None:
    with raises(jp.errors.MeshError, kind, near):
        jp.tensor.grid(kind, devices, depth=depth)


def test_an_unknown_kind() -> None:
    with raises(jp.errors.MeshError, "4d"):
        jp.tensor.grid("4d", 16)  # type: ignore[arg-type]


def test_rules_require_axes_for_the_batch() -> None:
    with raises(jp.errors.RulesError, "tensor.rules()"):
        jp.tensor.rules("2d", jp.Rules(embed=None))


def test_explain_says_what_each_matmul_sends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", str(write(tmp_path, "tp_2d", "x: 2, y: 4"))])
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "(mlp, embed): all-gather of the input over x; reduce-scatter of the result over y; sends 10,240 bytes "
        "forward and 14,336 backward"
    ) in text


def write(folder: Path, layout: str, mesh: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(
        "model: {family: llama, preset: tiny, heads: 8, kv_heads: 8, embed: 64, mlp: 128, layers: 1, dtype: float32}\n"
        f"layout: {LAYOUTS / layout}.yaml\n"
        f"mesh: {{data: 1, {mesh}}}\n"
        "data: {source: synthetic, batch: 8, seq: 8}\n"
    )
    return file


def test_the_command_compares_the_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write(tmp_path, "dp", "model: 1"), tmp_path / "out.json"
    arguments = ["tensor", str(file), "--topology", "v5e:2x4", "--json", str(out)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    plans = {plan["name"]: plan for plan in json.loads(out.read_text())["plans"]}
    assert list(plans) == ["1d", "2d", "2.5d", "3d"]
    assert plans["3d"]["mesh"] == {"x": 2, "y": 2, "z": 2}
    assert plans["2d"]["problem"].startswith("2d tensor parallelism requires a square q² devices, but there are 8.")
    best = min((p for p in plans.values() if not p["problem"]), key=lambda p: p["link_seconds"] + p["compute_seconds"])
    assert f"{best['name']} wins with " in text
    assert "2d: not possible: 2d tensor parallelism requires" in text


@pytest.mark.slow
def test_the_command_leaves_the_other_devices_to_data(tmp_path: Path) -> None:
    file, out = write(tmp_path, "dp", "model: 1"), tmp_path / "out.json"
    assert main(["tensor", str(file), "--topology", "v5e:2x4", "--devices", "4", "--json", str(out)]) == 0
    plans = {plan["name"]: plan for plan in json.loads(out.read_text())["plans"]}
    assert plans["2d"]["mesh"] == {"data": 2, "x": 2, "y": 2} and not plans["2d"]["problem"]
