"""``shards`` agrees with JAX's index map; ``draw`` renders every kind of tensor and leaves no figure open."""

from __future__ import annotations

import io
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from covers import covering
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples, few

import jaxpar as jp
from jaxpar.analysis.layout.draw_shards import draw_shards, shards
from jaxpar.errors import LayoutError, MissingExtraError

RULES = jp.Rules(
    batch=("replica", "data"),
    layers="pipeline",
    embed=None,
    mlp="model",
    heads=("context", "model"),
    vocab=jp.first_of("model", "data", None),
    params={"embed": "data"},
    optimizer=jp.over("data", min_bytes=0),
    indivisible={"mlp": "replicate"},
)
MESHES = {
    "data": jp.MeshSpec(data=8),
    "hybrid": jp.MeshSpec(replica=2, data=2, model=2),
    "context": jp.MeshSpec(data=2, context=2, model=2),
    "pipeline": jp.MeshSpec(pipeline=2, data=2, model=2),
    "one": jp.MeshSpec(data=1),
}


def build(name: str) -> jp.Layout:
    devices = jax.devices()[:1] if name == "one" else None
    return jp.Layout(MESHES[name].build(devices), RULES)


def expected(sharding: jax.sharding.NamedSharding, shape: tuple[int, ...]) -> dict[tuple[int, ...], set[int]]:
    """The device ids of each block, from the slices that JAX gives each device."""
    blocks: dict[tuple[int, ...], set[int]] = {}
    shard = sharding.shard_shape(shape)
    for device, index in sharding.devices_indices_map(shape).items():
        block = tuple((part.start or 0) // size for part, size in zip(index, shard, strict=True))
        blocks.setdefault(block, set()).add(device.id)
    return blocks


def assert_as_jax(layout: jp.Layout, dims: tuple[str | None, ...], shape: tuple[int, ...], role: str) -> None:
    found = shards(layout, dims, shape, role=role)
    wanted = expected(layout.sharding(dims, shape, role=role), shape)
    assert {block: set(devices) for block, devices in found.items()} == wanted
    assert sum(map(len, found.values())) == layout.mesh.size


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("role", ["activations", "params", "optimizer"])
@pytest.mark.parametrize(
    "dims",
    [(), ("embed",), ("embed", "mlp"), ("mlp", None), ("batch", "mlp", None), ("layers", "embed", "mlp")],
)
def test_shards_are_those_of_jax(name: str, role: str, dims: tuple[str | None, ...]) -> None:
    assert_as_jax(build(name), dims, (8, 16, 24)[: len(dims)], role)


@given(st.data())
@examples(60)
def test_shards_are_those_of_jax_for_any_dims(data: st.DataObject) -> None:
    layout = build(data.draw(st.sampled_from(sorted(MESHES))))
    dims = tuple(data.draw(st.lists(st.sampled_from([*RULES.table, None]), max_size=4)))
    shape = tuple(data.draw(st.integers(1, 4)) * data.draw(st.sampled_from([1, 8])) for _ in dims)
    role = data.draw(st.sampled_from(["activations", "params", "gradients", "optimizer"]))
    if layout.resolve(dims, shape, role=role).problems:
        with pytest.raises(LayoutError):
            shards(layout, dims, shape, role=role)
    else:
        assert_as_jax(layout, dims, shape, role)


def test_shards_follow_the_ids_of_a_permuted_mesh() -> None:
    layout = jp.Layout(jp.MeshSpec(data=4, model=2).build(jax.devices()[::-1]), RULES)
    assert_as_jax(layout, ("embed", "mlp"), (8, 16), "params")


def test_an_abstract_mesh_numbers_devices_by_position() -> None:
    spec = jp.MeshSpec(replica=2, data=2, model=2)
    concrete, abstract = jp.Layout(spec.build(), RULES), jp.Layout(spec.abstract(), RULES)
    position = {device: i for i, device in enumerate(concrete.mesh.device_ids.ravel().tolist())}
    by_id = shards(concrete, ("batch", "mlp"), (8, 16))
    assert shards(abstract, ("batch", "mlp"), (8, 16)) == {b: [position[i] for i in ids] for b, ids in by_id.items()}


def png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


HUGE = jp.Layout(jp.MeshSpec(pipeline=8, data=64, model=8).abstract(), RULES)
DRAWN = {
    "sharded": (build("data"), ("embed", "mlp"), (64, 256)),
    "two": (build("hybrid"), ("embed", "mlp"), (64, 256)),
    "tuple": (build("hybrid"), ("batch", "vocab"), (64, 256)),
    "whole": (build("one"), ("embed", "mlp"), (64, 256)),
    "vector": (build("data"), ("embed",), (64,)),
    "scalar": (build("data"), (), ()),
    "abstract": (HUGE, ("layers", "embed", "heads"), (80, 8192, 64)),
}


@pytest.mark.parametrize("case", few(DRAWN, 3))
def test_draw_renders(case: str) -> None:
    layout, dims, shape = DRAWN[case]
    figure = draw_shards(layout, *dims, shape=shape, role="params", path="params/up")
    assert png(figure).startswith(b"\x89PNG")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert figure.axes[0].get_title(loc="left").startswith("params/up [")
    assert plt.get_fignums() == []


@pytest.mark.parametrize(("case", "size"), covering(DRAWN, [(4, 3), (6, 4)], keep=len(DRAWN) // 2, strength=1))
def test_labels_stay_inside_their_blocks(case: str, size: tuple[float, float]) -> None:
    from matplotlib.figure import Figure

    layout, dims, shape = DRAWN[case]
    figures = [draw_shards(layout, *dims, shape=shape, role="params")]
    figures.append(
        draw_shards(layout, *dims, shape=shape, role="params", ax=Figure(size, layout="constrained").subplots())
    )
    for figure in figures:
        figure.draw_without_rendering()
        *labels, _ = figure.axes[0].texts  # the last is the subtitle
        boxes = [label.get_window_extent() for label in labels]
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[i + 1 :]), (labels[i].get_text(), case)


def test_blocks_list_their_devices() -> None:
    figure = draw_shards(build("hybrid"), "embed", "mlp", shape=(64, 256), role="params")
    assert texts(figure)[:-1] == ["0, 4", "1, 5", "2, 6", "3, 7"]
    assert "4 shards of 32 × 128, each on 2 of 8 devices" in texts(figure)[-1]
    axes = figure.axes[0]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("embed 64 → data 2", "mlp 256 → model 2")
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["0", "32", "64"]


def test_an_unsharded_tensor_is_one_block() -> None:
    figure = draw_shards(build("data"), "embed", "mlp", shape=(64, 256))
    assert texts(figure)[0] == "0, 1, 2, 3, 4, 5, 6, 7"
    assert figure.axes[0].get_ylabel() == "embed 64 → replicated"


def test_many_replicas_and_many_blocks_are_abbreviated() -> None:
    figure = draw_shards(HUGE, "embed", "mlp", shape=(8192, 28672), role="params")
    found = [text.replace("\n", " ") for text in texts(figure)]
    assert found[0] == "0, 512, … (8 devices)"
    assert "⋮" in found
    ticks = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert ticks == ["0", "128", "256", "384", "512", "7936", "8064", "8192"]


def test_a_third_sharded_dim_is_named_in_the_subtitle() -> None:
    figure = draw_shards(HUGE, "layers", "embed", "mlp", shape=(80, 8192, 28672), role="params")
    assert (figure.axes[0].get_ylabel(), figure.axes[0].get_xlabel()) == ("embed 8192 → data 64", "mlp 28672 → model 8")
    subtitle = texts(figure)[-1].replace("\n", " ")
    assert "Shown: the first of 8 blocks along layers 80 → pipeline 8." in subtitle


def test_draw_on_given_axes() -> None:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    left, right = figure.subplots(1, 2)
    assert draw_shards(build("data"), "embed", "mlp", shape=(64, 256), ax=left) is figure
    draw_shards(build("data"), "embed", "mlp", shape=(64, 256), role="params", ax=right)
    assert left.get_ylabel() != right.get_ylabel()
    assert png(figure).startswith(b"\x89PNG")


def test_a_misfit_is_the_layouts_error() -> None:
    with raises(LayoutError, "params/up", "mpl"):
        draw_shards(build("data"), "embed", "mpl", shape=(64, 256), path="params/up")
    with raises(LayoutError, "tensor [64]"):
        shards(build("data"), ("embed", "mlp"), (64,))


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_the_error_names_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"draw_shards\(\).*matplotlib.*jaxpar\[plots\]"):
        draw_shards(build("data"), "embed", shape=(64,))
    assert np.array_equal(shards(build("data"), ("embed",), (64,))[0,], range(8))  # numbers need no matplotlib
