"""``Plan``: one layout of a run, with the options of its step, as a point of the space that the planner searches."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxpar.parallel.zero.stages import Zero
from jaxpar.planning.search.fsdp import Axes, FsdpDims, StorageAxes, StoredArray, fsdp_dims, over_all, replicated
from jaxpar.sharding.layout import Layout
from jaxpar.sharding.mesh import AXES, MeshSpec
from jaxpar.sharding.rules import Rules

BATCH, SEQ, RESIDUAL_SEQ, LAYERS, EMBED, VOCAB = "batch", "seq", "residual_seq", "layers", "embed", "vocab"
EXPERTS, LATENT = "experts", "latent"


@dataclass(frozen=True)
class Plan:
    """One layout of a run, with the options of its step.

    Attributes:
      pipeline, replica, data, expert, context, ulysses, model: sizes of the mesh axes.
      tensor: the logical dims that are sharded over ``model``.
      sequence_parallel: whether the residual stream is sharded over ``model`` along the sequence.
      zero: the ZeRO stage. Stage 3 shards the weights where they are used (FSDP), along ``embed`` if they have it, else
        along ``latent`` or the dims that :meth:`fsdp` chooses.
      remat: the recomputation policy of the layers, or "" for what the model itself does.
      grad_accum_steps: microbatches that are run one after the other, without a pipeline.
      microbatches: of a pipeline.
      virtual_stages: pieces of the model on each stage of a pipeline.
      checkpoint_stages: whether a stage keeps only its input, and runs its layers again for the backward pass.
      copies: 2 runs the layers on two halves of each device's rows.
      offload: whether the optimizer state is stored in host memory.
      batch: sequences of a step over all devices; 0 for those of the run.

    >>> Plan(data=4, model=2, tensor=("heads", "mlp"), zero=3).describe()
    'FSDP 4 × TP 2'
    """

    pipeline: int = 1
    replica: int = 1
    data: int = 1
    expert: int = 1
    context: int = 1
    ulysses: int = 1
    model: int = 1
    tensor: tuple[str, ...] = ()
    sequence_parallel: bool = False
    zero: int = 0
    remat: str = ""
    grad_accum_steps: int = 1
    microbatches: int = 1
    virtual_stages: int = 1
    checkpoint_stages: bool = False
    copies: int = 1
    offload: bool = False
    batch: int = 0

    @cached_property
    def mesh(self) -> Mapping[str, int]:
        """The sizes of all mesh axes, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @cached_property
    def mesh_sizes(self) -> tuple[int, ...]:
        """The sizes of all mesh axes, outermost first."""
        return tuple(self.mesh.values())

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh.values())

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes of more than one device over which tokens are sharded."""
        return tuple(a for a in ("replica", "data", "expert", "context", "ulysses") if self.mesh[a] > 1)

    @property
    def zero_axes(self) -> tuple[str, ...]:
        """The axes over which ZeRO shards: all that split tokens, but for ``replica``."""
        return tuple(a for a in self.token_axes if a != "replica") if self.zero else ()

    @property
    def ticks(self) -> float:
        """The passes through a stage's layers that a pipeline runs, divided by those of its microbatches alone."""
        passes = self.microbatches * self.virtual_stages
        return (passes + self.pipeline - 1) / passes

    @property
    def scatters_chunks(self) -> bool:
        """Whether the stages of a pipeline scatter the gradients of a chunk when they change to another one."""
        return self.pipeline > 1 and self.virtual_stages > 1 and self.zero == 3

    @property
    def context_impl(self) -> str | None:
        """How attention runs over a split sequence, as ``parallel.context.impl`` names it."""
        if self.context > 1:
            return "hybrid" if self.ulysses > 1 else "ring"
        return "ulysses" if self.ulysses > 1 else None

    def rules(self, names: Iterable[str], stored: Sequence[StoredArray] = ()) -> dict[str, Any]:
        """Returns the rules of a model with these logical dims, as plain data.

        Args:
          names: of the model.
          stored: its weights. Without them FSDP shards those alone that have ``embed`` or ``latent``.

        >>> Plan(data=4, model=2, tensor=("mlp",), zero=3).rules(("batch", "embed", "mlp"))
        {'batch': ['replica', 'data'], 'embed': None, 'mlp': 'model', 'params': {'embed': ['data']}}
        """
        names = tuple(names)
        axes = self._axes(names)
        table: dict[str, Any] = {name: axes.get(name) for name in names}
        if self.zero == 3 and EMBED in table:
            chosen = self.fsdp(names, stored)
            if chosen is None:
                table["params"] = {name: self._stored(name) for name in (EMBED, LATENT) if name in table}
            elif chosen.rules is not None:
                table["params"] = dict(chosen.rules)
        return table

    def _axes(self, names: Collection[str]) -> dict[str, Any]:
        """Dim name → its rule in weights and activations, of all dims that the plan shards."""
        axes: dict[str, Any] = {BATCH: ["replica", "data"], SEQ: ["context", "ulysses"]}
        if EXPERTS in names:
            axes[BATCH], axes[EXPERTS] = ["replica", "data", "expert"], "expert"
        axes[RESIDUAL_SEQ] = [*axes[SEQ], *(["model"] if self.sequence_parallel else [])]
        axes |= dict.fromkeys(self.tensor, "model")
        if self.pipeline > 1:
            axes[LAYERS] = "pipeline"
            axes[VOCAB] = ["pipeline", *(["model"] if VOCAB in self.tensor else [])]
        return axes

    def storage(self, names: Iterable[str]) -> StorageAxes:
        """Returns the axes over which ZeRO stores the weights of a model with these logical dims."""
        names = tuple(names)
        rules = {name: (axes,) if isinstance(axes, str) else axes for name, axes in self._axes(names).items()}
        used: dict[str | None, Axes] = {
            name: tuple(axis for axis in axes if self.mesh[axis] > 1) for name, axes in rules.items()
        }
        never = {BATCH, SEQ, RESIDUAL_SEQ, EXPERTS, *(name for name in names if LAYERS in name)}
        first = tuple(name for name in (EMBED, LATENT) if name in names)
        never |= {name for name in used if name is not None and used[name]}
        return StorageAxes(self.mesh, self.zero_axes, used, never, first)

    def fsdp(self, names: Iterable[str], stored: Sequence[StoredArray]) -> FsdpDims | None:
        """Returns the dims along which FSDP shards the weights; ``None`` for ``embed`` and ``latent``, which suffice.

        Args:
          names: of the model.
          stored: its weights.
        """
        return fsdp_dims(stored, self.storage(names)) if self.zero_axes else None

    def how_stored(self, names: Iterable[str], stored: Sequence[StoredArray]) -> str:
        """Returns how FSDP shards weights that have no dim ``embed``, and which weights ZeRO leaves replicated, if any.

        Args:
          names: of the model.
          stored: its weights.
        """
        names = tuple(names)
        chosen = self.fsdp(names, stored) if self.zero == 3 and EMBED in names else None
        found = self.stored_over(names, stored)
        whole = replicated([array for array in stored if found.get(array.path) == ()])
        return "; ".join(text for text in ("" if chosen is None else chosen.reason, whole) if text)

    def stored_over(self, names: Collection[str], stored: Sequence[StoredArray]) -> Mapping[str, Axes]:
        """Returns the path of each weight that the axes of ZeRO may not all shard → those that do.

        Args:
          names: of the model.
          stored: its weights.
        """
        if not self.zero_axes:
            return {}
        chosen = self.fsdp(names, stored) if self.zero == 3 and EMBED in names else None
        if chosen is not None:
            return chosen.found
        return over_all(stored, self.storage(names)) if self.own_stage(names) else {}

    def own_stage(self, names: Collection[str], stored: Sequence[StoredArray] = ()) -> int:
        """Returns the ZeRO stage that the step needs beside the rules: 0 where rules alone shard the weights (FSDP).

        Args:
          names: of the model.
          stored: its weights.
        """
        if self.zero < 3 or EMBED not in names:
            return self.zero
        chosen = self.fsdp(names, stored)
        return 3 if chosen is not None and chosen.rules is None else 0

    def _stored(self, name: str) -> Any:
        """The rule for a dim of stored weights: over all axes of ZeRO; of experts, over those but ``expert``."""
        axes = list(self.zero_axes)
        others = [axis for axis in axes if axis != "expert"]
        if name == EMBED and others == axes:
            return axes
        fallback = [others] if name == EMBED and others else []
        return {"first_of": [axes, *fallback, None]}

    def names(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the logical dims that the plan's rules are for: a model's, and ``residual_seq`` if it is sharded."""
        found = tuple(names)
        return found if not self.sequence_parallel or RESIDUAL_SEQ in found else (*found, RESIDUAL_SEQ)

    @property
    def mesh_data(self) -> dict[str, int]:
        """The axes of more than one device, as a configuration has them."""
        return {axis: size for axis, size in self.mesh.items() if size > 1} or {"data": 1}

    def layout(
        self, names: Iterable[str], devices: Sequence[Any] | int | None = None, stored: Sequence[StoredArray] = ()
    ) -> tuple[Layout, Zero]:
        """Returns the plan's layout of a model with these logical dims, and its ZeRO stage.

        Args:
          names: of the model.
          devices: of the mesh; by default all of this machine, and for a number an abstract mesh of so many.
          stored: the model's weights, as for :meth:`rules`.
        """
        names = self.names(names)
        zero = Zero(self.own_stage(names, stored), self.zero_axes or "data")
        rules = zero.rules(Rules.from_dict(self.rules(names, stored)))
        spec = MeshSpec(**self.mesh_data)
        return Layout(spec.abstract(devices) if isinstance(devices, int) else spec.build(devices), rules), zero

    def describe(self) -> str:
        """Returns the plan in the words of the field."""
        words = [f"PP {self.pipeline}"] if self.pipeline > 1 else []
        if self.zero == 3 and self.data > 1:
            words.append(f"HSDP {self.replica}×{self.data}" if self.replica > 1 else f"FSDP {self.data}")
        elif self.replica * self.data > 1:
            words.append(f"DP {self.replica * self.data}")
        words += [f"EP {self.expert}"] if self.expert > 1 else []
        words += [f"ring {self.context}"] if self.context > 1 else []
        words += [f"Ulysses {self.ulysses}"] if self.ulysses > 1 else []
        words += [f"TP{'+SP' if self.sequence_parallel else ''} {self.model}"] if self.model > 1 else []
        text = " × ".join(words) or "one device"
        return ", ".join([text, *self._options()])

    def _options(self) -> list[str]:
        chosen: Mapping[str, Any] = {
            f"ZeRO {self.zero}": self.zero in (1, 2) or (self.zero == 3 and self.data == 1),
            f"remat {self.remat}": self.remat not in ("", "none"),
            f"{self.microbatches} microbatches": self.pipeline > 1,
            f"{self.virtual_stages} virtual stages": self.virtual_stages > 1,
            "stages recomputed": self.checkpoint_stages,
            f"{self.grad_accum_steps} accumulated": self.grad_accum_steps > 1,
            f"batch {self.batch}": self.batch,
            "two copies": self.copies > 1,
            "optimizer on the host": self.offload,
        }
        return [text for text, on in chosen.items() if on]
