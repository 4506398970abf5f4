"""``forward_pass``: FLOPs and bytes of the forward pass of a step on one device, from the workload's matmuls."""

from __future__ import annotations

from dataclasses import dataclass, fields

from jaxpar.planning.search.attention import computed_share
from jaxpar.planning.search.plan import BATCH, EMBED, SEQ, Plan
from jaxpar.planning.search.shards import Shards
from jaxpar.planning.search.workload import Workload


@dataclass(frozen=True)
class ForwardPass:
    """What one device does in the forward pass of a step, by the plan's mesh and sharded dims alone.

    Attributes:
      layer_flops, attention_flops, head_flops: of the layers' matmuls with weights, of matmuls of two activations, and
        of all other matmuls.
      traffic: bytes of the operands and results of matmuls, without those of experts.
      rows, expert_weights: bytes of the operands and results of experts' matmuls, and of their weights.
      outputs, inputs: bytes of matmuls' results that are sums over ``model``, and of activations whose gradients are,
        in the layers.
      head: both outside the layers.
      queries, keys: bytes that attention reads and writes along queries, and along keys and values.
      residual: bytes of the activation between two layers.
    """

    layer_flops: float = 0.0
    attention_flops: float = 0.0
    head_flops: float = 0.0
    traffic: float = 0.0
    rows: float = 0.0
    expert_weights: float = 0.0
    outputs: float = 0.0
    inputs: float = 0.0
    head: float = 0.0
    queries: float = 0.0
    keys: float = 0.0
    residual: float = 0.0


def forward_pass(plan: Plan, workload: Workload, in_tiles: bool) -> ForwardPass:
    """Returns what one device does in the forward pass of a step.

    Args:
      in_tiles: attention runs in tiles, which write no scores and leave out masked pairs.
    """
    w, outside, inside = workload, Shards(plan), Shards(plan, attention=True)
    unmasked = computed_share(plan, w.sizes.get(SEQ, 1)) if in_tiles and w.causal else 1.0
    sums = dict.fromkeys((f.name for f in fields(ForwardPass)), 0.0)
    seen: set[int] = set()
    for m in w.matmuls:
        shards = outside if m.weight else inside
        # Devices of a pipeline each run their layers; `model` and the tokens' axes split what is left.
        share = shards.ways(m.shared, m.rows, m.columns, m.summed)
        flops = m.flops / share / (plan.pipeline if m.layered else 1)
        times = m.times * w.compute_bytes / (plan.pipeline if m.layered else 1)
        left, right, out = (
            shards.local(*parts) * times
            for parts in (
                (m.shared, m.rows, m.summed),
                (m.shared, m.groups, m.columns, m.summed),
                (m.shared, m.rows, m.columns),
            )
        )
        if m.attends:
            sums["attention_flops"] += flops * unmasked
            # Scores are [.., queries, keys]; the other three arrays of the two matmuls are the small ones.
            small = sorted((left, right, out))[:2]
            sums["keys"] += min(small)
            sums["queries"] += max(small)
            sums["traffic"] += sum(small) if in_tiles else left + right + out
            continue
        sums["layer_flops" if m.layered else "head_flops"] += flops
        if m.groups:
            sums["rows"] += left + out
            sums["expert_weights"] += right
        else:
            sums["traffic"] += left + right + out
        if not m.weight or plan.model == 1:
            continue
        # Rows of experts are added up to tokens before their sum over `model`, and so are their gradients.
        if "model" in shards.axes(m.summed):
            sums["outputs" if m.layered else "head"] += out / m.choices
        if "model" in shards.axes(m.columns) and m.source not in seen:
            seen.add(m.source)
            sums["inputs" if m.layered else "head"] += left / m.choices
    tokens = tuple((name, w.sizes[name]) for name in (BATCH, SEQ, EMBED) if name in w.sizes)
    sums["residual"] = outside.local(tokens) * w.compute_bytes
    return ForwardPass(**sums)
