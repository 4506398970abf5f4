"""Hugging Face checkpoints in and out: safetensors files and a ``config.json``, read and written in shards.

The families are those of :data:`jaxpar.interop.families.FAMILIES`. Pickle files are never read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jaxpar.errors import CheckpointError, ConfigError
from jaxpar.interop.account import check_tensors
from jaxpar.interop.compressed_tensors import Writes, packed_writes, quantization_fields
from jaxpar.interop.copies import check_copies, check_frequencies, copies_of, has_other_head, is_frequencies
from jaxpar.interop.families import CONFIG, to_config, to_fields
from jaxpar.interop.fields import FURTHER
from jaxpar.interop.folder import read_object, read_parameters, write_folder
from jaxpar.interop.quantized_tensors import FIELD, scaled_tensors
from jaxpar.interop.safetensors import DTYPES, SPELLED, STORED_DTYPES, lay_out, read_tensors
from jaxpar.interop.tensor_map import EMBEDDING, TensorRule, shared_copies, tensor_rules
from jaxpar.interop.transfer import AnyTensor
from jaxpar.models.llama.config import LlamaConfig
from jaxpar.models.moe.config import MoEConfig
from jaxpar.models.moe.model import make_decoder
from jaxpar.parallel.precision.policy import PrecisionLike
from jaxpar.parallel.precision.quantized_array import QuantizedArray, is_quantized
from jaxpar.sharding.layout import Layout
from jaxpar.training.from_params import state_from_params
from jaxpar.training.model import build_shapes, leaves_with_paths, show
from jaxpar.training.state import abstract_state
from jaxpar.utils.multihost import settled

_FILE_BYTES = 5 * 10**9
_MOST_DEPTHS = 64
"""The most further tokens that a configuration may predict."""


@dataclass(frozen=True)
class LoadReport:
    """What a process read.

    Attributes:
      bytes_read: from the files of weights, by this process, and to compare copies.
      tensors: the number of tensors of the checkpoint.
      ignored: the names of tensors that the model does not have, and that are known to be unused.
    """

    bytes_read: int
    tensors: int
    ignored: tuple[str, ...]


def read_config(
    directory: str | os.PathLike[str], *, dtype: str | None = None, ignore: Collection[str] = (), **changes: Any
) -> LlamaConfig:
    """Returns the configuration of a checkpoint's model: a ``LlamaConfig``, or a ``MoEConfig`` if it has experts.

    The head is tied to the embedding only if the checkpoint has no other head, whatever ``tie_word_embeddings`` says.

    Args:
      directory: the checkpoint's folder, with ``config.json`` and safetensors files.
      dtype: the dtype of the parameters and of the compute; by default that of the checkpoint's embedding.
      ignore: fields of ``config.json`` that are not implemented, and do not change what the model computes; or
        ``num_nextn_predict_layers``, which leaves out layers that predict further tokens.
      **changes: values of our configuration's fields, such as ``remat="full"``.

    Raises:
      CheckpointError: there is no ``config.json``, or there are no safetensors files.
      ConfigError: the model's family is not supported; or a field is not implemented, and has another value than the
        neutral one.
      DamagedError: a file is malformed.
    """
    root = Path(directory)
    fields = read_fields(root)
    config = to_config({key: value for key, value in fields.items() if key != FIELD}, ignore=ignore)
    has_tensors = dtype is None or any(root.glob("*.safetensors"))
    tensors = scaled_tensors(read_tensors(root), fields) if has_tensors else {}
    if dtype is None:
        embedding = tensors.get(EMBEDDING)
        stored = DTYPES.get(embedding.dtype if embedding else "")
        dtype = "float32" if stored is None else stored.name
    further = {} if FURTHER in ignore else _further_tokens(fields, tensors, config)
    of_tensors = {**further, **_head(tensors, config)}
    return replace(config, **{"dtype": dtype, "param_dtype": dtype, **of_tensors, **changes})


def _further_tokens(fields: Mapping[str, Any], tensors: Mapping[str, AnyTensor], config: LlamaConfig) -> dict[str, Any]:
    """Returns how many further tokens a checkpoint has layers for: transformers writes the field, but no layers."""
    depth = fields.get(FURTHER)
    if not isinstance(config, MoEConfig) or depth not in range(1, _MOST_DEPTHS + 1):
        return {}
    return {"mtp_depth": depth} if f"model.layers.{config.layers}.eh_proj.weight" in tensors else {}


def _head(tensors: Mapping[str, AnyTensor], config: LlamaConfig) -> dict[str, Any]:
    """Returns that a head of other values than the embedding is not tied to it, whatever ``config.json`` says.

    transformers decides in the same way.
    """
    return {"tie_embeddings": False} if config.tie_embeddings and has_other_head(tensors) else {}


def read_fields(directory: Path) -> dict[str, Any]:
    """Returns the fields of a checkpoint's ``config.json``.

    Raises:
      CheckpointError: it is missing.
      DamagedError: it is no JSON object.
    """
    remedy = "the folder of a model, as save_pretrained of transformers writes it"
    return read_object(directory / CONFIG, f"{directory} has no {CONFIG}. Remedy: {remedy}.")


def load(
    layout: Layout,
    directory: str | os.PathLike[str],
    tx: optax.GradientTransformation | None = None,
    *,
    config: LlamaConfig | None = None,
    seed: int = 0,
    precision: PrecisionLike = None,
    report: Callable[[LoadReport], None] | None = None,
) -> Any:
    """Returns the weights of a Hugging Face checkpoint, sharded by a layout.

    Each process reads the bytes of its own shards, in parts of at most 16 MiB, and holds one parameter (all layers of
    one weight) in host memory besides those on its devices. All processes call it, and see the same files.

    Args:
      layout: mesh and rules. Its mesh holds devices.
      directory: the checkpoint's folder: ``config.json``, and ``model.safetensors`` or the files of an index.
      tx: an optimizer, for a state to train.
      config: the model's configuration, if it is not :func:`read_config` of the folder: with other dtypes the values
        are cast.
      seed, precision: of the state, as for :func:`jaxpar.init`.
      report: receives what this process read.

    Returns:
      The parameters, as a nested dict; with ``tx`` a :class:`jaxpar.TrainState` at step 0.

    Raises:
      CheckpointError: tensors are missing, unexpected, or of another shape or dtype: all are listed. Or a tensor that
        the model shares with another one is not its copy.
      DamagedError: a file is truncated or malformed.
      ConfigError, LayoutError: as :func:`read_config` and :func:`jaxpar.init`.

    >>> import tempfile, jax, optax
    >>> import jaxpar as jp
    >>> from jaxpar.interop import huggingface
    >>> from jaxpar.models import make_llama, preset
    >>> dims = ("embed", "norm", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers")
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data", **dict.fromkeys(dims)))
    >>> config = preset("tiny", layers=1)
    >>> state = jp.init(layout, make_llama(config), optax.identity())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     huggingface.export(f"{folder}/one", state.params, config)
    ...     huggingface.load(layout, f"{folder}/one")["blocks"]["attention"]["q"].shape
    (1, 128, 4, 32)
    """
    root = Path(directory)
    config, tensors, ignored = settled(lambda: _read(root, config))
    make_model = make_decoder(config)
    # The optimizer may store parameters in host memory.
    seen = abstract_state(layout, make_model, optax.identity() if tx is None else tx, precision).params
    leaves = {show(path): leaf for path, leaf in leaves_with_paths(seen)}
    rules = {rule.path: rule for rule in tensor_rules(config)}
    used = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    settled(lambda: check_tensors(rules.values(), _shapes(leaves), used, str(root)))
    share = (jax.process_index(), jax.process_count())
    compared = settled(lambda: check_copies(copies_of(config), tensors, root, share))
    settled(lambda: check_frequencies(config, tensors, root))

    def read() -> Any:
        made, bytes_read = read_parameters(rules, used, seen)
        if report is not None:
            report(LoadReport(bytes_read + compared, len(used), ignored))
        return made

    params = settled(read)
    if tx is None:
        return params
    return state_from_params(layout, make_model, tx, params, seed=seed, precision=precision)


def _read(root: Path, config: LlamaConfig | None) -> tuple[LlamaConfig, dict[str, AnyTensor], tuple[str, ...]]:
    """Returns the configuration, the tensors of the checkpoint, and the names of those that are known to be unused."""
    config = read_config(root) if config is None else config
    fields = read_fields(root)
    tensors = scaled_tensors(read_tensors(root), fields)
    more = fields.get(FURTHER) or 0
    more = more if isinstance(more, int) and more <= _MOST_DEPTHS else 0
    depth = config.mtp_depth if isinstance(config, MoEConfig) else 0
    unused = tuple(f"model.layers.{config.layers + i}." for i in range(depth, more))
    copies = {copy.name for copy in copies_of(config)}
    is_unused = lambda name: (
        is_frequencies(name)
        or name.startswith(unused)  # predict further tokens, which the configuration leaves out
        or name in copies
    )
    return config, tensors, tuple(name for name in tensors if is_unused(name))


def _shapes(leaves: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in leaves.items()}


def export(
    directory: str | os.PathLike[str],
    params: Any,
    config: LlamaConfig,
    *,
    family: str | None = None,
    dtype: str | None = None,
    file_bytes: int = _FILE_BYTES,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Writes parameters as a Hugging Face checkpoint that transformers loads: safetensors files and ``config.json``.

    Each process writes its own shards into files that all processes share. The folder gets its name when it is
    complete. With the dtype of the parameters, :func:`load` returns them bitwise equal.

    Args:
      directory: the folder to create; it must not exist.
      params: the parameters of the model, such as ``state.params``, or what :func:`jaxpar.compression.quantize` makes
        of them: integers are written as the package ``compressed-tensors`` reads them.
      config: the model's configuration.
      family: the ``model_type``; by default the first family that can express the configuration.
      dtype: the dtype of the files, such as ``bfloat16``; by default each parameter's own.
      file_bytes: the most bytes of tensors in one file, unless one tensor is larger.
      fields: further fields of ``config.json``, such as ``eos_token_id``; they replace those of the model.

    Raises:
      CheckpointError: the folder exists, or the parameters are not those of the configuration's model.
      ConfigError: no family can express the configuration, or ``dtype`` is not supported.
    """
    leaves = {show(path): leaf for path, leaf in leaves_with_paths(params, is_leaf=is_quantized)}
    written = to_fields(config, family)
    rules = tensor_rules(config)
    _check_params(leaves, config)
    quantization = quantization_fields(rules, leaves)
    written |= {FIELD: quantization} if quantization else {}
    if dtype is not None and dtype not in SPELLED:
        raise ConfigError(f"export: dtype must be one of {', '.join(SPELLED)}, got {dtype!r}.")
    written |= {"torch_dtype": dtype or config.param_dtype, **(fields or {})}
    writes, extra = _writes([*rules, *shared_copies(config)], leaves)
    shapes = {
        name: (_spelling(array, dtype), rule.shape(tuple(array.shape)))
        for rule, array in writes
        for _, name in rule.names(tuple(array.shape))
    }
    shapes |= {name: ("I64", (2,)) for name in extra}
    write_folder(directory, lambda here: lay_out(here, shapes, file_bytes), writes, extra, (CONFIG, written))


def _check_params(leaves: Mapping[str, Any], config: LlamaConfig) -> None:
    made = build_shapes(make_decoder(config)).params
    expected = {show(path): tuple(leaf.shape) for path, leaf in leaves_with_paths(made)}
    given = _shapes(leaves)
    wrong = [
        f"{path} {given.get(path, 'missing')}" for path in expected | given if expected.get(path) != given.get(path)
    ]
    if wrong:
        raise CheckpointError(
            f"export: the parameters are not those of the configuration's model: {', '.join(wrong[:8])}. "
            "Remedy: params=state.params, and the configuration that it was made with."
        )


def _writes(rules: list[TensorRule], leaves: Mapping[str, Any]) -> tuple[Writes, dict[str, np.ndarray]]:
    """Returns the arrays to write, and the small tensors beside those of quantized parameters."""
    writes: Writes = []
    extra: dict[str, np.ndarray] = {}
    for rule in rules:
        leaf = leaves[rule.path]
        if isinstance(leaf, QuantizedArray):
            own, shapes = packed_writes(rule, leaf)
            writes, extra = [*writes, *own], {**extra, **shapes}
        else:
            writes.append((rule, leaf))
    return writes, extra


def _spelling(array: Any, dtype: str | None) -> str:
    """Returns the dtype of an array's tensor as a file spells it; only floats are cast."""
    name = dtype if dtype and jax.numpy.issubdtype(array.dtype, jax.numpy.floating) else array.dtype.name
    return next(spelled for spelled, known in STORED_DTYPES.items() if known.name == name)
