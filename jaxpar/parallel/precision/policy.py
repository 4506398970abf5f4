"""``Precision``: the dtypes of a step, and the scale of its loss.

Weights are kept as the model makes them: fp32 master weights, as a rule.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.parallel.offload.placement import on_host

INT8, FP8 = "int8", "fp8"
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, arXiv:1710.03740), which keeps small 16-bit gradients from vanishing.

    The loss is multiplied by the scale, the gradients divided by it. A step that is not finite is skipped; ``hysteresis`` of them
    since the scale last grew, and it shrinks. After ``interval`` finite steps in a row it grows.

    Raises:
      ConfigError: a value that is NaN, negative or of no use.

    >>> scale = LossScale(initial=8.0, interval=2)
    >>> state = scale.start()
    >>> for finite in (True, True, False):
    ...     state = scale.next(state, jnp.asarray(finite))
    ...     print(float(state["scale"]))
    8.0
    16.0
    8.0
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    minimum: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"precision.scale: {name} is {value!r}, but a number is wanted.")
        wanted = {
            "initial": (0 < self.initial < math.inf, "a positive number"),
            "growth": (1 < self.growth < math.inf, "a number above 1"),
            "backoff": (0 < self.backoff < 1, "a number between 0 and 1"),
            "interval": (self.interval >= 1, "a number of steps, 1 or more,"),
            "hysteresis": (self.hysteresis >= 1, "a number of steps, 1 or more,"),
            "minimum": (0 < self.minimum <= self.initial, f"a positive number up to initial ({self.initial:g})"),
        }
        for name, (right, what) in wanted.items():
            if not right:
                raise ConfigError(f"precision.scale: {name} is {getattr(self, name):g}, but {what} is wanted.")

    def start(self) -> dict[str, jax.Array]:
        """What a state carries: the scale, finite steps in a row, and how many that are not are still borne."""
        counts = {"finite": jnp.zeros((), jnp.int32), "borne": jnp.asarray(self.hysteresis, jnp.int32)}
        return {"scale": jnp.asarray(self.initial, jnp.float32), **counts}

    def next(self, state: Mapping[str, jax.Array], finite: jax.Array) -> dict[str, jax.Array]:
        """The same after a step."""
        row = jnp.where(finite, state["finite"] + 1, 0)
        borne = jnp.where(finite, state["borne"], state["borne"] - 1)
        grows, shrinks = row >= self.interval, ~finite & (borne <= 0)
        shrunk = jnp.maximum(state["scale"] * self.backoff, self.minimum)
        grown = jnp.minimum(state["scale"] * self.growth, 2.0**126)  # never infinite
        return {
            "scale": jnp.where(grows, grown, jnp.where(shrinks, shrunk, state["scale"])),
            "finite": jnp.where(grows, 0, row),
            "borne": jnp.where(grows, self.hysteresis, jnp.maximum(borne, 0)),
        }


@dataclass(frozen=True)
class Precision:
    """In what the step computes, gathers weights and reduces gradients.

    Attributes:
      compute: weights are cast to it before the model sees them; ``None`` leaves them as they are.
      gather: dtype in which weights cross the mesh; that of ``compute`` if ``None``.
      reduce: dtype in which gradients are summed over devices; fp32 or wider if ``None``, also of a model that computes in 16 bits by its own
        word alone.
        Either may be ``int8``: blocks of integers with a scale each (:mod:`jaxpar.parallel.collectives.quantized`). Where weights are gathered, or gradients
        reduced, by the compiler (ZeRO stages 2 and 3), all this is for what the model hands to :func:`jaxpar.sharded_dot`.
      scale: how the loss is scaled; ``None`` does not. :meth:`of` takes the default for fp16.
      matmul: ``fp8`` multiplies weights that the model hands to :func:`jaxpar.sharded_dot` in 8-bit floating point; ``fp8`` for ``compute``,
        or alone, means this with ``compute`` in bf16.

    Raises:
      ConfigError: no floating dtype, another ``matmul``, or a dtype beyond what ``jax_enable_x64`` allows.

    Warns:
      UserWarning: compute in fp16 without a scale.

    >>> Precision.of("bf16")
    Precision(compute='bfloat16', gather=None, reduce=None, scale=None, matmul=None)
    >>> Precision.of({"compute": "bf16", "reduce": "bf16"}).reduce
    'bfloat16'
    """

    compute: str | None = None
    gather: str | None = None
    reduce: str | None = None
    scale: LossScale | None = None
    matmul: str | None = None

    def __post_init__(self) -> None:
        if self.matmul not in (None, FP8):
            raise ConfigError(f"precision: matmul is {self.matmul!r}, but {FP8!r} or nothing is wanted.")
        for name in ("compute", "gather", "reduce"):
            value = getattr(self, name)
            if value is not None and (name == "compute" or value != INT8):
                object.__setattr__(self, name, _dtype(value, name))
        if not isinstance(self.scale, LossScale | None):
            raise ConfigError(f"precision: scale is {self.scale!r}, but a mapping, as {{initial: 65536}}, is wanted.")
        if self.compute == "float16" and self.scale is None:
            text = "precision: compute is float16 without a loss scale, so small gradients vanish. Remedy: scale: {}."
            warnings.warn(text, stacklevel=3)

    @classmethod
    def of(cls, value: PrecisionLike) -> Precision:
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
            if value.get("compute") == FP8:
                value = {**value, "compute": "bfloat16", "matmul": FP8}
            scale = value.get("scale", {} if _half(value.get("compute")) else None)
            if isinstance(scale, Mapping):
                known = [field.name for field in fields(LossScale)]
                for key in scale:
                    if key not in known:
                        raise ConfigError(
                            f"precision.scale: unknown key {key!r}.{did_you_mean(key, known)} The keys are: {', '.join(known)}."
                        )
                scale = LossScale(**scale)
            return cls(**{**value, "scale": scale})
        if value == FP8:
            return cls(compute="bfloat16", matmul=FP8)
        return cls(compute=value, scale=LossScale() if _half(value) else None)

    def crossing(self, w: jax.Array) -> jax.Array:
        """A weight as it is gathered, if not in int8."""
        return _cast(w, self.compute if self.gather == INT8 else self.gather or self.compute)

    def computing(self, w: jax.Array) -> jax.Array:
        """A weight as the model sees it; in the host's memory it stays as it is, for whoever brings it from there."""
        return w if on_host(w) else _cast(w, self.compute)

    def gathering(self, dtype: Any) -> Any:
        """The dtype in which a weight that is computed with in ``dtype`` is gathered where it is used, if that is a narrower one."""
        narrow = self.gather not in (None, INT8) and jnp.dtype(self.gather).itemsize < jnp.dtype(dtype).itemsize
        return jnp.dtype(self.gather) if narrow else None

    def summing(self, dtype: Any) -> Any:
        """The dtype in which devices' parts of a gradient computed in ``dtype`` are summed where it arises, if that is a wider one.

        Raises:
          ConfigError: ``reduce`` is narrower than what a model computes in by its own word.
        """
        if self.reduce == INT8:
            return None
        dtype = jnp.dtype(dtype)
        wide = jnp.promote_types(dtype, self.reduce or jnp.float32)
        if self.compute is None and self.reduce is not None and jnp.dtype(self.reduce).itemsize < dtype.itemsize:
            raise ConfigError(
                f"precision: reduce is {self.reduce}, but here the compiler reduces gradients where they arise, and the model computes them in "
                f"{dtype.name}. Remedy: precision.compute: {self.reduce}, grad_reduction='per_step' (ZeRO stage 1), or leave precision.reduce out."
            )
        return None if wide == dtype else wide

    def reducing(self, grad: jax.Array) -> jax.Array:
        """A device's sum of gradients as it is reduced over devices, if not in int8."""
        return grad.astype(jnp.promote_types(grad.dtype, jnp.float32) if self.reduce in (None, INT8) else self.reduce)


type PrecisionLike = str | Mapping[str, Any] | Precision | None
"""How a precision may be given; see :meth:`Precision.of`."""


def _half(value: Any) -> bool:
    return NAMES.get(value, value) == "float16" if isinstance(value, str) else False


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
            f"precision: {where} is {value!r}, but a floating dtype{'' if where == 'compute' else ' or int8'} is wanted."
            f"{did_you_mean(str(value), known)} Known are {', '.join(NAMES)}{f', {FP8}' if where == 'compute' else ''}."
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ConfigError(f"precision: {where} is {dtype.name}, which jax computes only with jax_enable_x64.")
    return str(dtype.name)
