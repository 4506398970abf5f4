"""``draw`` plots the devices that hold each shard of a tensor; ``shards`` returns them. Neither needs devices.

Both use only the mesh and ``layout.spec``, and compute the owners from mesh coordinates.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxpar.analysis.units import axes_of_dims, shard_count
from jaxpar.sharding.layout import Layout
from jaxpar.utils.plotting import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Block = tuple[int, ...]

_HEAD, _TAIL = 4, 2
"""The number of blocks drawn before and after the gap, if a dim has too many blocks to draw all."""

_LISTED = 8
"""The largest number of devices that a block lists by number."""


def shards(
    layout: Layout,
    dims: Sequence[str | None],
    shape: Sequence[int],
    *,
    role: str = "activations",
    dtype: Any = np.float32,
    path: str = "tensor",
) -> dict[Block, list[int]]:
    """Returns the devices that hold each block of a tensor.

    Args:
      layout: the layout, on a concrete or an abstract mesh.
      dims: the logical dims, one for each dim of the tensor.
      shape: the global shape.
      role: the overlay of the rules to apply.
      dtype: of the tensor, for rules with ``over(min_bytes=...)``.
      path: the tensor's name in error messages.

    Returns:
      Block (its index along each dim) → the devices that hold it, in mesh order. A device is its id, or its position on
      an abstract mesh. Every device is in exactly one block.

    Raises:
      LayoutError: the tensor does not fit the rules.

    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=2, model=2).abstract(), jp.Rules(embed="data", mlp=None))
    >>> shards(layout, ("embed", "mlp"), (8, 4))
    {(0, 0): [0, 1], (1, 0): [2, 3]}
    """
    return owners(layout.mesh, layout.spec(dims, shape, role=role, dtype=dtype, path=path))


def owners(mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> dict[Block, list[int]]:
    """Returns block → devices, for a spec with one entry for each dim; see :func:`shards`.

    >>> import jax, jaxpar as jp
    >>> owners(jp.MeshSpec(data=4).abstract(), jax.sharding.PartitionSpec("data"))
    {(0,): [0], (1,): [1], (2,): [2], (3,): [3]}
    """
    devices = np.arange(mesh.size) if isinstance(mesh, AbstractMesh) else mesh.device_ids.ravel()
    sizes = dict(mesh.shape)
    coordinate = dict(zip(sizes, np.indices(tuple(sizes.values())).reshape(len(sizes), -1), strict=True))
    blocks = np.zeros((mesh.size, len(spec)), int)
    for i, axes in enumerate(axes_of_dims(spec, len(spec))):
        for axis in axes:  # major to minor
            blocks[:, i] = blocks[:, i] * sizes[axis] + coordinate[axis]
    found: dict[Block, list[int]] = {}
    for block, device in zip(blocks.tolist(), devices.tolist(), strict=True):
        found.setdefault(tuple(block), []).append(device)
    return found


def draw_shards(
    layout: Layout,
    *dims: str | None,
    shape: Sequence[int],
    role: str = "activations",
    dtype: Any = np.float32,
    path: str = "tensor",
    ax: Axes | None = None,
) -> Figure:
    """Returns a figure of a tensor's blocks, each labelled with the devices that hold it.

    The figure shows at most two dims: the sharded ones first, and the largest of these. If more dims are sharded, it
    shows the first block along the others, and its subtitle says so. If a dim has many blocks, it shows the first and
    the last few.

    Args:
      layout: the layout. Devices of an abstract mesh are numbered by their position.
      dims, shape, role, dtype, path: the tensor, as for :func:`shards`.
      ax: matplotlib axes to draw on; by default a new figure, which is not registered with pyplot.

    Returns:
      The figure. A notebook displays it.

    Raises:
      LayoutError: the tensor does not fit the rules.
      MissingExtraError: matplotlib is not installed.

    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=4).abstract(), jp.Rules(embed="data", mlp=None))
    >>> draw_shards(layout, "embed", "mlp", shape=(64, 128), path="up").axes[0].get_ylabel()
    'embed 64 → data 4'
    """
    spec = layout.spec(dims, shape, role=role, dtype=dtype, path=path)
    sides = [
        _Side(name or f"dim {i}", size, axes, shard_count(axes, layout.sizes))
        for i, (name, size, axes) in enumerate(zip(dims, shape, axes_of_dims(spec, len(spec)), strict=True))
    ]
    # Two dims at most, in the tensor's order: sharded before replicated, large before small.
    ranked = sorted(range(len(sides)), key=lambda i: (not sides[i].axes, -sides[i].size, i))
    kept = tuple(sorted(ranked[:2]))
    picture = _Picture(layout, spec, tuple(sides), kept, owners(layout.mesh, spec), path)
    if ax is None:
        columns, rows = len(picture.columns.blocks()), len(picture.rows.blocks())
        size = min(1.6 + max(0.85 * columns, 4.0), 10.0), 1.5 + max(0.38 * rows, 0.9)
        ax = new_figure("draw_shards()", figsize=size, layout="constrained").subplots()
    _fill(ax, picture)
    _label(ax, picture)
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


@dataclass(frozen=True)
class _Side:
    """One dim of the tensor: its size, its mesh axes and the number of blocks that they make."""

    name: str
    size: int
    axes: tuple[str, ...]
    num_shards: int

    def title(self, sizes: dict[str, int]) -> str:
        axes = " × ".join(f"{axis} {sizes[axis]}" for axis in self.axes) or "replicated"
        return f"{self.name} {self.size} → {axes}"

    def blocks(self) -> list[int | None]:
        """Returns the blocks to draw; ``None`` is the gap."""
        if self.num_shards <= _HEAD + _TAIL + 2:
            return list(range(self.num_shards))
        return [*range(_HEAD), None, *range(self.num_shards - _TAIL, self.num_shards)]


_NONE = _Side("", 1, (), 1)


@dataclass(frozen=True)
class _Picture:
    """The contents of a figure: the tensor's dims, those drawn as rows and columns, and the owners of its blocks."""

    layout: Layout
    spec: PartitionSpec
    sides: tuple[_Side, ...]
    kept: tuple[int, ...]
    owners: dict[Block, list[int]]
    path: str

    @property
    def rows(self) -> _Side:
        return self.sides[self.kept[0]] if len(self.kept) == 2 else _NONE

    @property
    def columns(self) -> _Side:
        return self.sides[self.kept[-1]] if self.kept else _NONE

    def at(self, row: int, column: int) -> list[int]:
        """Returns the devices of one block, which is the first along the dims that are not drawn."""
        place = dict(zip(self.kept, (row, column)[-len(self.kept) :], strict=True)) if self.kept else {}
        return self.owners[tuple(place.get(i, 0) for i in range(len(self.sides)))]

    def title(self) -> str:
        return f"{self.path} [{', '.join(str(side.size) for side in self.sides)}]: {self.spec}"

    def subtitle(self) -> str:
        copies, devices = len(self.owners[(0,) * len(self.sides)]), self.layout.mesh.size
        shard = " × ".join(str(side.size // side.num_shards) for side in self.sides) or "one number"
        many = f"{len(self.owners)} shards of {shard}, each" if len(self.owners) > 1 else "One block,"
        where = "one device" if copies == 1 else f"each of the {copies} devices" if copies == devices else ""
        text = f"{many} on {where or f'{copies} of {devices} devices'}."
        for i, side in enumerate(self.sides):
            if side.axes and i not in self.kept:
                text += f" Shown: the first of {side.num_shards} blocks along {side.title(self.layout.sizes)}."
        kind = "positions in the mesh" if isinstance(self.layout.mesh, AbstractMesh) else "device ids"
        return f"{text} Numbers: {kind}."


def _edges(blocks: Sequence[int | None]) -> list[float]:
    """Returns where the blocks begin and end in the figure: each is one unit wide, the gap less."""
    return [0.0, *np.cumsum([0.7 if block is None else 1.0 for block in blocks]).tolist()]


def _cell(ax: Any, picture: _Picture) -> tuple[float, float]:
    """Estimate the width and height of a block in points, before matplotlib makes room for the labels."""
    inches, box = ax.get_figure(root=True).get_size_inches(), ax.get_position()
    columns, rows = _edges(picture.columns.blocks())[-1], _edges(picture.rows.blocks())[-1]
    return 72 * 0.9 * inches[0] * box.width / columns, 72 * 0.8 * inches[1] * box.height / rows


def _fill(ax: Any, picture: _Picture) -> None:
    """Draw the blocks, coloured by shard and labelled with their devices."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    rows, columns = picture.rows.blocks(), picture.columns.blocks()
    tops, lefts = _edges(rows), _edges(columns)
    grid = list(itertools.product(zip(rows, tops, strict=False), zip(columns, lefts, strict=False)))
    drawn = {(i, j): picture.at(i, j) for i in rows if i is not None for j in columns if j is not None}
    texts, size = _fit(list(drawn.values()), *_cell(ax, picture))
    label = dict(zip(drawn, texts, strict=True))
    hues = dict(zip(drawn, colormaps["turbo"](np.linspace(0.08, 0.92, len(drawn)))[:, :3], strict=True))
    for (row, top), (column, left) in grid:
        middle = left + (0.35 if column is None else 0.5), top + (0.35 if row is None else 0.5)
        if row is None or column is None:
            dots = "⋱" if row is column else "⋮" if row is None else "⋯"
            ax.text(*middle, dots, ha="center", va="center", color="0.4")
            continue
        pale = 0.45 * hues[row, column] + 0.55
        ax.add_patch(Rectangle((left, top), 1, 1, facecolor=pale, edgecolor="white", linewidth=1.5))
        ax.text(*middle, label[row, column], ha="center", va="center", fontsize=size, color="0.1")
    ax.set_xlim(0, lefts[-1])
    ax.set_ylim(tops[-1], 0)


def _fit(cells: Sequence[Sequence[int]], width: float, height: float) -> tuple[list[str], float]:
    """Returns the devices of each block as text, all in one style, and the font size in points at which they fit.

    >>> _fit([[0, 8], [1, 9]], 60, 30)
    (['0, 8', '1, 9'], 11.0)
    >>> _fit([range(0, 128, 8)], 160, 30)
    (['0, 8, … (16 devices)'], 11.0)
    """
    most = max(map(len, cells))
    short = [", ".join(map(str, cell[:2])) for cell in cells]
    styles = [[f"{text}, … ({most} devices)" for text in short], [f"{text}, …\n({most} devices)" for text in short]]
    if most <= _LISTED:
        all_devices = [", ".join(map(str, cell)) for cell in cells]
        folded = [textwrap.fill(text, max(len(text) // 2 + 1, 3)) for text in all_devices]
        styles = [all_devices, folded, *(styles if most > 2 else [])]
    sizes = [min(_font(text, width, height) for text in texts) for texts in styles]
    best = next((i for i, size in enumerate(sizes) if size >= 7), int(np.argmax(sizes)))
    return styles[best], round(max(sizes[best], 4.0), 1)


def _font(text: str, width: float, height: float) -> float:
    """Returns the font size at which a text fits a box, for letters of 0.58 times that width."""
    lines = text.splitlines()
    return min(width / (0.58 * max(map(len, lines)) + 0.4), height / (1.4 * len(lines)), 11.0)


def _label(ax: Any, picture: _Picture) -> None:
    """Set the titles, the axis labels, and the index of the first element of each block."""
    width, height = _cell(ax, picture)
    for side, axis, room in ((picture.rows, ax.yaxis, height / 10), (picture.columns, ax.xaxis, width / 30)):
        if side is _NONE:
            axis.set_ticks([])
            continue
        ticks, stride = _ticks(side), math.ceil(1 / room)
        labels = [text if i % stride == 0 else "" for i, text in enumerate(ticks)]
        axis.set_ticks(_edges(side.blocks()), labels, fontsize=8)
        axis.set_label_text(side.title(picture.layout.sizes))
    ax.spines[:].set_visible(False)
    ax.tick_params(length=3, color="0.6")
    line = 1.15 * width * _edges(picture.columns.blocks())[-1]
    title = textwrap.wrap(picture.title(), max(int(line / 5.5), 20))
    subtitle = textwrap.wrap(picture.subtitle(), max(int(line / 4.1), 20))
    ax.set_title("\n".join(title), loc="left", fontsize=10, pad=8 + 10.5 * len(subtitle))
    style = {"fontsize": 8, "color": "0.35", "xycoords": "axes fraction", "textcoords": "offset points"}
    ax.annotate("\n".join(subtitle), (0, 1), (0, 5), **style)


def _ticks(side: _Side) -> list[str]:
    """Returns the index of the first element of each drawn block, and the end of the last block.

    >>> _ticks(_Side("embed", 64, ("data",), 4))
    ['0', '16', '32', '48', '64']
    """
    blocks, step = side.blocks(), side.size // side.num_shards
    begins = [_HEAD if block is None else block for block in blocks]
    return [str(begin * step) for begin in (*begins, side.num_shards)]
