"""Parameters cut into pieces, and the servers that own them, for random parameters and changes."""

from __future__ import annotations

import math

import numpy as np
import optax
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.errors import ConfigError
from jaxpar.parameter_server.assignment import assign, with_server, without_server
from jaxpar.parameter_server.membership import Membership, WorkerSpan, from_json
from jaxpar.parameter_server.piece_optimizer import check_pieces
from jaxpar.parameter_server.pieces import ParamPiece, ParamSpec, SparseTable, cut, server_params
from jaxpar.parameter_server.row_values import initial_rows

shapes = st.lists(st.integers(1, 40), max_size=3).map(tuple)
params = st.dictionaries(
    st.text("abc/", min_size=1, max_size=4),
    st.builds(ParamSpec, shapes, st.sampled_from(["float32", "bfloat16"])),
    min_size=1,
    max_size=8,
)


@given(params, st.integers(1, 2000))
def test_pieces_cover_each_row_once(specs: dict[str, ParamSpec], piece_bytes: int) -> None:
    pieces = cut(specs, piece_bytes)
    assert Membership(0, (0,), (), tuple(pieces), {}).params() == specs
    for name, spec in specs.items():
        own = [piece for piece in pieces if piece.name == name]
        assert [piece.start for piece in own] == [0, *(piece.stop for piece in own[:-1])]
        assert own[-1].stop == (spec.shape[0] if spec.shape else 1)
        assert sum(piece.spec.nbytes for piece in own) == spec.nbytes
        rows = [piece.stop - piece.start for piece in own]
        assert max(rows) - min(rows) <= 1
        row = spec.nbytes // max(spec.shape[0] if spec.shape else 1, 1)
        assert all(piece.spec.nbytes <= max(piece_bytes, row) for piece in own)


def _loads(owners: dict[str, int], pieces: list[ParamPiece], servers: list[int]) -> dict[int, int]:
    return {s: sum(p.spec.nbytes for p in pieces if owners[p.key] == s) for s in servers}


@given(params, st.integers(16, 2000), st.lists(st.sampled_from(["join", "leave"]), max_size=6), st.integers(1, 4))
def test_changes_move_only_what_they_must(
    specs: dict[str, ParamSpec], piece_bytes: int, changes: list[str], count: int
) -> None:
    pieces = cut(specs, piece_bytes)
    servers = list(range(count))
    owners = assign(pieces, servers)
    largest, total = max(p.spec.nbytes for p in pieces), sum(p.spec.nbytes for p in pieces)
    assert max(_loads(owners, pieces, servers).values()) <= total / count + largest
    for number, change in enumerate(changes, count):
        if change == "join":
            new = with_server(owners, pieces, number)
            assert all(new[key] in (owners[key], number) for key in owners)
            servers.append(number)
            loads = _loads(new, pieces, servers)
            assert max(loads.values()) <= max(_loads(owners, pieces, servers).values())
        elif len(servers) > 1:
            gone = servers.pop(0)
            new = without_server(owners, pieces, gone, servers)
            assert all(new[key] == owners[key] for key in owners if owners[key] != gone)
        else:
            continue
        owners = new
        assert owners.keys() == {p.key for p in pieces} and set(owners.values()) <= set(servers)


def test_a_membership_survives_its_text() -> None:
    pieces = tuple(cut({"w": ParamSpec((5, 2), "float32"), "b": ParamSpec((), "bfloat16")}, 16))
    spans = (WorkerSpan(0), WorkerSpan(3, 4, 9))
    one = Membership(3, (0, 2), spans, pieces, assign(pieces, (0, 2)))
    assert from_json(one.to_json()) == one
    assert [one.expected(step) for step in (3, 4, 9)] == [[0], [0, 3], [0]]


def test_initial_rows_are_normal_and_depend_on_their_number_only() -> None:
    table = SparseTable("t", 10**12, ids=("x",), stddev=2.0, seed=3)
    ids = np.arange(10**11, 10**11 + 20_000)
    rows = initial_rows(table, ids, 7)
    assert np.array_equal(initial_rows(table, ids[5:9], 7), rows[5:9])
    assert abs(rows.mean()) < 0.02 and abs(rows.std() - 2) < 0.02
    assert (
        abs(np.corrcoef(rows[:, 0], rows[:, 1])[0, 1]) < 0.03
        and abs(np.corrcoef(rows[1:, 0], rows[:-1, 0])[0, 1]) < 0.03
    )
    assert abs(float((rows**4).mean()) / 16 - 3) < 0.1  # the kurtosis of a normal
    assert not np.array_equal(initial_rows(SparseTable("t", 10**12, ids=("x",), stddev=2.0), ids, 7), rows)


def _checked(tx: optax.GradientTransformation, piece_bytes: int = 10**9) -> None:
    specs = {"params/a/kernel": ParamSpec((6, 5), "float32"), "params/b": ParamSpec((5,), "float32")}
    check_pieces(tx, specs, cut(specs, piece_bytes))


def test_optimizers_that_mix_parameters_or_rows_are_refused() -> None:
    mask = lambda tree: {name: name == "a" for name in tree}
    for tx in (optax.adamw(1e-3, mask=mask), optax.lion(1e-3), optax.sgd(0.1, 0.9, nesterov=True)):
        _checked(tx, 16)
    _checked(optax.lamb(1e-3))  # one norm for each parameter
    with raises(ConfigError, "params/a/kernel", "parameters"):
        _checked(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)))
    with raises(ConfigError, "params/a/kernel", "its 6"):
        _checked(optax.lamb(1e-1), 60)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (
            lambda: server_params({"params/w": ParamSpec((3,), "float32")}, [SparseTable("params/t", 9, ("x",))]),
            "params/t",
        ),
        (
            lambda: server_params({"params/w": ParamSpec((3,), "float32")}, [SparseTable("params/w", 9, ("x",))]),
            "float32[3]",
        ),
        (lambda: SparseTable("t", 0, ("x",)), "0"),
        (
            lambda: SparseTable("t", 1, "items"),  # type: ignore[arg-type]
            "items",
        ),
        (lambda: assign([], []), "no server"),
        (lambda: without_server({"w[0:1]": 4}, [], 4, []), "4"),
    ],
)
def test_bad_tables_and_owners(make: object, name: str) -> None:
    with raises(ConfigError, name):
        make()  # type: ignore[operator]


def test_one_piece_without_rows() -> None:
    (piece,) = cut({"s": ParamSpec((), "float32")}, 1)
    assert (piece.key, piece.spec.nbytes, math.prod(piece.spec.shape)) == ("s[0:1]", 4, 1)
