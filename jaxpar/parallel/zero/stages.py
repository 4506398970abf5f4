"""``Zero``: optimizer parallelism as rules, and as one key of a run.

After ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054). The weights a state holds are the optimizer's own (its master weights), and
so are sharded from stage 1 on; what the stages differ in is what the step makes of them:

- stage 1: whole weights for a step, and whole gradients until the microbatches are summed: one gather, one reduction a step.
- stage 2: whole weights for a step; gradients are scattered as soon as they are there.
- stage 3: weights are gathered where they are used, and again for the backward pass (also known as FSDP).
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
    """Optimizer parallelism over one mesh axis, for any optax optimizer.

    Attributes:
      stage: 0 (nothing is sharded) to 3.
      axis: the mesh axis, or several.
      min_bytes: smaller tensors stay whole; a number, or a text as ``64KiB``.
      fsdp_group_size: shard within groups of so many devices of ``data``, replicate across them (hybrid sharding, HSDP):
        ``data`` becomes ``replica`` × ``data``.

    Raises:
      RulesError: a stage beyond 3, a size that is none, a group of less than one device or on another axis than ``data``.

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
                f"optimizer: stage is {self.stage!r}, but 0 (none), 1 (optimizer state), 2 (and gradients) or 3 (and the "
                f"weights where they are used) is wanted."
            )
        self._spread()
        group = self.fsdp_group_size
        if group is not None and not is_count(group):
            raise RulesError(f"optimizer: fsdp_group_size is {group!r}, but a number of devices, 1 or more, is wanted.")
        if group is not None and self.axis != "data":
            raise RulesError(
                f"optimizer: fsdp_group_size splits the axis 'data', but axis is {self.axis!r}. Remedy: leave axis out, or give "
                f"the sizes in the mesh, as {{replica: 4, data: 4}}."
            )

    def _spread(self) -> Over:
        try:
            return over(self.axis, self.min_bytes)
        except RulesError as error:
            raise RulesError(f"optimizer: {error}") from error

    def rules(self, rules: Rules) -> Rules:
        """``rules`` with parameters, gradients and optimizer state spread over the axis.

        A role that the table already lays out is left as it is: an FSDP table stays the FSDP table.

        Raises:
          RulesError: with a ``fsdp_group_size``, the batch is split over ``data`` but not over ``replica``, so that groups would all
            compute the same.
        """
        if self.stage == 0:
            return rules
        if self.fsdp_group_size is not None:
            for dim, (_, rule) in rules.for_role("activations")[0].items():
                if any("data" in axes and "replica" not in axes for axes in options(rule)):
                    raise RulesError(
                        f"optimizer: fsdp_group_size={self.fsdp_group_size} makes groups along 'replica', but {dim} is split over 'data' "
                        f"alone, so each group would compute the same. Remedy: {dim}: [replica, data]."
                    )
        given = {role for role, _ in rules.overlays}
        return rules.replace(**{role: self._spread() for role in _SHARDED if role not in given})

    def mesh(self, spec: MeshSpec, devices: int) -> MeshSpec:
        """``spec`` on ``devices`` devices, with ``data`` split into groups.

        Raises:
          MeshError: the groups do not divide ``data``; as :meth:`MeshSpec.sizes`.
        """
        if self.fsdp_group_size is None or self.stage == 0:
            return spec
        sizes = spec.sizes(devices)
        if sizes["data"] % self.fsdp_group_size:
            raise MeshError(
                f"optimizer: fsdp_group_size={self.fsdp_group_size} does not divide the axis data of size {sizes['data']} (on {devices} "
                f"devices). Remedy: a divisor of {sizes['data']}."
            )
        groups = sizes["data"] // self.fsdp_group_size
        return replace(MeshSpec(**sizes), replica=sizes["replica"] * groups, data=self.fsdp_group_size)

    @property
    def step(self) -> dict[str, Any]:
        """What the stage asks of :func:`jaxpar.train_step`."""
        if self.stage in (0, 3):
            return {}
        return {"weight_gather": "per_step", "grad_reduction": "per_step" if self.stage == 1 else "per_microbatch"}
