"""The plans of a number of devices: all that divide, and a reason for every mesh that does not."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.errors import PlanError
from jaxpar.planning.search.pipeline import pipeline_table
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.space import Space, plans
from jaxpar.planning.search.workload import Workload

AXES = ("pipeline", "replica", "data", "context", "ulysses", "model")


def workload(**sizes: int) -> Workload:
    return Workload((), (), {}, 2.0, {"batch": 8, "seq": 64, "embed": 32, **sizes})


def found(work: Workload, devices: int, refused: Counter[str] | None = None, **options: Any) -> list[Plan]:
    space = Space(**{"axes": AXES, "tensor": ("heads", "mlp"), "sequence_parallel": True, **options})
    return list(plans(work, devices, space, Counter() if refused is None else refused))


def meshes(devices: int, axes: int) -> int:
    """The number of meshes: for each prime factor, the ways to give its powers to the axes."""
    count, n, prime = 1, devices, 2
    while n > 1:
        power = 0
        while n % prime == 0:
            n, power = n // prime, power + 1
        count *= math.comb(power + axes - 1, axes - 1)
        prime += 1
    return count


@given(
    st.integers(1, 48),
    st.fixed_dictionaries(
        {name: st.integers(1, 24) for name in ("batch", "seq", "heads", "kv_heads", "mlp", "layers")}
    ),
)
def test_every_mesh_is_a_plan_or_has_a_reason(devices: int, sizes: dict[str, int]) -> None:
    work, refused = workload(**sizes), Counter[str]()
    every = found(work, devices, refused)
    assert len({plan.mesh_sizes for plan in every}) + sum(refused.values()) == meshes(devices, len(AXES))
    assert len(set(every)) == len(every)
    for plan in every:
        assert plan.devices == devices
        assert work.sizes["batch"] % (plan.replica * plan.data * plan.grad_accum_steps) == 0
        assert work.sizes["seq"] % (plan.context * plan.ulysses) == 0
        assert work.sizes["layers"] % (plan.pipeline * plan.virtual_stages) == 0
        assert all(work.sizes[name] % plan.model == 0 for name in plan.tensor)
        assert plan.pipeline == 1 or plan.microbatches % plan.pipeline == 0


def test_stages_have_up_to_eight_chunks_that_scatter_their_gradients_under_stage_3() -> None:
    every = [plan for plan in found(workload(layers=32, vocab=64), 8) if plan.pipeline == 2 and plan.data == 4]
    assert {plan.virtual_stages for plan in every} == {1, 2, 4, 8}
    reductions = {(plan.zero, plan.virtual_stages > 1): pipeline_table(plan)["grad_reduction"] for plan in every}
    assert reductions == {
        (0, False): "per_step", (0, True): "per_step", (3, False): "per_step", (3, True): "per_chunk"
    }  # fmt: skip


def test_reasons_name_the_dim_and_the_sizes() -> None:
    refused = Counter[str]()
    found(workload(batch=6, seq=9, heads=6, layers=3), 4, refused, tensor=("heads",))
    assert "a batch of 6 does not divide over 4 devices" in refused
    assert "a sequence of 9 does not divide over 2 devices" in refused
    assert "6 heads do not divide over 4 devices" in refused
    assert "3 layers do not divide over 2 stages" in refused


def test_what_is_fixed_stays() -> None:
    every = found(workload(heads=8, mlp=64), 8, fixed={"model": 2, "zero": 3})
    assert every and {(plan.model, plan.zero) for plan in every} == {(2, 3)}


def test_a_choice_that_does_not_exist() -> None:
    with raises(PlanError, "sequence_parallel"):
        Space(fixed={"modle": 2})


def test_a_plan_is_a_table_of_rules() -> None:
    plan = Plan(data=2, context=2, model=2, tensor=("heads",), sequence_parallel=True, zero=3)
    assert plan.rules(("batch", "seq", "residual_seq", "embed", "heads")) == {
        "batch": ["replica", "data"],
        "seq": ["context", "ulysses"],
        "residual_seq": ["context", "ulysses", "model"],
        "embed": None,
        "heads": "model",
        "params": {"embed": ["data", "context"]},
    }
    layout, zero = plan.layout(("batch", "seq", "embed", "heads"), 8)
    assert layout.sizes["model"] == 2 and zero.stage == 0  # rules shard the weights
    assert Plan(data=8, zero=1).layout(("batch", "embed"), 8)[1].step["weight_gather"] == "per_step"


def test_plans_are_named_in_the_words_of_the_field() -> None:
    assert Plan().describe() == "one device"
    assert Plan(pipeline=2, data=4, zero=3, microbatches=8).describe() == "PP 2 × FSDP 4, 8 microbatches"
    assert Plan(replica=2, data=4, zero=3).describe() == "HSDP 2×4"
    assert Plan(context=4, zero=3, remat="full").describe() == "ring 4, ZeRO 3, remat full"
    assert Plan(ulysses=2, model=2, sequence_parallel=True, offload=True).describe() == (
        "Ulysses 2 × TP+SP 2, optimizer on the host"
    )
