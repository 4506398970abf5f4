"""What a plan says of experts, against sums by hand."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
from profiles import few

from jaxpar.parallel.experts.options import ExpertCall
from jaxpar.planning.search.best_estimate import best_estimate
from jaxpar.planning.search.calibration import Calibration
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.experts import ExpertExchange, exchanges
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.search import FULL
from jaxpar.planning.search.shards import weight_groups
from jaxpar.planning.search.space import Space, plans
from jaxpar.planning.search.workload import Backward, ExpertLayers, KeptArray, Matmul, Workload
from jaxpar.sharding.hardware.topology import Topology

ROWS, SEQ, EMBED, INNER, EXPERTS, K, LAYERS = 32, 64, 48, 24, 8, 2, 4
V5E = Topology.parse("v5e:4x4")


def mixture(count: int = EXPERTS, **options: object) -> Workload:
    """Layers of one dense matmul and of experts with two, in bf16, with the state of Adam."""
    rows = (("batch", ROWS), ("seq", SEQ))
    chosen = (*rows, (None, K))
    embed, inner, experts, layers = ("embed", EMBED), ("expert_mlp", INNER), ("experts", count), ("layers", LAYERS)
    matmuls = (
        Matmul((), rows, (embed,), (embed,), True, True, LAYERS, 0),
        Matmul((), chosen, (inner,), (embed,), True, True, LAYERS, 1, (experts,)),
        Matmul((), chosen, (embed,), (inner,), True, True, LAYERS, 2, (experts,)),
    )
    params = (
        KeptArray("mix", (layers, embed, ("other", EMBED)), 4),
        KeptArray("up", (layers, experts, embed, inner), 4),
        KeptArray("down", (layers, experts, inner, embed), 4),
        KeptArray("head", (embed, ("vocab", 64)), 4),
    )
    block = KeptArray("", (layers, *rows, embed), 2)
    hidden = KeptArray("", (layers, *chosen, inner), 2, rows=True)
    kept, full = Backward((block, hidden), 3.0, 3.0), Backward((block,), 3.7, 4.0)
    call = ExpertCall(count, K, 2 * EMBED, **options)  # type: ignore[arg-type]
    factors = (*rows, embed, inner, experts, layers, ("vocab", 64))
    return Workload(
        matmuls,
        params,
        {"none": kept, "full": full},
        2.0,
        dict(factors),
        tuple(dict(factors)),
        experts=(ExpertLayers(call, LAYERS, True),),
        in_pieces={"none": kept, "full": full},
    )


def exchange(plan: Plan, **options: object) -> ExpertExchange:
    (found,) = exchanges(plan, mixture(**options), V5E)
    return found


@pytest.mark.parametrize("expert", [2, 4, 8])
@pytest.mark.parametrize("dispatch", ["ragged", "deduplicated", "gather"])
def test_bytes_are_those_of_all_choices(expert: int, dispatch: str) -> None:
    found = exchange(Plan(data=16 // expert, expert=expert, zero=3, remat="full"), dispatch=dispatch)
    every = list(itertools.combinations(range(EXPERTS), K))
    devices = [[choice // (EXPERTS // expert) for choice in token] for token in every]
    mean = {
        "ragged": sum(d != 0 for token in devices for d in token) / len(every),
        "deduplicated": sum(len({*token} - {0}) for token in devices) / len(every),
        "gather": expert - 1,
    }
    tokens = ROWS * SEQ // 16
    # A token's own device is as likely to have a choice as any other, so device 0 stands for all.
    assert found.transfer_bytes == pytest.approx(tokens * mean[dispatch] * 2 * EMBED)
    choices = tokens * K * (expert - 1)
    five = LAYERS * (5 * found.transfer_bytes + choices * (2 * 8 + 4))
    assert found.calls == LAYERS and found.sent(again=True) == pytest.approx(five)
    assert found.sent(again=False) == pytest.approx(five - LAYERS * (found.transfer_bytes + 8 * choices))


def test_estimates_grow_with_the_shards_of_experts() -> None:
    """Bytes as the smallest of the three formulas, the step no faster than the room for rows."""
    work, topology = mixture(64).of_batch(2048), Topology.parse("v5p:4x4x4")
    tokens, row, steps = 2048 * SEQ // 64, 2 * EMBED, []
    for e in (2, 4, 8, 16, 32, 64):
        plan = Plan(data=64 // e, expert=e, zero=3, remat="full")
        (found,), cost = exchanges(plan, work, topology), CostModel(work, topology).cost(plan)
        away, each = (e - 1) / e, 64 // e
        holders = e * (1 - math.comb(64 - each, K) / math.comb(64, K))
        ragged, gather, once = K * away, e - 1.0, holders * away
        least = once if once <= 0.9 * min(ragged, gather) else min(ragged, gather)
        assert found.transfer_bytes == pytest.approx(tokens * least * row)
        (sent,) = (t.wire_bytes for t in cost.transfers if t.what == "experts")
        choices = tokens * K * (e - 1) * (2 * 8 + 4)
        assert sent == pytest.approx(LAYERS * (5 * tokens * least * row + choices))
        assert cost.compute * topology.accelerator.rate("bf16") == pytest.approx(
            2 * LAYERS * tokens * (3.7 * EMBED * EMBED + 3.7 * K * 2 * EMBED * INNER)
        )
        steps.append(cost.step)
    assert all(1.0 < more / less < 2.0 for less, more in itertools.pairwise(steps))


def test_the_dispatch_that_sends_least_is_chosen() -> None:
    assert [exchange(Plan(data=16 // e, expert=e)).dispatch for e in (1, 2, 8)] == ["local", "deduplicated", "ragged"]
    assert exchange(Plan(data=4, expert=4), capacity_factor=1.25, dispatch="all_to_all").transfer_bytes == (
        1.25 * exchange(Plan(data=4, expert=4), dispatch="ragged").transfer_bytes
    )
    (large,) = exchanges(Plan(data=4, expert=8), mixture(), Topology.parse("v5e:4x8"))
    assert large.dispatch == "gather"


def test_a_piece_has_room_for_what_the_balanced_whole_needs() -> None:
    found = exchange(Plan(expert=8, data=2))
    assert (found.pieces, found.rows) == (1, 1024)  # few rows are one piece, with room for the worst routing
    large = replace(mixture(), sizes={**mixture().sizes, "batch": 64 * ROWS})
    (found,) = exchanges(Plan(expert=8, data=2), large, V5E)
    assert found.rows <= found.sizes.tokens * K and found.pieces == 4 == found.room


def test_weights_are_divided_among_the_devices() -> None:
    plan = Plan(data=2, expert=4, context=2, zero=3, remat="full")
    groups = {(g.layered, g.experts): g for g in weight_groups(plan, mixture())}
    experts, mix = groups[True, True], groups[True, False]
    assert experts.elements == 2 * LAYERS * EXPERTS * EMBED * INNER / 4 and experts.axes == ("data", "context")
    assert mix.elements == LAYERS * EMBED * EMBED and mix.axes == ("data", "expert", "context")
    assert (experts.stored, mix.stored) == (experts.elements / 4, mix.elements / 16)
    cost = CostModel(mixture(), V5E).cost(plan)
    sent = {t.what: t.wire_bytes for t in cost.transfers if t.axes == ("data", "context")}
    assert sent["gather in experts"] == pytest.approx(2 * experts.elements * 2 * 3 / 4)
    assert sent["scatter in experts"] == pytest.approx(experts.elements * 4 * 3 / 4)
    held = sum(group.stored for group in groups.values())
    assert cost.memory["parameters"] == 4 * held and cost.memory["optimizer"] == 8 * held


@pytest.mark.parametrize(
    ("plan", "gathers"), [(Plan(data=4, expert=4, zero=3), 2), (Plan(data=4, expert=4, zero=1), 1)]
)
def test_gathered_weights_of_experts_go_through_main_memory(plan: Plan, gathers: int) -> None:
    """In both passes where layers gather them, once a microbatch; not where a device has its experts alone."""
    costs, plain = (CostModel(mixture(), V5E, Calibration(expert_gather_traffic=each)) for each in (10.0, 0.0))
    for accumulated in (1, 2):
        run = replace(plan, remat="full", grad_accum_steps=accumulated)
        more = costs.cost(run).hbm - plain.cost(run).hbm
        elements = 2 * LAYERS * EXPERTS * EMBED * INNER / 4
        times = gathers * (accumulated if plan.zero == 3 else 1)
        assert more * V5E.accelerator.hbm_bandwidth == pytest.approx(10 * times * 2 * elements)
    alone = Plan(expert=8, context=2, zero=0, remat="full")
    assert costs.cost(alone).hbm == plain.cost(alone).hbm


def test_gradients_of_experts_are_not_summed_over_expert() -> None:
    cost = CostModel(mixture(), V5E).cost(Plan(data=2, expert=8, remat="full"))
    found = {t.axes: t.wire_bytes for t in cost.transfers if t.what == "reduce" and len(t.axes) == 1}
    assert found == {("data",): pytest.approx(2 * 4 * 2 * LAYERS * EXPERTS * EMBED * INNER / 8 / 2)}


def test_a_stage_has_the_gradients_of_a_microbatch_beside_their_sums() -> None:
    plan = Plan(pipeline=2, data=2, expert=4, zero=3, remat="full", microbatches=4, virtual_stages=2)
    found = CostModel(mixture(), V5E).cost(plan).memory["gradients"]
    experts, mix = 2 * LAYERS * EXPERTS * EMBED * INNER / 4 / 2, LAYERS * EMBED * EMBED / 2
    head = EMBED * 64 / 2
    assert found == 4 * ((experts + mix) / 2 + head + experts / 2)


def test_devices_share_the_flops_of_active_experts() -> None:
    work = mixture()
    active = 2 * LAYERS * ROWS * SEQ * (EMBED * EMBED + K * 2 * EMBED * INNER)
    for plan in (Plan(data=16), Plan(data=4, expert=4), Plan(expert=8, context=2)):
        cost = CostModel(work, V5E).cost(replace(plan, zero=3, remat="none"))
        assert cost.compute * V5E.accelerator.rate("bf16") == pytest.approx(3.0 * active / 16)


def test_rows_that_are_kept_have_room_for_the_worst_routing() -> None:
    model = CostModel(mixture(), V5E)
    saved = {
        e: model.cost(Plan(data=16 // e, expert=e, zero=3, remat="none")).memory["saved activations"] for e in (1, 8)
    }
    rows = LAYERS * ROWS * SEQ * K * INNER * 2 / 16
    assert saved[8] - saved[1] == pytest.approx(rows * (exchange(Plan(data=2, expert=8)).room - 1.0))


def test_meshes_that_do_not_fit_the_experts_have_a_reason() -> None:
    refused = Counter[str]()
    space = Space(axes=("data", "expert"), zero=(3,), remat=("full",))
    assert {p.expert for p in plans(mixture(), 16, space, refused)} == {1, 2, 4, 8}
    assert refused == {"8 experts do not divide over expert 16": 1}
    refused.clear()
    forced = list(plans(mixture(dispatch="ragged"), 16, replace(space, ragged=False), refused))
    assert {p.expert for p in forced} == {1}
    reason = "dispatch 'ragged' needs a ragged exchange, which XLA does not have for these devices"
    assert refused == {reason: 3, "8 experts do not divide over expert 16": 1}
    refused.clear()
    every = {p.expert for p in plans(mixture(), 32, replace(space, slices=8, fixed={"data": 4}), refused)}
    assert every == set() and refused["expert crosses 8 slices: the step would wait for the network"] == 1


@pytest.mark.parametrize("batch", few([ROWS, 64 * ROWS], 1))
def test_pruning_changes_no_estimate(batch: int) -> None:
    work, topology = mixture().of_batch(batch), Topology.parse("v5e:2x4")
    space = Space(("pipeline", "data", "expert", "context", "model"), ("expert_mlp",), remat=("none", "full"))
    model = CostModel(work, topology)
    limit = topology.accelerator.hbm_bytes * FULL
    costs = [model.cost(plan) for plan in plans(work, 8, space, Counter())]
    lowest = min(cost.step for cost in costs if cost.peak_bytes <= limit)
    found = best_estimate(CostModel(work, topology), space)
    assert found is not None and found.cost.step == pytest.approx(lowest)


def test_an_estimate_does_not_depend_on_those_before_it() -> None:
    work, topology = mixture().of_batch(4 * ROWS), Topology.parse("v5e:2x4")
    space = Space(("pipeline", "data", "expert", "context", "model"), ("expert_mlp",), remat=("none", "full"))
    every, model = list(plans(work, 8, space, Counter())), CostModel(work, topology)
    costs = [model.cost(plan) for plan in every]
    assert len({(plan.microbatches, plan.virtual_stages) for plan in every if plan.expert > 1}) > 6
    for plan, cost in list(zip(every, costs, strict=True))[:: len(every) // 60]:
        assert CostModel(work, topology).cost(plan) == cost


def test_rules_keep_experts_apart() -> None:
    names = ("batch", "embed", "experts", "expert_mlp", "latent")
    plan = Plan(data=2, expert=4, model=2, tensor=("expert_mlp",), zero=3)
    assert plan.describe() == "FSDP 2 × EP 4 × TP 2"
    assert plan.rules(names) == {
        "batch": ["replica", "data", "expert"],
        "embed": None,
        "experts": "expert",
        "expert_mlp": "model",
        "latent": None,
        "params": {
            "embed": {"first_of": [["data", "expert"], ["data"], None]},
            "latent": {"first_of": [["data", "expert"], None]},
        },
    }
    layout, _ = plan.layout(names, 16)
    stored = lambda *dims: layout.resolve(dims, role="params").axes
    assert stored("experts", "embed", "expert_mlp") == (("expert",), ("data",), ("model",))
    assert stored("embed", "latent") == (("data", "expert"), ())
    assert stored("latent", None) == (("data", "expert"), ())
