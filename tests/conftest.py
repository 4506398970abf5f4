"""Fixtures that several test files share: the layouts of ``configs/layouts``, and one small plain-pytree model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxpar as jp

LAYOUTS = Path(__file__).parents[1] / "configs" / "layouts"


@pytest.fixture(scope="session")
def layout_of() -> Callable[..., jp.Layout]:
    """``layout_of(name, devices=None)``: a layout of ``configs/layouts``; an integer makes its mesh abstract."""

    def load(name: str, devices: Sequence[Any] | int | None = None) -> jp.Layout:
        return jp.Layout.from_yaml(LAYOUTS / f"{name}.yaml", devices=devices)

    return load


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every import of matplotlib fail, as if it were not installed."""
    for name in ["matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))]:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(scope="session")
def spec_of() -> Callable[[jax.Array], PartitionSpec]:
    """An array's ``PartitionSpec`` with an entry for each dim; a step's outputs may lack the last ``None``s."""
    return lambda x: PartitionSpec(*x.sharding.spec, *(None,) * (x.ndim - len(x.sharding.spec)))


@dataclass(frozen=True)
class Mlp:
    """A plain pytree of tagged arrays, awkward on purpose: with a square matrix, a vector and a scalar."""

    rules: jp.Rules

    def make(self, key: jax.Array) -> dict[str, Any]:
        up, down, square, bias = jax.random.split(key, 4)
        return {
            "block": {
                "up": jp.tag(jax.random.normal(up, (16, 24)) / 4, "embed", "mlp"),
                "down": jp.tag(jax.random.normal(down, (24, 16)) / 5, "mlp", "embed"),
                "bias": jp.tag(jax.random.normal(bias, (24,)), "mlp"),
            },
            "square": jp.tag(jax.random.normal(square, (16, 16)) / 4, "embed", "mlp"),
            "temperature": jnp.ones(()),
        }

    def loss(self, model: Any, batch: jax.Array) -> jax.Array:
        block = model["block"]
        hidden = jp.hint(jnp.tanh(batch @ block["up"] + block["bias"]), "batch", "mlp")
        out = jp.hint(hidden @ block["down"] @ model["square"], "batch", "embed")
        return jnp.mean((out * model["temperature"] - batch[:, ::-1]) ** 2)

    def batch(self, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).normal(size=(8, 16)).astype(np.float32)

    def layout(self, rules: jp.Rules | None = None, mesh: Any = None) -> jp.Layout:
        """Fully sharded over all devices, unless ``rules`` or ``mesh`` are given."""
        return jp.Layout(mesh or jp.MeshSpec(data=-1).build(), rules or self.rules)

    @property
    def one_device(self) -> jp.Layout:
        return self.layout(mesh=jp.MeshSpec().build(jax.devices()[:1]))


@pytest.fixture(scope="session")
def mlp() -> Mlp:
    return Mlp(jp.Rules(batch="data", embed=None, mlp=None, params={"embed": "data"}))
