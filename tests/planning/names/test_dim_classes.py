"""Tests the union-find of dims: products, sums and both."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.planning.names.dim_classes import DimClasses, Use
from jaxpar.planning.names.propagate import Propagation


def test_a_split_dim_is_split_everywhere() -> None:
    classes = DimClasses()
    one, other = classes.new(24), classes.new(24)
    classes.unite(one, other)
    heads, size = classes.new(4), classes.new(6)
    assert classes.unite(one, (*heads, *size))
    assert classes.flat(other) == classes.flat((*heads, *size))


def test_sizes_that_do_not_nest_are_counted() -> None:
    classes = DimClasses()
    assert not classes.unite((*classes.new(4), *classes.new(6)), (*classes.new(6), *classes.new(4)))
    assert classes.misaligned == 1


def test_pieces_of_a_sum_remain_apart_until_something_unites_them() -> None:
    classes = DimClasses()
    fused = classes.new(24)
    pieces = classes.cut(fused, [8, 8, 8])
    assert pieces is not None
    q, k, v = pieces
    assert classes.flat(q) != classes.flat(k) != classes.flat(v)
    classes.unite(q, k)
    assert classes.terms(fused[0]) == tuple(map(classes.flat, (q, q, v)))


def test_a_sum_of_equal_pieces_is_a_product() -> None:
    classes = DimClasses()
    half = classes.new(8)
    whole = classes.add([half, half])
    assert classes.split(whole[0], 2) is not None
    parts, minor = classes.flat(whole)
    assert (minor,) == classes.flat(half) and Use.PARTS in classes.uses[parts]


def test_sums_with_the_same_pieces_are_one_class() -> None:
    classes = DimClasses()
    a, b, c, d = (classes.new(8) for _ in range(4))
    first, second = classes.add([a, b]), classes.add([c, d])
    classes.unite(a, c)
    classes.unite(b, d)
    assert classes.flat(first) != classes.flat(second)
    classes.unite_equal_sums()
    assert classes.flat(first) == classes.flat(second)


def test_a_shifted_sequence_is_one_class_and_ends() -> None:
    """x[1:] and x[:-1] of one sequence: their pieces overlap, and refining them would never stop."""
    classes = DimClasses()
    seq = classes.new(4096)
    first, last = classes.cut(seq, [1, 4095]), classes.cut(seq, [4095, 1])
    assert first is not None and last is not None
    classes.unite(first[1], last[0])
    assert classes.flat(first[1]) == classes.flat(last[0]) and classes.size(classes.flat(seq)) == 4096


SIZES = st.sampled_from([2, 3, 4, 6, 8, 12, 24])


@given(st.data())
def test_what_is_united_is_equal_and_no_size_changes(data: st.DataObject) -> None:
    classes, dims, united = DimClasses(), [], []
    for _ in range(data.draw(st.integers(2, 6))):
        factors = data.draw(st.lists(SIZES, min_size=1, max_size=3))
        dims.append((tuple(atom for size in factors for atom in classes.new(size)), classes.size(())))
    sizes = [classes.size(dim) for dim, _ in dims]
    for _ in range(data.draw(st.integers(0, 8))):
        i, j = (data.draw(st.integers(0, len(dims) - 1)) for _ in range(2))
        if data.draw(st.booleans()):
            if sizes[i] == sizes[j] and classes.unite(dims[i][0], dims[j][0]):
                united.append((i, j))
        else:
            first = data.draw(st.integers(1, sizes[i] - 1))
            pieces = classes.cut(dims[i][0], [first, sizes[i] - first])
            assert pieces is None or [classes.size(piece) for piece in pieces] == [first, sizes[i] - first]
    assert [classes.size(classes.flat(dim)) for dim, _ in dims] == sizes
    for i, j in united:
        assert classes.flat(dims[i][0]) == classes.flat(dims[j][0])
    copy = classes.copy()
    copy.unite(copy.new(5), copy.new(5))
    assert [classes.flat(dim) for dim, _ in dims] == [copy.flat(dim) for dim, _ in dims]


def test_the_order_of_a_sort_has_the_dims_of_its_keys() -> None:
    program = jax.make_jaxpr(lambda x: jnp.argsort(x, axis=0))(jnp.zeros((6, 4)))
    dims = Propagation()
    keys = dims.value(program.in_avals[0])
    (order,), _ = dims.run(program, [keys])
    assert [*map(dims.classes.flat, order.dims)] == [*map(dims.classes.flat, keys.dims)]
