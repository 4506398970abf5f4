"""``jaxpar export``: checkpoints of jaxpar to checkpoints of Hugging Face models, or to adapters of PEFT."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from jaxpar.app.arguments import Flag
from jaxpar.app.huggingface import KEPT, Dtype, spread
from jaxpar.errors import ConfigError

if TYPE_CHECKING:
    from jaxpar.models.llama.config import LlamaConfig
    from jaxpar.training.model.quantize_targets import QuantizeConfig
    from jaxpar.training.state import TrainState


@dataclass(frozen=True)
class ExportCommand:
    """Convert a checkpoint of jaxpar to a Hugging Face checkpoint: safetensors files and config.json.

    Adapters are added to the weights with which they were trained, or written as PEFT reads them (--adapter).

    Attributes:
      checkpoint: folder of one checkpoint, or of a run's checkpoints, of which the newest step is used
      directory: folder to create
      family: the model_type (default: that of the import, or the first family that fits)
      dtype: dtype of the files (default: that of the parameters)
      quantize: bits of the weights of the layers, in the form of compressed-tensors (default: as model.quantize of the
        run trained them, else floats)
      group: how many inputs share a scale, with --quantize (default: all)
      base: checkpoint with the frozen weights of adapters (default: the run's train.init_from)
      adapter: write the adapters alone, as PEFT reads them
    """

    checkpoint: Annotated[Path, Positional, arg(metavar="CKPT")]
    directory: Annotated[Path, Positional, arg(metavar="DIR")]
    family: Annotated[str | None, arg(metavar="FAMILY", help_behavior_hint="")] = None
    dtype: Dtype = None
    quantize: Annotated[Literal["4", "8", "no"] | None, arg(metavar="4|8|no", help_behavior_hint="")] = None
    group: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    base: Annotated[Path | None, arg(metavar="CKPT", help_behavior_hint="")] = None
    adapter: Flag = False

    def run(self) -> int:
        import jax

        import jaxpar as jp
        from jaxpar.app.model_config import model_config
        from jaxpar.checkpoint.manifest import NAME, read
        from jaxpar.checkpoint.verify import steps_in
        from jaxpar.interop import huggingface, peft

        folder = self.checkpoint
        if not os.path.isfile(folder / NAME) and (steps := steps_in(folder)):
            folder = folder / str(steps[-1])
        run = read(folder).metadata.get("config")
        if not isinstance(run, dict) or not isinstance(run.get("model"), dict) or "family" not in run["model"]:
            raise ConfigError(
                f"export: {folder} does not say that it holds a built-in model. Remedy: "
                "jaxpar.interop.huggingface.export in Python."
            )
        config = model_config(run["model"], jp.Precision())
        self._check_options(folder, adapted=run["model"].get("lora") is not None)
        if self.adapter:
            state = adapters_of(folder, run, config)
            peft.export(self.directory, state, config)
            count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
            print(f"{folder}: {count:,} parameters of adapters; wrote {self.directory}")
            return 0
        how = self._quantization(run, config)
        params, source = weights_of(folder, run, config, self.base)
        params = params if how is None else jp.compression.quantize(params, how)
        kept = read(source).metadata.get("huggingface")
        kept = kept if isinstance(kept, dict) else {}
        fields = {key: kept[key] for key in KEPT if key in kept and key != "model_type"}
        family = self.family or kept.get("model_type")
        huggingface.export(self.directory, params, config, family=family, dtype=self.dtype, fields=fields)
        print(f"{folder}: {config.params:,} parameters; wrote {self.directory}")
        return 0

    def _quantization(self, run: dict[str, Any], config: LlamaConfig) -> QuantizeConfig | None:
        """Returns which weights become integers: as the options say, or else as the run trained them."""
        from jaxpar.app.quantize_config import QuantizeSettings, quantize_config
        from jaxpar.app.trained_model import KEY, quantize_settings

        if self.quantize in ("4", "8"):
            bits: Any = int(self.quantize)
            return quantize_config(QuantizeSettings(bits, self.group), config, "--quantize")
        settings = quantize_settings(run["model"]) if self.quantize is None else None
        return None if settings is None else quantize_config(settings, config, KEY)

    def _check_options(self, folder: Path, *, adapted: bool) -> None:
        """Raise an error for options that do not fit the checkpoint."""
        if not adapted and (self.adapter or self.base is not None):
            option = "--adapter" if self.adapter else "--base"
            raise ConfigError(f"export: {option} is for adapters, but {folder} has none. Remedy: leave it out.")


def weights_of(
    folder: Path, run: dict[str, Any], config: LlamaConfig, base: Path | None
) -> tuple[dict[str, Any], Path]:
    """Returns the weights of a checkpoint, with its adapters added, and the checkpoint that the weights come from.

    Args:
      folder: the checkpoint.
      run: the configuration in its metadata.
      config: of the model.
      base: checkpoint with the frozen weights of adapters; by default ``train.init_from`` of the run, or else random
        weights as the run has them.

    Raises:
      CheckpointError: the adapters belong to other weights.
    """
    import optax

    import jaxpar as jp
    from jaxpar.app.adapted import DIGEST, check_digest
    from jaxpar.checkpoint.manifest import read
    from jaxpar.models.moe.model import make_decoder

    layout, make_model, tx = spread(config), make_decoder(config), optax.identity()
    like = {"params": jp.abstract_state(layout, make_model, tx).params}
    if run["model"].get("lora") is None:
        return jp.restore(folder, like, only=["params"])["params"], folder
    train = run.get("train") or {}
    source = base or (Path(train["init_from"]) if train.get("init_from") else None)
    if source is None:
        weights = jp.init(layout, make_model, tx, seed=train.get("seed", 0)).params
    else:
        weights = jp.restore(source, like, only=["params"], cast=True)["params"]
    digest = {DIGEST: jp.lora.digest_of(weights)}
    check_digest(read(folder).metadata, digest, folder, None if source is None else str(source))
    state = jp.lora.with_frozen(adapters_of(folder, run, config), weights)
    return jp.lora.merge(state), source or folder


def adapters_of(folder: Path, run: dict[str, Any], config: LlamaConfig) -> TrainState:
    """Returns a state with the adapters of a checkpoint, without frozen weights and optimizer state."""
    import optax

    import jaxpar as jp
    from jaxpar.app.lora import adapted_model
    from jaxpar.models.moe.model import make_decoder

    make_model = adapted_model(run["model"], make_decoder(config))
    state = jp.lora.without_frozen(jp.abstract_state(spread(config), make_model, optax.identity()))
    params = jp.restore(folder, {"params": state.params}, only=["params"])["params"]
    return replace(state, params=params)
