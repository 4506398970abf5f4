"""Muon (K. Jordan, 2024; optax.contrib.muon) for the model of the quickstart, whose layers are stacked."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from jaxpar.app.config import load_run
from jaxpar.app.optimizer_config import learning_rate

# By the end of a parameter's path: its dims that go into the product, and those that come out of it. The first dim of
# each is the layer. All other parameters are updated by Adam.
MATRICES = {
    r"\b[qkv]\W*$": MuonDimensionNumbers((1,), (2, 3)),
    r"\bo\W*$": MuonDimensionNumbers((1, 2), (3,)),
    r"\b(gate|up|down)\W*$": MuonDimensionNumbers((1,), (2,)),
}


def muon(config: str, settings: Sequence[str], rate: float) -> optax.GradientTransformation:
    """Returns Muon with the learning rate ``rate`` for matrices.

    Args:
      config, settings: a run with AdamW. Its learning rate, decay of weights and b2 are those of the other parameters,
        and its schedule and decay of weights those of matrices too.
    """
    run = load_run(config, settings).config
    rates = [
        learning_rate(dataclasses.replace(run.optimizer, learning_rate=peak), run.train.steps)
        for peak in (rate, run.optimizer.learning_rate)
    ]
    decay = run.optimizer.options["weight_decay"]
    return optax.contrib.muon(
        rates[0],
        weight_decay=decay,
        adam_learning_rate=rates[1],
        adam_b2=run.optimizer.options["b2"],
        adam_weight_decay=decay,
        muon_weight_dimension_numbers=_matrices,
    )


def _matrices(params: Any) -> Any:
    def of(path: tuple[Any, ...], _: Any) -> MuonDimensionNumbers | None:
        text = jax.tree_util.keystr(path)
        return next((dims for pattern, dims in MATRICES.items() if re.search(pattern, text)), None)

    return jax.tree_util.tree_map_with_path(of, params)
