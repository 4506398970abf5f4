"""Compression: weights in int8 or int4, after training or while a model trains, and pruning with sharded masks."""

from jaxpar.parallel.precision.quantized_array import QuantizedArray
from jaxpar.training.model.quantize_targets import QuantizeConfig
from jaxpar.training.model.quantized import quantize_aware
from jaxpar.training.pruning import PruneConfig, PruneState, prune, sparsity_of
from jaxpar.training.quantize import bytes_of, dequantize, quantize

__all__ = [
    "PruneConfig",
    "PruneState",
    "QuantizeConfig",
    "QuantizedArray",
    "bytes_of",
    "dequantize",
    "prune",
    "quantize",
    "quantize_aware",
    "sparsity_of",
]
