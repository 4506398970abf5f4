"""A Llama in Flax NNX: the model, cached decoding, the pipeline loss, and sequence chunks."""

from jaxpar.models.llama.config import PRESETS, LlamaConfig, preset
from jaxpar.models.llama.layers import layer_shapes
from jaxpar.models.llama.model import Llama, make_llama

__all__ = ["PRESETS", "Llama", "LlamaConfig", "layer_shapes", "make_llama", "preset"]
