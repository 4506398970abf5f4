"""Which compilers run all-gathers of weights beside compute, and the options that make the others do so.

As compiled for a fully sharded 1B with libtpu 0.0.50: the compiler for v5e continues a gather in the fusions beside it,
and that for tpu7x gives it to a SparseCore. Those for v5p and v6e leave every gather alone unless their options are
set. No option was found for v4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"

GATHER_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "v5p": tuple(f"{_OFFLOAD}{kind}all_gather" for kind in ("", "2d_", "3d_")),
    "v6e": (f"{_OFFLOAD}all_gather",),
}
"""Accelerator → the options, each to be ``true``, that give all-gathers to its SparseCores."""


def overlaps_gathers(kind: str, options: Mapping[str, Any] | None = None) -> bool:
    """Returns whether the compiler for an accelerator runs all-gathers beside compute.

    Args:
      kind: of the accelerator, such as ``v6e``.
      options: of the compiler.

    >>> options = dict.fromkeys(GATHER_OPTIONS["v6e"], True)
    >>> overlaps_gathers("v5e"), overlaps_gathers("v6e"), overlaps_gathers("v6e", options)
    (True, False, True)
    """
    if kind not in GATHER_OPTIONS:
        return kind != "v4"
    return all((options or {}).get(name) is True for name in GATHER_OPTIONS[kind])
