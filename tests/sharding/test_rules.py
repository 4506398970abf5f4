"""Rules: the table for each role, and the axes and reasons that the resolver derives for a tensor."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from jaxpar import Rules, first_of, over
from jaxpar.errors import RulesError
from jaxpar.sharding.mesh import AXES
from jaxpar.sharding.resolve import Resolved, resolve
from jaxpar.sharding.rules import ROLES
from jaxpar.utils.yaml_config import parse_yaml

MESH = {"replica": 2, "data": 4, "context": 1, "model": 2}
KIB = 1024

DIMS = ("batch", "seq", "embed", "heads", "on", "null", "two words", "12")
AXIS_LISTS = st.lists(st.sampled_from(AXES), unique=True, max_size=3)
ENTRIES = st.one_of(
    st.none(),
    st.sampled_from(AXES),
    AXIS_LISTS,
    AXIS_LISTS.map(tuple),
    st.builds(
        lambda options, last: first_of(*options, *last),
        st.lists(AXIS_LISTS.filter(bool), min_size=1, max_size=3),
        st.sampled_from([(), (None,)]),
    ),
)
OVERS = st.builds(over, AXIS_LISTS.filter(bool), st.sampled_from([0, 256, "1KiB", "2 GiB"]))


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the keyword arguments of a table."""
    base = draw(st.dictionaries(st.sampled_from(DIMS), ENTRIES))
    dims = st.sampled_from(sorted(base)) if base else st.nothing()
    overlays = draw(st.dictionaries(st.sampled_from(ROLES), OVERS | st.dictionaries(dims, ENTRIES)))
    indivisible = draw(st.dictionaries(dims, st.just("replicate")))
    return {
        **base,
        **overlays,
        "indivisible": indivisible,
        "unannotated": draw(st.sampled_from(["error", "replicate"])),
    }


@dataclass(frozen=True)
class Case:
    """A table, a mesh and a tensor."""

    table: dict[str, Any]
    sizes: dict[str, int]
    names: tuple[str | None, ...]
    shape: tuple[int, ...]
    role: str

    def resolve(self) -> Resolved:
        return resolve(Rules(**self.table), self.sizes, self.names, self.shape, role=self.role)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    table = draw(tables())
    known = [None, *(dim for dim in DIMS if dim in table)]
    sizes = draw(st.fixed_dictionaries(dict.fromkeys(AXES, st.sampled_from([1, 1, 2, 3, 4]))))
    names = tuple(draw(st.lists(st.sampled_from([*known, *known, "unknown"]), max_size=4)))
    shape = tuple(draw(st.sampled_from([0, 1, 2, 6, 8, 12, 24])) for _ in names)
    return Case(table, sizes, names, shape, draw(st.sampled_from(ROLES)))


def spread(shape: tuple[int, ...], names: tuple[str | None, ...] | None = None, **options: Any) -> Resolved:
    """Resolve a tensor of bytes under ZeRO 1."""
    rules = Rules(embed=None, mlp="model", vocab="data", optimizer=over("data"))
    return resolve(rules, MESH, names or (None,) * len(shape), shape, role="optimizer", itemsize=1, **options)


def test_a_role_overlays_the_base_table_and_gradients_and_optimizer_start_from_params() -> None:
    rules = Rules(embed=None, mlp="model", params={"embed": "data"}, gradients={"mlp": None}, activations={"mlp": None})
    axes = {role: resolve(rules, MESH, ("embed", "mlp"), (8, 8), role=role).axes for role in ROLES}
    assert axes == {
        "activations": ((), ()),
        "params": (("data",), ("model",)),
        "gradients": (("data",), ()),
        "optimizer": (("data",), ("model",)),
    }


def test_a_rule_names_the_role_it_comes_from() -> None:
    rules = Rules(embed=None, mlp="model", params={"embed": "data"})
    resolved = resolve(rules, MESH, ("embed", "mlp"), role="optimizer")
    assert [dim.rule for dim in resolved.dims] == ["params: embed = data", "mlp = model"]
    assert resolved.used == {("params", "embed"), ("", "mlp")}


def test_replace_changes_a_role_rule_by_rule_and_keeps_its_alternatives() -> None:
    rules = Rules(embed=None, heads="model", params={"heads": first_of("model", None)}, optimizer=over("data"))
    changed = rules.replace(params={"embed": "data"}, optimizer={"embed": "model"}, unannotated="replicate")
    params = {"embed": "data", "heads": first_of("model", None)}
    assert changed == Rules(
        embed=None, heads="model", params=params, optimizer={"embed": "model"}, unannotated="replicate"
    )


def test_an_over_of_params_is_inherited_and_can_be_replaced() -> None:
    rules = Rules(params=over("data", 0), optimizer=over("model", 0))
    axes = {role: resolve(rules, MESH, (None,), (8,), role=role) for role in ROLES}
    assert {role: resolved.axes for role, resolved in axes.items()} == {
        "activations": ((),),
        "params": (("data",),),
        "gradients": (("data",),),
        "optimizer": (("model",),),
    }
    assert axes["gradients"].used == {("params", "over")}
    assert axes["optimizer"].used == {("optimizer", "over")}


def test_a_tuple_shards_major_to_minor_and_lists_are_tuples() -> None:
    rules = Rules(batch=("replica", "data"), seq=["data", "replica"])
    assert resolve(rules, MESH, ("batch",), (16,)).axes == (("replica", "data"),)
    assert resolve(rules, MESH, ("seq",), (16,)).axes == (("data", "replica"),)
    assert Rules(batch=["data"]) == Rules(batch="data") != Rules(batch=None)


def test_none_and_unnamed_dims_are_whole_for_different_reasons() -> None:
    resolved = resolve(Rules(embed=None), MESH, ("embed", None), (7, 7))
    assert [(dim.axes, dim.why) for dim in resolved.dims] == [
        ((), "the rule says None"),
        ((), "the dim has no name"),
    ]


def test_axes_of_size_1_vanish_as_do_axes_that_the_mesh_lacks() -> None:
    rules = Rules(batch=("pipeline", "data", "context"), seq="context", embed=first_of("context", "model"))
    resolved = resolve(rules, MESH, ("batch", "seq", "embed"), (4, 7, 2))
    assert resolved.axes == (("data",), (), ("model",))
    assert resolved.dims[1].why == "the axes of the rule have size 1"


def test_first_of_takes_the_first_option_that_divides() -> None:
    rules = Rules(kv_heads=first_of(("model", "data"), "model", None))
    resolved = {n: resolve(rules, MESH, ("kv_heads",), (n,)).dims[0] for n in (8, 6, 3)}
    assert {n: dim.axes for n, dim in resolved.items()} == {8: ("model", "data"), 6: ("model",), 3: ()}
    assert resolved[8].why == ""
    assert resolved[6].why == "the dim 'kv_heads' has size 6, which is not a multiple of model=2 × data=4 = 8"
    assert resolved[3].why.endswith("not a multiple of model=2; the rule says None")


def test_first_of_leaves_an_axis_to_a_plain_rule_wherever_it_stands() -> None:
    rules = Rules(kv_heads=first_of("model", None), mlp="model")
    for names in (("kv_heads", "mlp"), ("mlp", "kv_heads")):
        resolved = resolve(rules, MESH, names, (8, 8))
        assert dict(zip(names, resolved.axes, strict=True)) == {"kv_heads": (), "mlp": ("model",)}
        assert not resolved.problems


def test_indivisible_leaves_a_dim_whole_but_allows_no_axis_twice() -> None:
    rules = Rules(
        vocab="data", heads=first_of("model"), embed="data", indivisible={"vocab": "replicate", "heads": "replicate"}
    )
    resolved = resolve(rules, MESH, ("vocab", "heads"), (50257, 3))
    assert resolved.axes == ((), ())
    assert not resolved.problems
    assert resolved.dims[0].why.endswith(
        "has size 50257, which is not a multiple of data=4; indivisible allows replication"
    )
    assert len(resolve(rules, MESH, ("embed", "vocab"), (8, 8)).problems) == 1


def test_without_a_shape_divisibility_is_not_checked_and_over_does_not_apply() -> None:
    resolved = resolve(Rules(vocab="data", params=over("model", 0)), MESH, ("vocab", None), role="params")
    assert resolved.axes == (("data",), ())
    assert resolved.used == {("", "vocab")}


def test_over_leaves_tensors_below_min_bytes_whole() -> None:
    assert spread((63, KIB)).axes == ((), ())
    assert spread((63, KIB)).note == "over(data, min_bytes=65536) does not apply: the tensor has 64512 bytes"
    assert spread((64, KIB)).axes == (("data",), ())
    assert spread((65, KIB)).axes == ((), ("data",))
    assert spread((64, KIB)).note == ""


def test_over_takes_the_largest_free_dim_that_divides() -> None:
    """The last dim is used only where no other dim leaves a device the 8 rows of a TPU tile."""
    assert spread((32, 64 * KIB)).axes == (("data",), ())
    assert spread((28, 64 * KIB)).axes == ((), ("data",))
    assert spread((32, 40, 64 * KIB)).axes == ((), ("data",), ())
    assert spread((8, 64 * KIB + 2, 16)).axes == ((), (), ("data",))
    assert spread((256, 256)).axes == (("data",), ())
    assert spread((16, 64 * KIB), ("embed", "mlp")).axes == (("data",), ("model",))
    assert spread((16, 64 * KIB), ("embed", "mlp")).dims[0].rule == "over(data, min_bytes=65536)"


def test_over_splits_a_sharded_dim_further_when_no_other_divides() -> None:
    resolved = spread((3, 64 * KIB), ("embed", "mlp"))
    assert resolved.axes == ((), ("model", "data"))
    assert resolved.dims[1].rule == "mlp = model + over(data, min_bytes=65536)"
    # 65540 is a multiple of 4, but each of its two shards is not.
    assert spread((3, 64 * KIB + 4), ("embed", "mlp")).axes == ((), ("model",))


def test_over_does_not_use_an_axis_twice() -> None:
    resolved = spread((64, 64 * KIB), ("vocab", "embed"))
    assert resolved.axes == (("data",), ())
    assert resolved.note == "over(data, min_bytes=65536) does not apply: the tensor is already sharded over 'data'"
    rules = Rules(vocab="data", optimizer=over(("replica", "data"), 0))
    assert resolve(rules, MESH, ("vocab", None), (8, 8), role="optimizer").axes == (("data",), ("replica",))


def test_over_says_when_nothing_divides_or_its_axis_has_size_1() -> None:
    odd = spread((257, 257))
    assert odd.axes == ((), ())
    assert odd.note == "over(data, min_bytes=65536) does not apply: no dim of a shard is a multiple of 4"
    one = resolve(Rules(optimizer=over("context", 0)), MESH, (None,), (8,), role="optimizer")
    assert one.note == "over(context, min_bytes=0) does not apply: its axes have size 1"
    assert not odd.problems + one.problems


def test_every_axis_of_the_table_is_listed_with_its_place() -> None:
    rules = Rules(embed=None, heads=first_of("model", ("data", "expert")), params={"embed": "x"}, optimizer=over("y"))
    assert sorted(rules.axes()) == [
        ("heads", "data"),
        ("heads", "expert"),
        ("heads", "model"),
        ("optimizer: over", "y"),
        ("params: embed", "x"),
    ]


@examples()
@given(tables(), st.randoms(use_true_random=False))
def test_order_never_matters(table: dict[str, Any], rng: random.Random) -> None:
    def shuffled(entries: Any) -> Any:
        if not isinstance(entries, dict):
            return entries
        return {key: shuffled(entries[key]) for key in rng.sample(sorted(entries), len(entries))}

    assert Rules(**shuffled(table)) == Rules(**table)
    assert hash(Rules(**shuffled(table))) == hash(Rules(**table))


@examples()
@given(tables())
def test_a_table_survives_yaml(table: dict[str, Any]) -> None:
    rules = Rules(**table)
    assert Rules.from_dict(parse_yaml(yaml.safe_dump(rules.to_dict()))) == rules


@pytest.mark.parametrize("change", [{"mlp": None}, {"params": {"mlp": None}}, {"optimizer": over("data", 1)}])
def test_another_table_is_not_equal(change: dict[str, Any]) -> None:
    rules = Rules(mlp="model", optimizer=over("data"))
    assert rules != Rules(**{"mlp": "model", "optimizer": over("data"), **change})
    assert rules != Rules(mlp="model", optimizer=over("data"), indivisible={"mlp": "replicate"})


@examples()
@given(cases())
def test_an_axis_is_used_once_at_most_and_never_when_it_has_size_1(case: Case) -> None:
    axes = [axis for dim in case.resolve().dims for axis in dim.axes]
    assert len(axes) == len(set(axes))
    assert all(case.sizes[axis] > 1 for axis in axes)


@examples()
@given(cases())
def test_a_tensor_without_problems_is_cut_into_equal_shards(case: Case) -> None:
    resolved = case.resolve()
    assert [(dim.name, dim.size) for dim in resolved.dims] == list(zip(case.names, case.shape, strict=True))
    ways = [math.prod(case.sizes[axis] for axis in dim.axes) for dim in resolved.dims]
    shard = [size // way for size, way in zip(case.shape, ways, strict=True)]
    assert tuple(size * way for size, way in zip(shard, ways, strict=True)) == case.shape


@examples()
@given(cases())
def test_every_dim_has_a_rule_or_a_reason(case: Case) -> None:
    resolved = case.resolve()
    assert all(dim.rule if dim.axes else dim.why for dim in resolved.dims)
    assert bool(resolved.problems) >= ("unknown" in case.names)


def test_a_rank_that_does_not_match_has_a_reason_for_every_dim() -> None:
    resolved = resolve(Rules(batch="data"), MESH, ("batch",), (8, 8))
    assert [dim.why for dim in resolved.dims] == ["the names do not match the dims"] * 2
    assert len(resolved.problems) == 1


def test_an_unknown_role_is_refused() -> None:
    with raises(RulesError, "param", "unknown"):
        Rules().for_role("param")
