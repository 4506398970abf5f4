"""Tensors of a checkpoint that are skipped, as copies of others or of constants: they are compared first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxpar.errors import CheckpointError
from jaxpar.interop.fields import FURTHER
from jaxpar.interop.safetensors import DTYPES
from jaxpar.interop.tensor_map import EMBEDDING, HEAD, shared_copies
from jaxpar.interop.transfer import AnyTensor, OpenFiles, read_box
from jaxpar.models.llama.config import LlamaConfig
from jaxpar.models.llama.rope import frequencies

_SAMPLE_BYTES = 2**24


@dataclass(frozen=True)
class Copy:
    """A tensor that must be equal to another one.

    Attributes:
      name: of the tensor.
      original: name of the tensor that the model reads.
    """

    name: str
    original: str

    @property
    def reason(self) -> str:
        """What says that it is a copy."""
        return "tie_word_embeddings is true" if self.name == HEAD else "layers for further tokens share it"

    @property
    def remedy(self) -> str:
        """How to read a checkpoint in which it is none."""
        if self.name == HEAD:
            return "tie_word_embeddings: false in config.json, which reads both"
        return f"--ignore {FURTHER} (Python: read_config(DIR, mtp_depth=0)), which leaves these layers out"


def copies_of(config: LlamaConfig) -> list[Copy]:
    """Returns the copies that a checkpoint may have besides the tensors of the model."""
    head = [Copy(HEAD, EMBEDDING)] if config.tie_embeddings else []
    return head + [Copy(rule.name, HEAD if rule.path == "head" else EMBEDDING) for rule in shared_copies(config)]


def has_other_head(tensors: Mapping[str, AnyTensor]) -> bool:
    """Whether a checkpoint stores an output head that is seen at once to be no copy of its embedding.

    Only the first 16 MiB are compared, because every process asks. :func:`check_copies` compares all of it.
    """
    embedding, head = tensors.get(EMBEDDING), tensors.get(HEAD)
    if embedding is None or head is None or embedding.shape != head.shape or len(head.shape) != 2:
        return False  # an error of the tensors
    if not {embedding.dtype, head.dtype} <= {*DTYPES}:
        return False
    rows = min(head.shape[0], max(1, _SAMPLE_BYTES // (8 * max(1, head.shape[1]))))
    with OpenFiles() as files:
        return _first_difference(files, head, embedding, (0, rows)) is not None


def check_copies(
    copies: Sequence[Copy], tensors: Mapping[str, AnyTensor], root: Path, part: tuple[int, int] = (0, 1)
) -> int:
    """Checks that copies are equal to what they are copies of, and returns the number of bytes that this took.

    Args:
      copies: tensors that are compared, where the checkpoint has them.
      tensors: of the checkpoint, by name; the originals are among them.
      root: its folder, for errors.
      part: which share of the rows is compared: k of n.

    Raises:
      CheckpointError: a copy has another shape or other values.
    """
    k, n = part
    with OpenFiles() as files:
        for copy in copies:
            if copy.name not in tensors:
                continue
            mine, original = tensors[copy.name], tensors[copy.original]
            what = f"{root}: {copy.name} must be a copy of {copy.original}, because {copy.reason}, but "
            if mine.shape != original.shape or mine.dtype not in DTYPES:
                raise CheckpointError(
                    f"{what}it is {mine.dtype} {list(mine.shape)}, not {original.dtype} {list(original.shape)}. "
                    f"Remedy: {copy.remedy}."
                )
            rows = mine.shape[0]
            if place := _first_difference(files, mine, original, (rows * k // n, rows * (k + 1) // n)):
                at, values = place
                raise CheckpointError(f"{what}at {at} it has {values[0]:g}, not {values[1]:g}. Remedy: {copy.remedy}.")
        return files.bytes_read


def check_frequencies(config: LlamaConfig, tensors: Mapping[str, AnyTensor], root: Path) -> None:
    """Checks that the rotary frequencies that older versions of transformers saved are those of the configuration.

    Raises:
      CheckpointError: they are others, so the model was trained with another ``rope_theta``.
    """
    thetas = [config.rope_theta, *([config.gemma.local_rope_theta] if config.gemma else [])]
    known = [np.asarray(frequencies(config.rope_dim, theta, None)) for theta in thetas if theta is not None]
    known.append(np.asarray(frequencies(config.rope_dim, config.rope_theta, config.rope_scaling)))
    with OpenFiles() as files:
        for name, tensor in tensors.items():
            if not is_frequencies(name) or tensor.dtype not in DTYPES:
                continue
            precision = ml_dtypes.finfo(DTYPES[tensor.dtype])
            box = tuple((0, size) for size in tensor.shape)
            values = read_box(files, tensor, tensor.shape, box).astype(np.float64)
            close = lambda a, b, p=precision: np.allclose(a, b, rtol=2 * float(p.eps), atol=float(p.smallest_subnormal))
            if not any(values.shape == one.shape and close(values, one) for one in known):
                raise CheckpointError(
                    f"{root}: {name} has rotary frequencies from {values.max():g} to {values.min():g}, but those of "
                    f"rope_theta {config.rope_theta:g} are from {known[0].max():g} to {known[0].min():g}. Remedy: the "
                    "rope_theta of the model's training, in config.json."
                )


def is_frequencies(name: str) -> bool:
    """Whether a tensor is the rotary frequencies that older versions of transformers saved."""
    return name.endswith("rotary_emb.inv_freq")


type _Difference = tuple[list[int], tuple[float, float]]


def _first_difference(files: OpenFiles, one: AnyTensor, other: AnyTensor, rows: tuple[int, int]) -> _Difference | None:
    """Returns where two matrices of the same shape first differ in some rows, and both numbers there."""
    for start in range(*rows, step := max(1, _SAMPLE_BYTES // (8 * max(1, one.shape[1])))):
        box = ((start, min(start + step, rows[1])), (0, one.shape[1]))
        # A float of 64 bits holds every other float exactly, so a copy may have another dtype.
        a, b = (read_box(files, tensor, tensor.shape, box).astype(np.float64) for tensor in (one, other))
        differ = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        if differ.any():
            row, column = (int(x) for x in np.argwhere(differ)[0])
            return [start + row, column], (float(a[row, column]), float(b[row, column]))
    return None
