"""Recomputation and offloaded activations of a MindFormers configuration: ``recompute_config``, ``swap_config``."""

from __future__ import annotations

from typing import Any

from jaxpar.interop.configurations.keys import ConfigKeys, put
from jaxpar.interop.configurations.layout import AxisSizes
from jaxpar.interop.configurations.mindformers.pipeline import StageLayers
from jaxpar.utils.checks import is_count

_AT = "recompute_config."
_SAVED = ("attention", "attention_keys", "block_output", "qkv", "mlp_hidden")
"""The names of a layer's tensors that a remat policy may store, in our models."""


def write_recompute(keys: ConfigKeys, sizes: AxisSizes, stages: StageLayers | None, config: dict[str, Any]) -> None:
    """Writes ``parallel.remat`` and ``parallel.pipeline.recompute``.

    Args:
      keys: the configuration.
      sizes: of the axes.
      stages: the layers of each pipeline stage; ``None`` if the number of layers is not known.
      config: our configuration, which is changed.

    Raises:
      ConfigError: a list has not one number for each stage, or more than the layers of the stage.
    """
    for key in ("select_recompute_exclude", "select_comm_recompute_exclude"):
        keys.neutral(f"{_AT}{key}", (False,), "operators are not excluded one by one; see parallel.remat")
    full = _read(keys, "recompute", stages)
    selected = _read(keys, "select_recompute", stages)
    keys.ignore(f"{_AT}select_comm_recompute", "a recomputing layer recomputes its collectives too")
    if _write_swap(keys, full, config):
        keys.ignore_all({"swap decides": "mp_comm_recompute recompute_slice_activation"}, _AT)
        return
    if any(full):
        _write_full(keys, full, sizes, stages, config)
    elif any(selected):
        _write_selected(keys, selected, stages, config)
    else:
        put(config, "parallel.remat", "none")
        keys.ignore_all({"no layer recomputes": "mp_comm_recompute recompute_slice_activation"}, _AT)


def _read(keys: ConfigKeys, name: str, stages: StageLayers | None) -> list[int | bool]:
    """One value for each stage, or a single one for all: whether, or how many of its layers, recompute."""
    path, target = f"{_AT}{name}", "parallel.remat"
    value = keys.raw(path)
    if value is None or isinstance(value, bool):
        keys.translate(path, target)
        return [bool(value)]
    patterns = value if isinstance(value, dict) else None
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        patterns = dict.fromkeys(value, True)
    if patterns is not None and name == "select_recompute":
        return _operators(keys, path, patterns)
    if not isinstance(value, list) or not value:
        raise keys.error(path, f"must be true, false or a list with one number for each stage, got {value!r}")
    rows = value if all(isinstance(item, list) for item in value) else [value]
    pieces = stages.pieces if stages is not None else None
    if len(rows) > 1 and (stages is None or len(rows) != stages.virtual):
        virtual = "an unknown number of" if stages is None else f"{stages.virtual}"
        raise keys.error(path, f"must have one list for each of {virtual} pieces of a stage, got {len(rows)}")
    numbers = [_numbers(keys, path, row, pieces, at, shared=len(rows) == 1) for at, row in enumerate(rows)]
    keys.translate(path, target)
    if any(row != numbers[0] for row in numbers):
        keys.refuse(path, "all pieces of a stage recompute equally many layers")
        return [False]
    first: list[int | bool] = [*numbers[0]]
    if len(rows) == 1 and stages is not None and stages.virtual > 1:
        first = [-(-number // stages.virtual) for number in first]
    return first


def _operators(keys: ConfigKeys, path: str, patterns: dict[str, Any]) -> list[int | bool]:
    """Whether operators recompute: those between matmuls in all layers, which the policy ``dots`` recomputes."""
    keys.translate(path, "parallel.remat")
    unnamed = next((pattern for pattern in patterns if not isinstance(pattern, str)), None)
    if unnamed is not None:
        raise keys.error(path, f"must have patterns of operators' names, got {unnamed!r}")
    if any("matmul" in pattern or number is not True for pattern, number in patterns.items()):
        keys.refuse(path, "only operators between matmuls are selected, in all layers; see parallel.remat")
        return [False]
    return [bool(patterns)]


def _numbers(
    keys: ConfigKeys, path: str, row: list[Any], pieces: list[list[int]] | None, at: int, *, shared: bool
) -> list[int]:
    """The row of a list as numbers; ``true`` means all layers of the stage."""
    count = None if pieces is None else len(pieces[0])
    if count is not None and len(row) != count:
        raise keys.error(path, f"must have one number for each of {count} stages, got {len(row)}")
    numbers = []
    for stage, item in enumerate(row):
        most = None
        if pieces is not None:
            most = sum(piece[stage] for piece in pieces) if shared else pieces[at][stage]
        if isinstance(item, bool):
            item = (most or 0) if item else 0
        if not is_count(item, 0) or (most is not None and item > most):
            layers = "non-negative integers" if most is None else f"at most the {most} layers of stage {stage}"
            raise keys.error(path, f"must be {layers}, got {item!r}")
        numbers.append(item)
    return numbers


def _write_full(
    keys: ConfigKeys, full: list[int | bool], sizes: AxisSizes, stages: StageLayers | None, config: dict[str, Any]
) -> None:
    """Writes recomputation of whole layers."""
    keys.ignore(f"{_AT}select_recompute", "recompute decides")
    kept = sizes.model > 1 and not keys.get(f"{_AT}mp_comm_recompute", "bool", True)
    policy = "save_outputs" if kept else "full"
    keys.translate(f"{_AT}mp_comm_recompute", "parallel.remat", "results of collectives are kept" if kept else "")
    sliced = keys.get(f"{_AT}recompute_slice_activation", "bool", False)
    reason = {
        "it is false": not sliced,
        "model_parallel is 1": sizes.model == 1,
        "use_seq_parallel shards these activations already": sizes.sequence_parallel,
        "pipeline stages store activations as the rules shard them": sizes.pipeline > 1,
    }
    why = next((text for text, applies in reason.items() if applies), "")
    if why:
        keys.ignore(f"{_AT}recompute_slice_activation", why)
    else:
        keys.translate(f"{_AT}recompute_slice_activation", "parallel.remat.slice_activation")
    if full == [True]:
        put(config, "parallel.remat", policy if why else {"policy": policy, "slice_activation": True})
    elif sizes.pipeline > 1:
        _write_stages(keys, "recompute", full, stages, config)
    else:
        layers = stages.total if stages is not None else None
        remat: dict[str, Any] = {"policy": policy} if full == [layers] else {"policy": policy, "layers": full}
        put(config, "parallel.remat", remat if why else remat | {"slice_activation": True})


def _write_selected(
    keys: ConfigKeys, selected: list[int | bool], stages: StageLayers | None, config: dict[str, Any]
) -> None:
    """Writes recomputation of the MLP's elementwise operations, of which our policies have no exact counterpart."""
    keys.ignore_all({"no whole layer recomputes": "mp_comm_recompute recompute_slice_activation"}, _AT)
    path = f"{_AT}select_recompute"
    note = "the nearest policy: results of matmuls are kept, the rest recomputes"
    if selected == [True]:
        put(config, "parallel.remat", "dots")
        keys.translate(path, "parallel.remat", note)
    elif len(selected) > 1:
        note = "the nearest: these layers keep only their input"
        _write_stages(keys, "select_recompute", selected, stages, config, note)
    else:
        put(config, "parallel.remat", {"policy": "dots", "layers": selected})
        keys.translate(path, "parallel.remat", note)


def _write_stages(
    keys: ConfigKeys,
    name: str,
    numbers: list[int | bool],
    stages: StageLayers | None,
    config: dict[str, Any],
    note: str = "",
) -> None:
    put(config, "parallel.remat", "none")
    if config["parallel"]["pipeline"].get("sequence_chunks", 1) > 1 and any(numbers):
        put(config, "parallel.pipeline.activation_checkpointing", "full")
        all_layers = "the nearest: with sequence chunks, all layers of every stage recompute"
        keys.translate(f"{_AT}{name}", "parallel.pipeline.activation_checkpointing", all_layers)
        return
    most = [*map(int, numbers)] if stages is None else stages.most
    put(config, "parallel.pipeline.recompute", [min(int(n), m) for n, m in zip(numbers, most, strict=True)])
    if stages is not None and stages.virtual > 1:
        rounded = f"each of {stages.virtual} pieces of a stage recomputes its share, rounded up"
        note = f"{note}; {rounded}" if note else rounded
    keys.translate(f"{_AT}{name}", "parallel.pipeline.recompute", note)


def _write_swap(keys: ConfigKeys, full: list[int | bool], config: dict[str, Any]) -> bool:
    """Writes activations in host memory; returns whether there are any."""
    at = "swap_config."
    if not keys.take(f"{at}swap", "bool", False, "parallel.remat.offload_names"):
        keys.ignore("swap_config", "swap is false")
        return False
    keys.ignore(f"{at}default_prefetch", "XLA schedules the copies")
    layers, operators = (_swapped(keys, f"{at}{key}") for key in ("layer_swap", "op_swap"))
    if full == [True]:
        keys.ignore("swap_config", "recompute is true, under which MindFormers swaps nothing")
        return False
    for key in ("layer_swap", "op_swap"):
        keys.translate(f"{at}{key}", "parallel.remat.offload_names", "unnamed tensors recompute")
    offloaded: list[str] = []
    for entry in layers:
        offloaded = [*_SAVED]
        _check_layers(keys, f"{at}layer_swap", entry, config)
    for entry in operators:
        _check_layers(keys, f"{at}op_swap", entry, config)
        offloaded += _operator_names(keys, f"{at}op_swap", entry)
    if "pipeline" in config["parallel"]:
        keys.refuse(f"{at}swap", "pipeline stages store activations on the devices")
        return False
    if not layers and not operators:
        offloaded = ["attention"]  # the default of MindFormers: the results of flash attention
    if not offloaded:
        return False
    stored = [name for name in _SAVED if name not in offloaded]
    names = list(dict.fromkeys(offloaded))
    put(config, "parallel.remat", {"policy": "save_names", "save_names": stored, "offload_names": names})
    if any(full):
        keys.refuse(f"{_AT}recompute", "layers either recompute or offload: all of them have one policy")
    return True


def _swapped(keys: ConfigKeys, path: str) -> list[dict[str, Any]]:
    """The entries of ``layer_swap`` or ``op_swap``, after the checks of MindFormers."""
    value = keys.raw(path)
    entries = [] if value is None else value if isinstance(value, list) else [value]
    for entry in entries:
        if not isinstance(entry, dict):
            raise keys.error(path, f"must be a mapping or a list of mappings, got {entry!r}")
        layers = entry.get("layers")
        if not isinstance(layers, bool) and not (
            isinstance(layers, list) and layers and all(is_count(layer, 0) for layer in layers)
        ):
            raise keys.error(f"{path}.layers", f"must be true, false or a list of layers, got {layers!r}")
    prefetch = {str(entry.get("backward_prefetch")) for entry in entries}
    if len(prefetch) > 1 and any(entry["layers"] is True for entry in entries):
        raise keys.error(path, "has an entry for all layers, and others with another backward_prefetch")
    return [entry for entry in entries if entry["layers"] is not False]


def _check_layers(keys: ConfigKeys, path: str, entry: dict[str, Any], config: dict[str, Any]) -> None:
    total = config.get("model", {}).get("layers")
    if entry["layers"] is True or total is None or sorted(set(entry["layers"])) == [*range(total)]:
        return
    if max(entry["layers"]) >= total:
        raise keys.error(f"{path}.layers", f"must be below {total}, the number of layers, got {max(entry['layers'])}")
    keys.refuse(path, "all layers offload the same tensors")


def _operator_names(keys: ConfigKeys, path: str, entry: dict[str, Any]) -> list[str]:
    """Our names of the tensors that operators of MindFormers return."""
    operators = entry.get("op_name")
    operators = [operators] if isinstance(operators, str) else operators
    if not isinstance(operators, list) or not all(isinstance(name, str) for name in operators):
        raise keys.error(f"{path}.op_name", f"must be a text or a list of texts, got {operators!r}")
    patterns = {"flash_attention": "attention", "feed_forward": "mlp_hidden", "wq": "qkv", "wk": "qkv", "wv": "qkv"}
    found = []
    for operator in operators:
        names = [name for pattern, name in patterns.items() if pattern in operator]
        if not names:
            keys.refuse(path, f"no tensor here corresponds to {operator!r}")
        found += names
    return found
