"""Device groups: every spelling of ``replica_groups``, and the mesh axes that they cover."""

from __future__ import annotations

import itertools
import math
import re

import audit_programs as programs
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

import jaxpar as jp
from jaxpar.analysis.hlo.collectives import axes_of, groups_of, kind_of
from jaxpar.analysis.hlo.parser import Instruction, parse
from jaxpar.errors import AuditError

Groups = list[list[int]]


def spelt(groups: str, devices: int) -> Groups:
    """The groups that the auditor reads from a spelling."""
    return groups_of(
        Instruction("c", "all-reduce", (), (), f"channel_id=1, replica_groups={groups}", "", False), devices
    ).tolist()


def as_list(groups: Groups) -> str:
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


def lines(sizes: list[int], chosen: set[int]) -> Groups:
    """The groups of a row-major mesh along some of its dims, one device number at a time."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(itertools.product(*map(range, sizes))):
        key = tuple(c for dim, c in enumerate(place) if dim not in chosen)
        groups.setdefault(key, []).append(number)
    return list(groups.values())


meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(meshes, st.data())
def test_iota_spellings_are_the_lists_they_stand_for(sizes, data):
    order = data.draw(st.permutations(range(len(sizes))))
    devices = math.prod(sizes)
    width = data.draw(st.sampled_from([n for n in range(1, devices + 1) if devices % n == 0]))
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    turned = itertools.product(*(range(sizes[dim]) for dim in order))
    numbers = [sum(c * strides[dim] for c, dim in zip(place, order, strict=True)) for place in turned]
    groups = [numbers[i : i + width] for i in range(0, devices, width)]
    transposed = "" if list(order) == sorted(order) else f"T({','.join(map(str, order))})"
    iota = f"[{devices // width},{width}]<=[{','.join(map(str, sizes))}]{transposed}"
    assert spelt(iota, devices) == spelt(as_list(groups), devices) == groups


@given(meshes, st.data())
def test_axes_are_found_again_from_the_groups_of_every_subset(sizes, data):
    names = [f"axis{i}" for i in range(len(sizes))]
    chosen = data.draw(st.sets(st.sampled_from(range(len(sizes)))))
    groups = lines(sizes, chosen)
    expected = tuple(name for i, name in enumerate(names) if i in chosen and sizes[i] > 1)
    mesh = dict(zip(names, sizes, strict=True))
    assert axes_of(groups, mesh) == expected
    along = ",".join(f"'{names[i]}'" for i in sorted(chosen))
    spelling = f"mesh[{','.join(f"'{n}'={s}" for n, s in mesh.items())}] {{{along}}}"
    assert sorted(map(sorted, spelt(spelling, math.prod(sizes)))) == sorted(map(sorted, groups))


@pytest.mark.parametrize(
    ("spelling", "groups"),
    [
        ("mesh['a'=4,'b'=2] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=4,'b'=2] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=4,'b'=2] {'b','a':(1)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh[a=4,b=2] {b}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=4,'b'=2], device_ids=([4,2]<=[2,4]T(1,0)) {'b'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", [[0, 2], [1, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_mesh_spellings_with_parts_of_axes_and_orders_of_devices(spelling, groups):
    assert sorted(map(sorted, spelt(spelling, 8))) == groups


def test_groups_of_unequal_size_are_as_wide_as_the_widest():
    assert spelt("{{0,1,2},{3}}", 4) == [[0, 1, 2], [3, 3, 3]]
    assert axes_of([[0, 1, 2], [3, 3, 3]], {"data": 4}) == ("data",)


def test_an_unknown_spelling_is_an_error():
    with raises(AuditError, "replica_groups"):
        spelt("rings(4)", 4)


def spellings(text: str) -> set[str]:
    """The kinds of spelling in a program: ``list``, ``iota``, ``transposed``, ``mesh`` or ``part of an axis``."""
    found = re.findall(r"replica_groups=(\{\{|\[[\d,]+\]<=\[[\d,]+\](?:T)?|mesh\[[^\]]*\] \{[^}]*\})", text)
    names = {"{{": "list"}
    return {
        names.get(s)
        or ("transposed" if s.endswith("T") else "iota" if s[0] == "[" else "part of an axis" if ":(" in s else "mesh")
        for s in found
    }


def test_real_programs_use_every_spelling(stored_text, text_of, line_mesh, grid_mesh):
    compiled = [text_of(programs.part_of_an_axis(line_mesh)), text_of(programs.two_matmuls(grid_mesh, 64, 2))]
    texts = [*compiled, stored_text("tpu_tp_sp"), stored_text("gpu_tp_sp")]
    assert set().union(*map(spellings, texts)) == {"list", "iota", "transposed", "mesh", "part of an axis"}


def test_in_real_programs_every_group_lies_along_the_axes_it_is_said_to(stored_text, facts):
    for name in ("tpu_fsdp_tp", "tpu_tp_sp", "gpu_tp_sp"):
        mesh, module = facts(name)["mesh"], parse(stored_text(name))
        for instruction in (i for where in module.computations.values() for i in where):
            if kind_of(instruction) is None or instruction.attribute("replica_groups") is None:
                continue
            groups = groups_of(instruction, module.partitions).tolist()
            chosen = {i for i, axis in enumerate(mesh) if axis in axes_of(groups, mesh)}
            assert sorted(map(sorted, groups)) == sorted(lines(list(mesh.values()), chosen)), instruction.name


def test_a_part_of_an_axis_counts_with_its_own_size(line_mesh):
    report = jp.audit(programs.part_of_an_axis(line_mesh).compile(), mesh=line_mesh)
    found = {c.kind: (c.axes, c.group, c.result_bytes, c.wire_bytes) for c in report.collectives}
    row = 32 * 4
    assert found == {
        "all-reduce": (("data",), 2, row, 2 * 1 / 2 * row),
        "all-gather": (("data",), 4, 4 * row, 3 / 4 * 4 * row),
    }


def test_nothing_moves_over_an_axis_of_one_device(line_mesh, text_of):
    text = text_of(programs.alone_on_an_axis(line_mesh))
    assert " all-reduce(" in text and " all-gather(" in text
    report = jp.audit(text, mesh=line_mesh)
    assert report.collectives == () and report.wire_bytes() == 0
