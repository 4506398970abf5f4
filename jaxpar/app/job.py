"""``Job``: a run's configuration as the objects that the library takes, for all commands of ``jaxpar``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import optax

import jaxpar as jp
from jaxpar.app.config import ContextConfig, Loaded, ParallelConfig, PrecisionConfig, RematConfig, RunConfig
from jaxpar.app.conversation_data import check_conversations
from jaxpar.app.factory import FactoryConfig, FactoryModel, factory_model
from jaxpar.app.lora import LoraSettings, lora_settings
from jaxpar.app.model_config import model_config
from jaxpar.app.optimizer_config import make_optimizer
from jaxpar.app.own_data import OwnData, check_dims, own_data, tokens_of
from jaxpar.app.pipeline_config import check_recompute, make_pipeline
from jaxpar.app.quantize_config import QuantizeSettings, quantize_config
from jaxpar.app.trained_model import trained_model
from jaxpar.data.megatron import megatron_prefix
from jaxpar.data.token_file import TokenFile, is_token_file
from jaxpar.data.tokenizer import SEPARATOR, Tokenizer, load_tokenizer
from jaxpar.errors import ConfigError, prefixed
from jaxpar.models import llama
from jaxpar.models.llama.pipeline import staged_next_token_loss, staged_token_loss
from jaxpar.models.losses import next_token_loss, token_loss
from jaxpar.models.moe import config as moe_config
from jaxpar.models.moe.model import make_decoder
from jaxpar.parallel.attention.context import BALANCED, Context
from jaxpar.parallel.experts.bias import balanced_bias
from jaxpar.planning.search.pipeline import StagedModel
from jaxpar.sharding.names import Names
from jaxpar.training.batch import tag_batch
from jaxpar.training.one_bit_adam import NAME as ONE_BIT
from jaxpar.training.remat import SAVED_EMBED
from jaxpar.utils.yaml_config import build

BATCH_DIMS = ("batch", "seq")
DOCUMENT_ARRAYS = ("segment_ids", "positions", "loss_mask")
"""The arrays of a batch whose rows hold whole documents, beside tokens and targets."""


@dataclass(frozen=True)
class Job:
    """Model, loss, optimizer and parallelism of a run.

    Attributes:
      name: the name of the configuration.
      config: the configuration itself.
      model: the model's configuration, with the settings of ``parallel`` and ``precision`` applied; or a model of the
        user's own.
      make_model: takes a PRNG key and returns the model.
      loss_fn: the loss, as :func:`jaxpar.train_step` takes it.
      tx: the optimizer.
      layout_data: ``mesh`` and ``rules`` of the layout, as plain data.
      zero, precision, fusion, pipeline: settings of the step; without stages ``pipeline`` is ``None``.
      data: data of the user's own; ``None`` for a text.
    """

    name: str
    config: RunConfig
    model: llama.LlamaConfig | FactoryModel
    make_model: Callable[[jax.Array], Any]
    loss_fn: Callable[..., Any]
    tx: optax.GradientTransformation
    layout_data: Mapping[str, Any]
    zero: jp.Zero
    precision: jp.Precision
    fusion: jp.overlap.CollectiveFusion
    pipeline: jp.Pipeline | jp.pipeline.Asynchronous | None = None
    data: OwnData | None = None

    @property
    def eval_loss_fn(self) -> Callable[..., Any]:
        """The loss on held-out data, as :func:`jaxpar.eval_step` takes it: without the losses of routers."""
        if isinstance(self.model, FactoryModel):
            return self.model.eval_loss_fn
        if not isinstance(self.model, moe_config.MoEConfig):
            return self.loss_fn
        return token_loss if self.pipeline is None else staged_token_loss(self.model)

    @property
    def lora(self) -> LoraSettings | None:
        """The adapters that are trained instead of the model's weights, if any."""
        return lora_settings(self.config.model)

    @property
    def tokens(self) -> int | None:
        """The number of tokens in a batch; ``None`` if the batch has no array ``tokens``."""
        return self.config.data.batch * self.config.data.seq if self.data is None else tokens_of(self.data.shapes())

    @property
    def llama(self) -> llama.LlamaConfig:
        """The configuration of a built-in model.

        Raises:
          ConfigError: the model is one of the user's own.
        """
        if isinstance(self.model, FactoryModel):
            raise ConfigError(
                f"{self.model.name} is a model of your own, but this is for built-in models. Remedy: model: {{family: "
                "llama}}, or call the library from Python."
            )
        return self.model

    def layout(self, devices: Sequence[Any] | int | None = None) -> jp.Layout:
        """Returns the layout, including optimizer parallelism.

        Args:
          devices: the devices of its mesh (default: all); an integer gives an abstract mesh of that many devices.

        Raises:
          ConfigError: names that were found for the dims of a model have no rule.
          RulesError, MeshError: ``parallel.optimizer`` does not fit the rules or the mesh.
        """
        data = dict(self.layout_data)
        if isinstance(self.model, FactoryModel):
            self.model.check_rules(data["rules"] or {})
        if self.zero.stage:
            count = devices if isinstance(devices, int) else len(jax.devices() if devices is None else devices)
            data["mesh"] = self.zero.mesh(jp.MeshSpec.from_dict(data["mesh"] or {}), count).to_dict()
            data["rules"] = self.zero.rules(jp.Rules.from_dict(data["rules"] or {})).to_dict()
        if jp.RematPolicy.of(self.model.remat).slice_activation:
            # The rule that shards kept layer inputs over `model`.
            data["rules"] = {SAVED_EMBED: "model", **(data["rules"] or {})}
        return jp.Layout.from_dict(data, devices=devices)

    def step_options(self) -> dict[str, Any]:
        """The keyword arguments of :func:`jaxpar.train_step`."""
        train, precision = self.config.train, self.precision
        casts = isinstance(self.model, llama.LlamaConfig) and (self.zero.step or self.pipeline)
        if casts and precision.compute is None and precision.gather is None:
            precision = replace(precision, gather=self.model.dtype)  # the dtype to which the model would cast them
        return {
            "clip_norm": self.config.optimizer.clip_norm,
            "grad_accum_steps": train.grad_accum_steps,
            "skip_nonfinite": train.skip_nonfinite,
            "precision": precision,
            "fusion": self.fusion,
            **({} if self.pipeline is None else {"pipeline": self.pipeline}),
            **self.zero.step,
        }

    def eval_options(self) -> dict[str, Any]:
        """The keyword arguments of :func:`jaxpar.eval_step`."""
        if self.pipeline is None:
            return {"precision": self.precision}
        if isinstance(self.pipeline, jp.pipeline.Asynchronous):
            one = jp.pipeline.schedule("1f1b", self.pipeline.stages, self.pipeline.microbatches)
            pipeline = jp.Pipeline(one, layers_per_stage=self.pipeline.layers_per_stage)
            return {"precision": self.precision, "pipeline": pipeline}
        return {"precision": self.step_options()["precision"], "pipeline": self.pipeline}

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a text.

        Raises:
          DataError: it cannot be read, or the text is a token file of another tokenizer.
          ConfigError: the model's vocabulary is smaller than the tokenizer's.
        """
        found = load_tokenizer(self.config.data.tokenizer)
        for source in self.config.data.sources:
            if is_token_file(source.source):
                TokenFile(source.source).check_tokenizer(found)
            elif self.config.data.tokenizer is None and megatron_prefix(source.source):
                raise ConfigError(f"data: {source.source} does not hold its tokenizer. Remedy: data.tokenizer.")
        self.check_vocab(found.vocab, f"the tokenizer ({found.name})")
        return found

    def check_vocab(self, vocab: int, owner: str) -> None:
        """Raise a ConfigError if the model's vocabulary is smaller than that of ``owner``."""
        if self.model.vocab is not None and vocab > self.model.vocab:
            raise ConfigError(
                f"model: vocab must be at least {vocab}, the number of tokens of {owner}, got {self.model.vocab}. "
                f"Remedy: model: {{vocab: {vocab}}}."
            )

    def batch_names(self) -> tuple[str, ...]:
        """The names of a batch's arrays, each ``[batch, seq]``."""
        if self.config.data.chat_template is not None:
            return ("tokens", "targets", *(DOCUMENT_ARRAYS if self.config.data.packing else ("loss_mask",)))
        packing = self.config.data.packing
        packed = ("segment_ids",) if packing is True else DOCUMENT_ARRAYS if packing else ()
        return ("tokens", "targets", *packed, *(("order",) if self.model.context.load_balance == BALANCED else ()))

    def batch_dims(self) -> Mapping[str, Sequence[str | None]]:
        """The logical dims of a batch's arrays, by path."""
        if self.data is None or not isinstance(self.model, FactoryModel):
            return dict.fromkeys(self.batch_names(), BATCH_DIMS)
        return self.model.batch_dims

    def batch_spec(self) -> Any:
        """The batch as tagged shapes, for ``explain`` and ``check``."""
        if self.data is not None:
            return tag_batch(self.data.shapes(), self.batch_dims())
        shape = (self.config.data.batch, self.config.data.seq)
        return {name: jp.tag(jax.ShapeDtypeStruct(shape, "int32"), *BATCH_DIMS) for name in self.batch_names()}

    def reading(self, layout: jp.Layout) -> dict[str, Any]:
        """Options of :func:`jaxpar.data.batches`: the separator of bytes, and the token order for the layout's ring.

        Raises:
          ConfigError: the sequence cannot be cut into pieces to balance.
        """
        data, options = self.config.data, {"separator": SEPARATOR if self.config.data.packing else None}
        if self.model.context.load_balance != BALANCED or isinstance(self.model, FactoryModel):
            return options
        with layout:
            ring_size = self.model.context.ring(*llama.layer_shapes(self.model, (data.batch, data.seq)))
        chunks = next((n for n in (8, 4, 2) if data.seq % (n * ring_size) == 0), None)
        if chunks is None:
            raise ConfigError(
                "parallel.context: load_balance: balanced splits the sequence into 2 pieces for each of the ring's "
                f"{ring_size} devices, but data.seq={data.seq} is not a multiple of {2 * ring_size}. Remedy: set "
                f"data.seq to a multiple of {2 * ring_size}."
            )
        arrange = functools.partial(jp.context.balanced_packing, num_shards=ring_size, chunks=chunks)
        return {**options, "arrange": arrange}

    def compiler_options(self, platform: str) -> dict[str, Any] | None:
        """XLA options for a platform, as ``jax.stages.Lowered.compile`` takes them; ``None`` if none are configured."""
        return next((options for name, options in self.config.compiler.items() if name == platform), None)

    def abstract_devices(self) -> int:
        """The number of devices that the layout is for, without any devices: the mesh's product, else ``cpu_devices``.

        Raises:
          ConfigError: the mesh leaves the number open, and ``cpu_devices`` is not set.
        """
        sizes = [size for size in (self.layout_data["mesh"] or {}).values() if isinstance(size, int)]
        if -1 not in sizes:
            return int(jp.MeshSpec.from_dict(self.layout_data["mesh"] or {}).abstract().size)
        if self.config.cpu_devices is None:
            raise ConfigError(
                "the mesh has an axis of -1, so the number of devices is unknown. Remedy: pass --devices N, or set "
                "cpu_devices."
            )
        return self.config.cpu_devices


def make_job(loaded: Loaded, *, training: bool = True) -> Job:
    """Build the job that a configuration describes.

    Args:
      loaded: the configuration.
      training: if false, ``parallel.pipeline`` is ignored, because stages then need no schedule.

    Raises:
      ConfigError: an unknown model family, preset, field or optimizer; or settings that contradict each other.
    """
    config = loaded.config
    if "factory" in config.model:
        return _factory_job(loaded, training=training)
    if config.data.factory is not None:
        raise ConfigError(
            f"data.factory names data of your own, but model.family: {config.model.get('family')} trains on text. "
            "Remedy: data.source, or a model.factory of your own."
        )
    check_conversations(config)
    if isinstance(
        config.generate.weights, QuantizeSettings
    ):  # only `generate` uses it, but no command takes a wrong one
        quantize_config(config.generate.weights, model_config(config.model, _precision(config)), "generate.weights")
    precision, zero = _precision(config), _zero(config)
    model = model_config(config.model, precision)
    if config.parallel.remat is not None:
        if "remat" in config.model:
            raise ConfigError("model.remat and parallel.remat are both set. Remedy: leave model.remat out.")
        model = replace(model, remat=_remat(config.parallel.remat))
    if config.parallel.context is not None:
        model = replace(model, context=_context(config.parallel.context, packed=bool(config.data.packing)))
    if config.parallel.reshard_after_forward is not True:
        model = replace(model, reshard_after_forward=config.parallel.reshard_after_forward)
    model = _with_overlap(config, model)
    fusion = _fusion(config)
    if config.optimizer.name == ONE_BIT:
        _check_one_bit(config, precision, zero, fusion)
    make_model = trained_model(config, make_decoder(model), model)
    tx = make_optimizer(config.optimizer, config.train.steps, make_model)
    if isinstance(model, moe_config.MoEConfig) and model.bias_rate is not None and "lora" not in config.model:
        tx = balanced_bias(tx, model.bias_rate)
    tx = _offload(config, model, tx)
    mesh = loaded.layout["mesh"] or {}
    pipeline = make_pipeline(config.parallel.pipeline, mesh, model.block_layers) if training else None
    check_recompute(pipeline, model.remat)
    run = (make_model, _loss(model, pipeline), tx)
    return Job(loaded.name, config, model, *run, loaded.layout, zero, precision, fusion, pipeline)


def _factory_job(loaded: Loaded, *, training: bool) -> Job:
    """The job of a model of the user's own, which itself decides how attention runs."""
    config, parallel, default = loaded.config, loaded.config.parallel, ParallelConfig()
    for key in ("context", "reshard_after_forward", "overlap", "offload"):
        if getattr(parallel, key) != getattr(default, key):
            raise ConfigError(
                f"parallel.{key} is for built-in models, but model.factory names one of your own. Remedy: leave it "
                f"out; the model itself can do this, with the functions of jaxpar."
            )
    if config.data.packing:
        raise ConfigError(
            "data.packing is for built-in models, but model.factory names one of your own. Remedy: packing: false."
        )
    precision, zero, fusion = _precision(config), _zero(config), _fusion(config)
    if config.optimizer.name == ONE_BIT:
        _check_one_bit(config, precision, zero, fusion)
    table, data = build(FactoryConfig, config.model, "model"), own_data(config.data)
    if data is None:
        dims: Mapping[str, Names] = dict.fromkeys(("tokens", "targets"), BATCH_DIMS)
        batch = dict.fromkeys(dims, jax.ShapeDtypeStruct((config.data.batch, config.data.seq), "int32"))
    else:
        batch = data.shapes()
        dims = check_dims(config.data.dims, batch)
    model = factory_model(table, batch, dims, (loaded.layout["rules"] or {}).keys())
    policy = jp.RematPolicy.of("none" if parallel.remat is None else _remat(parallel.remat))
    pipeline = None
    if parallel.pipeline is not None and training:
        staged = StagedModel.of(model.make_model, model.loss_fn)
        if staged is None:
            raise ConfigError(
                f"parallel.pipeline runs the layers that a jaxpar.pipeline.PipelineLoss names, but model.loss: "
                f"{table.loss} is none. Remedy: a PipelineLoss(layers=..., embed=..., layer=..., head=...), or leave "
                "parallel.pipeline out."
            )
        pipeline = make_pipeline(parallel.pipeline, loaded.layout["mesh"] or {}, staged.count)
        loss = staged.staged(policy if parallel.remat is not None else "")
        own_eval = model.eval_loss_fn if table.eval_loss is not None else loss
        model = replace(model, make_model=staged.make_model, loss_fn=loss, eval_loss_fn=own_eval, remat=policy)
    elif parallel.remat is not None:
        model = replace(model, loss_fn=jp.models.remat_layers(model.loss_fn, policy), remat=policy)
    make_model = trained_model(config, model.make_model, None)
    tx = make_optimizer(config.optimizer, config.train.steps, make_model)
    run = (make_model, model.loss_fn, tx, loaded.layout)
    return Job(loaded.name, config, model, *run, zero, precision, fusion, pipeline, data=data)


def _with_overlap(config: RunConfig, model: llama.LlamaConfig) -> llama.LlamaConfig:
    """The model with its layers split into as many parts as ``parallel.overlap`` configures."""
    parallel = config.parallel
    if parallel.overlap.ways != 1 and parallel.offload.parameters is not None:
        raise ConfigError(
            f"parallel.overlap.ways is {parallel.overlap.ways}, but parallel.offload.parameters is "
            f"{parallel.offload.parameters}: weights in host memory would be copied to the device once for each part. "
            "Remedy: leave one of them out."
        )
    if parallel.overlap.dim != "batch" and parallel.overlap.ways == 1:
        raise ConfigError(
            f"parallel.overlap.dim is {parallel.overlap.dim!r}, but overlap.ways is 1, so nothing is split. Remedy: "
            "overlap: {ways: 2}, or leave overlap.dim out."
        )
    with prefixed("parallel."):
        overlap = parallel.overlap
        return replace(model, copies=overlap.ways, copies_dim=overlap.dim, overlap_matmuls=overlap.matmuls)


def _loss(model: llama.LlamaConfig, pipeline: jp.Pipeline | jp.pipeline.Asynchronous | None) -> Callable[..., Any]:
    return next_token_loss if pipeline is None else staged_next_token_loss(model)


def _offload(config: RunConfig, model: llama.LlamaConfig, tx: optax.GradientTransformation) -> Any:
    """The optimizer, with its state and the parameters offloaded as ``parallel.offload`` configures."""
    offload = config.parallel.offload
    if offload.parameters is not None:
        if offload.optimizer != "host":
            raise ConfigError(
                "parallel.offload: parameters: host requires optimizer: host, because the update reads both, got "
                f"optimizer: {offload.optimizer or 'null'}. Remedy: {{parameters: host, optimizer: host}}."
            )
        if model.reshard_after_forward is not True:
            raise ConfigError(
                "parallel.offload: parameters are stored in host memory, but reshard_after_forward: "
                f"{str(model.reshard_after_forward).lower()} keeps all layers' weights on the device for the backward "
                "pass. Remedy: leave reshard_after_forward out, or parallel.offload.parameters."
            )
        if model.remat != "none" and jp.RematPolicy.of(model.remat).layers:
            raise ConfigError(
                "parallel.offload: parameters are stored in host memory, where a stack of layers cannot be sliced, but "
                "remat.layers selects some of its layers. Remedy: leave remat.layers out, or "
                "parallel.offload.parameters."
            )
        gathers = config.parallel.optimizer is not None and config.parallel.optimizer.stage in (1, 2)
        if gathers and "lora" not in config.model:
            raise ConfigError(
                "parallel.offload: parameters are stored in host memory and copied to the device one layer at a time, "
                f"but parallel.optimizer.stage {_zero(config).stage} gathers all of them before the step. "
                "Remedy: parallel.optimizer.stage: 3, or leave parallel.offload.parameters out."
            )
    if offload.path is not None and offload.optimizer != "disk":
        raise ConfigError("parallel.offload: path is only valid with optimizer: disk. Remedy: leave path out.")
    if offload.path is None and offload.optimizer == "disk":
        raise ConfigError(
            "parallel.offload: optimizer: disk requires path, the folder of its files. Remedy: path: DIR, on a fast "
            "disk."
        )
    if offload.optimizer is None:
        return tx
    if config.optimizer.prune is not None:
        raise ConfigError(
            "optimizer.prune keeps masks on the device, but parallel.offload moves the optimizer state. Remedy: leave "
            "one of them out."
        )
    with prefixed("parallel."):
        if offload.path is not None:
            return jp.offload.to_disk(tx, offload.path, min_bytes=offload.min_bytes)
        return jp.offload.to_host(tx, parameters=offload.parameters is not None, min_bytes=offload.min_bytes)


def _zero(config: RunConfig) -> jp.Zero:
    zero = config.parallel.optimizer
    if zero is None:
        return jp.Zero(stage=0)
    axis = tuple(zero.axis) if isinstance(zero.axis, list) else zero.axis
    with prefixed("parallel."):
        return jp.Zero(zero.stage, axis, zero.min_bytes, zero.fsdp_group_size)


def _check_one_bit(
    config: RunConfig, precision: jp.Precision, zero: jp.Zero, fusion: jp.overlap.CollectiveFusion
) -> None:
    """Reject options that ``one_bit_adam`` does not support; the error names both keys."""
    groups = [name for name, value in vars(fusion).items() if isinstance(value, tuple)]
    clip, signs = "optimizer.clip_norm", "it reduces gradients in fp32 during its warm-up, and sends signs afterwards"
    unsupported = [
        (clip, config.optimizer.clip_norm, "the norm of the gradient over all devices is not known"),
        ("parallel.optimizer", zero.stage or None, "weights and moments must be replicated (stage 0)"),
        ("parallel.offload", config.parallel.offload.optimizer, "its state stays on the devices"),
        ("precision.reduce", precision.reduce, signs),
        *((f"parallel.fusion.{name}", True, "it sends all signs together") for name in groups),
    ]
    for key, value, why in unsupported:
        if value is not None:
            remedy = f"{key}: null" if key == clip else f"leave {key} out"
            raise ConfigError(f"optimizer.name: {ONE_BIT} does not support {key}: {why}. Remedy: {remedy}.")


def _remat(remat: str | RematConfig) -> str | jp.RematPolicy:
    return remat if isinstance(remat, str) else jp.RematPolicy(**asdict(remat))


def _fusion(config: RunConfig) -> jp.overlap.CollectiveFusion:
    sizes = {name: tuple(v) if isinstance(v, list) else v for name, v in asdict(config.parallel.fusion).items()}
    with prefixed("parallel."):
        return jp.overlap.CollectiveFusion(**sizes)


def _context(context: ContextConfig, *, packed: bool) -> Context:
    if context.load_balance == BALANCED and not packed:
        raise ConfigError(
            "parallel.context: load_balance: balanced distributes packed documents, but data.packing is false. Remedy: "
            "data: {packing: true}, or load_balance: zigzag."
        )
    with prefixed("parallel."):
        return Context(**asdict(context))


def _precision(config: RunConfig) -> jp.Precision:
    precision = config.precision
    if isinstance(precision, PrecisionConfig):
        return jp.Precision.of({key: value for key, value in asdict(precision).items() if value is not None})
    return jp.Precision.of(precision)


def in_fp32(job: Job) -> Job:
    """Returns the same job with compute and parameters in fp32."""
    if isinstance(job.model, FactoryModel):
        return replace(job, precision=jp.Precision())
    return replace(with_dtypes(job, dtype="float32", param_dtype="float32"), precision=jp.Precision())


def with_dtypes(job: Job, **dtypes: Any) -> Job:
    """Returns the job of a built-in model with other ``dtype`` or ``param_dtype``."""
    model = replace(job.llama, **dtypes)
    make_model = trained_model(job.config, make_decoder(model), model)
    return replace(job, model=model, make_model=make_model, loss_fn=_loss(model, job.pipeline))
