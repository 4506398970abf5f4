"""The wheel, installed into an empty environment outside of the checkout, runs the commands by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from error_texts import raises

from jaxpar.app.config import load_run
from jaxpar.app.shipped_configs import find_config, shipped_folder, shipped_names
from jaxpar.errors import ConfigError

ROOT = Path(__file__).parents[2]
SMALL = [f"--set={key}" for key in ("train.steps=4", "train.eval_every=4", "data.batch=8", "data.seq=32")]


def test_configurations_have_names() -> None:
    names = shipped_names()
    assert "quickstart" in names and "recipes/moe" in names and "bench/1b_fsdp16" in names
    assert shipped_folder() == ROOT / "configs" and find_config(Path("quickstart")) == ROOT / "configs/quickstart.yaml"
    assert load_run("recipes/moe").name == "moe"


@pytest.mark.parametrize("given", ["quickstart.yaml", "/quickstart", "a/b.yaml"])
def test_a_path_is_no_name(given: str) -> None:
    assert find_config(Path(given)) == Path(given)


def test_an_unknown_name() -> None:
    with raises(ConfigError, "quickstart", "quickstrt"):
        find_config(Path("quickstrt"))


@pytest.mark.slow
def test_the_wheel_trains_explains_and_generates(tmp_path: Path) -> None:
    # A launcher of pyenv is found on the path even where the Python of this folder has no uv.
    if shutil.which("uv") is None or subprocess.run(["uv", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("needs uv")

    def run(*words: str | Path) -> str:
        place = {"cwd": tmp_path, "env": {**os.environ, "JAX_PLATFORMS": "cpu"}}
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=600, **place)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("uv", "build", "--wheel", "--out-dir", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "jaxpar/configs/quickstart.yaml" in zipfile.ZipFile(wheel).namelist()
    run("uv", "venv", "--python", "3.12", tmp_path / "venv")
    run("uv", "pip", "install", "--python", tmp_path / "venv/bin/python", f"{wheel}[train]")
    jaxpar = tmp_path / "venv/bin/jaxpar"
    assert "finished and saved" in run(jaxpar, "train", "quickstart", *SMALL)
    assert (tmp_path / "runs/quickstart/loss.png").stat().st_size > 1000
    assert "blocks/mlp/gate" in run(jaxpar, "explain", "quickstart")
    saved = ("--checkpoint", "runs/quickstart/checkpoints")
    assert "def " in run(jaxpar, "generate", "quickstart", *SMALL, *saved, "--prompt=def ", "--max-new-tokens=4")
