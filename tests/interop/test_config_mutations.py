"""A field of ``config.json`` is neutral only if a table says so for its value: every field is changed, in every family.

transformers loads the golden checkpoints with thousands of changed configurations
(``benchmarks/interop/make_mutations.py``).
With each, jaxpar computes the same logits, or refuses it.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from config_mutations import BASES, GOLDEN, Mutation, base_fields, read, sample
from error_texts import raises
from profiles import few

import jaxpar as jp
from jaxpar.errors import CheckpointError, ConfigError
from jaxpar.interop import huggingface
from jaxpar.interop.families import same_model, to_config
from jaxpar.interop.family_table import FAMILIES, IGNORED, NEUTRAL
from jaxpar.models import make_decoder
from jaxpar.models.llama import LlamaConfig
from jaxpar.models.llama.rope import RopeScaling, frequencies
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


BY_HAND: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BY_HAND |= {"attention_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
EXTREMES = (0, 1, -1, 0.5, 1e-300, 1e30, math.inf, math.nan, 10**30, None)


def numbers_of(fields: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from (((key, *path), number) for path, number in numbers_of(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (key,), value


def changed(fields: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {**fields, path[0]: changed(fields[path[0]], path[1:], value) if len(path) > 1 else value}


@functools.cache
def angles(dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    return np.asarray(frequencies(dim, theta, scaling))


@pytest.mark.parametrize("yarn", [False, True])
@pytest.mark.parametrize("case", few(BASES, 4))
def test_a_number_of_any_size_is_refused_by_its_name_or_computes_with_finite_numbers(case: str, yarn: bool) -> None:
    fields = base_fields(case)
    if yarn and case != "gemma3":
        fields = {**fields, "rope_theta": 1e4, "rope_parameters": None, "rope_scaling": BY_HAND}
    paths = [path for path, _ in numbers_of(fields)]
    keys = "|".join({key for path in paths for key in path} | {"layer_types"})
    for path in paths:
        for value in EXTREMES:
            try:
                config = to_config(changed(fields, path, value))
            except ConfigError as error:
                # A contradiction of several fields is one of our configuration.
                assert re.search(rf"\b({keys})\b|^(llama|moe|Router|rope_scaling): ", str(error)), (
                    path,
                    value,
                    str(error),
                )
                continue
            dim = getattr(config, "rope_dim", config.head_dim)
            computed = [angles(dim, config.rope_theta, config.rope_scaling), config.score_scale or 1.0]
            if config.gemma is not None and config.gemma.local_rope_theta is not None:
                computed.append(angles(dim, config.gemma.local_rope_theta, None))
            if config.rope_scaling is not None:
                computed += [config.rope_scaling.rotated_factor, config.rope_scaling.score_factor]
            assert all(np.isfinite(x).all() for x in computed), (path, value)


@pytest.mark.parametrize("theta", [1, 1.0])
def test_yarn_needs_frequencies_that_differ(theta: float) -> None:
    with raises(ConfigError, "rope_theta is 1", "yarn"):
        to_config({**base_fields("llama2"), "rope_theta": theta, "rope_parameters": None, "rope_scaling": BY_HAND})


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
    count, base = 0, np.empty(0)
    if any(one.answer is None for one in ones):
        (folder / "config.json").write_text(json.dumps(base_fields(case)))
        base = sample(logits_of(folder, layout, tokens))
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


def words(one: Mutation) -> str:
    return repr((one.changes, one.removed))


@functools.cache
def others(case: str) -> list[Mutation]:
    """One change for each configuration that is read and not that of the golden file."""
    base = to_config(base_fields(case))
    different = {repr(config): one for one, config in accepted(mutations(case)) if not same_model(config, base)}
    return list(different.values())


def chosen(case: str) -> list[Mutation]:
    """Of the changes of this family, six of each set of fields; ``test_rope_fields.py`` has their values."""
    fields: dict[tuple[str, ...], list[Mutation]] = {}
    for one in in_turn(case):
        fields.setdefault(tuple(sorted({*one.changes, *one.removed})), []).append(one)
    return [one for ones in fields.values() for one in ones[:: -(-len(ones) // 6)]]


def in_turn(case: str) -> list[Mutation]:
    """Every change in two of the families that have it, in turn; of families with experts a part."""
    if isinstance(to_config(base_fields(case)), MoEConfig):
        return others(case)[::6]
    families: dict[str, list[str]] = {}
    for family in BASES:
        for one in others(family):
            families.setdefault(words(one), []).append(family)
    taking = {}
    for number, (change, all_of) in enumerate(families.items()):
        taking[change] = {all_of[(number + further) % len(all_of)] for further in (0, len(all_of) // 2)}
    return [one for one in others(case) if case in taking[words(one)]]


@pytest.mark.slow
@pytest.mark.parametrize("case", BASES)
def test_changes_that_are_read_have_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    assert check_logits(case, chosen(case), tmp_path) > 3


def test_the_epsilon_of_a_deepseek_is_not_for_its_latent_vectors(tmp_path: Path) -> None:
    """With ``rms_norm_eps: 0.5`` for them too, the logits differ from those of transformers by 1.0."""
    ones = [one for one in mutations("deepseek_v3") if one.changes == {"rms_norm_eps": 0.5}]
    assert len(ones) == 1 and ones[0].answer is not None
    assert check_logits("deepseek_v3", ones, tmp_path) == 1
