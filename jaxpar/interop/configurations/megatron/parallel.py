"""Parallelism, batch and recomputation of Megatron-LM arguments."""

from __future__ import annotations

import math
from typing import Any

from jaxpar.interop.configurations.keys import ConfigKeys, put, token_sources
from jaxpar.interop.configurations.layout import AxisSizes

_TP, _PP, _CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
_EP, _COMM, _LEVELS = "--expert-model-parallel-size", "--cp-comm-type", "--hierarchical-context-parallel-sizes"
_LAYERS, _STAGES = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"


def read_sizes(keys: ConfigKeys, model: dict[str, Any], launcher: dict[str, Any]) -> AxisSizes:
    """Returns the sizes of all axes; data parallelism uses the devices that the other sizes leave.

    Args:
      keys: the arguments.
      model: ``model`` of the run, if the arguments have it.
      launcher: the arguments of torchrun, whose product is the number of devices.

    Raises:
      ConfigError: the sizes do not divide the devices or the model, or the number of devices is not known.
    """
    tensor = keys.take(_TP, "count", 1, "mesh.model")
    stages = keys.take(_PP, "count", 1, "mesh.pipeline")
    context, ulysses = _context(keys)
    expert = keys.take(_EP, "count", 1, "mesh.expert")
    devices = keys.options.devices or _launched(keys, launcher)
    product = tensor * stages * context * ulysses
    if devices % product:
        raise keys.error(
            _TP, f"{tensor} × pipeline {stages} × context {context * ulysses} = {product} must divide {devices} devices"
        )
    data = devices // product
    experts = model.get("experts", 1)
    if model and experts % expert:
        raise keys.error(_EP, f"must divide --num-experts={experts}, got {expert}")
    if data % expert:
        keys.refuse(_EP, f"must divide the {data} data-parallel ranks: here experts use those ranks only")
        expert = 1
    sequence = keys.take("--sequence-parallel", "bool", False, "rules.residual_seq")
    if tensor == 1:
        keys.ignore("--sequence-parallel", f"{_TP} is 1")
    heads = tensor * ulysses
    for name, path in (("heads", "--num-attention-heads"), ("kv_heads", "--num-query-groups")):
        size = model.get(name, heads)
        repeated = name == "kv_heads" and ulysses == 1 and heads % size == 0
        if size % heads and not repeated:
            raise keys.error(path, f"must be a multiple of {_TP}{' × Ulysses' * (ulysses > 1)} = {heads}, got {size}")
    return AxisSizes(
        stages, data // expert, expert, context, ulysses, tensor, sequence_parallel=sequence and tensor > 1
    )


def _launched(keys: ConfigKeys, launcher: dict[str, Any]) -> int:
    each, nodes = launcher.get("--nproc-per-node"), launcher.get("--nnodes", 1)
    if isinstance(each, int) and isinstance(nodes, int) and each > 0 and nodes > 0:
        return each * nodes
    unknown = [str(value)[1:] for value in (each, nodes) if isinstance(value, str) and value.startswith("$")]
    remedy = "--devices N" + "".join(f", or --variable {name}=N" for name in unknown)
    raise keys.error("torchrun", "does not say the number of devices", remedy)


def _context(keys: ConfigKeys) -> tuple[int, int]:
    """The sizes of the axes ``context`` and ``ulysses``."""
    size = keys.take(_CP, "count", 1, "mesh.context, mesh.ulysses")
    kinds = keys.raw(_COMM)
    kinds = "p2p" if kinds is None else kinds
    kind = kinds[0] if isinstance(kinds, list) and len(set(map(str, kinds))) == 1 else kinds
    if size == 1:
        keys.ignore_each((_COMM, _LEVELS), f"{_CP} is 1")
        return 1, 1
    if kind not in ("p2p", "a2a", "all_gather", "allgather", "a2a+p2p"):
        raise keys.error(_COMM, f"must be p2p, a2a, allgather or a2a+p2p, the same in all layers, got {kinds!r}")
    keys.translate(_COMM, "parallel.context.impl")
    if kind != "a2a+p2p":
        keys.ignore(_LEVELS, f"{_COMM} is {kind}")
        return (1, size) if kind == "a2a" else (size, 1)
    levels = keys.take(_LEVELS, "list", None, "mesh.ulysses, mesh.context")
    if levels is None or len(levels) != 2 or not all(isinstance(n, int) for n in levels) or math.prod(levels) != size:
        raise keys.error(_LEVELS, f"must be two numbers whose product is {_CP}={size}, got {levels}")
    return levels[1], levels[0]


def write_context(keys: ConfigKeys, sizes: AxisSizes, seq: int | None, config: dict[str, Any]) -> None:
    """Writes ``parallel.context``.

    Raises:
      ConfigError: the sequence does not divide.
    """
    ways = sizes.context * sizes.ulysses
    shards = (2 * ways if ways > 1 else 1) * (sizes.model if sizes.sequence_parallel else 1)
    if seq is not None and seq % shards:
        raise keys.error("--seq-length", f"must be a multiple of {shards} for these sizes, got {seq}")
    if ways == 1:
        return
    kinds = keys.raw(_COMM) or "p2p"
    gathers = "gather" in str(kinds)
    impl = "ulysses" if sizes.context == 1 else "hybrid" if sizes.ulysses > 1 else "gather" if gathers else "ring"
    balance = {} if impl == "ulysses" else {"load_balance": "zigzag"}
    put(config, "parallel.context", {"impl": impl, **balance})


def write_batch(keys: ConfigKeys, sizes: AxisSizes, config: dict[str, Any]) -> int:
    """Writes the batch and its microbatches; returns the rows of a batch.

    Raises:
      ConfigError: the global batch does not divide.
    """
    ranks = sizes.data * sizes.expert
    if not keys.has("--micro-batch-size"):
        raise keys.error("--micro-batch-size", "is missing", "--micro-batch-size N")
    micro = keys.take("--micro-batch-size", "count", None, "data.batch")
    batch = keys.take("--global-batch-size", "count", micro * ranks, "data.batch")
    if batch % (micro * ranks):
        raise keys.error(
            "--global-batch-size",
            f"must be a multiple of --micro-batch-size {micro} × {ranks} data-parallel ranks, got {batch}",
        )
    seq = keys.take("--seq-length", "count", None, "data.seq")
    sources = token_sources(keys.raw("--data-path"))
    if sources:
        keys.translate("--data-path", f"data.{next(iter(sources))}")
    data = {**(sources or {"source": "synthetic"}), "batch": batch}
    put(config, "data", data if seq is None else {**data, "seq": seq})
    if keys.take("--reset-attention-mask", "bool", False, "data.packing"):
        put(config, "data.packing", True)
    parts = batch // (micro * ranks)
    if sizes.pipeline == 1:
        put(config, "train.grad_accum_steps", parts)
    else:
        pipeline = {"schedule": "1f1b", "microbatches": parts, "activation_checkpointing": "none"}
        put(config, "parallel.pipeline", pipeline)
    return int(batch)


def write_pipeline(keys: ConfigKeys, sizes: AxisSizes, layers: int | None, config: dict[str, Any]) -> int:
    """Writes virtual stages and uneven stages; returns the number of pieces of a stage.

    Raises:
      ConfigError: the layers do not divide into pieces.
    """
    names = (_LAYERS, _STAGES, _FIRST, _LAST)
    if sizes.pipeline == 1:
        keys.ignore_each((*names, "--microbatch-group-size-per-virtual-pipeline-stage"), f"{_PP} is 1")
        return 1
    keys.neutral("--microbatch-group-size-per-virtual-pipeline-stage", (sizes.pipeline,), "groups have one per stage")
    virtual = keys.take(_STAGES, "count", 1, "parallel.pipeline.virtual_stages")
    if keys.has(_LAYERS):
        each = keys.take(_LAYERS, "count", None, "parallel.pipeline.virtual_stages")
        if keys.has(_STAGES):
            raise keys.error(_LAYERS, f"and {_STAGES} are both given", "leave one of them out")
        if layers is None or layers % (sizes.pipeline * each):
            raise keys.error(_LAYERS, f"× {_PP} must divide --num-layers={layers}, got {each} × {sizes.pipeline}")
        virtual = layers // (sizes.pipeline * each)
    if virtual > 1:
        put(config, "parallel.pipeline.schedule", "interleaved")
        put(config, "parallel.pipeline.virtual_stages", virtual)
        micro = config["parallel"]["pipeline"]["microbatches"]
        if micro % sizes.pipeline:
            raise keys.error(
                "--global-batch-size",
                f"must give a multiple of {sizes.pipeline} microbatches for virtual stages, got {micro}",
            )
    _write_uneven(keys, sizes.pipeline, virtual, layers, config)
    return int(virtual)


def _write_uneven(keys: ConfigKeys, stages: int, virtual: int, layers: int | None, config: dict[str, Any]) -> None:
    ends = [keys.take(name, "count", None, "parallel.pipeline.layers_per_stage") for name in (_FIRST, _LAST)]
    given = [end for end in ends if end is not None]
    if layers is None and given:
        keys.refuse(_FIRST if ends[0] is not None else _LAST, "the number of layers is not in the arguments")
    elif virtual > 1 and given:
        keys.refuse(_FIRST if ends[0] is not None else _LAST, "uneven stages with virtual stages are not translated")
    elif layers is not None and given:
        middle, rest = stages - len(given), layers - sum(given)
        if middle < 0 or rest < middle or (middle == 0 and rest) or (middle and rest % middle):
            raise keys.error(
                "--num-layers", f"{layers} without {sum(given)} cannot be split over {middle} other stages"
            )
        first, last = ([] if end is None else [end] for end in ends)
        each = [rest // middle] * middle if middle else []
        put(config, "parallel.pipeline.layers_per_stage", [*first, *each, *last])
    elif layers is not None and layers % (stages * virtual):
        raise keys.error(
            "--num-layers", f"must be a multiple of {stages * virtual} pieces of the pipeline, got {layers}"
        )


def write_recompute(
    keys: ConfigKeys, sizes: AxisSizes, layers: int | None, virtual: int, config: dict[str, Any]
) -> None:
    """Writes ``parallel.remat``.

    Raises:
      ConfigError: an unknown granularity or method.
    """
    kind = keys.take("--recompute-granularity", "text", None, "parallel.remat")
    if keys.take("--recompute-activations", "bool", False, "parallel.remat"):
        kind = "selective"
    method = keys.take("--recompute-method", "text", None, "parallel.remat")
    count = keys.take("--recompute-num-layers", "count", None, "parallel.remat")
    sliced = keys.take("--distribute-saved-activations", "bool", False, "parallel.remat.slice_activation")
    if kind not in (None, "full", "selective"):
        raise keys.error("--recompute-granularity", f"must be full or selective, got {kind!r}")
    modules = keys.raw("--recompute-modules")
    put(config, "parallel.remat", "none")
    if kind != "full":
        others = ("--recompute-method", "--recompute-num-layers", "--distribute-saved-activations")
        keys.ignore_each(others, "--recompute-granularity is not full")
        keys.neutral(
            "--recompute-modules", ("core_attn", ["core_attn"]), "only core_attn is translated; see parallel.remat"
        )
        if kind == "selective" and modules in (None, "core_attn", ["core_attn"]):
            for name in ("--recompute-granularity", "--recompute-activations"):
                keys.translate(name, "parallel.remat", "none: attention in tiles never stores scores")
        return
    keys.ignore("--recompute-modules", "--recompute-granularity is full")
    if method not in ("uniform", "block"):
        raise keys.error("--recompute-method", f"must be uniform or block, got {method!r}")
    if sliced and (sizes.sequence_parallel or sizes.model == 1 or sizes.pipeline > 1):
        keys.ignore("--distribute-saved-activations", "the rules shard these activations already")
        sliced = False
    remat: dict[str, Any] = {"policy": "full", **({"slice_activation": True} if sliced else {})}
    if method == "uniform":
        if (count or 1) > 1:
            keys.translate("--recompute-num-layers", "parallel.remat", "the nearest: every layer keeps its input")
        put(config, "parallel.remat", remat if sliced else "full")
        return
    if count is None:
        raise keys.error("--recompute-num-layers", "is missing for the method block")
    if sizes.pipeline > 1:
        most = None if layers is None else layers // (sizes.pipeline * virtual)
        count = count if most is None else min(count, most)
        put(config, "parallel.pipeline.recompute", [count] * sizes.pipeline)
        keys.translate("--recompute-num-layers", "parallel.pipeline.recompute")
    else:
        count = count if layers is None else min(count, layers)
        put(config, "parallel.remat", remat if count == layers else remat | {"layers": [count]})


def write_zero(keys: ConfigKeys, sizes: AxisSizes, config: dict[str, Any]) -> None:
    """Writes ``parallel.optimizer`` and ``parallel.offload``.

    Raises:
      ConfigError: an unknown strategy, or groups that do not divide the ranks.
    """
    strategies = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    stage = 1 if keys.take("--use-distributed-optimizer", "bool", False, "parallel.optimizer.stage") else 0
    name = keys.take("--data-parallel-sharding-strategy", "text", "no_shard", "parallel.optimizer.stage")
    if name not in strategies:
        raise keys.error("--data-parallel-sharding-strategy", f"must be one of {', '.join(strategies)}, got {name!r}")
    flags = ("--use-megatron-fsdp", "--use-custom-fsdp")
    fsdp = [keys.take(flag, "bool", False, "parallel.optimizer.stage") for flag in flags]
    if any(fsdp):
        stage = strategies[name]
    if keys.take("--use-torch-fsdp2", "bool", False, "parallel.optimizer.stage"):
        stage = 3
    if stage > 1 and sizes.pipeline > 1:
        put(config, "parallel.pipeline.grad_reduction", "per_microbatch")
        stage = 1  # a pipeline gathers weights once per step
    copies = keys.take("--num-distributed-optimizer-instances", "count", 1, "parallel.optimizer.fsdp_group_size")
    zero: dict[str, Any] = {"stage": stage, **sizes.zero_axes()}
    if copies > 1:
        if sizes.data % copies:
            raise keys.error(
                "--num-distributed-optimizer-instances", f"must divide the {sizes.data} ranks, got {copies}"
            )
        if "axis" in zero:
            keys.refuse("--num-distributed-optimizer-instances", "groups of devices are only formed along data")
        else:
            zero["fsdp_group_size"] = sizes.data // copies
    if stage:
        put(config, "parallel.optimizer", zero)
    if keys.take("--optimizer-cpu-offload", "bool", False, "parallel.offload.optimizer"):
        put(config, "parallel.offload.optimizer", "host")
