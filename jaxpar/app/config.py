"""The configuration of a run: frozen dataclasses that are built from YAML with strict checks."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxpar.app.config_ranges import Bytes, Count, Natural, NonNegative, Positive, Share
from jaxpar.app.data_config import DataConfig, check_blend
from jaxpar.app.quantize_config import QuantizeSettings
from jaxpar.app.server_config import ServerSettings, server_config
from jaxpar.app.shipped_configs import find_config, find_layout
from jaxpar.app.train_config import CheckpointConfig, TrainConfig, check_checkpoint, check_profile, check_spike
from jaxpar.errors import ConfigError, prefixed
from jaxpar.parameter_server.config import ServerConfig
from jaxpar.sharding.mesh import AxisSize, LayoutData
from jaxpar.utils.checks import Range
from jaxpar.utils.yaml_config import build, load_yaml, merge, override

Platform = Literal["tpu", "gpu", "cpu"]
Option = bool | int | float | str
TrackerName = Literal["wandb", "trackio"]


@dataclass(frozen=True)
class PruneSettings:
    """Which weights are pruned while the model trains; see :class:`jaxpar.compression.PruneConfig`."""

    sparsity: Share | None = None
    pattern: tuple[int, ...] | None = None
    targets: tuple[str, ...] = ("*",)
    axis: int | dict[str, int] = -2
    begin: Natural = 0
    end: Natural = 0
    every: Count = 1


@dataclass(frozen=True)
class MuonSettings:
    """Which weights ``muon`` updates, and the rate of all others; see :class:`jaxpar.optimizers.MuonConfig`.

    Attributes:
      adam_learning_rate: the highest rate of the parameters that Adam updates, with the schedule of ``learning_rate``;
        by default ``learning_rate``.
      targets: patterns of the paths of the weights that Muon updates. By default the matrices of stacked layers; in a
        model without stacked layers, all matrices that have no dim ``vocab``.
      inputs: pattern → the number of dims that the weight sums over. By default the number that makes its matrices
        most nearly square.
      stacked: logical dims along which a parameter holds separate matrices.
    """

    adam_learning_rate: Positive | None = None
    targets: tuple[str, ...] = ()
    inputs: dict[str, Count] = field(default_factory=dict)
    stacked: tuple[str, ...] = ("layers", "dense_layers", "experts")


@dataclass(frozen=True)
class DecaySettings:
    """Which parameters weight decay shrinks; see :func:`jaxpar.optimizers.decay_mask`.

    Attributes:
      exclude: those that do not decay: words in their paths such as ``norm``, patterns of paths such as ``*/bias``, the
        logical dim of a vector, or ``vectors``, all with fewer than two dims beside those of stacked layers.
    """

    exclude: tuple[str, ...]


@dataclass(frozen=True)
class OptimizerConfig:
    """An optax optimizer by name, ``muon`` or ``one_bit_adam``, with a schedule of its learning rate.

    Attributes:
      name: the optimizer. ``muon`` updates the matrices of layers; Adam updates all other parameters.
      learning_rate: the highest rate, reached after ``warmup`` steps of linear growth from 0.
      warmup: number of steps.
      schedule: how the rate decays: by a ``cosine``, ``linear``, or not at all (``constant``).
      decay_steps: the step at which the rate is the last one, and stays so; ``None`` for ``train.steps``.
      final_lr_ratio: the last rate, as a fraction of the highest; a ``constant`` schedule ignores it.
      clip_norm: gradients are scaled down to this norm over all parameters; ``None`` keeps them.
      options: the optimizer's other keyword arguments; for ``muon`` those of ``optax.contrib.muon``.
      decay: which parameters weight decay shrinks: ``{exclude: [norm, bias, embed]}``; by default all.
      muon: which weights ``muon`` updates, and the rate of all others: ``{adam_learning_rate: 1e-3}``.
      prune: which weights are pruned: ``{sparsity: 0.5, begin: 100, end: 300}`` or ``{pattern: [2, 4]}``.
    """

    name: str = "adamw"
    learning_rate: Positive = 1e-3
    warmup: Natural = 20
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    decay_steps: Count | None = None
    final_lr_ratio: Share = 0.1
    clip_norm: Positive | None = 1.0
    options: dict[str, Option | None] = field(default_factory=dict)
    decay: DecaySettings | None = None
    muon: MuonSettings | None = None
    prune: PruneSettings | None = None


@dataclass(frozen=True)
class ZeroConfig:
    """Optimizer parallelism; see :class:`jaxpar.Zero`."""

    stage: int
    axis: str | list[str] = "data"
    min_bytes: Bytes = "64KiB"
    fsdp_group_size: int | None = None


@dataclass(frozen=True)
class RematConfig:
    """Which activations the backward pass recomputes; see :class:`jaxpar.RematPolicy`."""

    policy: str
    save_names: tuple[str, ...] = ()
    offload_names: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    slice_activation: bool = False


@dataclass(frozen=True)
class FusionConfig:
    """Which tensors share one collective; see :class:`jaxpar.overlap.CollectiveFusion`."""

    reduce: str | int | list[int] = "auto"
    gather: str | int | list[int] = "auto"
    scatter: str | int | list[int] = "auto"


@dataclass(frozen=True)
class OffloadConfig:
    """Which state is stored in host memory, or on disk in the folder ``path``; see :func:`jaxpar.offload`."""

    optimizer: Literal["host", "disk"] | None = None
    parameters: Literal["host"] | None = None
    min_bytes: Bytes = "64KiB"
    path: str | None = None


@dataclass(frozen=True)
class ContextConfig:
    """How attention runs over a sharded sequence; see :class:`jaxpar.parallel.attention.context.Context`."""

    impl: str = "auto"
    load_balance: str | None = None
    grad_dtype: str | None = None
    block: int | None = None
    keep_gathered_kv: bool = False


@dataclass(frozen=True)
class PipelineConfig:
    """How layers are assigned to the stages of the mesh axis ``pipeline``; see :class:`jaxpar.Pipeline`.

    Attributes:
      schedule: a name for :func:`jaxpar.pipeline.schedule`. ``pipedream_2bw`` and ``pipedream`` are not drained between
        steps; see :func:`jaxpar.pipeline.pipedream_train_step`.
      microbatches: number of microbatches of a batch.
      virtual_stages: pieces of the model on each stage, for schedules that take several.
      sequence_chunks: parts of each sequence, for ``seq1f1b``.
      activation_checkpointing: ``full`` keeps only a stage's inputs and recomputes its layers; ``none`` keeps their
        residuals.
      grad_reduction: when gradients are reduced.
      executor: ``lockstep``, or ``independent`` stages.
      layers_per_stage: the number of layers of each piece, in model order; empty if all pieces are equal.
      recompute: for each stage, how many of its first layers keep only their input, where the stage keeps residuals.
      embedding: ``per_microbatch`` looks up the tokens of one microbatch at a time.
      head_grad_reduction: ``per_microbatch`` reduces gradients outside the layers for every microbatch.
    """

    schedule: str = "1f1b"
    microbatches: Count = 1
    virtual_stages: Count = 1
    sequence_chunks: Count = 1
    activation_checkpointing: Literal["full", "none"] = "full"
    grad_reduction: Literal["per_step", "per_chunk", "per_microbatch"] = "per_step"
    executor: Literal["lockstep", "independent"] = "lockstep"
    layers_per_stage: tuple[int, ...] = ()
    recompute: tuple[int, ...] = ()
    embedding: Literal["per_step", "per_microbatch"] = "per_step"
    head_grad_reduction: Literal["per_step", "per_microbatch"] = "per_step"


@dataclass(frozen=True)
class OverlapConfig:
    """How communication runs beside compute.

    Attributes:
      ways: into how many parts the layers split each device's rows or tokens; see
        :func:`jaxpar.overlap.interleave_batches`.
      dim: ``batch`` splits rows, ``seq`` tokens.
      matmuls: whether matmuls overlap with the gathers and scatters of sequences beside them; see
        :func:`jaxpar.overlap.gather_dot`. In layers with experts, whether the gathers of their weights and the
        scatters of the gradients run beside other compute; see :func:`jaxpar.experts`.
    """

    ways: int = 1
    dim: Literal["batch", "seq"] = "batch"
    matmuls: bool = False


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism that the layout does not describe.

    Attributes:
      optimizer: the stage of optimizer parallelism, and the mesh axes.
      remat: which activations the backward pass recomputes; replaces ``model.remat``. A policy's name, or
        ``{policy, save_names, offload_names, layers, slice_activation}``.
      reshard_after_forward: whether sharded weights are gathered again for the backward pass. ``false`` keeps the
        gathered weights of the forward pass; a number g keeps them sharded over groups of g devices.
      fusion: which gradients and weights share one collective.
      offload: state to store in host memory: ``{optimizer: host}``, or ``{parameters: host, optimizer: host}``; or on
        disk: ``{optimizer: disk, path: DIR}``, relative to the current directory.
      context: how attention runs over a sharded sequence: ``{impl: ring}``.
      pipeline: how layers are assigned to stages: ``{schedule: 1f1b, microbatches: 8}``.
      overlap: ``{ways: 2}`` runs the layers on two halves of each device's rows, one communicating while the other
        computes; see :func:`jaxpar.overlap.interleave_batches`. ``{ways: 2, dim: seq}`` halves each sequence, for
        devices with a single row. ``{matmuls: true}`` overlaps sequence parallelism with the matmuls themselves,
        and experts' weights with other compute.
      parameter_server: parameters are on servers, and workers train at their own pace (extra ray).
    """

    optimizer: ZeroConfig | None = None
    remat: str | RematConfig | None = None
    reshard_after_forward: bool | Count = True
    fusion: FusionConfig = field(default_factory=FusionConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    context: ContextConfig | None = None
    pipeline: PipelineConfig | None = None
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    parameter_server: ServerSettings | None = None


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes of a step, and its loss scale; see :class:`jaxpar.Precision`."""

    compute: str | None = None
    gather: str | None = None
    reduce: str | None = None
    scale: dict[str, float] | None = None
    matmul: str | None = None


@dataclass(frozen=True)
class GenerateConfig:
    """The formats of the generator's weights and cache; see :func:`jaxpar.models.llama.decode.cached_llama`.

    ``weights: {bits: 4, group: 32}`` stores the matrices of the layers in int4.
    """

    weights: Literal["int8"] | QuantizeSettings | None = None
    cache: Literal["int8"] | None = None


@dataclass(frozen=True)
class SuperviseConfig:
    """How ``jaxpar train --processes N`` supervises its processes; see :class:`jaxpar.app.launch.supervisor.Policy`.

    Attributes:
      processes: number of processes, unless the command line sets it.
      step_timeout: seconds after which a step counts as hung; includes saves and evaluations between steps.
      compile_timeout: the same for everything before the first step (start, restore, compile) and after the last.
      restarts: maximum number of restarts, each from the newest checkpoint.
      restart_delay: seconds before the first restart; doubles with each restart.
      elastic: after a process of this host or of Ray is lost, continue with the remaining processes, or with as many
        of them as fit the layout.
      resources: Ray resources of each process, with ``--ray``: ``{CPU: 4, GPU: 1}``.
    """

    processes: Count | None = None
    step_timeout: Positive = 300.0
    compile_timeout: Positive = 1800.0
    restarts: Natural = 3
    restart_delay: NonNegative = 1.0
    elastic: bool = False
    resources: dict[str, NonNegative] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run, as written in a YAML file.

    Attributes:
      model: ``family``, ``preset``, and any field of the family's configuration; or for a model of your own
        ``factory``, ``loss``, ``eval_loss``, ``decoder`` and ``args`` (:class:`jaxpar.app.factory.FactoryConfig`).
        ``lora: {rank: 8, alpha: 16, targets: [attention/q]}`` trains adapters (:class:`jaxpar.app.lora.LoraSettings`),
        ``quantize: {bits: 4, group: 32}`` rounds weights (:class:`jaxpar.app.quantize_config.QuantizeSettings`).
      layout: a layout file, relative to the run's file, or one that comes with jaxpar (``layouts/tp.yaml``); without
        one, ``mesh`` and ``rules`` are the layout.
      mesh, rules: changes to that layout, key by key.
      rings: mesh axes whose devices form closed rings of TPU chips where the ends of the torus are not joined, such as
        ``[model]``; instead of the layout's.
      parallel: parallelism that the layout does not describe.
      precision: a dtype such as ``bf16`` or ``fp8``, or ``{compute, gather, reduce, scale, matmul}``; by default the
        model's dtypes.
      cpu_devices: number of CPU devices to simulate on a machine without TPU and GPU; ``None`` simulates none.
      data: the data, and its batches.
      optimizer: the optimizer and its schedule.
      train: number of steps, evaluation, and rollbacks.
      compiler: XLA options by platform, such as ``{tpu: {xla_tpu_scoped_vmem_limit_kib: 65536}}``; options of other
        platforms are ignored.
      checkpoint: which checkpoints to keep, and whether to resume: ``{save_interval_steps: 100}``.
      generate: formats of weights and cache in ``jaxpar generate``: ``{weights: int8, cache: int8}``.
      supervise: how several processes are supervised: ``{processes: 2, step_timeout: 60}``.
      trackers: services that also receive the metrics, with the arguments of their ``init``: ``{wandb: {project: p}}``.
      output: folder for metrics, loss curve and summary, relative to the current directory.
    """

    model: dict[str, Any]
    layout: str | None = None
    mesh: dict[str, AxisSize] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)
    rings: list[str] | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: str | PrecisionConfig | None = None
    cpu_devices: Annotated[int, Range(1, 2**12)] | None = None
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    compiler: dict[Platform, dict[str, Option]] = field(default_factory=dict)
    checkpoint: CheckpointConfig | None = None
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    trackers: dict[TrackerName, dict[str, Option]] = field(default_factory=dict)
    supervise: SuperviseConfig = field(default_factory=SuperviseConfig)
    output: str = "runs/default"


@dataclass(frozen=True)
class Loaded:
    """A run's configuration, its layout as plain data, and its name (the file's name without suffix)."""

    config: RunConfig
    layout: dict[str, Any]
    name: str


def load_run(path: str | os.PathLike[str], settings: Sequence[str] = ()) -> Loaded:
    """Read a run's YAML file, or one that comes with jaxpar (``quickstart``), apply settings, and read its layout file.

    Raises:
      ConfigError: a key in either file is unknown, has the wrong type or an invalid value, or is missing.
    """
    file = find_config(Path(path))
    data = override(load_yaml(file, paths=("layout",)), settings)
    config = build(RunConfig, data, str(file))
    _check(config, file)
    own = LayoutData(mesh=None, rules=None)
    if config.layout is not None:
        source = find_layout(file, config.layout)
        own = build(LayoutData, {"mesh": None, "rules": None, **load_yaml(source)}, str(source))
    layout: dict[str, Any] = {"mesh": merge(own.mesh or {}, config.mesh), "rules": merge(own.rules or {}, config.rules)}
    if rings := own.rings if config.rings is None else config.rings:
        layout["rings"] = rings
    return Loaded(config, layout, file.stem)


def _check(config: RunConfig, file: Path) -> None:
    """Raises an error for values that only some commands use, or that contradict each other, so that all refuse them.

    Raises:
      ConfigError: it names the keys.
    """
    check_blend(config.data, file)
    check_spike(config.train.spike, file)
    check_checkpoint(config.checkpoint, config.train, file)
    check_profile(config.train, file)
    if not config.output:
        raise ConfigError(f"{file}: output must not be empty. Remedy: the path of a folder, or leave the key out.")
    if config.parallel.parameter_server is not None:
        with prefixed(f"{file}: "):
            _check_servers(config, server_config(config.parallel.parameter_server))


def _check_servers(run: RunConfig, config: ServerConfig) -> None:
    """Raises if a run has what servers do not train.

    Raises:
      ConfigError: the text names the key.
    """
    pipeline = run.parallel.pipeline
    for key, value in (
        ("parallel.offload.optimizer", run.parallel.offload.optimizer),
        ("model.lora", run.model.get("lora")),
        ("train.init_from", run.train.init_from),
        ("optimizer.name: one_bit_adam", run.optimizer.name == "one_bit_adam"),
        ("parallel.pipeline.schedule: pipedream", pipeline is not None and pipeline.schedule.startswith("pipedream")),
    ):
        if value:
            raise ConfigError(
                f"{key} does not work with parallel.parameter_server, whose servers hold the optimizer state. Remedy: "
                "leave one of them out."
            )
    if run.train.profile is not None:
        raise ConfigError(
            "train.profile has no effect with parallel.parameter_server, whose workers write no trace. Remedy: leave "
            "it out."
        )
    if run.data.batch % config.workers:
        larger = math.ceil(run.data.batch / config.workers) * config.workers
        raise ConfigError(
            f"data.batch={run.data.batch} is divided among the {config.workers} workers of parallel.parameter_server, "
            f"and is not a multiple of {config.workers}. Remedy: data.batch: {larger}."
        )
