"""``RematPolicy``: what the backward pass keeps of each layer and what it recomputes.

After Chen et al. 2016 (arXiv:1604.06174) and the selective recomputation of Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.parallel.attention.tiled.padding import KEPT, SAVED
from jaxpar.parallel.zero.gather import GATHERED, all_but_gathered
from jaxpar.sharding.hardware.topology import platform_of
from jaxpar.sharding.layout import current_layout
from jaxpar.utils.checks import is_count
from jaxpar.utils.contexts import keep_gathered

OUTPUT = "block_output"
"""The name of the tensors that attention and MLP add to the residual stream."""
SAVED_EMBED = "saved_embed"
"""The logical dim of the activations between layers, where ``slice_activation`` shards them."""
POLICIES = ("none", "full", "dots", "save_attention", "save_outputs", "save_names")


@dataclass(frozen=True)
class RematPolicy:
    """A recomputation policy, and the layers that it applies to.

    Attributes:
      policy: ``none`` keeps everything. ``full`` keeps only the activations between layers. ``dots`` keeps the results
        of matmuls with weights. ``save_attention`` keeps the results of attention. ``save_outputs`` keeps the tensors
        added to the residual stream (under tensor parallelism, the results of collectives). ``save_names`` keeps the
        tensors named here.
      save_names: with ``save_names``, the tensors that stay on the device.
      offload_names: with ``save_names``, the tensors that are stored in host memory.
      slice_activation: shard the saved activations between layers by the dims ``batch``, ``residual_seq``,
        :data:`SAVED_EMBED`. If a rule shards the last one over ``model``, each device keeps a part, and each layer
        gathers it at its start.
      layers: one number per pipeline stage (all stages have the same number of layers): how many of the stage's first
        layers recompute. The other layers keep everything. Empty: the policy
        applies to all layers.

    Raises:
      ConfigError: an unknown policy, names without ``save_names`` or the reverse, a repeated name, ``slice_activation``
        with the policy ``none``, or a negative number.

    >>> RematPolicy("full", layers=(2, 1)).segments(8)
    [(0, 2, True), (2, 4, False), (4, 5, True), (5, 8, False)]
    """

    policy: str = "none"
    save_names: tuple[str, ...] = ()
    offload_names: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    slice_activation: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(
                f"remat: unknown policy {self.policy!r}.{did_you_mean(str(self.policy), POLICIES)} The policies are: "
                f"{', '.join(POLICIES)}."
            )
        names = (*self.save_names, *self.offload_names)
        if bool(names) is not (self.policy == "save_names"):
            takes = "takes no names" if names else "requires names"
            raise ConfigError(
                f"remat: the policy {self.policy!r} {takes}. Remedy: set policy: save_names, with save_names or "
                "offload_names as lists."
            )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"remat: {', '.join(twice)} appears more than once in save_names and offload_names. Remedy: list it "
                "once."
            )
        if self.slice_activation and self.policy == "none":
            raise ConfigError(
                "remat: slice_activation shards what recomputing layers save, but the policy 'none' recomputes no "
                "layer. Remedy: use another policy, or leave slice_activation out."
            )
        if any(not is_count(n, 0) for n in self.layers):
            raise ConfigError(f"remat: layers must be a list of non-negative integers, got {list(self.layers)}.")

    @classmethod
    def of(cls, value: str | RematPolicy) -> RematPolicy:
        """Returns the policy of this name, or ``value`` if it is a policy already.

        Raises:
          ConfigError: no policy has this name.
        """
        return value if isinstance(value, RematPolicy) else cls(value)

    def refuse_host_memory(self) -> None:
        """Raises an error if tensors are stored in host memory, for a pipeline, whose loop over ticks cannot do that.

        Raises:
          ConfigError: there are ``offload_names``.
        """
        if self.offload_names:
            raise ConfigError(
                f"pipeline: remat.offload_names is {list(self.offload_names)}, but a pipeline keeps the activations of "
                "its microbatches in a loop, whose buffers cannot be in host memory. Remedy: move these names to "
                "save_names, or leave them out, so that they are recomputed."
            )

    def segments(self, layers: int) -> list[tuple[int, int, bool]]:
        """Returns the layers as runs ``(first, end, recomputes)``; layers that do not recompute keep everything.

        Args:
          layers: number of layers of the model.

        Raises:
          ConfigError: the stages do not divide the layers, or a stage has fewer layers than it should recompute.
        """
        if not self.layers:
            return [(0, layers, True)]
        stages = len(self.layers)
        if layers % stages:
            raise ConfigError(
                f"remat: layers has {stages} numbers, one per stage, but {layers} layers cannot be split into "
                f"{stages} equal stages. Remedy: give as many numbers as there are stages."
            )
        per_stage = layers // stages
        if max(self.layers) > per_stage:
            raise ConfigError(
                f"remat: layers is {list(self.layers)}, but each of {stages} stages has {per_stage} of the {layers} "
                f"layers. Remedy: use numbers up to {per_stage}."
            )
        flags = [i < n for n in self.layers for i in range(per_stage)]
        edges = [0, *(i for i in range(1, layers) if flags[i] is not flags[i - 1]), layers]
        return [(a, b, flags[a]) for a, b in itertools.pairwise(edges)]

    def rule(self, known: Sequence[str], *, reshard_after_forward: bool = True) -> Callable[..., Any]:
        """Returns the policy in the form that ``jax.checkpoint`` takes.

        Args:
          known: the names that tensors of the model have.
          reshard_after_forward: gather weights again in the backward pass. Otherwise the gathered weights are kept, and
            the parameters' sharding saves no memory. A step of ZeRO stage 1 that leaves the gathers to the layers
            keeps the gathered weights in any case.

        Raises:
          ConfigError: a name that no tensor has.

        Warns:
          UserWarning: ``offload_names`` on simulated CPU devices, whose memory is host memory.
        """
        policies = jax.checkpoint_policies
        for name in (*self.save_names, *self.offload_names):
            if name not in known:
                raise ConfigError(
                    f"remat: no tensor of the model is named {name!r}.{did_you_mean(name, known)} The names are: "
                    f"{', '.join(known)}."
                )
        reshard_after_forward = reshard_after_forward and not keep_gathered.value
        if self.policy == "none":
            return all_but_gathered if reshard_after_forward else policies.everything_saveable
        kept = {"save_attention": (SAVED, KEPT), "save_outputs": (OUTPUT,), "save_names": self.save_names}.get(
            self.policy, ()
        )
        kept = kept if reshard_after_forward else (*kept, GATHERED)
        if self.offload_names:
            if platform_of(current_layout().mesh) == "cpu":
                text = (
                    "remat: offload_names saves no memory on simulated CPU devices, which use host memory; the "
                    "results are the same."
                )
                warnings.warn(text, stacklevel=2)
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(kept),
                names_which_can_be_offloaded=list(self.offload_names),
                offload_src="device",
                offload_dst="pinned_host",
            )
        named = policies.save_only_these_names(*kept)
        if self.policy == "dots":
            return policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, named)
        return named if kept else policies.nothing_saveable
