"""Whether a loss may run with its sequence sharded: whether all of its attention can run as a ring or an exchange."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.errors import listing
from jaxpar.parallel.attention.select import DENSE
from jaxpar.parallel.attention.tiled.padding import SAVED
from jaxpar.planning.names.program import NamedProgram
from jaxpar.planning.search.plan import SEQ
from jaxpar.planning.search.traced import walk
from jaxpar.planning.search.workload import Workload

CONTEXT_AXES = ("context", "ulysses")


@dataclass(frozen=True)
class SequenceSharding:
    """What is known of a loss whose sequence may be sharded.

    Attributes:
      axes: the mesh axes that may shard it; empty if none may.
      note: why none may; empty otherwise.
      flash: whether attention runs in tiles where the sequence is not sharded.
      causal: whether no query sees later keys.
    """

    axes: tuple[str, ...] = ()
    note: str = ""
    flash: bool = False
    causal: bool = True

    @classmethod
    def of(cls, program: NamedProgram, workload: Workload, *, annotated: bool) -> SequenceSharding:
        """Returns what a traced loss allows.

        Args:
          program: the loss, traced without a mesh.
          workload: its step.
          annotated: whether the step replaces attention that is written in matmuls.
        """
        sites = program.attention_sites()
        total = sum(site.count for site in sites)
        own = sum(
            times
            for step, times, _ in walk(program, program.visited)
            if step.eqn.primitive.name == "name" and step.eqn.params["name"] == SAVED
        )
        if SEQ not in workload.sizes or not total:
            return cls()  # no sequence that attention reads
        flash = own >= total and workload.sizes[SEQ] ** 2 > DENSE
        causal = all(site.attention is not None and site.attention.masks.band[0] == 0 for site in sites)
        replaced = sum(site.count for site in sites if site.attention) if annotated else 0
        if max(own, min(own + replaced, total)) >= total:
            return cls(CONTEXT_AXES, "", flash, causal)
        reasons = sorted({site.reason for site in sites if site.reason}) if annotated else []
        why = f" ({listing(reasons)})" if reasons else ""
        return cls(
            (),
            f"left out: context and ulysses, because {total - min(own + replaced, total)} of {total} attentions would "
            f"gather the sequence{why}; to shard it, call jp.attention",
            flash,
            causal,
        )
