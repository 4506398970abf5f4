"""Low-rank adapters (LoRA) for any model: weights are frozen, and pairs of small matrices beside them are trained."""

from jaxpar.training.lora.state import digest_of, frozen_params, init_from, merge, with_frozen, without_frozen
from jaxpar.training.model.lora import adapt
from jaxpar.training.model.lora_targets import LoraConfig

__all__ = [
    "LoraConfig",
    "adapt",
    "digest_of",
    "frozen_params",
    "init_from",
    "merge",
    "with_frozen",
    "without_frozen",
]
