"""``Precision``: the dtypes of a step. Weights are kept as the model makes them (fp32 master weights, as a rule)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError, did_you_mean

NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


@dataclass(frozen=True)
class Precision:
    """In what the step computes, gathers weights and reduces gradients.

    Attributes:
      compute: weights are cast to it before the model sees them; ``None`` leaves them as they are.
      gather: dtype in which weights cross the mesh, where they are gathered once a step; that of ``compute`` if ``None``.
      reduce: dtype in which gradients cross it, where each device sums its own first; fp32 or wider if ``None``.

    Raises:
      ConfigError: no floating dtype, or one beyond what ``jax_enable_x64`` allows.

    >>> Precision.of("bf16")
    Precision(compute='bfloat16', gather=None, reduce=None)
    >>> Precision.of({"compute": "bf16", "reduce": "bf16"}).reduce
    'bfloat16'
    """

    compute: str | None = None
    gather: str | None = None
    reduce: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                object.__setattr__(self, field.name, _dtype(value, field.name))

    @classmethod
    def of(cls, value: str | Mapping[str, Any] | Precision | None) -> Precision:
        """A name as ``bf16``, a mapping of the attributes, or nothing: every dtype is then the model's own."""
        if isinstance(value, Precision):
            return value
        if isinstance(value, Mapping):
            known = [field.name for field in fields(cls)]
            for key in value:
                if key not in known:
                    raise ConfigError(
                        f"precision: unknown key {key!r}.{did_you_mean(key, known)} The keys are: {', '.join(known)}."
                    )
            return cls(**value)
        return cls(compute=value)

    def crossing(self, w: jax.Array) -> jax.Array:
        """A weight as it is gathered."""
        return _cast(w, self.gather or self.compute)

    def computing(self, w: jax.Array) -> jax.Array:
        """A weight as the model sees it."""
        return _cast(w, self.compute)

    def reducing(self, grad: jax.Array) -> jax.Array:
        """A device's sum of gradients as it is reduced over devices."""
        return grad.astype(self.reduce or jnp.promote_types(grad.dtype, jnp.float32))


def _cast(x: jax.Array, dtype: str | None) -> jax.Array:
    return x if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype)


def _dtype(value: Any, where: str) -> str:
    name = NAMES.get(value, value) if isinstance(value, str) else value
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        known = [*NAMES, *NAMES.values()]
        raise ConfigError(
            f"precision: {where} is {value!r}, but a floating dtype is wanted.{did_you_mean(str(value), known)} Known are "
            f"{', '.join(NAMES)}."
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ConfigError(f"precision: {where} is {dtype.name}, which jax computes only with jax_enable_x64.")
    return str(dtype.name)
