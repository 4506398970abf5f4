"""A field of ``config.json`` is neutral only if a table says so for its value: every field is changed, in every family.

transformers loads the golden checkpoints with thousands of changed configurations
(``benchmarks/interop/make_mutations.py``).
With each, jaxpar computes the same logits, or refuses it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from config_mutations import BASES, GOLDEN, Mutation, base_fields, read, sample

import jaxpar as jp
from jaxpar.errors import CheckpointError, ConfigError
from jaxpar.interop import huggingface
from jaxpar.interop.families import same_model, to_config
from jaxpar.interop.family_table import FAMILIES, IGNORED, NEUTRAL
from jaxpar.models import make_decoder
from jaxpar.models.llama import LlamaConfig
from jaxpar.models.moe.config import MoEConfig

DIMS = ("embed", "norm", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers")
DIMS += ("experts", "expert_mlp", "latent", "dense_layers", "seq", "residual_seq")


@functools.cache
def all_mutations() -> list[Mutation]:
    return read()


def mutations(case: str) -> list[Mutation]:
    return [one for one in all_mutations() if one.case == case]


def accepted(ones: Iterable[Mutation]) -> Iterator[tuple[Mutation, LlamaConfig]]:
    """The changes that are not refused, and the configurations that are read."""
    for one in ones:
        try:
            config = to_config(one.fields)
        except ConfigError:
            continue
        yield one, config


@pytest.mark.parametrize("case", BASES)
def test_no_change_that_matters_is_neutral(case: str) -> None:
    """Where transformers computes other logits, the configuration that is read is another one too."""
    base = to_config(base_fields(case))
    matter = [one for one in mutations(case) if one.answer is not None]
    readable = list(accepted(matter))
    assert len(matter) > 200 and len(readable) > 60
    assert [(one.changes, one.removed) for one, config in readable if same_model(config, base)] == []


@pytest.mark.parametrize("case", BASES)
def test_every_field_has_one_entry(case: str) -> None:
    """A field that is read, or may have any value, has no list of neutral values; and the file's own are known."""
    family = FAMILIES[base_fields(case)["model_type"]]
    assert not IGNORED & ({*NEUTRAL, *family.neutral} | family.reads)
    assert not family.reads & family.neutral.keys() - {"sliding_window_pattern"}
    for value in (None, False, True, 0, 1, "", "x", [], {}):
        with pytest.raises(ConfigError, match="a_new_field is "):
            to_config({**base_fields(case), "a_new_field": value})
        to_config({**base_fields(case), "a_new_field": value}, ignore=["a_new_field"])


@pytest.mark.parametrize("case", BASES)
def test_fields_of_any_value_change_nothing(case: str) -> None:
    """transformers was given several values of each."""
    answers: dict[str, list[bool]] = {}
    for one in mutations(case):
        if len(one.changes) == 1 and not one.removed:
            answers.setdefault(next(iter(one.changes)), []).append(one.answer is None)
    tried = IGNORED & answers.keys()
    assert IGNORED - tried <= {"model_type", "tie_word_embeddings"}
    assert {key for key in tried if not all(answers[key])} == set()


def logits_of(folder: Path, layout: jp.Layout, tokens: np.ndarray) -> np.ndarray:
    config = huggingface.read_config(folder)
    params = huggingface.load(layout, folder, config=config)
    kind = jp.abstract_state(layout, make_decoder(config), optax.identity()).metadata.kind
    run = lambda params, tokens: kind.merge(params, {})(tokens)
    # Without jit, operations are compiled once for all configurations; those of experts run slowly then.
    with layout, nullcontext() if isinstance(config, MoEConfig) else jax.disable_jit():
        return np.asarray(jax.jit(run)(params, tokens))


def check_logits(case: str, ones: list[Mutation], folder: Path) -> int:
    """Compares logits with those of transformers; returns how many configurations are read with the weights."""
    golden = GOLDEN / BASES[case][0]
    (folder / "model.safetensors").symlink_to(golden / "model.safetensors")
    with np.load(golden / "answers.npz") as answers:
        tokens = answers["tokens"]
    layout = jp.Layout(jp.MeshSpec(data=1).build(jax.devices()[:1]), jp.Rules(batch="data", **dict.fromkeys(DIMS)))
    (folder / "config.json").write_text(json.dumps(base_fields(case)))
    base = sample(logits_of(folder, layout, tokens))
    count = 0
    for one in ones:
        (folder / "config.json").write_text(json.dumps(one.fields))
        try:
            logits = logits_of(folder, layout, tokens)
        except (CheckpointError, ConfigError):
            continue
        count += 1
        wanted = base if one.answer is None else one.answer
        np.testing.assert_allclose(sample(logits), wanted, atol=1e-4, rtol=0, err_msg=f"{one.changes} {one.removed}")
    return count


def others(case: str) -> list[Mutation]:
    """One change for each configuration that is read and not that of the golden file; of those with experts a part."""
    base = to_config(base_fields(case))
    different = {repr(config): one for one, config in accepted(mutations(case)) if not same_model(config, base)}
    return list(different.values())[:: 6 if isinstance(base, MoEConfig) else 1]


@pytest.mark.slow
@pytest.mark.parametrize("case", BASES)
def test_changes_that_are_read_have_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    assert check_logits(case, others(case), tmp_path) > 8


def test_the_epsilon_of_a_deepseek_is_not_for_its_latent_vectors(tmp_path: Path) -> None:
    """With ``rms_norm_eps: 0.5`` for them too, the logits differ from those of transformers by 1.0."""
    ones = [one for one in mutations("deepseek_v3") if one.changes == {"rms_norm_eps": 0.5}]
    assert len(ones) == 1 and ones[0].answer is not None
    assert check_logits("deepseek_v3", ones, tmp_path) == 1
