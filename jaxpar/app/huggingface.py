"""``jaxpar import``: checkpoints of Hugging Face models to checkpoints of jaxpar."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from jaxpar.app.outputs import write_output
from jaxpar.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jaxpar.models.llama.config import LlamaConfig
    from jaxpar.sharding.layout import Layout

type Dtype = Annotated[Literal["float32", "bfloat16", "float16"] | None, arg(metavar="DTYPE", help_behavior_hint="")]

CHECKPOINT, RUN = "checkpoint", "run.yaml"
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "model_type")
"""Fields of ``config.json`` that our configuration does not have, and that an export writes back."""
_NOT_OF_THE_MODEL = {"remat", "reshard_after_forward", "context", "copies", "copies_dim", "dispatch", "pieces"}
_NOT_OF_THE_MODEL |= {"capacity_factor", "overlap_matmuls"}


@dataclass(frozen=True)
class ImportCommand:
    """Convert a Hugging Face checkpoint: OUT/checkpoint, and OUT/run.yaml for `jaxpar train` and `jaxpar generate`.

    Attributes:
      directory: folder with config.json and safetensors files
      out: folder to create
      dtype: dtype of the saved parameters and of the compute (default: that of the files); a run trains them in float32
      ignore: field of config.json that is not implemented, and does not change what the model computes; or
        num_nextn_predict_layers, which leaves these layers out
    """

    directory: Annotated[Path, Positional, arg(metavar="DIR")]
    out: Annotated[Path, Positional, arg(metavar="OUT")]
    dtype: Dtype = None
    ignore: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="FIELD")] = ()

    def run(self) -> int:
        import jaxpar as jp
        from jaxpar.interop import huggingface

        if (self.out / CHECKPOINT).exists():
            raise CheckpointError(f"{self.out / CHECKPOINT} exists. Remedy: delete it, or use another OUT.")
        config = huggingface.read_config(self.directory, dtype=self.dtype, ignore=self.ignore)
        for field in self.ignore:
            self._check_ignored(field, config)
        fields = huggingface.read_fields(self.directory)
        layout, read = spread(config), list[huggingface.LoadReport]()
        params = huggingface.load(layout, self.directory, config=config, report=read.append)
        model = model_fields(config, fields["model_type"])
        metadata = {
            "config": {"model": model},
            "huggingface": {key: fields[key] for key in KEPT if fields.get(key) is not None},
        }
        jp.save(self.out / CHECKPOINT, {"params": params}, layout=layout, metadata=metadata)
        write_output("OUT", self.out / RUN, lambda: run_text(self, config, model))
        print(
            f"{self.directory}: {read[0].tensors} tensors, {read[0].bytes_read / 2**20:.1f} MiB, {config.params:,} "
            f"parameters in {config.param_dtype}; wrote {self.out / CHECKPOINT} and {self.out / RUN}"
        )
        return 0

    def _check_ignored(self, field: str, config: LlamaConfig) -> None:
        """Raise an error if the model of ``config`` is the same without a field of ``--ignore``."""
        from jaxpar.interop import huggingface

        others = [name for name in self.ignore if name != field]
        try:
            if huggingface.read_config(self.directory, dtype=self.dtype, ignore=others) != config:
                return
        except ConfigError:
            return
        raise ConfigError(
            f"{self.directory / 'config.json'}: --ignore {field} has no effect: the file has no such field, or the "
            "field is not refused. Remedy: leave it out."
        )


def spread(config: LlamaConfig) -> Layout:
    """Returns a layout on all devices that shards one dim of each parameter that divides."""
    import jaxpar as jp
    from jaxpar.models.moe.model import make_decoder
    from jaxpar.training.model import build_shapes

    named = {name: None for _, names in build_shapes(make_decoder(config)).dims for name in names if name}
    return jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(**named, params=jp.over("data")))


def model_fields(config: LlamaConfig, family: str) -> dict[str, Any]:
    """Returns the configuration as ``model`` of a run has it."""
    from jaxpar.models.moe.config import FAMILIES

    values = {key: value for key, value in dataclasses.asdict(config).items() if key not in _NOT_OF_THE_MODEL}
    return {"family": family if family in FAMILIES else "llama", **values}


def run_text(command: ImportCommand, config: LlamaConfig, model: dict[str, Any]) -> str:
    """Returns a run's configuration as YAML: fully sharded data parallelism, from the imported parameters."""
    import yaml

    from jaxpar.models.moe.config import MoEConfig

    rules: dict[str, Any] = {"batch": ["replica", "data"], "seq": None, "residual_seq": None, "layers": None}
    rules |= dict.fromkeys(("embed", "norm", "heads", "kv_heads", "head_dim", "mlp", "vocab"))
    if isinstance(config, MoEConfig):
        rules |= dict.fromkeys(("experts", "expert_mlp", "latent", "dense_layers"))
    tokenizer = command.directory / "tokenizer.json"
    own = {"tokenizer": str(tokenizer)} if tokenizer.is_file() else {}
    # Trained in fp32: an update of 1e-5 of a weight in bf16 rounds away, because its neighbors are 1e-4 away.
    param_dtype = "float32" if config.param_dtype in ("bfloat16", "float16") else config.param_dtype
    run = {
        "model": {**model, "param_dtype": param_dtype},
        "mesh": {"data": -1},
        "rules": {**rules, "params": {"embed": "data"}},
        "data": {"source": "stdlib", **own, "batch": 8, "seq": 128},
        "optimizer": {"name": "adamw", "learning_rate": 1e-5},
        "train": {"steps": 100, "init_from": str(command.out / CHECKPOINT)},
        "output": str(command.out / "run"),
    }
    text = yaml.safe_dump(run, sort_keys=False, default_flow_style=None, width=110)
    return f"# Written by: jaxpar import {command.directory} {command.out}\n{text}"
