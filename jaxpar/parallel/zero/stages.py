"""``Zero``: a ZeRO stage, as rules for a layout and options for a training step.

After ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054). The weights in the training state are the optimizer's master
weights, so they are sharded from stage 1 on, as its moments are. The stages differ in how the step uses them:

- stage 1: the step gathers full weights once, and sums full gradients over its microbatches before one reduce-scatter.
  With one microbatch it may overlap both with the layers (:mod:`jaxpar.training.layer_gathers`).
- stage 2: the step gathers full weights once, and reduce-scatters the gradients of every microbatch as they arise.
- stage 3: each weight is gathered where it is used, and again for the backward pass (FSDP).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxpar.errors import MeshError, RulesError
from jaxpar.sharding.mesh import MeshSpec
from jaxpar.sharding.rules import Over, Rules, options, over
from jaxpar.utils.checks import is_count

STAGES = (0, 1, 2, 3)
_SHARDED = ("params", "gradients", "optimizer")


@dataclass(frozen=True)
class Zero:
    """A ZeRO stage over one mesh axis or several, for any optax optimizer.

    Attributes:
      stage: 0 (nothing is sharded) to 3.
      axis: the mesh axis, or several.
      min_bytes: smaller tensors are not sharded; bytes as a number, or a text such as ``64KiB``.
      fsdp_group_size: shards within groups of this many devices of ``data``, and replicates across the groups (hybrid
        sharding, HSDP); the axis ``data`` is split into ``replica`` × ``data``.

    Raises:
      RulesError: an unknown stage, a size that cannot be read, or a group that is smaller than one device or on another
        axis than ``data``.

    >>> from jaxpar import MeshSpec, Rules
    >>> zero = Zero(stage=1, fsdp_group_size=4)
    >>> zero.mesh(MeshSpec(data=-1), 16).to_dict()
    {'replica': 4, 'data': 4}
    >>> zero.rules(Rules(batch=("replica", "data"), embed=None)).to_dict()["optimizer"]
    {'over': 'data', 'min_bytes': 65536}
    """

    stage: int = 1
    axis: str | tuple[str, ...] = "data"
    min_bytes: int | str = "64KiB"
    fsdp_group_size: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in STAGES:
            raise RulesError(
                f"optimizer: stage must be 0 (none), 1 (optimizer state), 2 (and gradients) or 3 (and the weights "
                f"where they are used), got {self.stage!r}."
            )
        self._over()
        group = self.fsdp_group_size
        if group is not None and not is_count(group):
            raise RulesError(f"optimizer: fsdp_group_size must be a number of devices >= 1, got {group!r}.")
        if group is not None and self.axis != "data":
            raise RulesError(
                f"optimizer: fsdp_group_size splits the axis 'data', but axis is {self.axis!r}. Remedy: leave axis "
                f"out, or set the sizes in the mesh, such as {{replica: 4, data: 4}}."
            )

    def _over(self) -> Over:
        try:
            return over(self.axis, self.min_bytes)
        except RulesError as error:
            raise RulesError(f"optimizer: {error}") from error

    def rules(self, rules: Rules) -> Rules:
        """Returns ``rules`` with parameters, gradients and optimizer state sharded over the axis.

        A role that ``rules`` already overlays is left unchanged, so the rules of an FSDP table stay in force.

        Raises:
          RulesError: with ``fsdp_group_size``, the rules shard the batch over ``data`` but not over ``replica``, so all
            groups would compute the same rows.
        """
        if self.stage == 0:
            return rules
        if self.fsdp_group_size is not None:
            for dim, (_, rule) in rules.for_role("activations")[0].items():
                if any("data" in axes and "replica" not in axes for axes in options(rule)):
                    raise RulesError(
                        f"optimizer: fsdp_group_size={self.fsdp_group_size} makes groups along 'replica', but {dim} is "
                        f"sharded over 'data' only, so all groups would compute the same rows. Remedy: use the rule "
                        f"{dim}: [replica, data]."
                    )
        given = {role for role, _ in rules.overlays}
        return rules.replace(**{role: self._over() for role in _SHARDED if role not in given})

    def mesh(self, spec: MeshSpec, devices: int) -> MeshSpec:
        """Returns ``spec`` on ``devices`` devices, with ``data`` split into groups if ``fsdp_group_size`` is set.

        Raises:
          MeshError: the group size does not divide ``data``, or the sizes do not fit ``devices``.
        """
        if self.fsdp_group_size is None or self.stage == 0:
            return spec
        sizes = spec.sizes(devices)
        if sizes["data"] % self.fsdp_group_size:
            raise MeshError(
                f"optimizer: fsdp_group_size={self.fsdp_group_size} does not divide the axis data of size "
                f"{sizes['data']} (on {devices} devices). Remedy: use a divisor of {sizes['data']}."
            )
        groups = sizes["data"] // self.fsdp_group_size
        return replace(MeshSpec(**sizes), replica=sizes["replica"] * groups, data=self.fsdp_group_size)

    @property
    def step(self) -> dict[str, Any]:
        """The keyword arguments for :func:`jaxpar.train_step` at this stage."""
        if self.stage in (0, 3):
            return {}
        return {"weight_gather": "per_step", "grad_reduction": "per_step" if self.stage == 1 else "per_microbatch"}
