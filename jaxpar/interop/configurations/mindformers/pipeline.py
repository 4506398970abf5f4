"""The pipeline of a MindFormers configuration: its schedule, and which layers each stage has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxpar.interop.configurations.keys import ConfigKeys, put
from jaxpar.interop.configurations.layout import AxisSizes
from jaxpar.interop.configurations.mindformers.model import LAYERS, MTP_DEPTH, ImportedModel
from jaxpar.utils.checks import shown

_SCHEDULER = "parallel.pipeline_config.pipeline_scheduler"
_INTERLEAVE = "parallel.pipeline_config.pipeline_interleave"
_SPLIT = "parallel_config.seq_split_num"
_NAMES = {("1f1b", False): "1f1b", ("1f1b", True): "interleaved", ("gpipe", False): "gpipe"}
_NAMES |= {("gpipe", True): "breadth_first", ("seqpipe", False): "1f1b", ("seqpipe", True): "interleaved"}
_NAMES |= {("zero_bubble_v", True): "zb_v"}
_KNOWN = ("1f1b", "gpipe", "seqpipe", "seqvpp", "seqsmartvpp", "zero_bubble_v")


@dataclass(frozen=True)
class StageLayers:
    """The number of layers of every piece of a model.

    Attributes:
      pieces: one list for each piece of a stage, with one number for each stage, as MindFormers counts them.
      dense, further: how many of the first layers have no experts, and how many of the last predict further tokens.
        Here all stages run them, so they belong to no piece.
    """

    pieces: list[list[int]]
    dense: int = 0
    further: int = 0

    @property
    def virtual(self) -> int:
        """The number of pieces of a stage."""
        return len(self.pieces)

    @property
    def total(self) -> int:
        """The number of layers that MindFormers counts."""
        return sum(map(sum, self.pieces))

    @property
    def flat(self) -> list[int]:
        """The number of layers of each piece here, in model order; a piece that would have none takes one of another.

        >>> StageLayers([[2, 3, 2]], dense=1, further=2).flat
        [1, 2, 1]
        """
        counts = [count for piece in self.pieces for count in piece]
        ends = ((range(len(counts)), self.dense), (reversed(range(len(counts))), self.further))
        for order, outside in ends:
            for at in order:
                taken = min(outside, counts[at])
                counts[at], outside = counts[at] - taken, outside - taken
        while 0 in counts:
            counts[counts.index(max(counts))] -= 1
            counts[counts.index(0)] += 1
        return counts

    @property
    def most(self) -> list[int]:
        """The number of layers here of the largest piece of each stage."""
        stages = len(self.pieces[0])
        return [max(self.flat[stage::stages]) for stage in range(stages)]


def virtual_stages(keys: ConfigKeys, prefix: str) -> int:
    """Returns the number of pieces of each stage, which counts only with ``pipeline_interleave``."""
    path = f"{prefix}pp_interleave_num"
    number = keys.get(path, "count", 1)
    if keys.get(_INTERLEAVE, "bool", False):
        keys.translate(path, "parallel.pipeline.virtual_stages")
        return int(number)
    keys.ignore(path, "pipeline_interleave is false")
    return 1


def read_stage_layers(keys: ConfigKeys, model: ImportedModel, stages: int, virtual: int) -> StageLayers | None:
    """Returns the layers of each piece, from ``offset``; ``None`` if the number of layers is not known.

    Raises:
      ConfigError: ``offset`` has another shape than the pieces, does not sum to the remaining layers, or leaves a piece
        without a layer.
    """
    path, dense, further = (
        f"{model.prefix}offset",
        model.fields.get("dense_layers", 0),
        model.fields.get("mtp_depth", 0),
    )
    outside = "first layers without experts and layers of further tokens run on all stages" if dense + further else ""
    keys.translate(path, "parallel.pipeline.layers_per_stage", outside)
    if stages == 1:
        keys.ignore(path, "pipeline_stage is 1")
    if model.layers is None:
        if keys.raw(path) not in (None, 0):
            keys.refuse(path, "the number of layers is not in the file")
        return None
    total = model.layers + further
    if stages == 1:
        return StageLayers([[total]], dense, further)
    offset, pieces = keys.raw(path) or 0, stages * virtual
    low, rest = divmod(total, pieces)
    layers = keys.first([f"{model.prefix}{name}" for name in LAYERS])
    counted = f"{layers}={model.layers}"
    if further:
        names = keys.first([f"{model.prefix}{name}" for name in MTP_DEPTH])
        counted = f"{counted} + {names.removeprefix(model.prefix)}={further}"
    if pieces > model.layers - dense:
        without = f", without the first {dense}, which have no experts and run on all stages" if dense else ""
        raise keys.error(
            layers, f"must be at least the {pieces} pieces of the pipeline{without}, got {model.layers - dense}"
        )
    if isinstance(offset, int):
        if offset or rest:
            raise keys.error(
                path,
                f"must be a list that sums to {rest}, the {counted} modulo {pieces} pieces of the pipeline, got "
                f"{offset}",
                f"{[1] * rest + [0] * (stages - rest)}" if rest <= stages else "",
            )
        rows = [[0] * stages] * virtual
    else:
        rows = _rows(keys, path, offset, stages, virtual)
        # MindFormers counts a flat list once, although it applies to every piece of a stage.
        counts = sum(sum(row) for row in (rows if isinstance(offset[0], list) else rows[:1]))
        if counts != rest or sum(map(sum, rows)) + low * pieces != total:
            raise keys.error(
                path, f"must sum to {rest}, the {counted} modulo {pieces} pieces of the pipeline, got {shown(offset)}"
            )
    if low + min(min(row) for row in rows) < 1:
        raise keys.error(path, f"must leave every piece of the pipeline a layer, got {shown(offset)}")
    return StageLayers([[low + number for number in row] for row in rows], dense, further)


def _rows(keys: ConfigKeys, path: str, offset: Any, stages: int, virtual: int) -> list[list[int]]:
    if not isinstance(offset, list) or not offset:
        raise keys.error(path, f"must be an integer or a list, got {shown(offset)}")
    nested = isinstance(offset[0], list)
    rows = offset if nested else [offset] * virtual
    if nested and len(rows) != virtual:
        raise keys.error(path, f"must have one list for each of pp_interleave_num={virtual} pieces, got {len(rows)}")
    for row in rows:
        if not isinstance(row, list) or any(not isinstance(n, int) or isinstance(n, bool) for n in row):
            raise keys.error(path, f"must hold integers, got {shown(row)}")
        if len(row) != stages:
            raise keys.error(path, f"must have one number for each of pipeline_stage={stages} stages, got {len(row)}")
    return rows


def write_pipeline(
    keys: ConfigKeys, model: ImportedModel, sizes: AxisSizes, stages: StageLayers | None, config: dict[str, Any]
) -> None:
    """Writes ``parallel.pipeline``.

    Raises:
      ConfigError: there are fewer microbatches than stages, an unknown scheduler, or sequence chunks that do not fit.
    """
    micro = "parallel_config.micro_batch_num"
    chunks = keys.take(_SPLIT, "count", 1, "parallel.pipeline.sequence_chunks")
    if sizes.pipeline == 1:
        if chunks > 1:
            raise keys.error(_SPLIT, f"must be 1 without pipeline stages, got {chunks}", "pipeline_stage: 2 or more")
        keys.ignore_each((micro, _SCHEDULER, _INTERLEAVE, "parallel.pipeline_config"), "pipeline_stage is 1")
        return
    microbatches = keys.take(micro, "count", 1, "parallel.pipeline.microbatches")
    if microbatches < sizes.pipeline:
        raise keys.error(micro, f"must be at least pipeline_stage={sizes.pipeline}, got {microbatches}")
    virtual = virtual_stages(keys, model.prefix)
    if chunks > 1 and model.experts > 1:
        keys.refuse(_SPLIT, "models with experts do not run on sequence chunks")
        chunks = 1
    schedule, chunks = _schedule(keys, virtual, chunks)
    pipeline: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches}
    if virtual > 1:
        pipeline["virtual_stages"] = virtual
    if chunks > 1:
        _check_chunks(keys, model, sizes, chunks)
        pipeline["sequence_chunks"] = chunks
    pipeline["activation_checkpointing"] = "none"
    if stages is not None and len(set(stages.flat)) > 1:
        pipeline["layers_per_stage"] = stages.flat
        if sum(stages.flat) % sizes.pipeline:
            put(config, "rules.indivisible", {"layers": "replicate"})
    put(config, "parallel.pipeline", pipeline)


def _schedule(keys: ConfigKeys, virtual: int, chunks: int) -> tuple[str, int]:
    """Returns the schedule, and the number of its sequence chunks: 1 if more of them are refused."""
    interleaved = keys.take(_INTERLEAVE, "bool", False, "parallel.pipeline.schedule")
    name = keys.take(_SCHEDULER, "text", "1f1b", "parallel.pipeline.schedule")
    if name not in _KNOWN:
        raise keys.error(_SCHEDULER, f"must be one of {', '.join(_KNOWN)}, got {name!r}")
    if not interleaved and name != "seqpipe":
        keys.translate(_SCHEDULER, "parallel.pipeline.schedule", "1f1b, because pipeline_interleave is false")
        name = "1f1b"
    if chunks > 1:
        if name not in ("seqpipe", "seqvpp", "seqsmartvpp"):
            raise keys.error(
                _SPLIT,
                f"is {chunks}, but pipeline_scheduler {name!r} does not split sequences",
                "pipeline_interleave: true with pipeline_scheduler: seqpipe, or seq_split_num: 1",
            )
        if name == "seqpipe" and virtual == 1:
            return "seq1f1b", chunks
        keys.refuse(_SPLIT, "sequence chunks are only built for one piece on each stage")
    if name in ("seqvpp", "seqsmartvpp"):
        name = "seqpipe"  # with one chunk they differ in nothing else
    schedule = _NAMES.get((name, virtual > 1))
    if schedule is None:
        raise keys.error(_SCHEDULER, f"{name} requires pp_interleave_num: 2, got {virtual}")
    return schedule, 1


def _check_chunks(keys: ConfigKeys, model: ImportedModel, sizes: AxisSizes, chunks: int) -> None:
    shards = sizes.context * sizes.ulysses * (sizes.model if sizes.sequence_parallel else 1)
    if model.seq is not None and model.seq % (chunks * shards):
        what = f"seq_length={model.seq}" if shards == 1 else f"the {model.seq // shards} tokens of a device"
        raise keys.error(_SPLIT, f"must divide {what}, got {chunks}")
