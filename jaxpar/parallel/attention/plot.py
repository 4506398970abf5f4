"""``draw_mask``: plots the tiles that each device computes."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpar.parallel.attention.load_balance import Balance, Grid, balance, describe, grid_of
from jaxpar.parallel.attention.mask import Mask
from jaxpar.utils.plotting import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LISTED = 16
"""The maximum number of devices in the legend; with more, it lists only the busiest and the least busy."""
PALE = 0.6
"""The fraction of white in the colour of a partially masked tile."""


def draw_mask(
    mask: Mask,
    path: str | PathLike[str] | None = None,
    *,
    seq: int,
    num_shards: int = 1,
    order: Any = "zigzag",
    block: int = 512,
    segment_ids: Any = None,
) -> Figure:
    """Returns a plot of the tiles that each device computes, in the colour of the device that stores the queries.

    Unmasked tiles are dark, partially masked tiles are lighter, and skipped tiles are white. Rows and columns are
    sorted by position, whatever the order of the tokens. The legend shows each device's share of the work.

    Args:
      mask: the mask.
      path: file to save the figure to; the suffix selects the format.
      seq, num_shards, order, block, segment_ids: as for :func:`jaxpar.context.balance`.

    Returns:
      The matplotlib figure.

    Raises:
      ConfigError, LayoutError: as for :func:`jaxpar.context.balance`.
      MissingExtraError: matplotlib is not installed.

    >>> draw_mask(Mask(causal=True), seq=64, num_shards=4).axes[0].get_title(loc="left")
    'causal: 64 tokens over 4 devices, zigzag, tiles of 8'
    """
    found = grid_of(mask, seq, num_shards, order, block=block, segment_ids=segment_ids)
    # impl="gather" sums the work over hops: the picture does not show the waiting within a ring.
    work = balance(mask, seq, num_shards, order, block=block, segment_ids=segment_ids, impl="gather")
    figure = new_figure("draw_mask()", figsize=(8.6, 4.8), layout="constrained")
    ax = figure.subplots()
    colours = hues(num_shards)
    ax.imshow(painted(found, colours), interpolation="nearest", extent=(0, len(found.first), len(found.first), 0))
    _label(ax, found, seq)
    split = f" over {num_shards} devices, {work.order}" if num_shards > 1 else ""
    ax.set_title(f"{describe(mask)}: {seq:,} tokens{split}, tiles of {work.block}", loc="left", fontsize=10)
    _legend(ax, work, colours)
    if path is not None:
        figure.savefig(path)
    return figure


def hues(num_shards: int) -> Any:
    """Returns an RGB colour for each device [num_shards, 3]."""
    from matplotlib import colormaps

    return 0.85 * colormaps["turbo"](np.linspace(0.08, 0.92, num_shards))[:, :3]


def painted(found: Grid, colours: Any) -> Any:
    """Returns the RGB colour of each tile [n, n, 3], with rows and columns sorted by position."""
    order = np.argsort(found.first, kind="stable")
    unmasked = (found.visible == found.size)[..., None]
    dark = colours[found.device][:, None]
    colour = np.where(unmasked, dark, PALE + (1 - PALE) * dark)
    return np.where(found.visited[..., None], colour, 1.0)[order][:, order]


def _label(ax: Any, found: Grid, seq: int) -> None:
    """Labels both axes with the first position of at most nine blocks."""
    first = [*np.sort(found.first).tolist(), seq]
    step = -(-len(first) // 9)
    ticks = range(0, len(first), step)
    for axis, what in ((ax.xaxis, "key"), (ax.yaxis, "query")):
        axis.set_ticks(list(ticks), [f"{first[i]:,}" for i in ticks], fontsize=8)
        axis.set_label_text(f"position of the first {what}")
    ax.tick_params(length=3, color="0.6")
    ax.spines[:].set_color("0.8")


def _legend(ax: Any, work: Balance, colours: Any) -> None:
    from matplotlib.patches import Patch

    scores, mean = np.array(work.per_device), np.mean(work.per_device)
    devices = range(work.num_shards) if work.num_shards <= LISTED else [int(np.argmax(scores)), int(np.argmin(scores))]
    share = lambda i: f" ({scores[i] / mean:.0%} of the mean)" if mean and work.num_shards > 1 else ""
    patches = [Patch(color=colours[i], label=f"device {i}: {scores[i]:,.0f} scores{share(i)}") for i in devices]
    patches.append(Patch(color=(PALE + (1 - PALE) * 0.3,) * 3, label="lighter: partially masked"))
    ax.get_figure(root=True).legend(handles=patches, loc="outside right upper", fontsize=8, frameon=False)
