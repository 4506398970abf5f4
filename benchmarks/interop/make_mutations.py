"""Writes what transformers makes of every golden ``config.json`` after a change of one field, or of a few.

    uv run --no-project --with transformers --with torch --with numpy python benchmarks/interop/make_mutations.py

Every field gets values of many types and is removed: those that the file has, those that transformers knows, those
that its code reads, and those in the tables of jaxpar. Fields of rotary positions and windows are changed together.
``tests/golden/huggingface/mutations.json.gz`` gets each change with which transformers loads the weights and computes:
``[case, fields, removed, answer]``, where ``answer`` is null for the same logits, and else a sample of them (see
``sample`` in ``tests/interop/config_mutations.py``). The default tests read it, so that they need neither torch nor
transformers.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "huggingface"
sys.path.insert(0, str(ROOT / "tests" / "interop"))
sys.path.insert(0, str(ROOT))
from config_mutations import BASES, FILE, FOREIGN, sample  # type: ignore[import-not-found]

os.environ["HF_HUB_OFFLINE"] = "1"
SAME = 1e-5
READ = re.compile(r"config\.([a-z][a-z_0-9]*)|getattr\((?:self\.)?config, *\"([a-z][a-z_0-9]*)\"")
PLAIN: list[Any] = [None, False, True, 2, "other"]
"""Values of a field that the file does not have."""
MORE: list[Any] = [*PLAIN, 0, 1, 0.5, [], {}]

type Fields = dict[str, Any]
type Change = tuple[Fields, tuple[str, ...]]
"""Fields with new values, and fields to remove."""

ROPES: list[Fields] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4},
    {"rope_type": "dynamic", "factor": 2.0},
]
ROPE_VALUES: dict[str, list[Any]] = {
    "rope_type": ["default", "linear", "yarn", None],
    "type": ["linear", "default"],
    "factor": [1.0, 0.5, 3, None],
    "rope_theta": [500.0, 2.0, None],
    "original_max_position_embeddings": [16, 128, 10**9, None],
    "attention_factor": [0.0, 1.0, 1.5, None],
    "beta_fast": [0, 2, 8.5, None],
    "beta_slow": [0, 0.5, 2, None],
    "mscale": [0, 0.5, 1.0, None],
    "mscale_all_dim": [0, 0.7, 1.0, None],
    "truncate": [True, False, None, 0],
    "partial_rotary_factor": [1.0, 0.5, None],
    "low_freq_factor": [0.5, None],
    "high_freq_factor": [2, 1.0, None],
    "short_factor": [[1.0, 2.0], None],
}


def known(case: str, fields: Fields) -> list[str]:
    """The fields of a configuration: its own, those of transformers, those that its code reads, and those of jaxpar."""
    kind = type(AutoConfig.for_model(fields["model_type"]))
    names = {*fields, *kind.attribute_map, *(field.name for field in dataclasses.fields(kind)), *FOREIGN}
    folder = Path(transformers.__file__).parent
    module = fields["model_type"].removesuffix("_text")
    files = [*(folder / "models" / module).glob("*.py"), folder / "masking_utils.py"]
    for file in (*files, folder / "modeling_utils.py", folder / "modeling_rope_utils.py", folder / "cache_utils.py"):
        names |= {a or b for a, b in READ.findall(file.read_text())}
    return sorted(names - {"model_type", "quantization_config"})


def values(key: str, value: Any, *, own: bool) -> Iterator[Any]:
    """Values for a field that has a value."""
    yield from MORE if own else PLAIN
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from (value * 2, value + 1, value // 2 if isinstance(value, int) else value / 2)
    if isinstance(value, list):
        yield from (value[::-1], value[:-1], value + value[:1])
    if key.startswith("hidden_act"):
        yield from ("gelu", "silu", "swish", "gelu_pytorch_tanh", "relu")


def rope_changes(fields: Fields) -> Iterator[Change]:
    """Changes of the fields of rotary positions, alone and together."""
    nested = "full_attention" in (fields.get("rope_parameters") or {})
    wrap = lambda rope: {"full_attention": rope, "sliding_attention": {"rope_type": "default"}} if nested else rope
    every = ("rope_parameters", "rope_scaling", "rope_theta")
    ropes = [*ROPES, *([] if nested else [fields["rope_parameters"]])]
    for rope in ropes:
        yield {"rope_scaling": rope}, ()
        yield {"rope_scaling": rope}, ("rope_parameters",)
        yield {"rope_scaling": rope, "rope_theta": 300.0}, ()
        yield {"rope_scaling": rope, "rope_theta": 300.0}, every[:1]
        yield {"rope_scaling": {**rope, "rope_theta": 300.0}}, ()
        yield {"rope_scaling": rope, "rope_parameters": wrap({"rope_type": "default", "rope_theta": 300.0})}, ()
        yield {"rope_parameters": wrap(rope)}, ()
        yield {"rope_parameters": wrap(rope), "rope_theta": 300.0}, ()
        yield {"rope_parameters": wrap({**rope, "rope_theta": 300.0})}, ()
        for key, candidates in ROPE_VALUES.items():
            for value in candidates:
                yield {"rope_parameters": wrap({**rope, key: value})}, ()
        for key in rope:
            yield {"rope_parameters": wrap({name: v for name, v in rope.items() if name != key})}, ()
    yield {}, every
    yield {"rope_scaling": {}}, ()
    yield {"rope_scaling": {}, "rope_theta": 300.0}, every[:1]
    if nested:
        local = fields["rope_parameters"]["sliding_attention"]
        for more in ({"rope_theta": 300.0}, {"rope_local_base_freq": 300.0}):
            yield more, ()
            yield more, every[:1]
            yield {**more, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, ()
            yield {**more, "rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, ()
            yield {**more, "rope_parameters": {"full_attention": None, "sliding_attention": None}}, ()
        for rope in ROPES:
            yield {"rope_parameters": {**fields["rope_parameters"], "sliding_attention": {**local, **rope}}}, ()


def window_changes(fields: Fields) -> Iterator[Change]:
    """Changes of the fields of windows together."""
    layers = fields["num_hidden_layers"]
    types = [["sliding_attention"] * layers, ["full_attention"] * layers]
    types.append((["sliding_attention", "full_attention"] * layers)[:layers])
    for window, used, first in itertools.product((None, 8), (None, True, False), (None, 0, 1)):
        named = {"use_sliding_window": used, "max_window_layers": first}
        set_ = {"sliding_window": window, **{key: value for key, value in named.items() if value is not None}}
        removed = tuple(key for key in named if named[key] is None and key in fields)
        yield set_, (*removed, *(["layer_types"] if "layer_types" in fields else []))
        yield from (({**set_, "layer_types": one}, removed) for one in types)
    yield from (({"layer_types": one}, ()) for one in types)
    yield {}, ("layer_types", "sliding_window")
    yield from (({"sliding_window_pattern": period}, ("layer_types",)) for period in (1, 2, 3))


def changes(case: str, fields: Fields) -> Iterator[Change]:
    for key in known(case, fields):
        if key in fields:
            yield {}, (key,)
        yield from (({key: value}, ()) for value in values(key, fields.get(key), own=key in fields))
    yield from rope_changes(fields)
    yield from window_changes(fields)


def answer(folder: Path, fields: Fields, tokens: torch.Tensor) -> np.ndarray | None:
    """The logits [1, seq, vocab] of a folder's weights with these fields, if transformers loads and runs them."""
    (folder / "config.json").write_text(json.dumps(fields))
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if loading["missing_keys"] or loading["mismatched_keys"] or loading.get("error_msgs"):
            return None
        with torch.no_grad():
            logits: np.ndarray = model.eval()(tokens).logits.numpy()
    except Exception:  # noqa: BLE001  whatever it raises, transformers does not accept the change
        return None
    return logits if np.isfinite(logits).all() else None


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    lines, tried = [], 0
    for case, (golden, base) in BASES.items():
        fields = {**json.loads((GOLDEN / golden / "config.json").read_text()), **base}
        tokens = torch.from_numpy(np.load(GOLDEN / golden / "answers.npz")["tokens"].astype(np.int64))
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            shutil.copy(GOLDEN / golden / "model.safetensors", folder)
            wanted = answer(folder, fields, tokens)
            assert wanted is not None, case
            seen = {json.dumps(fields, sort_keys=True)}
            for named, removed in changes(case, fields):
                changed = {key: value for key, value in {**fields, **named}.items() if key not in removed}
                text = json.dumps(changed, sort_keys=True)
                if text in seen:
                    continue
                seen.add(text)
                tried += 1
                found = answer(folder, changed, tokens)
                if found is not None:
                    same = found.shape == wanted.shape and np.abs(found - wanted).max() < SAME
                    lines.append([case, named, list(removed), None if same else sample(found)])
        print(f"{case}: {tried} changes tried, transformers accepts {len(lines)}", flush=True)
    with gzip.GzipFile(FILE, "wb", mtime=0) as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
    print(f"{FILE.name}: {FILE.stat().st_size:,} bytes, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
