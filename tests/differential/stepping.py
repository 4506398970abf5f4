"""Functions that the families of train steps share: layouts, states from given parameters, and comparisons of trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar as jp

from .cases import Differences

CANCELLED = 0.05
"""A gradient's size counts as at least this part of the largest gradient: both sum terms of one cotangent, and their
rounding is relative to those terms. Where all gradients are small, their size counts as at least this part of 1:
they are differences of probabilities and rows of about 1."""


def layout_of(rules: jp.Rules, sizes: Mapping[str, int]) -> jp.Layout:
    """The layout on as many of the simulated devices as the product of ``sizes``."""
    count = int(np.prod(list(sizes.values())))
    return jp.Layout(jp.MeshSpec(**sizes).build(jax.devices()[:count]), rules)


def state_with(shapes: Any, params: Any, opt_state: Any = (), rest: Any = None, seed: int = 0) -> Any:
    """The state of these shapes with given leaves, on the host: step 0, and the key of a seed."""
    same = lambda given, wanted: jax.tree.unflatten(jax.tree.structure(wanted), jax.tree.leaves(given))
    return replace(
        shapes,
        step=np.int32(0),
        params=same(params, shapes.params),
        opt_state=same(opt_state, shapes.opt_state),
        variables=shapes.variables if rest is None else same(rest, shapes.variables),
        key=jax.random.key(seed),
    )


def step_key(seed: int, step: int = 0) -> jax.Array:
    """The key that a ``loss_fn`` receives in a step of such a state."""
    return jax.random.fold_in(jax.random.key(seed), step)


def wide(tree: Any) -> Any:
    """The tree with floating-point arrays as fp64."""
    to = lambda x: np.asarray(x, np.float64) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating) else np.asarray(x)
    return jax.tree.map(to, tree)


def check_trees(differences: Differences, what: str, found: Any, want: Any, bound: float, label: str) -> None:
    """Compare each array relative to its largest entry, or to a part of the largest of all arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(want)
    floating = [np.abs(np.asarray(x, np.float64)).max(initial=0) for _, x in leaves]
    least = CANCELLED * max((float(x) for x in floating if np.isfinite(x)), default=0.0)
    least = max(least, CANCELLED)
    others = jax.tree.leaves(found)
    differences.claim(len(others) == len(leaves), f"{what}: {len(others)} arrays, the reference {len(leaves)}")
    for (path, array), other in zip(leaves, others, strict=False):
        differences.check(f"{what}{jax.tree_util.keystr(path)}", other, array, bound, least, label)
