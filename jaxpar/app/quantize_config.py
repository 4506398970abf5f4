"""Weights as integers in a run's configuration: ``generate.weights``, and ``model.quantize`` for training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from jaxpar.errors import ConfigError
from jaxpar.utils.checks import INT32, Range

if TYPE_CHECKING:
    from jaxpar.models.llama.config import LlamaConfig
    from jaxpar.training.model.quantize_targets import QuantizeConfig


@dataclass(frozen=True)
class QuantizeSettings:
    """Which weights are integers; see :class:`jaxpar.compression.QuantizeConfig`.

    Attributes:
      bits: 8 or 4.
      group: how many neighboring inputs share a scale; without it, all inputs of an output.
      targets: patterns of paths; by default, in a built-in model, the matrices of the layers.
      skip: patterns of targets that stay as they are.
      axis: the dims that products sum over; found in a built-in model.
      scales: the dtype of the scales.
    """

    bits: Literal[8, 4] = 8
    group: Annotated[int, Range(1, INT32)] | None = None
    targets: tuple[str, ...] | None = None
    skip: tuple[str, ...] = ()
    axis: int | tuple[int, ...] | dict[str, int | tuple[int, ...]] | None = None
    scales: Literal["float32", "bfloat16"] = "float32"


def quantize_config(settings: QuantizeSettings, model: LlamaConfig | None, key: str) -> QuantizeConfig:
    """Returns which parameters of a model become integers.

    Args:
      settings: of the run.
      model: the configuration of a built-in model; ``None`` for one of the user's own.
      key: of the settings, for errors.

    Raises:
      ConfigError: a value is wrong, or ``targets`` are missing for a model of the user's own.
    """
    from jaxpar.training.model.quantize_targets import QuantizeConfig

    s = settings
    if model is None and s.targets is None:
        raise ConfigError(
            f"{key} needs targets, because the model is one of your own. Remedy: targets: ['*/kernel'], patterns of "
            "the parameters' paths."
        )
    try:
        if model is None:
            axis = -2 if s.axis is None else s.axis
            return QuantizeConfig(s.targets or (), s.bits, s.group, axis, s.skip, s.scales)
        if s.axis is not None:
            raise ConfigError(f"quantize: axis is found in a built-in model, got {s.axis!r}. Remedy: leave axis out.")
        from jaxpar.models.llama.decode import quantized_weights

        own = {} if s.targets is None else {"targets": s.targets}
        return quantized_weights(model, s.bits, s.group, skip=s.skip, scales=s.scales, **own)
    except ConfigError as error:
        raise ConfigError(f"{key}: {str(error).removeprefix('quantize: ')}") from error
