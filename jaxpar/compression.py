"""Compression: weights in int8 or int4, after training or while a model trains, and pruning with sharded masks."""

from jaxpar.parallel.precision.quantized_array import QuantizedArray
from jaxpar.training.pruning import PruneConfig, PruneState, prune, sparsity_of
from jaxpar.training.quantize import QuantizeConfig, bytes_of, dequantize, quantize

__all__ = [
    "PruneConfig",
    "PruneState",
    "QuantizeConfig",
    "QuantizedArray",
    "bytes_of",
    "dequantize",
    "prune",
    "quantize",
    "sparsity_of",
]
