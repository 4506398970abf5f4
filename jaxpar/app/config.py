"""The configuration of a run: frozen dataclasses that YAML fills strictly."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxpar.errors import ConfigError
from jaxpar.utils.yaml_config import build, load_yaml, merge, override

Platform = Literal["tpu", "gpu", "cpu"]
CompilerOption = bool | int | float | str


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from and how it is cut: ``batch`` sequences of ``seq`` tokens a step, over all devices.

    With ``packing`` a sequence's documents are told apart: a token sees those of its own.
    """

    source: str = "stdlib"
    batch: int = 32
    seq: int = 128
    seed: int = 0
    packing: bool = False


@dataclass(frozen=True)
class OptimizerConfig:
    """Any optax optimizer by name, or ``one_bit_adam``, with a warmup-cosine schedule; ``options`` are its own keyword arguments."""

    name: str = "adamw"
    learning_rate: float = 1e-3
    warmup: int = 20
    final_lr_ratio: float = 0.1
    clip_norm: float | None = 1.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ZeroConfig:
    """Optimizer parallelism; see :class:`jaxpar.Zero`."""

    stage: int
    axis: str | list[str] = "data"
    min_bytes: int | str = "64KiB"
    fsdp_group_size: int | None = None


@dataclass(frozen=True)
class RematConfig:
    """What of the layers the backward pass computes again; see :class:`jaxpar.RematPolicy`."""

    policy: str
    save_names: tuple[str, ...] = ()
    offload_names: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    slice_activation: bool = False


@dataclass(frozen=True)
class FusionConfig:
    """What goes in one collective; see :class:`jaxpar.CollectiveFusion`."""

    reduce: str | int | list[int] = "auto"
    gather: str | int | list[int] = "auto"
    scatter: str | int | list[int] = "auto"


@dataclass(frozen=True)
class OffloadConfig:
    """What waits in the host's memory, or on disk in the folder ``path``; see :func:`jaxpar.offload`."""

    optimizer: Literal["host", "disk"] | None = None
    parameters: Literal["host"] | None = None
    min_bytes: int | str = "64KiB"
    path: str | None = None


@dataclass(frozen=True)
class ContextConfig:
    """How attention goes over a split sequence; see :class:`jaxpar.parallel.attention.context.Context`."""

    impl: str = "auto"
    load_balance: str | None = None
    grad_dtype: str | None = None
    block: int | None = None
    keep_gathered_kv: bool = False


@dataclass(frozen=True)
class PipelineConfig:
    """How layers go over the stages of the mesh's axis ``pipeline``; see :func:`jaxpar.schedule` and :class:`jaxpar.Pipeline`.

    ``schedule: pipedream_2bw`` and ``pipedream`` are not emptied between steps; see :class:`jaxpar.PipedreamStep`.
    ``offset`` says by how many layers each piece (stage by stage, then chunk by chunk) has more or fewer than its equal share,
    ``recompute`` how many of the first layers of each stage keep their input alone, where it keeps residuals. ``sequence_chunks`` is for ``seq1f1b``.
    ``embedding: per_microbatch`` looks tokens up microbatch by microbatch.
    """

    schedule: str = "1f1b"
    microbatches: int = 1
    virtual_stages: int = 1
    sequence_chunks: int = 1
    activation_checkpointing: Literal["full", "none"] = "full"
    grad_reduction: Literal["per_step", "per_chunk", "per_microbatch"] = "per_step"
    executor: Literal["lockstep", "independent"] = "lockstep"
    offset: tuple[int, ...] = ()
    recompute: tuple[int, ...] = ()
    embedding: Literal["per_step", "per_microbatch"] = "per_step"


@dataclass(frozen=True)
class OverlapConfig:
    """In how many parts of each device's rows or tokens the layers run; see :func:`jaxpar.interleave_batches`."""

    ways: int = 1
    dim: Literal["batch", "seq"] = "batch"


@dataclass(frozen=True)
class ParallelConfig:
    """What is split beside the layout.

    Attributes:
      optimizer: the stage of optimizer parallelism, and over what.
      remat: what of the layers the backward pass computes again, in the place of ``model.remat``; a policy's name, or
        ``{policy, save_names, offload_names, layers, slice_activation}``.
      reshard_after_forward: gather sharded weights anew for the backward pass; ``false`` keeps them from the forward pass, a
        number keeps a part of them within groups of so many devices.
      fusion: what of gradients and weights goes in one collective.
      offload: what waits in the host's memory: ``{optimizer: host}``, or ``{parameters: host, optimizer: host}``; or on disk:
        ``{optimizer: disk, path: DIR}``, relative to where the command runs.
      context: how attention goes over a split sequence: ``{impl: ring}``.
      pipeline: how layers go over stages: ``{schedule: 1f1b, microbatches: 8}``.
      overlap: ``{ways: 2}`` runs the layers on two halves of each device's rows, one sending while the other computes; see
        :func:`jaxpar.interleave_batches`. ``{ways: 2, dim: seq}`` cuts each sequence in halves, where a device has a single row.
    """

    optimizer: ZeroConfig | None = None
    remat: str | RematConfig | None = None
    reshard_after_forward: bool | int = True
    fusion: FusionConfig = field(default_factory=FusionConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    context: ContextConfig | None = None
    pipeline: PipelineConfig | None = None
    overlap: OverlapConfig = field(default_factory=OverlapConfig)


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes of a step, and the scale of its loss; see :class:`jaxpar.Precision`."""

    compute: str | None = None
    gather: str | None = None
    reduce: str | None = None
    scale: dict[str, float] | None = None
    matmul: str | None = None


@dataclass(frozen=True)
class SpikeConfig:
    """Which losses are spikes; a run rolls back after ``patience`` of them in a row.

    Attributes:
      sigmas: a spike is so many standard deviations (by the median of deviations) above the median of the last good losses; 6 if neither is said.
      factor: or so many times the median.
      window: how many losses that is; before, nothing is a spike.
      patience: how many spikes in a row are too many.
    """

    sigmas: float | None = None
    factor: float | None = None
    window: int = 50
    patience: int = 3


@dataclass(frozen=True)
class StragglerConfig:
    """Which process of several is slow: its own time in a step (data, bookkeeping) is ``factor`` times that of the others, over ``every`` steps."""

    factor: float = 2.0
    every: int = 50


@dataclass(frozen=True)
class TrainConfig:
    """How long to train and how often to look. ``eval_batches`` batches of held-out text make one evaluation.

    ``grad_accum_steps`` cuts each batch into so many microbatches. A step whose loss or gradients are not finite changes nothing but
    the step's number; ``skip_nonfinite: false`` lets them pass. After ``max_consecutive_nonfinite`` of them in a row, or too many spikes of the loss
    (``spike: {}``; none are looked for without), the run goes back to its newest good checkpoint and passes over the batches since;
    ``max_rollbacks`` times at most, then it stops.
    """

    steps: int = 100
    grad_accum_steps: int = 1
    skip_nonfinite: bool = True
    max_consecutive_nonfinite: int = 3
    spike: SpikeConfig | None = None
    max_rollbacks: int = 3
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    seed: int = 0
    eval_every: int = 50
    eval_batches: int = 8


@dataclass(frozen=True)
class BestConfig:
    """Which steps are kept beside the newest: ``keep`` of those whose ``metric`` is the least (``mode: max``: the most), also after a restart."""

    metric: Literal["heldout_loss", "loss"] = "heldout_loss"
    mode: Literal["min", "max"] = "min"
    keep: int = 1


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run keeps of itself, and whether it goes on from that; see :class:`jaxpar.CheckpointManager`.

    Attributes:
      directory: of the checkpoints, relative to where the command runs; ``checkpoints`` in the run's output if not given.
      save_interval_steps, save_interval_minutes: save after so many steps, or so many minutes; the last step is saved in any case.
      keep: how many of the newest.
      best: which to keep beside: ``{metric: heldout_loss, mode: min, keep: 2}``. A step has a held-out loss where ``train.eval_every`` says so.
      resume: ``auto`` goes on from the newest good step if there is one, ``required`` wants one, ``never`` begins anew.
    """

    directory: str | None = None
    save_interval_steps: int | None = None
    save_interval_minutes: float | None = None
    keep: int = 3
    best: BestConfig | None = None
    resume: Literal["auto", "never", "required"] = "auto"


@dataclass(frozen=True)
class GenerateConfig:
    """In what a generator keeps the model's weights and its cache; see :func:`jaxpar.models.llama.decode.cached_llama`."""

    weights: Literal["int8"] | None = None
    cache: Literal["int8"] | None = None


@dataclass(frozen=True)
class SuperviseConfig:
    """How ``jaxpar train --processes N`` keeps the processes that it starts; see :class:`jaxpar.app.launch.supervisor.Policy`.

    Attributes:
      processes: how many, where the command line does not say.
      step_timeout: seconds that a step may take before its process counts as hung; saves and evaluations between steps are part of it.
      compile_timeout: the same for whatever comes before the first step (start, restore, compile) and after the last.
      restarts: how often the run is started again, from its newest checkpoint, at most.
      restart_delay: seconds before the first restart, doubled with each.
      elastic: after a process is lost, go on with those that remain, or with as many of them as fit the layout.
      resources: of each process, with ``--ray``: ``{CPU: 4, GPU: 1}``.
    """

    processes: int | None = None
    step_timeout: float = 300.0
    compile_timeout: float = 1800.0
    restarts: int = 3
    restart_delay: float = 1.0
    elastic: bool = False
    resources: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    """A run, as a YAML file describes it.

    Attributes:
      model: ``family``, ``preset``, and any field of the family's configuration.
      layout: a layout file, relative to the run's file.
      mesh, rules: changes to that layout, key by key.
      parallel: optimizer parallelism, and what of it the backward pass repeats.
      precision: a dtype as ``bf16`` or ``fp8``, or ``{compute, gather, reduce, scale, matmul}``; without it every dtype is the model's.
      cpu_devices: CPU devices to simulate where there is neither TPU nor GPU; ``None`` takes the machine as it is.
      compiler: XLA's options by platform, as ``{tpu: {xla_tpu_scoped_vmem_limit_kib: 65536}}``; others than the machine's
        are left alone.
      checkpoint: what to keep of the run, and whether to go on from that: ``{every: 100}``.
      generate: in what ``jaxpar generate`` keeps weights and cache: ``{weights: int8, cache: int8}``.
      supervise: how its processes are kept, where there are several: ``{processes: 2, step_timeout: 60}``.
      output: folder for metrics, curve and summary, relative to where the command runs.
    """

    model: dict[str, Any]
    layout: str
    mesh: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: str | PrecisionConfig | None = None
    cpu_devices: int | None = None
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    compiler: dict[Platform, dict[str, CompilerOption]] = field(default_factory=dict)
    checkpoint: CheckpointConfig | None = None
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    supervise: SuperviseConfig = field(default_factory=SuperviseConfig)
    output: str = "runs/default"


@dataclass(frozen=True)
class Loaded:
    """A run's configuration and the layout it names, as plain data."""

    config: RunConfig
    layout: dict[str, Any]
    name: str


def load_run(path: str | os.PathLike[str], settings: Sequence[str] = ()) -> Loaded:
    """Read a run's YAML file, apply ``a.b=c`` settings, and read the layout it names.

    Raises:
      ConfigError: anything in either file that is unknown, of the wrong type, or missing.
    """
    file = Path(path)
    data = override(load_yaml(file, paths=("layout",)), settings)
    config = build(RunConfig, data, str(file))
    positive = {
        "data.batch": config.data.batch,
        "data.seq": config.data.seq,
        "train.steps": config.train.steps,
        "train.grad_accum_steps": config.train.grad_accum_steps,
        "train.max_consecutive_nonfinite": config.train.max_consecutive_nonfinite,
        "train.eval_every": config.train.eval_every,
        "train.eval_batches": config.train.eval_batches,
        "cpu_devices": config.cpu_devices if config.cpu_devices is not None else 1,
    }
    for key, value in positive.items():
        if value < 1:
            raise ConfigError(f"{file}: {key} is {value}, but at least 1 is wanted.")
    _check_watch(config.train, str(file))
    layout = merge(load_yaml(file.parent / config.layout), {"mesh": config.mesh, "rules": config.rules})
    return Loaded(config, layout, file.stem)


def _check_watch(train: TrainConfig, file: str) -> None:
    """What spikes, stragglers and rollbacks are asked to be."""
    if train.max_rollbacks < 0:
        raise ConfigError(f"{file}: train.max_rollbacks is {train.max_rollbacks}, but 0 or more is wanted.")
    least = {
        "train.straggler.factor": (train.straggler.factor, 1.0),
        "train.straggler.every": (train.straggler.every, 0),
    }
    if train.spike is not None:
        spike = train.spike
        if spike.sigmas is not None and spike.factor is not None:
            raise ConfigError(
                f"{file}: train.spike.sigmas={spike.sigmas:g} and train.spike.factor={spike.factor:g} both say what a spike is. Remedy: leave one out."
            )
        least |= {"train.spike.window": (spike.window, 1), "train.spike.patience": (spike.patience, 0)}
        least["train.spike.sigmas"] = (1.0 if spike.sigmas is None else spike.sigmas, 0.0)
        least["train.spike.factor"] = (2.0 if spike.factor is None else spike.factor, 1.0)
    for key, (value, bound) in least.items():
        if not value > bound:
            raise ConfigError(f"{file}: {key} is {value:g}, but a number above {bound:g} is wanted.")
