"""Assertions for users' own tests: what a layout promises, frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optax

from jaxpar.errors import VerificationError
from jaxpar.inspect.compare import Verdict, compare
from jaxpar.layout import Layout
from jaxpar.model import MakeModel


def assert_matches_single_device(
    layout: Layout,
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    loss_fn: Callable[..., Any],
    data: Sequence[Mapping[str, np.ndarray]],
    dims: Mapping[str, Sequence[str | None]],
    *,
    bound: float = 1e-5,
    seed: int = 0,
) -> Verdict:
    """Train on ``data`` in the layout and on one device; loss and gradients of every step must agree.

    Args:
      layout: the layout to prove.
      make_model, tx, seed: as for :func:`jaxpar.init`. The model should compute in fp32 for a bound this tight.
      loss_fn: as for :func:`jaxpar.train_step`.
      data: one batch per step, name → global array.
      dims: name → logical dims of that array.
      bound: largest relative difference allowed, per gradient tensor and for the loss.

    Returns:
      The differences that were found.

    Raises:
      VerificationError: naming the first module that diverges.

    >>> import jax, numpy as np, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data", embed="data"))
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (16,)), "embed")}
    >>> loss_fn = lambda params, batch: ((batch["x"] @ params["w"]) ** 2).mean()
    >>> data = [{"x": np.ones((8, 16), np.float32)}]
    >>> assert_matches_single_device(layout, make_model, optax.sgd(0.1), loss_fn, data, {"x": ("batch", None)}).passed
    True
    """
    verdict = compare(layout.on_one_device(), layout, make_model, tx, loss_fn, data, dims, bound=bound, seed=seed)
    if not verdict.passed:
        raise VerificationError(
            f"the layout does not compute what one device computes (loss {verdict.loss:.2e}, gradients "
            f"{verdict.gradients:.2e} in {verdict.worst}, bound {bound:.0e}). First: {verdict.first}."
        )
    return verdict
