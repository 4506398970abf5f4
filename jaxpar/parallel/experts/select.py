"""Selects how rows reach their experts: the bytes of each dispatch, and the reason for the choice."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.errors import ConfigError, listing
from jaxpar.parallel.experts.options import LOCAL, ExpertSizes
from jaxpar.sharding.rules import Axes

_DEDUPLICATION_GAIN = 0.9
"""``auto`` deduplicates if it sends at most this share of the bytes of ``ragged``: it permutes the rows once more."""


@dataclass(frozen=True)
class DispatchChoice:
    """A dispatch, and the reason for the choice."""

    dispatch: str
    why: str


def bytes_per_transfer(dispatch: str, sizes: ExpertSizes, row: int) -> float:
    """Returns the bytes that a device sends to bring its rows to their experts once, if the routing is balanced.

    The way back sends as much. ``ragged`` sends one row per choice, ``deduplicated`` one row per device that holds any
    of a token's experts, and ``gather`` every token to every device.

    Args:
      dispatch: ``local``, ``ragged``, ``deduplicated``, ``gather`` or ``all_to_all`` (with a capacity factor of 1).
      sizes: the sizes.
      row: bytes of a row.

    >>> sizes = ExpertSizes(tokens=4096, k=6, experts=64, devices=4, token_devices=4)
    >>> {d: round(bytes_per_transfer(d, sizes, 4096) / 2**20) for d in ("ragged", "deduplicated", "gather")}
    {'ragged': 72, 'deduplicated': 40, 'gather': 48}
    """
    if dispatch == LOCAL:
        return 0.0
    away = (sizes.devices - 1) / sizes.devices
    if dispatch == "gather":
        return float(sizes.tokens * (sizes.token_devices - 1) * row)
    return sizes.tokens * (sizes.distinct_devices if dispatch == "deduplicated" else sizes.k) * row * away


def select_dispatch(
    requested: str,
    sizes: ExpertSizes,
    axes: Axes,
    token_axes: Axes,
    row: int,
    *,
    capacity: bool = False,
    ragged: bool = True,
) -> DispatchChoice:
    """Returns the dispatch that a request resolves to.

    Args:
      requested: the requested dispatch, or ``auto``.
      sizes: the sizes.
      axes: the mesh axes that shard the experts.
      token_axes: those of them along which devices have different tokens.
      row: bytes of a row.
      capacity: whether experts have a capacity.
      ragged: whether the devices can exchange rows of which each pair of devices has another number.

    Raises:
      ConfigError: the dispatch requires different tokens on each device, or a ragged exchange.

    >>> sizes = ExpertSizes(tokens=4096, k=2, experts=8, devices=4, token_devices=4)
    >>> select_dispatch("auto", sizes, ("expert",), ("expert",), 4096).dispatch
    'ragged'
    """
    if sizes.devices == 1:
        return DispatchChoice(LOCAL, "every device has all experts")
    if axes != token_axes:
        same = listing(axis for axis in axes if axis not in token_axes)
        if requested not in ("auto", "gather"):
            raise ConfigError(
                f"experts: dispatch {requested!r} exchanges rows over {listing(axes)}, but devices along {same} have "
                f"the same tokens. Remedy: dispatch='auto' or 'gather', or rules that shard the batch or the sequence "
                f"over {same} too."
            )
        return DispatchChoice("gather", f"devices along {same} have the same tokens")
    if requested in ("ragged", "deduplicated") and not ragged:
        raise ConfigError(
            f"experts: dispatch {requested!r} requires an exchange of rows (ragged_all_to_all) that XLA does not have "
            "for v5e slices of more than 16 chips. Remedy: dispatch='gather', or capacity_factor with "
            "dispatch='all_to_all'."
        )
    if requested != "auto":
        return DispatchChoice(requested, f"dispatch {requested!r} was requested")
    names = ["gather", *(["ragged", "deduplicated"] if ragged else []), *(["all_to_all"] if capacity else [])]
    cost = {name: bytes_per_transfer(name, sizes, row) for name in names}
    # The first of equals is the one that sends no row for a choice that no token made.
    order = [name for name in ("ragged", "all_to_all", "gather") if name in cost]
    best: str = min(order, key=lambda name: cost[name])
    if ragged and cost["deduplicated"] <= _DEDUPLICATION_GAIN * cost[best]:
        best = "deduplicated"
    shown = ", ".join(f"{name} {value / 2**20:.4g}" for name, value in sorted(cost.items(), key=lambda item: item[1]))
    return DispatchChoice(best, f"MiB sent per device and transfer: {shown}")
