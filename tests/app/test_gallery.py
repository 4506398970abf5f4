"""The gallery: every recipe can be trained on its chips, and its figures are those of the recipe as it is."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import pytest
import yaml
from error_texts import raises
from interpreters import python

import jaxpar as jp
from benchmarks.planning import gallery as measured
from jaxpar.analysis.compile.ahead_of_time import aim, step_for
from jaxpar.app import gallery
from jaxpar.app.cli import main
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.app.model_facts import step_flops
from jaxpar.errors import ConfigError
from jaxpar.sharding.hardware.topology import Topology

RECIPES = gallery.read_recipes()
SMALLEST = "vit_v5e"
LONG = ("unet_sliced_v5e", "seed_70b_v5p", "long_1m_v5p")
"""Recipes whose step takes long to trace."""


TRACED = ("vit_v5e", "unet_sliced_v5e", "seed_70b_v5p", "pretrain_8b_h100", "mixtral_v5e", "lora_8b_v5e", "long_1m_v5p")
"""One of each kind; a trace takes seconds to minutes."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.name not in TRACED], ids=lambda recipe: recipe.name)
def test_a_recipe_fits_the_mesh_of_its_chips(recipe: gallery.Recipe) -> None:
    topology = Topology.parse(recipe.chips)
    job = make_job(load_run(recipe.file))
    report = jp.explain(aim(job.layout(topology.devices), topology), job.make_model, job.tx, batch=job.batch_spec())
    assert report.problems == () and report.rows and job.step_options()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == SMALLEST else pytest.mark.slow) for name in TRACED]
)
def test_a_recipe_is_traced_and_explained_on_its_chips(name: str) -> None:
    recipe = gallery.find_recipe(name, RECIPES)
    topology = Topology.parse(recipe.chips)
    job = make_job(load_run(recipe.file))
    layout = aim(job.layout(topology.devices), topology)
    run = {"batch": job.batch_spec(), "loss_fn": job.loss_fn}
    if recipe.name not in LONG:
        run["step"] = job.step_options()  # then the memory is estimated too
    report = jp.explain(layout, job.make_model, job.tx, **run)
    assert report.problems == () and report.rows
    if recipe.name not in LONG:
        assert report.memory is not None and report.memory.total <= 1.1 * topology.accelerator.hbm_bytes


@pytest.mark.slow
def test_the_smallest_recipe_compiles() -> None:
    job = make_job(load_run(gallery.find_recipe(SMALLEST, RECIPES).file))
    layout = job.layout(jax.devices())
    step, state, batch = step_for(layout, job.make_model, job.tx, job.loss_fn, job.batch_spec(), **job.step_options())
    compiled = jax.jit(step).lower(state, batch).compile()
    assert compiled.memory_analysis().argument_size_in_bytes > 400e6  # fp32 weights and moments of 0.3e9 / 8


@pytest.mark.slow
def test_the_figures_of_a_recipe_are_those_of_its_program() -> None:
    """Needs libtpu."""
    recipe = gallery.find_recipe("pretrain_1b_v5e", RECIPES)
    assert recipe.figures is not None
    found = measured.compiled(recipe)
    assert dataclasses.replace(found, versions={}) == dataclasses.replace(recipe.figures, versions={})


def test_recipes_fit_and_the_page_shows_their_figures() -> None:
    assert len(RECIPES) >= 12
    measured_recipes = [recipe for recipe in RECIPES if recipe.figures is not None]
    assert [recipe.name for recipe in measured_recipes if recipe.figures is None or not recipe.figures.fits] == []
    assert set(gallery.read_figures(gallery.gallery_folder())) == {recipe.name for recipe in measured_recipes}
    page = measured.PAGE.read_text(encoding="utf-8")
    assert measured.page(page, RECIPES) == page


def test_the_list_fits_80_columns_and_imports_no_jax() -> None:
    text = python("import sys, jaxpar.app.cli as cli; cli.main(['gallery']); assert 'jax' not in sys.modules")
    assert max(map(len, text.splitlines())) <= 80
    assert [line.split()[0] for line in text.splitlines()[1 : 2 * len(RECIPES) : 2]] == [r.name for r in RECIPES]


def test_a_recipe_is_shown_with_its_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["gallery", "pretrain_8b_v5p", "--full"]) == 0
    text = capsys.readouterr().out
    assert "jaxpar check " in text and " --topology v5p:2x4x4\n" in text
    alone = tmp_path / "pretrain_8b_v5p.yaml"
    alone.write_text(text, encoding="utf-8")
    assert gallery.digest(alone) == gallery.digest(gallery.find_recipe(alone.stem, RECIPES).file)
    assert yaml.safe_load(text)["model"]["preset"] == "llama3_1_8b"
    assert main(["gallery", "vit_v5e", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["chips"] == "v5e:4x4"


def test_figures_of_a_changed_recipe_are_not_shown(tmp_path: Path) -> None:
    folder = tmp_path / "configs" / "gallery"
    shutil.copytree(gallery.gallery_folder().parent, folder.parent)
    file = folder / "pretrain_1b_v5e.yaml"
    comment = file.read_text(encoding="utf-8") + "# a comment changes nothing\n"
    for text, known in ((comment, True), (comment.replace("batch: 32", "batch: 64"), False)):
        file.write_text(text, encoding="utf-8")
        found = gallery.find_recipe("pretrain_1b_v5e", gallery.read_recipes(folder))
        assert (found.figures is not None) == known
        assert ("not measured" in gallery.listed([found])) != known


def test_what_is_no_recipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gallery", "pretrain_8b_v5"]) != 0
    assert "unknown recipe 'pretrain_8b_v5'. Did you mean 'pretrain_8b_v5" in capsys.readouterr().err
    (tmp_path / "own.yaml").write_text("model: {family: llama}\n")
    with raises(ConfigError, "own.yaml"):
        gallery.read_recipes(tmp_path)
    with raises(ConfigError, "/none"):
        gallery.read_recipes(tmp_path / "none")
    (tmp_path / gallery.FIGURES).write_text('{"own": {"fits": true}}')
    with raises(ConfigError, "figures.json", "memory_bytes"):
        gallery.read_recipes(tmp_path)
    (tmp_path / gallery.FIGURES).write_text("[1]")
    with raises(ConfigError, "figures.json", "list"):
        gallery.read_recipes(tmp_path)


def test_frozen_weights_have_no_gradient_in_the_flops_of_a_step() -> None:
    file = gallery.find_recipe("lora_8b_v5e", RECIPES).file
    whole, adapted = (make_job(load_run(file, settings)) for settings in (["model.lora=null"], []))
    tokens, seq = 16 * 2048, 2048
    attention = 12 * 32 * 32 * 128 * seq / 2  # 32 layers of 32 heads; a query sees half of the keys
    weights = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336) + 4096 * 128_256
    assert step_flops(whole) == tokens * (6 * weights + attention)
    assert step_flops(adapted) == tokens * (4 * weights + attention)
