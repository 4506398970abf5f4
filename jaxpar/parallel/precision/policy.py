"""``Precision``: the dtypes of a training step, and dynamic loss scaling.

The training state keeps weights in the dtype in which the model creates them, usually as fp32 master weights.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError, did_you_mean, unknown
from jaxpar.parallel.offload.placement import on_host
from jaxpar.utils.checks import INT32

INT8, FP8 = "int8", "fp8"
STORED: Literal["stored"] = "stored"
type Exact = bool | Literal["stored"]
"""Whether a weight is gathered in the compute dtype, whatever ``Precision.gather`` is; ``stored``: it and its gradient
stay in the dtype in which it is stored, whatever the precision is."""
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling, which keeps small 16-bit gradients from underflow.

    After Micikevicius et al. 2018 (arXiv:1710.03740). The step multiplies the loss by the scale and divides the
    gradients by it. It skips updates that are not finite.

    Attributes:
      initial: the first scale.
      growth: the factor by which the scale grows after ``interval`` finite steps in a row.
      backoff: the factor by which the scale shrinks.
      interval: the number of finite steps after which the scale grows.
      hysteresis: the number of non-finite steps, counted since the scale last grew, from which on each one shrinks the
        scale.
      minimum: the smallest scale.

    Raises:
      ConfigError: a value is not a number, or out of its range.

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
                raise ConfigError(f"precision.scale: {name} must be a number, got {value!r}.")
        wanted = {
            "initial": (0 < self.initial < math.inf, "a positive number"),
            "growth": (1 < self.growth < math.inf, "a number > 1"),
            "backoff": (0 < self.backoff < 1, "a number between 0 and 1"),
            "interval": (1 <= self.interval <= INT32, f"a number of steps from 1 to {INT32:,}"),
            "hysteresis": (1 <= self.hysteresis <= INT32, f"a number of steps from 1 to {INT32:,}"),
            "minimum": (0 < self.minimum <= self.initial, f"a positive number up to initial ({self.initial:g})"),
        }
        for name, (right, what) in wanted.items():
            if not right:
                raise ConfigError(f"precision.scale: {name} must be {what}, got {getattr(self, name):g}.")

    def start(self) -> dict[str, jax.Array]:
        """Returns the initial state: the scale, finite steps in a row, and non-finite steps left before it shrinks."""
        counts = {"finite": jnp.zeros((), jnp.int32), "borne": jnp.asarray(self.hysteresis, jnp.int32)}
        return {"scale": jnp.asarray(self.initial, jnp.float32), **counts}

    def next(self, state: Mapping[str, jax.Array], finite: jax.Array) -> dict[str, jax.Array]:
        """Returns the state after a step whose loss and gradients are finite or not.

        Args:
          state: the state before the step.
          finite: bool ``[]``.
        """
        row = jnp.where(finite, state["finite"] + 1, 0)
        borne = jnp.where(finite, state["borne"], state["borne"] - 1)
        grows, shrinks = row >= self.interval, ~finite & (borne <= 0)
        shrunk = jnp.maximum(state["scale"] * self.backoff, self.minimum)
        grown = jnp.minimum(state["scale"] * self.growth, 2.0**126)  # the scale must not overflow to inf
        return {
            "scale": jnp.where(grows, grown, jnp.where(shrinks, shrunk, state["scale"])),
            "finite": jnp.where(grows, 0, row),
            "borne": jnp.where(grows, self.hysteresis, jnp.maximum(borne, 0)),
        }


@dataclass(frozen=True)
class Precision:
    """The dtypes in which a step computes, gathers weights and reduces gradients.

    ``gather`` and ``reduce`` may also be ``int8``: blocks of integers, each with its scale (see
    :mod:`jaxpar.parallel.collectives.quantized`). Where the compiler gathers weights or reduces gradients (ZeRO stages
    2 and 3), both apply only to weights that the model passes to :func:`jaxpar.sharded_dot`.

    Attributes:
      compute: the step casts weights to this dtype before the model uses them; ``None`` keeps their dtype.
      gather: the dtype in which weights are gathered; ``None`` means that of ``compute``.
      reduce: the dtype in which gradients are summed over devices. ``None`` means fp32 or wider, also if the model
        itself computes in 16 bits.
      scale: the loss scaling, or ``None``. :meth:`of` chooses the default scaling for fp16.
      matmul: ``fp8`` multiplies weights that the model passes to :func:`jaxpar.sharded_dot` in fp8. :meth:`of` reads
        ``fp8`` alone, or for ``compute``, as this with ``compute`` in bf16.
      exact: logical dims; weights with one of them are gathered in the compute dtype, whatever ``gather`` is. The
        weights of routers (:class:`jaxpar.moe.Router`) always are.

    Raises:
      ConfigError: a dtype that is not floating, an unknown ``matmul``, ``exact`` that is no list of names, or a dtype
        that requires ``jax_enable_x64``.

    Warns:
      UserWarning: ``compute`` is fp16 and there is no loss scaling.

    >>> Precision.of("bf16")
    Precision(compute='bfloat16', gather=None, reduce=None, scale=None, matmul=None, exact=())
    >>> Precision.of({"compute": "bf16", "reduce": "bf16"}).reduce
    'bfloat16'
    """

    compute: str | None = None
    gather: str | None = None
    reduce: str | None = None
    scale: LossScale | None = None
    matmul: str | None = None
    exact: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.matmul not in (None, FP8):
            raise ConfigError(f"precision: matmul must be {FP8!r} or left out, got {self.matmul!r}.")
        for name in ("compute", "gather", "reduce"):
            value = getattr(self, name)
            if value is not None and (name == "compute" or value != INT8):
                object.__setattr__(self, name, _dtype(value, name))
        if not isinstance(self.exact, tuple | list) or not all(isinstance(name, str) for name in self.exact):
            raise ConfigError(
                f"precision: exact must be a list of logical dims, got {self.exact!r}. Remedy: exact: [vocab]."
            )
        object.__setattr__(self, "exact", tuple(self.exact))
        if not isinstance(self.scale, LossScale | None):
            raise ConfigError(f"precision: scale must be a mapping such as {{initial: 65536}}, got {self.scale!r}.")
        if self.compute == "float16" and self.scale is None:
            warnings.warn(
                "precision: compute is float16 without a loss scale, so small gradients underflow. Remedy: set "
                "scale: {}.",
                stacklevel=3,
            )

    @classmethod
    def of(cls, value: PrecisionLike) -> Precision:
        """Returns the precision that a value describes.

        Args:
          value: a name such as ``bf16``, a mapping of the attributes, or ``None`` for the model's own dtypes.

        Raises:
          ConfigError: an unknown key or a bad value.
        """
        if isinstance(value, Precision):
            return value
        given = value if isinstance(value, Mapping) else {"compute": value}
        _check_keys("precision", given, cls)
        if given.get("compute") == FP8:
            given = {**given, "compute": "bfloat16", "matmul": FP8}
        scale: Any = given.get("scale", {} if _half(given.get("compute")) else None)
        if isinstance(scale, Mapping):
            _check_keys("precision.scale", scale, LossScale)
            scale = LossScale(**scale)
        return cls(**{**given, "scale": scale})

    def crossing(self, w: jax.Array) -> jax.Array:
        """Returns a weight in the dtype in which it is gathered, unless that is int8."""
        return _cast(w, self.compute if self.gather == INT8 else self.gather or self.compute)

    def computing(self, w: jax.Array) -> jax.Array:
        """Returns a weight in the compute dtype; one in host memory is returned as it is, and cast when fetched."""
        return w if on_host(w) else _cast(w, self.compute)

    def gathering(self, dtype: Any) -> Any:
        """Returns the dtype for gathering a weight that is used in ``dtype``, if it is narrower; else ``None``."""
        narrow = self.gather not in (None, INT8) and jnp.dtype(self.gather).itemsize < jnp.dtype(dtype).itemsize
        return jnp.dtype(self.gather) if narrow else None

    @property
    def rounds_weights(self) -> bool:
        """Whether weights are gathered in fewer bits than they may be used in."""
        return self.gather == INT8 or (
            self.gather is not None and jnp.dtype(self.gather).itemsize < jnp.dtype(self.compute or "float32").itemsize
        )

    def for_weight(self, exact: Exact) -> Precision:
        """Returns the precision of one weight: without ``gather`` if it is gathered exactly."""
        if exact == STORED:
            return Precision()
        return replace(self, gather=None) if exact and self.gather is not None else self

    def summing(self, dtype: Any) -> Any:
        """Returns the dtype in which the compiler sums a gradient computed in ``dtype``, if it is wider; else ``None``.

        Raises:
          ConfigError: ``reduce`` is narrower than the dtype in which the model itself computes.
        """
        if self.reduce == INT8:
            return None
        dtype = jnp.dtype(dtype)
        wide = jnp.promote_types(dtype, self.reduce or jnp.float32)
        if self.compute is None and self.reduce is not None and jnp.dtype(self.reduce).itemsize < dtype.itemsize:
            raise ConfigError(
                f"precision: reduce is {self.reduce}, but the compiler reduces gradients where they arise, in a dtype "
                f"no narrower than that of the model ({dtype.name}). Remedy: set precision.compute: {self.reduce} or "
                f"grad_reduction='per_step' (ZeRO stage 1), or leave precision.reduce out."
            )
        return None if wide == dtype else wide

    def reducing(self, grad: jax.Array) -> jax.Array:
        """Returns a device's gradient in the dtype in which it is reduced over devices, unless that is int8."""
        return grad.astype(jnp.promote_types(grad.dtype, jnp.float32) if self.reduce in (None, INT8) else self.reduce)


type PrecisionLike = str | Mapping[str, Any] | Precision | None
"""The ways to give a precision; see :meth:`Precision.of`."""


def _check_keys(where: str, given: Mapping[str, Any], kind: type[Precision | LossScale]) -> None:
    known = [field.name for field in fields(kind)]
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}: {unknown('key', key, known)}")


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
            f"precision: {where} must be a floating dtype{'' if where == 'compute' else ' or int8'}, got "
            f"{value!r}.{did_you_mean(str(value), known)} Known are "
            f"{', '.join(NAMES)}{f', {FP8}' if where == 'compute' else ''}."
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ConfigError(f"precision: {where} is {dtype.name}, which JAX supports only with jax_enable_x64.")
    return str(dtype.name)
