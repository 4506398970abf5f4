"""``Mask``: which keys a query sees, as a rule on positions. It is evaluated tile by tile, never for all seq² pairs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import ConfigError
from jaxpar.utils.checks import is_count

type Rule = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: the query at position q sees the key at position k if all given conditions hold.

    A mask is causal unless ``causal=False``, whatever else it contains. A later token then never changes an earlier
    result, with one exception: all tokens of a ``prefix`` see each other.

    Attributes:
      causal: ``k <= q``. ``None``, the default, means ``True`` and is stored as ``True``.
      window: the last ``window`` tokens up to and including the query; with ``causal=False`` also the ``window - 1``
        tokens after it. Or a pair (tokens before, tokens after), each 0 or more, or ``None`` for no limit on that side.
        Of any size.
      prefix: every query also sees the keys before this position, regardless of ``causal`` and ``window`` (prefix-LM).
        Of any size.
      chunk: ``q // chunk == k // chunk`` (chunked local attention). Of any size.
      where: a function ``where(q, k)`` from integer arrays of positions, which broadcast, to booleans. It is called for
        one tile at a time, with any positions of the sequence.

    Raises:
      ConfigError: a size is not a number of tokens, ``where`` does not take two positions, or a window shows tokens
        after the query without ``causal=False``.

    >>> Mask(window=2).visible(4, 3), Mask(window=2).visible(4, 2), Mask(window=2).visible(4, 5)
    (True, False, False)
    >>> Mask(causal=False, window=(0, 1)).visible(4, 5)
    True
    """

    causal: bool | None = None
    window: int | tuple[int | None, int | None] | None = None
    prefix: int | None = None
    chunk: int | None = None
    where: Rule | None = None

    def __post_init__(self) -> None:
        if isinstance(self.window, tuple):
            sides: tuple[Any, ...] = self.window
            if len(sides) != 2 or any(side is not None and not is_count(side, 0) for side in sides):
                raise ConfigError(
                    f"mask: window must be (tokens before, tokens after), each an integer >= 0 or None, got {sides!r}."
                )
            # With an explicit causal=True, None adds no limit; without ``causal``, None may mean all later tokens.
            after, allowed = sides[1], {None: (0,), True: (0, None)}.get(self.causal)
            if allowed is not None and after not in allowed:
                raise ConfigError(
                    f"mask: window {sides!r} shows tokens after the query, but the mask is causal. Remedy: use "
                    f"causal=False for a two-sided mask, or window=({sides[0]}, 0) for a causal one."
                )
        elif self.window is not None and not is_count(self.window, 1):
            raise ConfigError(f"mask: window must be a number of tokens >= 1, got {self.window!r}.")
        for name, value, least in (("prefix", self.prefix, 0), ("chunk", self.chunk, 1)):
            if value is not None and not is_count(value, least):
                raise ConfigError(f"mask: {name} must be a number of tokens >= {least}, got {value!r}.")
        if self.where is not None:
            _check_arity(self.where)
        if self.causal is None:
            object.__setattr__(self, "causal", True)

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """The maximum number of tokens that a query sees before and after itself; ``None`` for no limit."""
        before, after = self.window if isinstance(self.window, tuple) else (None, None)
        if isinstance(self.window, int):
            before, after = self.window - 1, None if self.causal else self.window - 1
        return before, 0 if self.causal else after

    def visible(self, q: Any, k: Any, prefix: Any = None) -> Any:
        """Returns whether the query at position ``q`` sees the key at position ``k``.

        Args:
          q, k: positions, which broadcast: Python integers, numpy arrays or JAX arrays.
          prefix: replaces the mask's own ``prefix``.
        """
        seen: Any = True
        before, after = self.sides
        if before is not None:
            seen = k >= _less(q, before)
        if after is not None:
            seen = seen & (k <= _more(q, after))
        prefix = self.prefix if prefix is None else prefix
        if prefix is not None:
            seen = seen | _below(k, prefix)
        if self.chunk is not None:
            seen = seen & (_chunk(q, self.chunk) == _chunk(k, self.chunk))
        if self.where is not None:
            seen = seen & self.where(q, k)
        return seen

    def bounds(self, q: tuple[Any, Any], k: tuple[Any, Any], prefix: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
        """Returns whether some query of a block may see some key of a block, and whether every query sees every key.

        A mask with ``where`` is only known from its values: the first result ignores ``where``, and the second is
        False.

        Args:
          q, k: the minimum and maximum position of a block, as integers or arrays that broadcast.
          prefix: the minimum and maximum prefix length; they replace the mask's own.
        """
        some: Any = True
        every: Any = True
        before, after = self.sides
        if before is not None:
            some, every = k[1] >= _less(q[0], before), k[0] >= _less(q[1], before)
        if after is not None:
            some, every = some & (k[0] <= _more(q[1], after)), every & (k[1] <= _more(q[0], after))
        if prefix is None and self.prefix is not None:
            prefix = (self.prefix, self.prefix)
        if prefix is not None:
            some, every = some | _below(k[0], prefix[1]), every | _below(k[1], prefix[0])
        if self.chunk is not None:
            (a, b), (c, d) = ((_chunk(x, self.chunk) for x in block) for block in (q, k))
            some, every = some & (a <= d) & (c <= b), every & (a == b) & (c == d) & (a == c)
        return some, every & (self.where is None)


def mask_of(causal: bool | None, mask: Mask | Rule | None) -> Mask:
    """Returns the mask given by the options ``causal`` and ``mask``; it is causal unless one of them says otherwise.

    Raises:
      ConfigError: ``causal`` contradicts the mask, or ``mask`` is neither a mask nor a function.
    """
    if mask is None:
        return Mask(causal=causal is not False)
    if isinstance(mask, Mask):
        if causal is not None and causal is not mask.causal:
            raise ConfigError(
                f"attention: causal is {causal}, but the mask has causal={mask.causal}. Remedy: leave causal out, or "
                f"set it in the mask."
            )
        return mask
    if not callable(mask):
        raise ConfigError(
            f"attention: mask must be a jp.Mask or a function of two positions, got {type(mask).__name__}."
        )
    return Mask(causal=causal is not False, where=mask)


def _dtype_range(x: Any) -> tuple[int, int]:
    """Returns the minimum and maximum of the dtype of ``x``; a Python integer counts as int32, as positions do."""
    if isinstance(x, int):
        return -(2**31), 2**31 - 1
    numbers: int = 256**x.dtype.itemsize
    return (0, numbers - 1) if x.dtype.kind == "u" else (-numbers // 2, numbers // 2 - 1)


def _less(x: Any, tokens: int) -> Any:
    """Returns ``x - tokens``, saturated at the minimum of the dtype instead of wrapping around."""
    least, greatest = _dtype_range(x)
    tokens = min(tokens, greatest - least)
    while tokens:
        step = min(tokens, greatest)
        x = (max(x, least + step) if isinstance(x, int) else x.clip(least + step)) - step
        tokens -= step
    return x


def _more(x: Any, tokens: int) -> Any:
    """Returns ``x + tokens``, saturated at the maximum of the dtype."""
    least, greatest = _dtype_range(x)
    tokens = min(tokens, greatest - least)
    while tokens:
        step = min(tokens, greatest)
        x = (min(x, greatest - step) if isinstance(x, int) else x.clip(None, greatest - step)) + step
        tokens -= step
    return x


def _below(x: Any, length: Any) -> Any:
    """Returns ``x < length``, also if ``length`` is an integer that exceeds the dtype of ``x``."""
    return x <= min(length - 1, _dtype_range(x)[1]) if isinstance(length, int) else x < length


def _chunk(x: Any, size: int) -> Any:
    """Returns ``x // size``; if ``size`` exceeds the dtype of ``x``, that is 0, or -1 for negative ``x``."""
    return x // size if size <= _dtype_range(x)[1] else (x < 0) * -1


def _check_arity(where: Any) -> None:
    if not callable(where):
        raise ConfigError(f"mask: where must be a function of two positions, where(q, k), got {where!r}.")
    try:
        inspect.signature(where).bind(0, 0)
    except TypeError:
        parameters = ", ".join(inspect.signature(where).parameters)
        raise ConfigError(
            f"mask: where takes ({parameters}), but it is called with two positions. Remedy: pass a function "
            f"where(q, k)."
        ) from None
    except ValueError:
        pass  # a builtin without a signature
