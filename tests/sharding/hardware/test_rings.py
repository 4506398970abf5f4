"""Closed rings of chips where the torus has none: places, links, device orders, and meshes that have no ring."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import yaml
from error_texts import raises
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import examples

import jaxpar as jp
from jaxpar.analysis.compile import ahead_of_time
from jaxpar.app.config import load_run
from jaxpar.errors import MeshError
from jaxpar.sharding.hardware.device_order import arrange
from jaxpar.sharding.hardware.links import Links, links_of
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.sharding.hardware.torus import Torus

MESH = {"data": 4, "model": 4}


@dataclass(frozen=True)
class Chip:
    """The attributes of a TPU device that the order reads."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int = 0
    core_on_chip: int = 0
    device_kind: str = "TPU v5 lite"
    platform: str = "tpu"
    process_index: int = 0


def chips(shape: tuple[int, ...], slices: int = 1, cores: int = 1, kind: str = "TPU v5 lite") -> list[Chip]:
    places = itertools.product(range(slices), *(range(n) for n in reversed((*shape, 1)[:3])), range(cores))
    return [Chip(i, (x + 2, y, z), at, core, kind) for i, (at, z, y, x, core) in enumerate(places)]


def steps(a: tuple[int, ...], b: tuple[int, ...], shape: tuple[int, ...], closed: tuple[bool, ...]) -> int:
    """Links between two places."""
    away = [abs(p - q) for p, q in zip(a, b, strict=True)]
    return sum(min(d, n - d) if ring else d for d, n, ring in zip(away, shape, closed, strict=True))


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]),
)
@examples(200)
def test_neighbours_in_a_ring_are_neighbours_on_the_torus(shape: list[int], ends: list[bool], size: int) -> None:
    count, at, closed = math.prod(shape), tuple(shape), tuple(ends[: len(shape)])
    assume(count % size == 0)
    try:
        torus = Torus.lay({"data": count // size, "model": size}, at, closed, 1.0, ["model"])
    except MeshError as error:
        dims = [n for n in shape if n > 1]
        assert f"the {size} devices of 'model' form no closed ring on {'x'.join(map(str, shape))} chips" in str(error)
        assert (
            size % 2
            or len(dims) < 2
            or not any(
                math.prod(block) == size and size not in block
                for block in itertools.product(*([f for f in range(1, n + 1) if n % f == 0] for n in shape))
            )
        )
        return
    groups = np.reshape(np.array(torus.places(["data", "model"])), (count // size, size, len(shape)))
    assert len({tuple(place) for place in groups.reshape(count, -1).tolist()}) == count
    for group in groups.tolist():
        for a, b in zip(group, [*group[1:], group[0]], strict=True):
            assert size == 1 or steps(tuple(a), tuple(b), at, closed) == 1


def test_a_ring_of_four_uses_every_link_of_its_square_once() -> None:
    links = Links.of(Topology.parse("v5e:4x4"), MESH, ["model"])
    ways = [[(i, (i + step) % 4) for i in range(4)] for step in (1, -1)]
    there, back = (links.phases("collective-permute", ("model",), 50e9, pairs=pairs)[0].queues for pairs in ways)
    assert set(there.values()) == set(back.values()) == {1.0}
    assert not there.keys() & back.keys() and len(there) == len(back) == 4
    line = Links.of(Topology.parse("v5e:4x4"), MESH)
    there, back = (line.phases("collective-permute", ("model",), 50e9, pairs=pairs)[0].queues for pairs in ways)
    assert there == back == {"ICI 0 +": 1.0, "ICI 0 -": 1.0}  # both directions, over the same links


def test_the_axis_between_the_squares_shares_its_links_with_one_other_group() -> None:
    links = Links.of(Topology.parse("v5e:4x4"), MESH, ["model", "data"])
    pairs = [(i, (i + 1) % 4) for i in range(4)]
    (phase,) = links.phases("collective-permute", ("data",), 50e9, pairs=pairs)
    assert phase.seconds == 2.0 and {round(s) for s in phase.queues.values()} == {1, 2}
    # A gather has the bandwidth of a line over both dims, and twice that of a line within the squares.
    assert links.seconds("all-gather", ("data",), 50e9) == 1.0
    assert links.seconds("all-gather", ("model",), 50e9) == 0.5
    assert links.rings(("data",)) == links.rings(("model",)) == (4,)


@pytest.mark.parametrize(
    ("kind", "shape", "mesh"),
    [
        ("v5e", (4, 4), {"data": 4, "model": 4}),
        ("v5e", (4, 8), {"data": 2, "context": 2, "model": 8}),
        ("v5e", (2, 4), {"data": 2, "model": 4}),
        ("v5p", (2, 2, 4), {"data": 2, "model": 8}),
        ("tpu7x", (4, 4, 2), {"data": 2, "model": 16, "z": 2}),
    ],
)
@pytest.mark.parametrize("slices", [1, 2])
def test_devices_are_ordered_as_the_model_of_the_links_assumes(
    kind: str, shape: tuple[int, ...], mesh: dict[str, int], slices: int
) -> None:
    topology = Topology(kind, shape, slices)
    sizes = jp.MeshSpec(**{**mesh, "data": mesh["data"] * slices}).sizes(topology.devices)
    links = Links.of(topology, sizes, ["model"])
    given = chips(shape, slices, topology.accelerator.chip_devices, topology.device_kind)
    placed = arrange(given[::-1], sizes, ["model"])
    assert placed.shape == tuple(sizes.values()) and {c.id for c in placed.flat} == {c.id for c in given}
    along = np.moveaxis(placed, list(sizes).index("model"), -1).reshape(-1, sizes["model"])
    for group in along:
        assert len({chip.slice_index for chip in group}) == len({chip.core_on_chip for chip in group}) == 1
        for a, b in zip(group, [*group[1:], group[0]], strict=True):
            assert sum(abs(p - q) for p, q in zip(a.coords, b.coords, strict=True)) == 1
    assert links.torus is not None
    first = [tuple(place) for place in links.torus.places(["model"])]
    assert [
        tuple(c - o for c, o in zip(chip.coords, (2, 0, 0), strict=True))[: len(shape)] for chip in along[0]
    ] == first


def test_rings_have_no_effect_without_a_torus() -> None:
    mesh = jp.MeshSpec(data=2, model=4).build(rings=["model"])
    assert list(mesh.devices.flat) == list(jp.MeshSpec(data=2, model=4).build().devices.flat)
    assert Links.of(Topology.parse("h100:2x8"), {"data": 4, "model": 4}, ["model"]).torus is None


def test_a_guess_at_the_slice_may_have_no_ring() -> None:
    mesh = jp.MeshSpec(data=3, model=3).on("v5e:1x9")
    links = links_of(mesh, ["model"])
    assert links is not None and links.torus is not None and links.torus.ringed == ()


@pytest.mark.parametrize(
    ("topology", "mesh", "rings", "name"),
    [
        ("v5e:1x8", {"data": 2, "model": 4}, ["model"], "1x8"),
        ("v5e:3x3", {"model": 9}, ["model"], "rings: the 9"),
        ("v5e:4x4", {"model": 4, "z": 4}, ["model"], "4x4"),
        ("v5e:2x2*2", {"model": 8}, ["model"], "rings: the 8"),
        ("v5e:4x4", MESH, ["modle"], "modle"),
    ],
)
def test_a_ring_that_the_chips_do_not_have_is_refused(
    topology: str, mesh: dict[str, int], rings: list[str], name: str
) -> None:
    target = Topology.parse(topology)
    for build in (
        lambda: Links.of(target, mesh, rings),
        lambda: arrange(chips(target.shape, target.slices), mesh, rings),
    ):
        with raises(MeshError, name):
            build()


def test_a_ring_takes_full_slices() -> None:
    with raises(MeshError, "14 devices"):
        arrange([chip for chip in chips((4, 4)) if chip.id not in (3, 5)], {"data": 7, "model": 2}, ["model"])


def test_a_layout_carries_its_rings() -> None:
    data = {"mesh": {"data": 2, "model": 4}, "rules": {"batch": "data", "mlp": "model", "embed": None}}
    layout = jp.Layout.from_dict({**data, "rings": ["model"]})
    assert layout.rings == ("model",) and layout != jp.Layout.from_dict(data)
    assert layout.on_one_device().rings == ("model",)
    with raises(MeshError, "modle", "'pipeline'"):
        jp.Layout(layout.mesh, layout.rules, rings=("modle",))
    with raises(MeshError, "seq"):
        jp.Layout.from_dict({**data, "rings": ["seq"]})


def test_a_step_on_devices_in_rings_is_that_of_one_device() -> None:
    sizes = jp.MeshSpec(data=2, model=4).sizes(8)
    order = np.vectorize(lambda chip: chip.id)(arrange(chips((2, 4)), sizes, ["model"]))
    assert order.ravel().tolist() != list(range(8))
    mesh = jax.sharding.Mesh(np.array(jax.devices())[order], tuple(sizes))
    rules = jp.Rules(batch="data", embed=None, mlp="model", params={"embed": "data"})
    layout = jp.Layout(mesh, rules, rings=("model",))
    x = jax.random.normal(jax.random.key(1), (6, 10))

    def make(key: jax.Array) -> dict[str, Any]:
        up, down = jax.random.split(key)
        return {
            "up": jp.tag(jax.random.normal(up, (10, 12)), "embed", "mlp"),
            "down": jp.tag(jax.random.normal(down, (12, 10)), "mlp", "embed"),
        }

    def loss(model: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        h = jp.constrain(jax.nn.silu(batch @ model["up"]), "batch", "mlp")
        return ((h @ model["down"] - batch) ** 2).mean()

    found = []
    for one in (layout, layout.on_one_device()):
        state = jp.init(one, make, optax.sgd(0.1))
        step = jp.train_step(one, loss)
        for _ in range(2):
            state, metrics = step(state, jp.shard_array(one, x, "batch", None))
        found.append((float(metrics["loss"]), jax.device_get(state.params)))
    (ring, ring_params), (alone, alone_params) = found
    assert ring == pytest.approx(alone, rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ring_params, alone_params)


def test_a_run_and_its_layout_file_name_rings(tmp_path: Path) -> None:
    """The run's list stands instead of the layout's, and the worker gets it for TPUs only."""
    run = {"model": {"family": "llama", "preset": "tiny"}, "layout": "layout.yaml", "cpu_devices": 8}
    rules = {"batch": "data", "embed": None}
    for own, asked, expected in ((["model"], None, ("model",)), (["model"], [], ()), ([], ["data"], ("data",))):
        layout = {"mesh": {"data": 2, "model": 4}, "rules": rules} | ({"rings": own} if own else {})
        (tmp_path / "layout.yaml").write_text(yaml.safe_dump(layout))
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(run | ({} if asked is None else {"rings": asked})))
        loaded = load_run(tmp_path / "run.yaml")
        assert jp.Layout.from_dict(loaded.layout, devices=8).rings == expected
        assert ("rings" in loaded.layout) is bool(expected)


def test_a_program_is_placed_as_its_layout_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def run(compiler: Any, program: Any, request: dict[str, Any]) -> Any:
        asked.append(request)

    monkeypatch.setattr(ahead_of_time, "_run", run)
    monkeypatch.setattr(ahead_of_time, "versions_of", lambda compiler: {"jax": "0"})
    monkeypatch.setattr(ahead_of_time, "description_of", lambda topology, versions: {})

    def compiled(topology: str, rings: tuple[str, ...]) -> None:
        layout = jp.Layout(jp.MeshSpec(data=2, model=4).on(topology), jp.Rules(batch="data"), rings=rings)
        x = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=layout.sharding(("batch", None)))
        ahead_of_time.compile_program(Topology.parse(topology), layout, lambda x: x + 1, (x,))

    compiled("v5e:2x4", ("model",))
    compiled("v5e:2x4", ())
    compiled("h100:8", ("model",))
    assert [request.get("rings") for request in asked] == [["model"], None, None]
    with raises(MeshError, "model", "1x8"):
        compiled("v5e:1x8", ("model",))
    assert len(asked) == 3
