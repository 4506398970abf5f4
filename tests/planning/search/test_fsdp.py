"""Which dims FSDP shards weights along, against sums by hand, and what the cost model makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.fsdp import StoredArray
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.shards import weight_groups
from jaxpar.planning.search.workload import Backward, KeptArray, Workload
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.sharding.resolve import resolve
from jaxpar.sharding.rules import Rules

NAMES = ("batch", "embed", "latent", "layers", "mlp", "pixels", "norm", "experts")
PIXELS, HIDDEN = ("pixels", 784), ("mlp", 256)
VAE = (
    StoredArray("enc", (PIXELS, HIDDEN), 4),
    StoredArray("mean", (HIDDEN, ("embed", 32)), 4),
    StoredArray("dec", (HIDDEN, PIXELS), 4),
    StoredArray("bias", (HIDDEN,), 4),
)
FSDP = Plan(data=8, zero=3)


def work(stored: tuple[StoredArray, ...]) -> Workload:
    params = tuple(KeptArray(array.path, array.dims, array.itemsize) for array in stored)
    return Workload((), params, {"": Backward((), 3.0, 3.0)}, 2.0, {"batch": 64}, NAMES, stored=stored)


def axes_of(plan: Plan, stored: tuple[StoredArray, ...]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The sharding of each weight by the plan's own rules."""
    layout, _ = plan.layout(NAMES, plan.devices, stored)
    found = {}
    for array in stored:
        names, shape = zip(*array.dims, strict=True)
        resolved = resolve(layout.rules, layout.sizes, names, shape, role="params", itemsize=array.itemsize)
        assert not resolved.problems
        found[array.path] = resolved.axes
    return found


def test_embed_alone_where_it_is_in_every_large_weight() -> None:
    norms = StoredArray("norms", (("layers", 16), ("norm", 2048)), 4)  # 128 KiB, a 16,000th of all
    stored = (StoredArray("up", (("layers", 16), ("embed", 2048), ("mlp", 16384)), 4), norms)
    assert FSDP.rules(NAMES, stored) == FSDP.rules(NAMES) and FSDP.how_stored(NAMES, stored) == ""
    assert FSDP.rules(NAMES)["params"] == {"embed": ["data"], "latent": {"first_of": [["data"], None]}}
    (group,) = weight_groups(FSDP, work(stored))
    assert group.others == 8


def test_the_dim_that_saves_most_and_the_larger_of_equals() -> None:
    assert FSDP.rules(NAMES, VAE)["params"] == {"embed": ["data"], "pixels": {"first_of": [["data"], None]}}
    assert axes_of(FSDP, VAE) == {
        "enc": (("data",), ()),
        "mean": ((), ("data",)),
        "dec": ((), ("data",)),
        "bias": ((),),
    }
    more = (*VAE, StoredArray("mix", (HIDDEN, ("norm", 1000)), 4))
    assert FSDP.rules(NAMES, more)["params"] == {"embed": ["data"], "mlp": {"first_of": [["data"], None]}}
    assert axes_of(FSDP, more)["enc"] == ((), ("data",))
    assert FSDP.how_stored(NAMES, VAE) == (
        "FSDP shards pixels besides embed, latent: 1.53 MiB of the weights' 1.56 MiB have no dim embed or latent that "
        "8 devices divide"
    )


def test_dims_that_the_plan_shards_otherwise_are_not_taken() -> None:
    plan = Plan(data=4, model=2, tensor=("mlp",), zero=3)
    assert axes_of(plan, VAE)["enc"] == (("data",), ("model",))
    stacked = (StoredArray("up", (("layers", 8), ("mlp", 256), ("pixels", 784)), 4), VAE[1])
    assert axes_of(Plan(data=8, zero=3), stacked)["up"] == ((), (), ("data",))  # a scan takes layer after layer


def test_axes_that_divide_together_or_only_in_part() -> None:
    plan = Plan(data=4, context=4, zero=3)
    stored = (StoredArray("a", (("mlp", 4 * 129), ("norm", 129)), 4), StoredArray("b", (("pixels", 160), HIDDEN), 4))
    embed = StoredArray("c", (("embed", 24), ("norm", 9)), 4)
    assert plan.rules(NAMES, (*stored, embed))["params"] == {
        "embed": {"first_of": [["data"], None]},
        "mlp": {"first_of": [["data", "context"], ["data"], None]},
    }
    found = axes_of(plan, (*stored, embed))
    assert found == {"a": (("data",), ()), "b": ((), ("data", "context")), "c": (("data",), ())}


def test_every_weight_along_a_dim_that_fits_where_names_do_not_suffice() -> None:
    stored = (StoredArray("window", ((None, 48), (None, 768)), 4), *VAE)
    assert "params" not in FSDP.rules(NAMES, stored) and FSDP.own_stage(NAMES, stored) == 3
    layout, zero = FSDP.layout(NAMES, 8, stored)
    assert zero.stage == 3 and layout.rules.to_dict()["params"] == {"over": "data", "min_bytes": 65536}
    found = axes_of(FSDP, stored)
    assert found["window"] == ((), ("data",)) and found["enc"] == (("data",), ())
    assert FSDP.how_stored(NAMES, stored).startswith(
        "FSDP shards every weight along a dim that fits, with or without a"
    )


@pytest.mark.parametrize("zero", [1, 3])
def test_what_no_axes_divide_is_reported_and_estimated_as_replicated(zero: int) -> None:
    odd = StoredArray("odd", (("mlp", 255), ("pixels", 513)), 4)
    stored = (*VAE, odd)
    plan = replace(FSDP, zero=zero)
    assert plan.how_stored(NAMES, stored).endswith(
        "odd, 511.00 KiB, stay replicated: the devices divide none of their dims"
    )
    sharded, whole = weight_groups(plan, work(stored))
    assert (whole.elements, whole.others, whole.summed) == (255 * 513, 1, ("data",))
    cost = CostModel(work(stored), Topology.parse("v5e:2x4")).cost(plan)
    assert cost.memory["parameters"] == pytest.approx(4 * (sharded.elements / 8 + 255 * 513))
    (summed,) = (t for t in cost.transfers if t.what == "reduce" and t.wire_bytes)
    assert summed.wire_bytes == pytest.approx(2 * 7 / 8 * 4 * 255 * 513)


def test_experts_are_sharded_over_the_other_axes() -> None:
    plan = Plan(data=4, expert=2, zero=3)
    stored = (
        StoredArray("up", (("experts", 8), ("mlp", 256), ("pixels", 784)), 4),
        StoredArray("mean", (HIDDEN, ("embed", 784)), 4),
    )
    assert plan.rules(NAMES, stored)["params"] == {
        "embed": {"first_of": [["data", "expert"], None]},
        "pixels": {"first_of": [["data"], None]},
    }
    assert axes_of(plan, stored) == {"up": (("expert",), (), ("data",)), "mean": ((), ("data", "expert"))}
    table = Rules.from_dict(plan.rules(NAMES, stored))
    assert Rules.from_dict(table.to_dict()) == table
