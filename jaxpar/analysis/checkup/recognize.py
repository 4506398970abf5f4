"""Recognizes logits and attention scores by the shape of a buffer. An ambiguous shape is not recognized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxpar.analysis.checkup.footprint import HeldTensor
from jaxpar.analysis.hlo.liveness import Buffer


def is_logits(buffer: Buffer, held: Sequence[HeldTensor], sizes: Mapping[str, int], *, vocab: int) -> bool:
    """Whether one dim is the vocabulary or its shard, and the other dims are not those of the tables that share it.

    Args:
      buffer: the tensor.
      held: the arrays that the step receives. A width of its parameters does not count as the vocabulary.
      sizes: mesh axis → size.
      vocab: the size of the vocabulary; 0 if unknown.

    >>> is_logits(Buffer(1, "f32[8,128,500]", "", "", "", False), (), {"model": 2}, vocab=1000)
    True
    """
    parameters = [h for h in held if h.category == "parameters"]
    products = _products(sizes)
    partners = {n for h in parameters if vocab in h.shape for n in h.shape} - {vocab}
    partners = {n // shards for n in partners for shards in products}
    widths = {n for h in parameters for n in h.shape} - {vocab}
    shards = {vocab // count for count in products if vocab and vocab % count == 0} - widths
    found = next((n for n in reversed(buffer.dims) if n > 1 and n in shards), None)
    if found is None:
        return False
    rest = [n for n in buffer.dims if n > 1]
    rest.remove(found)
    return bool(rest) and not (len(rest) == 1 and rest[0] in partners)


def is_scores(buffer: Buffer, held: Sequence[HeldTensor], sizes: Mapping[str, int], *, seq: int) -> bool:
    """Whether two dims are the full sequence.

    If the sequence length is also a width of the model, three dims must have it, or jax's name of the operation must
    contain ``BNTS``.

    Args:
      buffer: the tensor.
      held: the arrays that the step receives.
      sizes: mesh axis → size.
      seq: the length of the sequence; 0 if unknown.

    >>> is_scores(Buffer(1, "f32[8,128,128]", "", "", "", False), (), {}, seq=128)
    True
    """
    if not seq or buffer.dims.count(seq) < 2:
        return False
    widths = {n for h in held if h.category == "parameters" for n in h.shape}
    return seq not in widths or buffer.dims.count(seq) > 2 or "BNTS" in buffer.op_name


def _products(sizes: Mapping[str, int]) -> set[int]:
    """Returns the numbers of shards that the mesh's axes can make of a dim."""
    found = {1}
    for size in sizes.values():
        found |= {size * n for n in found}
    return found
