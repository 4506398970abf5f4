"""``jaxpar tensor``: which kind of tensor parallelism sends least for a run's model on a topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import UseAppendAction, arg

from jaxpar.app.arguments import Config, File, Number
from jaxpar.app.outputs import write_output
from jaxpar.errors import ConfigError
from jaxpar.utils.terminal import terminal_width


@dataclass(frozen=True)
class TensorCommand:
    """Compare tensor parallelism in 1, 2, 2.5 and 3 dimensions: bytes, time and memory of a layer. Needs no devices.

    Attributes:
      topology: the hardware, such as v5e:8x8
      set: change one key, such as data.batch=64
      devices: number of devices that share a layer (default: all of the topology)
      json: also write the comparison as JSON
    """

    config: Config
    topology: str
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY=VALUE")] = ()
    devices: Number = None
    json: File = None

    def run(self) -> int:
        import jax

        import jaxpar as jp
        from jaxpar.app.config import load_run
        from jaxpar.app.job import make_job
        from jaxpar.training.model import Tagged

        job = make_job(load_run(self.config, self.set))
        if job.pipeline is not None:
            raise ConfigError(
                "jaxpar tensor compares layers outside of a pipeline, but the run has pipeline stages. Remedy: --set "
                "pipeline=null."
            )
        rules = jp.Rules.from_dict(job.layout_data["rules"] or {})
        batch = jax.tree.map(lambda leaf: leaf.value, job.batch_spec(), is_leaf=lambda leaf: isinstance(leaf, Tagged))
        run = (job.make_model, job.tx, job.loss_fn, batch)
        found = jp.tensor.compare_tensor(
            *run, topology=self.topology, layouts=rules, devices=self.devices, precision=job.precision
        )
        print(found.to_text(terminal_width()), end="")
        write_output("--json", self.json, found.to_json)
        return 0 if found.best is not None else 1
